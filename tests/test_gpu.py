"""The promises once more on a CUDA device, where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import taskgraft as tg

from families import SAMPLES, batch, build, perturb

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS = ["a", "b", None, "c", "b", "a"]


def grafted(name: str) -> Any:
    model = build(name, torch.float64).to("cuda")
    heads = (None, None, None) if SAMPLES[name].writes else (2, 5, 3)
    tg.graft(model, tg.Adapter(size=8, head_dropout=0.0), {"a": heads[0], "b": heads[1]})
    tg.add_task(model, "c", tg.Adapter(size=3, activation="sigmoid", head_dropout=0.0), heads[2])
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads."))


def logits(model: Any, inputs: dict[str, Tensor], rows: Any) -> Tensor:
    with tg.rows(model, rows):
        values = model(**{key: value.to("cuda") for key, value in inputs.items()}).logits
    return torch.where(torch.isfinite(values), values, 0.0)


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "modernbert"])
def test_a_mixed_batch_equals_its_rows_alone(name: str) -> None:
    model = grafted(name)
    tg.train_only(model, ["a", "c"])
    inputs = batch(model)
    mixed = logits(model, inputs, ROWS)
    mixed.square().sum().backward()
    together = {path: p.grad.clone() for path, p in tg.trainable(model).items()}
    model.zero_grad()
    for i, task in enumerate(ROWS):
        alone = (
            logits(model, {key: value[i : i + 1] for key, value in inputs.items()}, [task])
            if (task is not None or SAMPLES[name].writes)
            else mixed[i : i + 1].detach()
        )
        length = int(inputs["attention_mask"][i].sum()) if not model.config.is_encoder_decoder else None
        assert torch.allclose(mixed[i][:length], alone[0][:length], rtol=1e-8, atol=1e-8)
        if alone.requires_grad:
            alone.square().sum().backward()
    for path, p in tg.trainable(model).items():
        assert torch.allclose(together[path], p.grad, rtol=1e-6, atol=1e-8), path


@pytest.mark.parametrize("autocast", [False, True])
def test_a_task_without_rows_changes_in_no_bit(autocast: bool) -> None:
    model = grafted("bert").float().train()
    optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    labels = torch.tensor([0, 1, 1], device="cuda")

    def step(rows: list[str], seed: int) -> float:
        inputs = {key: value.to("cuda") for key, value in batch(model, rows=3, seed=seed).items()}
        with tg.rows(model, rows), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step(["a", "b", "c"], 0)
    before = model.taskgraft.read("b")
    losses = [step(["a", "a", "c"], 1) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[key]) for key, value in model.taskgraft.read("b").items())


@torch.no_grad()
def test_half_precision_and_generate() -> None:
    model = grafted("t5").to(torch.bfloat16)
    inputs = {key: value.to("cuda") for key, value in batch(model, rows=3).items() if key != "decoder_input_ids"}
    rows = ["a", None, "c"]
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 2}
    with tg.rows(model, rows):
        assert model.generate(**inputs, **options).shape == (3, 5)


@torch.no_grad()
def test_a_graft_moves_between_devices(tmp_path: Any) -> None:
    model = grafted("bert").float()
    inputs = batch(model)
    tg.get_graft(model, "b").save(tmp_path / "b")
    there = build("bert", torch.float64).float()
    tg.add_graft(there, tmp_path / "b")
    found = there(**inputs).logits
    assert torch.allclose(found.to("cuda"), logits(model, inputs, "b")[:, : found.shape[1]], atol=1e-4)
