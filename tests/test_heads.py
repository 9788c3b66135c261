"""Heads of different widths and kinds in one batch, and their loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import taskgraft as tg

from families import batch, build, perturb

HEADS: dict[str, Any] = {
    "two": 2,
    "many": 77,
    "score": tg.Head("regression"),
    "tags": tg.Head("multilabel", ("x", "y", "z")),
    "entities": tg.Head("tokens", ("O", "B", "I")),
    "answer": tg.Head("spans"),
}


def grafted(tasks: list[str], method: Any = None) -> Any:
    model = build("bert", torch.float64)
    tg.graft(model, method or tg.Adapter(size=4, head_dropout=0.0), {name: HEADS[name] for name in tasks})
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads"))


def gradients(model: Any) -> dict[str, Tensor]:
    found = {path: p.grad.clone() for path, p in tg.trainable(model).items()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_two_77_classes_and_a_regression_in_one_batch_equal_the_three_alone(smoothing: float) -> None:
    model = grafted(["two", "many", "score"])
    rows = ["two", "many", "score", "many", "two", "score", None]
    labels = torch.tensor([1.0, 76.0, -2.5, 3.0, 0.0, 4.25, 0.0], dtype=torch.float64)
    inputs = batch(model, rows=len(rows))
    with tg.rows(model, rows):
        output = model(**inputs)
        together = tg.loss(model, output, labels, label_smoothing=smoothing)
    together.backward()
    mixed = gradients(model)
    assert output.logits.shape == (7, 77) and output.mask.sum(1).tolist() == [2, 77, 1, 77, 2, 1, 0]

    total = torch.zeros((), dtype=torch.float64)
    for task in ("two", "many", "score"):
        chosen = [i for i, row in enumerate(rows) if row == task]
        with tg.rows(model, task):
            logits = model(**{k: v[chosen] for k, v in inputs.items()}).logits
        if task == "score":
            alone = F.mse_loss(logits[:, 0], labels[chosen], reduction="sum")
        else:
            width = HEADS[task]
            alone = F.cross_entropy(
                logits[:, :width], labels[chosen].long(), label_smoothing=smoothing, reduction="sum"
            )
        total = total + alone / 6
    total.backward()
    assert torch.allclose(together, total, rtol=1e-12)
    for path, grad in gradients(model).items():
        assert torch.allclose(mixed[path], grad, rtol=1e-10, atol=1e-12), path


def test_every_kind_of_head_in_one_batch_equals_each_alone() -> None:
    model = grafted(list(HEADS))
    rows = [*HEADS, None]
    inputs = batch(model, rows=len(rows), length=6)
    inputs["attention_mask"][:] = (torch.arange(6) < torch.tensor([6, 5, 4, 6, 4, 5, 6])[:, None]).long()
    labels = torch.full((len(rows), 6), -100.0, dtype=torch.float64)
    labels[0, 0], labels[1, 0], labels[2, 0] = 1, 42, 0.5
    labels[3, :3] = torch.tensor([1.0, 0.0, 1.0])
    labels[4, :4] = torch.tensor([0.0, 1.0, 2.0, -100.0])
    labels[5, :2] = torch.tensor([1.0, 3.0])
    with tg.rows(model, rows):
        output = model(**inputs, labels=labels)
        losses = tg.loss(model, output, labels, reduction="none")
    assert torch.allclose(output.loss, losses.sum() / 6)

    def alone(i: int) -> Any:
        with tg.rows(model, rows[i]):
            one = {k: v[i : i + 1, : int(inputs["attention_mask"][i].sum())] for k, v in inputs.items()}
            return model(**one)

    entities, answer = alone(4).token_logits[0], alone(5).token_logits[0]
    expected = [
        F.cross_entropy(alone(0).logits[:, :2], torch.tensor([1])),
        F.cross_entropy(alone(1).logits, torch.tensor([42])),
        (alone(2).logits[0, 0] - 0.5).square(),
        F.binary_cross_entropy_with_logits(alone(3).logits[0, :3], labels[3, :3]),
        F.cross_entropy(entities[:3, :3], torch.tensor([0, 1, 2])),
        (
            F.cross_entropy(answer[None, :, 0], torch.tensor([1]))
            + F.cross_entropy(answer[None, :, 1], torch.tensor([3]))
        )
        / 2,
        torch.zeros((), dtype=torch.float64),
    ]
    assert torch.allclose(losses, torch.stack(expected), atol=1e-10)


def test_a_span_cannot_begin_in_the_padding() -> None:
    model = grafted(["answer"])
    inputs = batch(model)
    logits = model(**inputs).token_logits
    assert torch.equal(torch.isfinite(logits[..., 0]), inputs["attention_mask"].bool())


def test_ignored_rows_do_not_count() -> None:
    model = grafted(["two", "score"])
    inputs = batch(model, rows=4)
    labels = torch.tensor([1.0, -100.0, 2.0, float("nan")], dtype=torch.float64)
    with tg.rows(model, ["two", "two", "score", "score"]):
        losses = tg.loss(model, model(**inputs), labels, reduction="none")
        mean = model(**inputs, labels=labels).loss
    assert losses[1] == 0 and losses[3] == 0
    assert torch.allclose(mean, losses.sum() / 2) and torch.isfinite(mean)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last", "pooler"])
@pytest.mark.parametrize("hidden", [None, 5])
def test_a_head_is_a_linear_map_of_the_pooled_state(pooling: Any, hidden: int | None) -> None:
    model = grafted(["two", "many"], tg.HeadOnly(hidden=hidden, pooling=pooling, head_dropout=0.0))
    inputs = batch(model)
    with tg.rows(model, None):
        bare = model(**inputs)
    state, mask = bare.last_hidden_state, inputs["attention_mask"]
    pooled = {
        "cls": state[:, 0],
        "mean": torch.stack([row[: int(m.sum())].mean(0) for row, m in zip(state, mask, strict=True)]),
        "last": torch.stack([row[int(m.sum()) - 1] for row, m in zip(state, mask, strict=True)]),
        "pooler": bare.pooler_output,
    }[pooling]
    with tg.rows(model, "many"):
        logits = model(**inputs).logits
    w = {key.removeprefix("head."): value for key, value in model.taskgraft.read("many").items()}
    if hidden is not None:
        pooled = torch.tanh(pooled @ w["hidden"] + w["hidden_bias"])
    assert torch.allclose(logits, pooled @ w["weight"] + w["bias"], atol=1e-12)


def test_poolings_mix_in_one_batch() -> None:
    model = grafted(["two"], tg.HeadOnly(pooling="cls", head_dropout=0.0))
    tg.add_task(model, "other", tg.HeadOnly(pooling="last", head_dropout=0.0), 5)
    inputs = batch(model, rows=3)
    with tg.rows(model, ["two", "other", None]):
        mixed = model(**inputs).logits
    with tg.rows(model, "two"):
        assert torch.allclose(mixed[0, :2], model(**inputs).logits[0], atol=1e-12)
    with tg.rows(model, "other"):
        assert torch.allclose(mixed[1], model(**inputs).logits[1], atol=1e-12)
    assert not torch.isfinite(mixed[2]).any()


def test_head_dropout_acts_only_while_training() -> None:
    model = grafted(["two"], tg.HeadOnly(head_dropout=0.5))
    inputs = batch(model)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_missing_labels_of_every_kind() -> None:
    model = grafted(["tags", "score", "two"])
    inputs = batch(model, rows=2)

    def losses(task: str, labels: Any) -> Tensor:
        with tg.rows(model, task):
            return tg.loss(model, model(**inputs), torch.tensor(labels), reduction="none")

    some = losses("tags", [[1.0, 0.0, -100.0], [-100.0, 0.0, 1.0]])
    with tg.rows(model, "tags"):
        logits = model(**inputs).logits
    assert torch.allclose(some[0], F.binary_cross_entropy_with_logits(logits[0, :2], torch.tensor([1.0, 0.0]).double()))
    assert torch.allclose(
        some[1], F.binary_cross_entropy_with_logits(logits[1, 1:3], torch.tensor([0.0, 1.0]).double())
    )
    assert losses("score", [-100, 1])[0] == 0
    with pytest.raises(tg.GraftError, match="needs 3 columns of labels or more, and got 1"):
        losses("tags", [2, 1])


def test_token_labels_are_checked_and_lost_spans_ignored() -> None:
    model = grafted(["entities", "answer", "tags"])
    inputs = batch(model, rows=2)
    with tg.rows(model, "entities"), pytest.raises(tg.GraftError, match="label 3 is not a class of task 'entities'"):
        tg.loss(model, model(**inputs), torch.tensor([[0, 3], [0, 1]]))
    with tg.rows(model, "answer"):
        losses = tg.loss(model, model(**inputs), torch.tensor([[0, 99], [99, 99]]), reduction="none")
    assert torch.isfinite(losses).all() and losses[0] > 0 and losses[1] == 0
    with tg.rows(model, ["tags", "entities"]):  # three columns of one beside seven of the other
        labels = torch.full((2, 7), -100)
        labels[0, :3], labels[1, :2] = torch.tensor([1, 0, 1]), torch.tensor([0, 2])
        assert torch.isfinite(model(**inputs, labels=labels).loss)


def test_the_loss_is_computed_in_single_precision() -> None:
    model = grafted(["two"]).to(torch.bfloat16)
    with tg.rows(model, "two"):
        output = model(**batch(model))
        assert tg.loss(model, output, torch.zeros(6, dtype=torch.long)).dtype == torch.float32
