"""Grafted models under `transformers.Trainer`: training, saving, resuming, the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

import taskgraft as tg

from families import SAMPLES, batch, build


class Rows(Dataset[dict[str, Tensor]]):
    """A learnable task: whether a text begins with a small or a large id."""

    def __init__(self, model: Any, tasks: list[str], count: int = 24) -> None:
        self.inputs = batch(model, rows=count, seed=3)
        self.tasks = tg.task_ids(model, [tasks[i % len(tasks)] for i in range(count)])
        self.labels = (self.inputs["input_ids"][:, 0] > 50).long()

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {**{k: v[i] for k, v in self.inputs.items()}, "task_ids": self.tasks[i], "labels": self.labels[i]}


def arguments(folder: Path, **changes: Any) -> Any:
    return hf.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "epoch",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "label_names": ["labels"],
            "max_grad_norm": 0.0,
            **changes,
        },
    )


def grafted(tasks: list[str], **changes: Any) -> Any:
    model = build("bert")
    return tg.graft(model, tg.Adapter(size=4, head_dropout=0.0, **changes), dict.fromkeys(tasks, 2))


def bits(model: Any, task: str) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.taskgraft.read(task).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_it_learns_and_saves_the_graft_without_the_backbone(tmp_path: Path) -> None:
    model = grafted(["a"], pooling="cls")
    backbone = {key: value.clone() for key, value in build("bert").state_dict().items()}
    data = Rows(model, ["a"], 64)
    trainer = hf.Trainer(model, arguments(tmp_path, num_train_epochs=15), train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    saved = load_file(next(tmp_path.glob("checkpoint-*/model.safetensors")))
    assert set(saved) - {"taskgraft_tasks.names"} == set(tg.trainable(model)), "the graft and not the backbone"
    now = model.state_dict()
    assert all(torch.equal(value, now[key]) for key, value in backbone.items())
    predictions = trainer.predict(data).predictions
    assert predictions.shape == (64, 2)


def test_a_run_that_is_resumed_ends_as_the_unbroken_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = grafted(["a", "b"])
    options = {"lr_scheduler_type": "linear", "seed": 7}

    def run(model: Any, folder: Path, resume: str | None = None, **changes: Any) -> None:
        optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1)
        trainer = hf.Trainer(
            model,
            arguments(folder, **options, **changes),
            train_dataset=Rows(model, ["a", "b"]),
            optimizers=(optimizer, None),
        )
        trainer.train(resume_from_checkpoint=resume)

    run(whole, tmp_path / "whole")
    resumed = grafted(["a", "b"])
    checkpoint = sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))[0]
    run(resumed, tmp_path / "resumed", resume=str(checkpoint))
    for task in ("a", "b"):
        assert equal(bits(whole, task), bits(resumed, task))
    assert "missing keys" not in caplog.text


def test_the_best_checkpoint_comes_back_at_the_end(tmp_path: Path) -> None:
    model = grafted(["a"])
    data = Rows(model, ["a"])
    seen: list[dict[str, Tensor]] = []

    def merit(_: Any) -> dict[str, float]:
        seen.append(bits(model, "a"))
        return {"merit": [0.1, 0.9, 0.5, 0.4][len(seen) - 1]}  # the second epoch is the best

    trainer = hf.Trainer(
        model,
        arguments(
            tmp_path,
            num_train_epochs=4,
            eval_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="merit",
            greater_is_better=True,
            save_total_limit=1,
        ),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=merit,
    )
    trainer.train()
    assert len(seen) == 4 and not equal(seen[1], seen[3])
    assert equal(seen[1], bits(model, "a"))


def test_a_task_without_rows_changes_in_no_bit(tmp_path: Path) -> None:
    """Both are being trained and B has moments; then 50 steps of A's rows, decay 0.1, with one optimiser."""
    model = grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1)

    def run(tasks: list[str], steps: int) -> None:
        data = Rows(model, tasks)
        settings = arguments(tmp_path / "-".join(tasks), max_steps=steps, save_strategy="no")
        hf.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, None)).train()

    run(["b"], 3)
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    assert any(bool(moment.any()) for moment in moments)
    a, b = bits(model, "a"), bits(model, "b")
    run(["a"], 50)
    assert equal(b, bits(model, "b")) and not equal(a, bits(model, "a"))


def test_stock_adamw_cannot_reach_a_task_at_rest(tmp_path: Path) -> None:
    model = grafted(["a", "b"])
    tg.train_only(model, "b")
    hf.Trainer(model, arguments(tmp_path / "b"), train_dataset=Rows(model, ["b"])).train()
    tg.train_only(model, "a")
    a, b = bits(model, "a"), bits(model, "b")
    hf.Trainer(model, arguments(tmp_path / "a"), train_dataset=Rows(model, ["a"])).train()
    assert equal(b, bits(model, "b")) and not equal(a, bits(model, "a"))


def test_accumulated_batches_give_the_gradient_of_one_large_batch(tmp_path: Path) -> None:
    models = {}
    for size, accumulation in ((8, 1), (4, 2)):
        model = grafted(["a"])
        data = Rows(model, ["a"], 8)
        settings = arguments(
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            save_strategy="no",
        )
        optimizer = torch.optim.SGD(tg.trainable(model).values(), lr=1.0)
        hf.Trainer(model, settings, train_dataset=data, optimizers=(optimizer, None)).train()
        models[size] = bits(model, "a")
    for key in models[8]:
        assert torch.allclose(models[8][key], models[4][key], atol=1e-6), key


@pytest.mark.parametrize("name", [name for name in ("t5", "gpt2") if name in SAMPLES])
def test_text_tasks_train_by_the_models_own_loss(name: str, tmp_path: Path) -> None:
    model = tg.graft(build(name), tg.Adapter(size=4), ["a", "b"])
    data = Rows(model, ["a", "b"])
    data.labels = data.inputs["input_ids"].clone()
    data.inputs.pop("decoder_input_ids", None)
    trainer = hf.Trainer(
        model,
        arguments(tmp_path, num_train_epochs=5),
        train_dataset=data,
        eval_dataset=data,
        optimizers=(tg.AdamW(model, lr=1e-2), None),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    saved = load_file(next(tmp_path.glob("checkpoint-*/model.safetensors")))
    assert set(saved) - {"taskgraft_tasks.names"} == set(tg.trainable(model))
