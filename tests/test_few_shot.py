"""A new task from few examples: what it starts from, what is tuned, what becomes of the others, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import taskgraft as tg
from taskgraft.errors import Stopped
from taskgraft.tasks.task import schema_of
from taskgraft.training.few_shot import STEPS, examples, few_shot
from taskgraft.training.progress import Quiet
from taskgraft.training.related import MOST_JUDGING, RIDGE, drift_of, judging_rows, left_out_error

import tiny

PLUS, FULL = tg.HyperFormer(shared=True, size=8), tg.FullFineTuning()
DAGGER = tg.Adapter(size=8, norm_after="shared", init_std=1e-2)
METHODS = {"hyperformer++": PLUS, "dagger": DAGGER, "full": FULL}
FAST: dict[str, Any] = {"epochs": 2, "learning_rate": 1e-2, "max_length": 16, "progress": False}
NEW = tiny.task("classification", 60, "new", seed=7)


def backbone_that(writes: bool) -> tg.Backbone:
    return tiny.writer() if writes else tiny.backbone()


@functools.cache
def together(method: str, writes: bool) -> tg.Joint:
    """Three tasks of different kinds, trained for a little while."""
    kinds = ("classification", "regression", "text" if writes else "multilabel")
    tasks = [tiny.task(kind, 36, f"old {kind}", seed=number) for number, kind in enumerate(kinds)]
    return tg.train(backbone_that(writes), tasks, METHODS[method], **FAST)


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Of every tensor, so that a change of any bit of any of them is seen."""
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


# -- a run


@pytest.mark.parametrize("writes", [False, True], ids=["encoder", "t5"])
@pytest.mark.parametrize("method", METHODS)
def test_a_task_is_added_and_the_others_are_not_touched(method: str, writes: bool, tmp_path: Path) -> None:
    backbone, joint = backbone_that(writes), together(method, writes)
    backbone.model.train()
    before, model_before = digest(joint.tensors), digest(backbone.model.state_dict())
    found = few_shot(backbone, joint, NEW, 8, seeds=(3, 1, 4), **FAST)
    assert digest(joint.tensors) == before and list(joint.tasks) == [task for task in joint.tasks if task != "new"]
    assert digest(backbone.model.state_dict()) == model_before and not hasattr(backbone.model, "taskgraft")
    assert backbone.model.training, "it was training before"

    scores = [run.score for run in found.runs]
    assert all(score == run.test["accuracy"] for score, run in zip(scores, found.runs, strict=True))
    assert found.score == pytest.approx(statistics.mean(scores))  # type: ignore[type-var]
    assert found.deviation == pytest.approx(statistics.stdev(scores))  # type: ignore[type-var]
    assert (found.task, found.rows, found.tune) == ("new", 8, "all")
    assert [run.settings.seed for run in found.runs] == [3, 1, 4] and found.first is found.runs[0]
    assert all(run.validation == {} and run.epochs == 2 for run in found.runs), "no validation rows are used"
    assert found.drift.keys() == joint.tasks.keys()
    if method == "full":
        assert found.like == [None] * 3 and found.losses == [{}] * 3 and found.first.graft is None
    else:
        graft = found.first.graft
        assert graft is not None and graft.task["rows"] == {"train": 8, "test": 20}
        assert [min(each, key=each.__getitem__) for each in found.losses] == found.like
        assert all(each.keys() == joint.tasks.keys() for each in found.losses)
        assert tg.evaluate(backbone, graft, NEW)["score"] == pytest.approx(found.first.score)

    found.joint.save(tmp_path / "with new")
    loaded = tg.load_joint(tmp_path / "with new")
    assert list(loaded.tasks) == [*joint.tasks, "new"] and loaded.tasks["new"].metrics["score"] == found.first.score
    own = {name: value for name, value in before.items() if not name.startswith("*/")}
    assert own.items() <= digest(loaded.tensors).items()
    tg.add_joint(backbone.model, loaded)
    assert tg.tasks_of(backbone.model) == [*joint.tasks, "new"]
    if not writes:
        right, rows = 0, NEW.splits["test"].to_pylist()
        backbone.model.eval()
        for row in rows:
            with tg.rows(backbone.model, "new"), torch.no_grad():
                logits = backbone.model(**backbone.tokenizer(row["text"], return_tensors="pt")).logits
            right += int(logits[0, :2].argmax()) == row["label"]
        assert right / len(rows) == pytest.approx(found.first.score)


@pytest.mark.parametrize("writes", [False, True], ids=["encoder", "t5"])
@pytest.mark.parametrize("method", ["hyperformer++", "dagger"])
def test_tuning_its_own_weights_alone_leaves_the_others_to_the_bit(method: str, writes: bool) -> None:
    backbone, joint = backbone_that(writes), together(method, writes)
    found = {tune: few_shot(backbone, joint, NEW, 8, tune=tune, **FAST) for tune in ("own", "all")}
    assert all(value == 0 for drift in found["own"].drift.values() for value in drift.values())
    shared = {name: value for name, value in digest(joint.tensors).items() if name.startswith("*/")}
    assert shared and shared.items() <= digest(found["own"].joint.tensors).items()
    now = digest(found["all"].joint.tensors)
    assert any(now[name] != value for name, value in shared.items())
    drift = found["all"].drift["old classification"]
    assert 0 < drift["largest"] <= 1 and 0 <= drift["changed"] <= 1
    if not writes:
        assert found["all"].drift["old regression"]["largest"] > 0 and found["all"].drift["old multilabel"]
    assert 0 < found["own"].first.trained < found["all"].first.trained
    held = sum(value.numel() for name, value in joint.tensors.items() if name.startswith("*/"))
    assert found["own"].first.trained == found["all"].first.trained - held
    assert found["own"].first.trained == sum(
        value.numel() for name, value in found["own"].joint.tensors.items() if name.startswith("new/")
    )


def test_a_fine_tuned_backbone_is_tuned_with_the_new_head_alone() -> None:
    found = few_shot(tiny.backbone(), together("full", False), NEW, 8, **FAST)
    assert found.first.trained == 20640 + 2 * 33
    assert {name.partition("/")[2] for name in found.joint.tensors if name.startswith("new/")} == {
        "head.weight",
        "head.bias",
    }


def test_plain_adapters_share_nothing_so_nothing_drifts() -> None:
    tasks = [tiny.task("classification", 24, "a"), tiny.task("regression", 24, "b")]
    joint = tg.train(tiny.backbone(), tasks, tg.Adapter(size=4, pooling="cls"), **FAST)
    found = few_shot(tiny.backbone(), joint, NEW, 8, **FAST)
    assert all(value == 0 for drift in found.drift.values() for value in drift.values())
    assert found.first.method == joint.method, "it is read as the others are: pooling='cls'"


# -- the examples


def test_examples_are_balanced_and_drawn_by_the_seed() -> None:
    rows = [{"text": f"{label} {i}", "label": label} for label, n in ((0, 200), (1, 20), (2, 3)) for i in range(n)]
    table = pa.Table.from_pylist(rows, schema_of("classification", False))
    task = tg.Task("new", "classification", ("a", "b", "c"), ("accuracy",), {"train": table})
    for count, each in ((6, [2, 2, 2]), (7, None), (12, None), (32, None), (500, [200, 20, 3])):
        drawn = examples(task, count, seed=0)
        labels = np.bincount(drawn["label"].to_numpy(), minlength=3)
        assert labels.sum() == drawn.num_rows == min(count, 223) and len(set(drawn["text"].to_pylist())) == len(drawn)
        assert each is None or labels.tolist() == each
        assert all(n == have or labels.max() - n <= 1 for n, have in zip(labels, (200, 20, 3), strict=True))
    assert examples(task, 12, 5).equals(examples(task, 12, 5))
    assert not examples(task, 12, 5).equals(examples(task, 12, 6))
    numbers = tiny.task("regression", 40, "numbers")
    assert examples(numbers, 9, 0).num_rows == 9 and examples(numbers, 900, 0).equals(numbers.splits["train"])


def test_seeds_decide_and_more_rows_than_there_are_mean_all() -> None:
    joint = together("dagger", False)
    small = dataclasses.replace(NEW, splits={**NEW.splits, "train": NEW.splits["train"].slice(0, 10)})

    def tensors(seed: int) -> dict[str, str]:
        graft = few_shot(tiny.backbone(), joint, small, 99, seeds=[seed], **FAST).first.graft
        assert graft is not None and graft.task["rows"]["train"] == 10
        return digest(graft.tensors)

    assert tensors(0) == tensors(0) != tensors(1)
    found = few_shot(tiny.backbone(), joint, small, 99, seeds=[2], **FAST)
    assert (found.rows, found.deviation) == (10, None)


def test_fewer_examples_take_more_epochs_and_a_task_without_test_rows_has_no_score() -> None:
    joint = together("dagger", False)
    bare = dataclasses.replace(NEW, splits={"train": NEW.splits["train"]})
    found = few_shot(tiny.backbone(), joint, bare, 33, batch_size=16, max_length=8, progress=False)
    assert found.first.epochs == STEPS // 3 and found.first.steps == STEPS
    assert found.score is None and found.deviation is None and found.first.graft is not None
    held_out = dataclasses.replace(NEW, splits={key: NEW.splits[key] for key in ("train", "validation")})
    found = few_shot(tiny.backbone(), joint, held_out, 8, **FAST)
    assert found.score is not None and found.first.graft is not None
    assert found.first.graft.task["rows"] == {"train": 8, "validation": NEW.splits["validation"].num_rows}
    assert found.first.split == found.first.graft.metrics["split"] == "validation" and not found.first.test


def test_a_graft_says_what_it_started_from_and_the_new_joint_claims_no_old_scores(tmp_path: Path) -> None:
    joint = together("hyperformer++", False)
    joint.save(tmp_path / "house")
    found = few_shot(tiny.backbone(), tmp_path / "house", NEW, 8, seeds=2, **FAST)
    assert len(found.runs) == 2 and found.first.graft is not None
    origin = found.first.graft.training
    assert (origin["like"], origin["tune"], origin["together"]) == (found.like[0], "all", list(joint.tasks))
    assert origin["method"]["method"] == "hyperformer" and found.first.graft.method.name == "adapter"
    assert found.joint.metrics == {} and all(not found.joint.tasks[task].metrics for task in joint.tasks)


def test_a_state_of_a_run_from_other_tasks_is_not_taken_up(tmp_path: Path) -> None:
    """Plain adapters share nothing, so what tells two joints apart is the task that was started from."""
    joint = together("dagger", False)
    own = {n: v + 0.1 if "/head" not in n and not n.startswith("*/") else v for n, v in joint.tensors.items()}
    other = dataclasses.replace(joint, tensors=own)
    like = next(iter(joint.tasks))
    few_shot(tiny.backbone(), joint, NEW, 8, like=like, run=tmp_path, **FAST)
    again = few_shot(tiny.backbone(), other, NEW, 8, like=like, run=tmp_path, **FAST)
    fresh = few_shot(tiny.backbone(), other, NEW, 8, like=like, **FAST)
    assert again.first.graft is not None and fresh.first.graft is not None
    assert digest(again.first.graft.tensors) == digest(fresh.first.graft.tensors)


# -- what it starts from


def signs(name: str, about: str, seed: int) -> tg.Task:
    """Texts with a word of mood and a word of place, of which one kind is the answer."""
    draw, splits = random.Random(seed), {}
    for split, count in (("train", 120), ("validation", 40), ("test", 40)):
        rows = []
        for _ in range(count):
            good, film = draw.random() < 0.5, draw.random() < 0.5
            words = [draw.choice(tiny.GOOD if good else tiny.BAD), "film" if film else "shop"]
            rows.append({"text": tiny.sentence(draw, words), "label": int(good if about == "mood" else film)})
        splits[split] = pa.Table.from_pylist(rows, schema_of("classification", False))
    return tg.Task(name, "classification", ("no", "yes"), ("accuracy",), splits)


def test_it_starts_from_the_task_that_it_is_like_on_an_encoder() -> None:
    options = {**FAST, "epochs": 6, "batches": "mixed"}
    joint = tg.train(
        tiny.backbone(), [signs("mood", "mood", 0), signs("place", "place", 1)], tg.Adapter(size=8), **options
    )
    for about in ("mood", "place"):
        found = few_shot(tiny.backbone(), joint, signs("new", about, 5), 16, seeds=range(3), **{**FAST, "epochs": 1})
        assert found.like == [about] * 3, found.losses


def test_it_starts_from_the_task_that_it_is_like_on_a_model_that_writes() -> None:
    """One task writes numbers of classes, the other words."""
    kinds = ("classification", "text")
    tasks = [tiny.task(kind, 48, kind, seed=number) for number, kind in enumerate(kinds)]
    joint = tg.train(tiny.writer(), tasks, tg.Adapter(size=8), **{**FAST, "epochs": 4})
    for kind in kinds:
        found = few_shot(tiny.writer(), joint, tiny.task(kind, 24, "new", seed=8), 8, seeds=range(2), **FAST)
        near, far = ([losses[k] for losses in found.losses] for k in sorted(kinds, key=lambda k: k != kind))
        assert found.like == [kind] * 2 and max(near) < min(far) - 0.1, found.losses


@pytest.mark.parametrize("method", ["hyperformer++", "dagger"])
def test_like_names_the_task_to_start_from(method: str) -> None:
    joint = together(method, False)
    still = {**FAST, "epochs": 1, "learning_rate": 1e-12, "weight_decay": 0.0}
    for like in joint.tasks:
        found = few_shot(tiny.backbone(), joint, NEW, 8, like=like, tune="own", **still)
        assert found.like == [like] and found.losses == [{}]
        started, ended = joint.part(like), found.joint.part("new")
        same = [name for name in ended if not name.startswith("head.")]
        assert same and all(torch.allclose(started[name], ended[name], atol=1e-9) for name in same)
        if joint.tasks[like].head == tg.Head("classification", NEW.labels):
            assert torch.allclose(started["head.weight"], ended["head.weight"], atol=1e-9)
        else:
            assert started["head.weight"].shape != ended["head.weight"].shape or not torch.allclose(
                started["head.weight"], ended["head.weight"], atol=1e-3
            )


def test_words_and_spans_start_from_a_named_task() -> None:
    joint = together("hyperformer++", False)
    for kind in ("tokens", "spans"):
        found = few_shot(tiny.backbone(), joint, tiny.task(kind, 24, "new"), 8, like="old multilabel", **FAST)
        assert found.score is not None and found.like == ["old multilabel"]


@pytest.mark.parametrize(("rows", "width", "outputs"), [(7, 3, 1), (16, 40, 2), (2, 5, 3)])
def test_the_error_of_what_was_left_out_is_that_of_fitting_without_it(rows: int, width: int, outputs: int) -> None:
    draw = np.random.default_rng(rows)
    features, answers = 3 + 2 * draw.normal(size=(rows, width)), draw.normal(size=(rows, outputs))
    x = features - features.mean(0)
    x = np.concatenate([x / np.sqrt((x**2).mean()), np.ones((rows, 1))], 1)
    errors = []
    for row in range(rows):
        others = np.arange(rows) != row
        inner = x[others].T @ x[others] + RIDGE * (width + 1) * np.eye(width + 1)
        fitted = np.linalg.solve(inner, x[others].T @ answers[others])
        errors.append((answers[row] - x[row] @ fitted) ** 2)
    assert left_out_error(features, answers) == pytest.approx(float(np.mean(errors)), rel=1e-9)


def test_features_that_are_all_the_same_are_judged_too() -> None:
    assert np.isfinite(left_out_error(np.ones((1, 4)), np.ones((1, 2))))
    assert np.isfinite(left_out_error(np.ones((5, 4)), np.eye(5)[:, :2]))


def test_drift_is_counted_in_answers_and_in_the_largest_change() -> None:
    classes = [np.array([0.9, 0.1]), np.array([0.4, 0.6]), np.array([0.5, 0.5])]
    moved = [np.array([0.8, 0.2]), np.array([0.7, 0.3]), np.array([0.5, 0.5])]
    labels = [np.array([[0.9, 0.1], [0.2, 0.8]])], [np.array([[0.9, 0.1], [0.6, 0.4]])]
    before: Any = {"class": classes, "labels": labels[0], "number": [np.array([3.0]), np.array([4.0])], "text": ["a"]}
    after: Any = {"class": moved, "labels": labels[1], "number": [np.array([3.0]), np.array([4.5])], "text": ["b"]}
    found = drift_of(before, after)
    assert found["class"] == {"changed": pytest.approx(1 / 3), "largest": pytest.approx(0.3)}
    assert found["labels"] == {"changed": 1.0, "largest": pytest.approx(0.4)}
    assert found["number"] == {"largest": 0.5} and found["text"] == {"changed": 1.0}


# -- resuming


class Stopping(Quiet):
    """Stops the run of one seed at a step, and remembers where each run began."""

    def __init__(self, run: int, at: int) -> None:
        self.run, self.at, self.began = run, at, []  # type: tuple[int, int, list[int]]

    def begin(self, name: str, steps: int, done: int) -> None:
        self.began.append(done)

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        if len(self.began) == self.run and done == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("tune", ["all", "own"])
def test_seeds_that_were_stopped_go_on_to_the_same_bits(tune: str, tmp_path: Path) -> None:
    joint = together("hyperformer++", False)
    options: dict[str, Any] = {**FAST, "epochs": 4, "seeds": (0, 1), "tune": tune, "checkpoint_seconds": 0.0}
    with pytest.raises(Stopped, match="stopped at step 3 of 4; the same command goes on from step 2"):
        few_shot(tiny.backbone(), joint, NEW, 8, run=tmp_path, **{**options, "progress": Stopping(2, 3)})
    listener = Stopping(-1, -1)
    resumed = few_shot(tiny.backbone(), joint, NEW, 8, run=tmp_path, **{**options, "progress": listener})
    whole = few_shot(tiny.backbone(), joint, NEW, 8, **options)
    assert listener.began == [4, 2]
    for one, other in zip(resumed.runs, whole.runs, strict=True):
        assert one.graft is not None and other.graft is not None
        assert digest(one.graft.tensors) == digest(other.graft.tensors) and one.history == other.history
    assert digest(resumed.joint.tensors) == digest(whole.joint.tensors) and resumed.drift == whole.drift
    listener = Stopping(-1, -1)
    like = next(task for task in joint.tasks if task != whole.like[0])
    few_shot(tiny.backbone(), joint, NEW, 8, like=like, run=tmp_path, **{**options, "progress": listener})
    assert listener.began == [0, 0], "a start from another task is another run"


# -- what is refused

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("dagger", {"task": dataclasses.replace(NEW, name="old regression")}, "'old regression' is already among old"),
    ("dagger", {"like": "unknown"}, "'unknown' is not among those trained together: old classification, old"),
    ("dagger", {"rows": 0}, "0 examples are too few to learn from: give 1 or more"),
    ("dagger", {"tune": "x"}, "tune='x' is unknown: use all or own"),
    ("full", {"like": "old regression"}, "trained by 'full' have nothing of their own to start from"),
    ("full", {"tune": "own"}, "have nothing of their own to start from or to tune alone: leave like and tune out"),
    ("dagger", {"seeds": ()}, "no seeds were given: give one or more"),
    ("dagger", {"seeds": (-1,)}, "seed=-1 must be a whole number of at least 0"),
    (
        "dagger",
        {"task": tiny.task("tokens", 24, "new")},
        "cannot be told for a task of kind tokens: name one with like",
    ),
    ("dagger", {"task": tiny.task("text", 24, "new")}, "'new' is text to text and tiny does not read and write"),
    ("dagger", {"task": dataclasses.replace(NEW, splits={"test": NEW.splits["test"]})}, "'new' has no train rows"),
    ("dagger", {"task": dataclasses.replace(NEW, name="*")}, r"task name '\*' cannot be used"),
    ("dagger", {"epoch": 1}, "the settings are epochs"),
]


@pytest.mark.parametrize(("method", "options", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_input_is_one_sentence_and_the_model_is_as_it_was(
    method: str, options: dict[str, Any], sentence: str
) -> None:
    backbone = tiny.backbone()
    before, options = digest(backbone.model.state_dict()), {"task": NEW, "rows": 8, **FAST, **options}
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        few_shot(backbone, together(method, False), **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert digest(backbone.model.state_dict()) == before and not hasattr(backbone.model, "taskgraft")


def test_a_backbone_with_grafts_and_another_backbone_are_refused() -> None:
    backbone, joint = tiny.backbone(), together("dagger", False)
    tg.graft(backbone.model, tg.Adapter(size=4), {"there": 2})
    with pytest.raises(tg.GraftError, match="already carries grafts: load it anew for a new task"):
        few_shot(backbone, joint, NEW, 8, **FAST)
    assert tg.tasks_of(backbone.model) == ["there"]
    other = tiny.backbone()
    with torch.no_grad():
        other.model.embeddings.word_embeddings.weight.mul_(-1.0)
    with pytest.raises(tg.GraftError, match="another backbone"):
        few_shot(other, joint, NEW, 8, **FAST)
    assert not hasattr(other.model, "taskgraft")


@pytest.mark.parametrize("count", [1, 7, MOST_JUDGING, MOST_JUDGING + 1, 10 * MOST_JUDGING])
def test_many_examples_are_judged_by_some_of_them(count: int) -> None:
    part: Any = SimpleNamespace(encoded={"train": range(count)})
    rows = judging_rows(part).tolist()
    assert len(rows) == min(count, MOST_JUDGING) and rows == sorted(set(rows)) and rows[0] == 0
    assert count - 1 - rows[-1] <= count // MOST_JUDGING, "to the end of them"
