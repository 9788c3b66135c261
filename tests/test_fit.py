"""Training: every kind and method learns, the model comes back as it was, and what was wrong is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.tasks.metrics import evaluate
from taskgraft.training.course import Course
from taskgraft.training.loop import Loop
from taskgraft.training.progress import Quiet

import tiny

FAST: dict[str, Any] = {"epochs": 6, "learning_rate": 1e-2, "batch_size": 16, "patience": 99}


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "tokens", "spans"])
def test_every_kind_is_learned_and_the_graft_says_the_same_elsewhere(kind: str) -> None:
    task = tiny.task(kind)
    run = tg.fit(tiny.backbone(), task, tg.Adapter(size=8), **{**FAST, "epochs": 12})
    assert run.score is not None and run.score > 0.9, run.history
    assert run.split == "test" and run.score == pytest.approx(run.test[task.metrics[0]])
    assert run.graft is not None and run.graft.metrics["score"] == run.score
    again = tg.evaluate(tiny.backbone(), run.graft, task)
    assert again["score"] == pytest.approx(run.score)


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "tokens", "spans"])
@pytest.mark.parametrize("method", [tg.Adapter(size=4), tg.FullFineTuning(), tg.HeadOnly()], ids=lambda one: one.name)
def test_a_run_keeps_its_answers_to_the_test_rows(method: tg.Method, kind: str) -> None:
    task = tiny.task(kind)
    run = tg.fit(tiny.backbone(), task, method, **{**FAST, "epochs": 1})
    right = task.split("test")["label"].to_pylist()
    assert evaluate(kind, task.metrics, task.labels, right, run.answers) == run.test
    assert "answers" not in run.to_json()


def test_text_to_text_is_learned_by_a_model_that_writes() -> None:
    task = tiny.task("text")
    run = tg.fit(tiny.writer(), task, tg.FullFineTuning(), **{**FAST, "learning_rate": 3e-3, "max_length": 12})
    assert run.score is not None and run.score > 0.9, run.history
    graft = tg.train(tiny.writer(), task, tg.Adapter(size=8), **{**FAST, "max_length": 12})
    assert graft.training["history"][-1]["loss"] < graft.training["history"][0]["loss"]
    assert tg.evaluate(tiny.writer(), graft, task)["score"] == pytest.approx(graft.metrics["score"])
    with pytest.raises(tg.GraftError, match="is text to text and tiny does not read and write"):
        tg.fit(tiny.backbone(), task)


@pytest.mark.parametrize(
    ("method", "rate"),
    [
        (tg.FullFineTuning(), 1e-3),
        (tg.TopLayers(k=1), 1e-3),
        (tg.NormsOnly(), 3e-2),
        (tg.HeadOnly(), 3e-2),
        (tg.HeadOnly(hidden=16), 3e-2),
        (tg.Adapter(size=8, backbone_dropout=True), 1e-2),
        (tg.Adapter(size=8, norm_inside="batch"), 1e-2),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_method_learns_and_the_model_comes_back_to_the_bit(method: tg.Method, rate: float) -> None:
    backbone = tiny.backbone()
    before = state(backbone.model)
    run = tg.fit(backbone, tiny.task(), method, **{**FAST, "learning_rate": rate})
    assert run.score is not None and run.score > 0.8, run.history
    assert equal(before, state(backbone.model)) and not hasattr(backbone.model, "taskgraft")
    assert run.trained == tg.count(method, backbone.model.config, labels=2)
    assert (run.graft is None) == method.trains_backbone


def test_a_head_alone_trains_on_cached_features_as_it_would_through_the_backbone() -> None:
    backbone, task = tiny.backbone(), tiny.task(count=32)
    method = tg.HeadOnly(head_dropout=0.0)
    calls = 0

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = backbone.model.embeddings.register_forward_hook(counted)
    run = tg.fit(backbone, task, method, **FAST)
    handle.remove()
    assert calls <= 6, "each split goes through the backbone once"
    answers = tg.predict(tiny.backbone(), run.graft, task.splits["test"]["text"].to_pylist())  # type: ignore[arg-type]
    right = sum(a.answer == y for a, y in zip(answers, task.splits["test"]["label"].to_pylist(), strict=True))
    assert right / len(answers) == pytest.approx(run.test["accuracy"]), "cached and whole forward passes agree"


def test_numbers_are_predicted_in_their_own_units() -> None:
    run = tg.fit(tiny.backbone(), tiny.task("regression"), tg.Adapter(size=8), **{**FAST, "epochs": 12})
    good, bad = tg.predict(tiny.backbone(), run.graft, ["the film was good", "the film was awful"])  # type: ignore[arg-type]
    assert 510 < good.answer < 530 and 470 < bad.answer < 490


def test_what_is_reported_is_what_the_graft_gives_in_bf16_too() -> None:
    far = tiny.task("regression")
    moved = {
        split: table.set_column(1, "label", pa.array(table["label"].to_numpy() + 1e5))
        for split, table in far.splits.items()
    }
    task = dataclasses.replace(far, splits=moved)
    run = tg.fit(tiny.backbone(), task, tg.Adapter(size=8), precision="bf16", **FAST)
    assert run.test["pearson"] > 0.8
    assert tg.evaluate(tiny.backbone(), run.graft, task)["pearson"] == pytest.approx(run.test["pearson"])  # type: ignore[arg-type]


def test_without_rows_held_out_there_is_no_score() -> None:
    task = dataclasses.replace(tiny.task(count=32), splits={"train": tiny.task(count=32).splits["train"]})
    run = tg.fit(tiny.backbone(), task, tg.Adapter(size=4), epochs=2)
    assert run.score is None and run.epoch == 2 and run.graft is not None
    assert run.graft.metrics["score"] is None, "JSON has no NaN"


def test_a_stream_of_tasks_leaves_earlier_ones_to_the_bit() -> None:
    backbone = tiny.backbone()
    texts = [f"the film was {word}" for word in (*tiny.GOOD, *tiny.BAD)]
    first = tg.train(backbone, tiny.task(), tg.Adapter(size=8), **FAST)
    tg.add_graft(backbone.model, first)
    before = [found.probabilities for found in tg.predict(backbone, first, texts)]
    resting = {name: value.clone() for name, value in backbone.model.taskgraft.read("mood").items()}
    second = tg.train(backbone, tiny.task("regression", name="price"), tg.Adapter(size=4), **FAST)
    tg.add_graft(backbone.model, second)
    assert equal(resting, backbone.model.taskgraft.read("mood"))
    assert [found.probabilities for found in tg.predict(backbone, first, texts)] == before
    assert tg.tasks_of(backbone.model) == ["mood", "price"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    options = {**FAST, "epochs": 2}
    one, same, other = (
        tg.train(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **options, seed=seed) for seed in (1, 1, 2)
    )
    assert equal(one.tensors, same.tensors) and not equal(one.tensors, other.tensors)


def test_the_callers_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    backbone = tiny.backbone()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tg.train(backbone, tiny.task(count=16), epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_accumulated_batches_take_the_step_of_one_large_batch() -> None:
    task = tiny.task(count=32)
    task = dataclasses.replace(task, splits={"train": task.splits["train"].slice(0, 32)})
    options: dict[str, Any] = {"epochs": 1, "average": 0.0, "learning_rate": 1e-2}
    method = tg.Adapter(size=4, head_dropout=0.0)
    large = tg.train(tiny.backbone(), task, method, batch_size=32, **options)
    small = tg.train(tiny.backbone(), task, method, batch_size=8, accumulation=4, **options)
    assert large.training["steps"] == small.training["steps"] == 1
    for name, value in large.tensors.items():
        assert torch.allclose(value, small.tensors[name], atol=1e-5), name


def test_balanced_classes_find_the_rare_one() -> None:
    table = tiny.task(count=400).splits["train"].to_pylist()
    rare = [row for row in table if row["label"] == 1][:6] + [row for row in table if row["label"] == 0]
    schema = tiny.task().splits["train"].schema
    task = dataclasses.replace(
        tiny.task(), splits={"train": pa.Table.from_pylist(rare, schema), "test": tiny.task().splits["test"]}
    )
    options = {**FAST, "epochs": 3, "learning_rate": 2e-3}
    plain = tg.fit(tiny.backbone(), task, tg.Adapter(size=8), **options)
    balanced = tg.fit(tiny.backbone(), task, tg.Adapter(size=8), balance_classes=True, **options)
    assert balanced.test["macro_f1"] > plain.test["macro_f1"]
    with pytest.raises(tg.GraftError, match="balance_classes is for classification"):
        tg.fit(tiny.backbone(), tiny.task("regression"), balance_classes=True)


def test_the_last_epoch_near_the_best_is_kept_and_patience_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.5, 0.9, 0.88, 0.6, 0.55, 0.5, 0.4])
    seen: list[dict[str, Tensor]] = []

    def validated(self: Loop, course: Course, split: str, weights: Any = None) -> dict[str, dict[str, float]]:
        if weights is None:
            return {"mood": {"accuracy": 0.0}}
        seen.append({name: value.clone() for name, value in weights.items()})
        return {"mood": {"accuracy": next(scores)}}

    monkeypatch.setattr(Loop, "evaluate", validated)
    run = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **{**FAST, "patience": 3, "epochs": 9})
    assert run.epochs == 5, "three epochs without a better score"
    assert run.epoch == 3, "0.88 is within a standard error of 0.9 among 80 rows; 0.6 is not"
    kept = seen[2]
    head = next(name for name in kept if name.endswith(".weight") and "heads" in name)
    assert torch.equal(kept[head][0], run.graft.tensors["head.weight"])  # type: ignore[union-attr]


def test_patience_begins_with_the_first_score_that_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.0] * 5 + [0.3, 0.2, 0.2, 0.2, 0.2])

    def validated(self: Loop, course: Course, split: str, weights: Any = None) -> dict[str, dict[str, float]]:
        return {"mood": {"accuracy": 0.0 if weights is None else next(scores)}}

    monkeypatch.setattr(Loop, "evaluate", validated)
    run = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **{**FAST, "patience": 3, "epochs": 12})
    assert run.epochs == 9


@pytest.mark.parametrize(("rows", "epochs"), [(40, 20), (1120, 5), (1883, 4), (3001, 3), (1_000_000, 3)])
def test_small_tasks_take_more_epochs(rows: int, epochs: int) -> None:
    settings = tg.Settings().resolved(tg.Adapter(), "classification", rows)
    assert (settings.epochs, settings.learning_rate, settings.max_length) == (epochs, 2e-3, 128)
    assert tg.Settings(epochs=7, learning_rate=0.1).resolved(tg.Adapter(), "spans", rows).epochs == 7
    assert tg.Settings().resolved(tg.Adapter(), "spans", rows).max_length == 384


@pytest.mark.parametrize(
    ("method", "epsilon"),
    [(tg.Adapter(), 1e-6), (tg.HyperFormer(shared=True), 1e-6), (tg.HyperFormer(), 1e-8)],
    ids=["adapter", "plus", "hyperformer"],
)
def test_generators_of_their_own_have_a_smaller_epsilon(method: tg.Method, epsilon: float) -> None:
    assert tg.Settings().resolved(method, "classification", 100).epsilon == epsilon
    assert tg.Settings(epsilon=1e-4).resolved(method, "classification", 100).epsilon == 1e-4


def test_texts_that_are_cut_are_counted() -> None:
    run = tg.fit(tiny.backbone(), tiny.task(count=24), tg.Adapter(size=4), epochs=1, max_length=6)
    task = tiny.task(count=24)
    long = sum(len(text.split()) + 2 > 6 for text in task.splits["train"]["text"].to_pylist())
    assert run.cut["train"] == long > 0


def test_trackers_write_to_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tg.fit(
        tiny.backbone(), tiny.task(count=16), tg.Adapter(size=4), epochs=2, run=tmp_path / "run", track="tensorboard"
    )
    assert list((tmp_path / "run").rglob("events.out.*"))


class Listener(Quiet):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.scores: list[float] = []

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        self.steps.append(done)

    def epoch(self, epoch: int, metric: str, score: float) -> None:
        self.scores.append(score)


def test_a_listener_hears_of_every_step_and_epoch() -> None:
    listener = Listener()
    run = tg.fit(tiny.backbone(), tiny.task(count=32), tg.Adapter(size=4), epochs=2, batch_size=8, progress=listener)
    assert listener.steps == list(range(1, 9)) and len(listener.scores) == 2
    assert listener.scores == [entry["tasks"]["mood"]["accuracy"] for entry in run.history]


def test_a_quiet_run_writes_nothing_when_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    tg.fit(tiny.backbone(), tiny.task(count=16), tg.Adapter(size=4), epochs=1)
    assert capfd.readouterr() == ("", "")


BAD = [
    ({"epochs": 0}, "epochs=0 must be a whole number"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0 must be above 0"),
    ({"epsilon": 0.0}, "epsilon=0.0 must be above 0"),
    ({"warmup": 1.0}, "warmup=1.0 must be at least 0 and below 1"),
    ({"precision": "int8"}, "precision='int8' is unknown"),
    ({"epoch": 3}, "the settings are epochs"),
    ({"track": "tensorboard"}, "needs a run folder"),
    ({"learning_rate": 1e30, "clip_norm": 1e30, "epochs": 3}, "became nan|became inf"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_settings_are_one_sentence_and_the_model_is_as_it_was(options: dict[str, Any], sentence: str) -> None:
    backbone = tiny.backbone()
    before = state(backbone.model)
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        tg.fit(backbone, tiny.task(count=32), tg.Adapter(size=4), **options)
    assert "\n" not in str(caught.value)
    assert equal(before, state(backbone.model)) and not hasattr(backbone.model, "taskgraft")


def test_out_of_memory_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(Loop, "_step", fail)
    with pytest.raises(tg.GraftError, match="halve the batch size and double the accumulation"):
        tg.fit(tiny.backbone(), tiny.task(count=32), tg.Adapter(size=4))


def test_methods_without_a_graft_and_half_precision_are_refused() -> None:
    with pytest.raises(tg.GraftError, match="changes the backbone itself, so there is no graft"):
        tg.train(tiny.backbone(), tiny.task(), tg.FullFineTuning())
    backbone = tiny.backbone()
    backbone.model.to(torch.bfloat16)
    with pytest.raises(tg.GraftError, match="would be trained in bfloat16, where small steps are lost"):
        tg.fit(backbone, tiny.task(), tg.FullFineTuning())
    assert tg.fit(backbone, tiny.task(count=16), tg.Adapter(size=4), epochs=1).trained > 0, "a graft trains in float32"


def test_evaluating_other_data_is_refused() -> None:
    graft = tg.train(tiny.backbone(), tiny.task(count=16), tg.Adapter(size=4), epochs=1)
    other = dataclasses.replace(tiny.task(), labels=("no", "yes"))
    with pytest.raises(tg.GraftError, match=r"is of kind classification with labels \['bad', 'good'\]"):
        tg.evaluate(tiny.backbone(), graft, other)
    with pytest.raises(tg.GraftError, match="reads one text, and second ones were given"):
        tg.predict(tiny.backbone(), graft, ["a", "b"], ["c"])
    assert tg.predict(tiny.backbone(), graft, []) == []
    for texts, sentence in (
        ("good film", "is one string: give a list"),
        ([None], r"texts\[0\] is 'None'"),
        ([["a"]], "a string is needed"),
    ):
        with pytest.raises(tg.GraftError, match=sentence):
            tg.predict(tiny.backbone(), graft, texts)
