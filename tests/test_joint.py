"""Tasks trained together: every method learns them, batches may be mixed, runs resume to the bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.errors import Stopped
from taskgraft.training.course import Course
from taskgraft.training.loop import Lane, Loop, pieces_of
from taskgraft.training.optim import AdamW, shared_by
from taskgraft.training.parts import Part, part_of
from taskgraft.training.passes import LaneBatch, losses_of
from taskgraft.training.progress import Quiet
from taskgraft.training.sampling import Batch
from taskgraft.training.session import Heard, mounted, rates_of, trained_places

import tiny

CPU = torch.device("cpu")
FAST: dict[str, Any] = {"epochs": 2, "learning_rate": 3e-3, "patience": 99, "batches": "mixed", "progress": False}
HYPER, PLUS = tg.HyperFormer(size=8), tg.HyperFormer(shared=True, size=8)
DAGGER = tg.Adapter(size=8, norm_after="shared", init_std=1e-2)
HEADS = {"mood": 2, "price": 1, "both": 3}  # classes of each task's head
POOLED = {"mood": "classification", "price": "regression", "both": "multilabel"}
PER_TOKEN = {"names": "tokens", "where": "spans"}
WRITTEN = {"mood": "classification", "price": "regression", "say": "text"}


def several(kinds: dict[str, str], count: int = 24) -> list[tg.Task]:
    """Tasks of these kinds, each smaller than the one before, and with three labels where there may be several."""
    found = []
    for number, (name, kind) in enumerate(kinds.items()):
        task = tiny.task(kind, count - count // 6 * number, name, seed=number)
        found.append(dataclasses.replace(task, labels=("good", "bad", "never")) if kind == "multilabel" else task)
    return found


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def loop_of(backbone: tg.Backbone, tasks: Sequence[tg.Task], method: tg.Method, **changes: Any) -> Iterator[Loop]:
    """A loop over tasks that are on the model, before its first step."""
    rows = sum(task.splits["train"].num_rows for task in tasks)
    settings = tg.Settings(**changes).resolved(method, tasks[0].kind, rows)
    parts = [part_of(backbone, task, settings, CPU, prefix=method.trains_backbone) for task in tasks]
    with mounted(backbone.model, {part.name: part.head for part in parts}, method, settings.seed):
        yield loop_over(backbone, parts, settings)


def loop_over(backbone: tg.Backbone, parts: Sequence[Part], settings: tg.Settings) -> Loop:
    rates = rates_of(backbone.model, [part.name for part in parts], settings)
    course = Course({part.name: part for part in parts}, settings, trained_places(backbone.model), rates)
    given = {"eps": settings.epsilon, "weight_decay": settings.weight_decay, "clip_norm": settings.clip_norm}
    optimizer = AdamW(backbone.model, rates, **given)
    return Loop(backbone.model, backbone.tokenizer, optimizer, CPU, False, [Lane(course)])


def course_of(loop: Loop) -> Course:
    return loop.lanes[0].course


def all_rows(loop: Loop, *names: str) -> Batch:
    parts = course_of(loop).parts
    return Batch({name: np.arange(len(parts[name].encoded["train"])) for name in names or parts})


def loss_of(loop: Loop, batch: Batch) -> Tensor:
    """The sum over the batch's rows."""
    return losses_of(loop.model, [LaneBatch(0, pieces_of(course_of(loop), batch), step_rows=1)], CPU, False)[0]


def step(loop: Loop, batch: Batch) -> None:
    """Take a step over this batch."""
    course = course_of(loop)
    course._planned = (course.epoch, [[batch]] * course.steps_per_epoch)
    loop._step(Heard(Quiet(), None))


def gradient(loop: Loop, batch: Batch) -> dict[str, Tensor]:
    loop.model.zero_grad()
    loss_of(loop, batch).backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in tg.trainable(loop.model).items()
    }


def weighted_sum(gradients: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    return {
        name: torch.stack([w * each[name] for w, each in zip(weights, gradients, strict=True)]).sum(0)
        for name in gradients[0]
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10 * largest, msg=name)


# -- learning


@pytest.mark.parametrize(
    ("method", "rate", "batches", "epochs", "least"),
    [
        (HYPER, 6e-3, "mixed", 5, {"mood": 0.9, "price": 0.8}),
        (HYPER, 3e-3, "single", 4, {}),
        (PLUS, 3e-3, "mixed", 5, {}),
        (DAGGER, 1e-2, "mixed", 4, {}),
        (tg.Adapter(size=8), 1e-2, "mixed", 5, {"mood": 0.9, "price": 0.8, "both": 0.8}),
        (tg.Adapter(size=8), 1e-2, "single", 3, {}),
        (tg.FullFineTuning(), 2e-3, "mixed", 5, {"mood": 0.9, "price": 0.9, "both": 0.6}),
        (tg.TopLayers(k=1), 1e-3, "mixed", 3, {}),
    ],
    ids=["hyperformer", "hyperformer, single", "hyperformer++", "dagger", "adapter", "adapter, single", "full", "top"],
)
def test_every_method_learns_tasks_together_and_says_what_came_of_them(
    method: tg.Method, rate: float, batches: str, epochs: int, least: dict[str, float]
) -> None:
    backbone, tasks = tiny.backbone(), several(POOLED, 180)
    before = state(backbone.model)
    options = {**FAST, "epochs": epochs, "learning_rate": rate, "batches": batches}
    run = tg.fit(backbone, tasks, method, **options)
    assert equal(before, state(backbone.model)) and not hasattr(backbone.model, "taskgraft")
    losses = [entry["loss"] for entry in run.history]
    assert losses[-1] < 0.95 * losses[0], losses
    scores = {name: found["score"] for name, found in run.results.items()}
    assert all(scores[name] >= score for name, score in least.items()), scores

    config = backbone.model.config
    heads = sum(width * (config.hidden_size + 1) for width in HEADS.values())
    shared_backbone = method.trains_backbone  # one for all tasks, where `tg.count` has a copy for each
    assert run.trained == tg.count(method, config, tasks=1 if shared_backbone else 3) + heads
    assert run.total == 20640 == sum(p.numel() for p in backbone.model.parameters())
    assert list(run.results) == list(run.joint.tasks) == list(HEADS)
    assert list(run.grafts) == ([] if method.trains_backbone else list(HEADS))
    assert run.score == pytest.approx(sum(scores.values()) / 3) == run.joint.metrics["score"]
    for task in tasks:
        found = run.results[task.name]
        assert found["split"] == "test" and found["score"] == found["test"][task.metrics[0]]
        assert found["validation"] == run.history[run.epoch - 1]["tasks"][task.name]
        if run.grafts:
            graft = run.grafts[task.name]
            again = tg.evaluate(backbone, graft, task)
            assert again.pop("score") == pytest.approx(found["score"], abs=1e-4)  # prices around 500, in float32
            assert again == pytest.approx(found["test"], abs=1e-4)
            assert graft.metrics["score"] == found["score"] and graft.method.name == "adapter"
    if run.grafts:
        assert 450 < tg.predict(backbone, run.grafts["price"], ["it was good"])[0].answer < 550, "in its own units"


def test_running_statistics_are_not_counted_as_trained() -> None:
    method = tg.Adapter(size=4, norm_inside="batch")
    run = tg.fit(tiny.backbone(), several(POOLED)[:2], method, **{**FAST, "epochs": 1})
    assert run.trained == tg.count(method, tiny.backbone().model.config, tasks=2) + 3 * 33


def test_train_gives_the_tasks_together_by_hyperformer_plus_plus() -> None:
    joint = tg.train(tiny.backbone(), several(POOLED), **{**FAST, "epochs": 1})
    assert isinstance(joint, tg.Joint) and list(joint.tasks) == list(POOLED)
    assert joint.method == tg.HyperFormer(shared=True, size=64, pooling="mean")
    assert all(len(value) == 64 for value in joint.embeddings().values())
    written = tg.train(tiny.writer(), several(WRITTEN, 12), **{**FAST, "epochs": 1})
    assert written.method == tg.HyperFormer(shared=True), "on a model that writes it is the paper's"


# -- the loss


@pytest.mark.parametrize("method", [HYPER, PLUS, DAGGER, tg.FullFineTuning()], ids=lambda m: m.name)
@pytest.mark.parametrize("kinds", [{**POOLED, **PER_TOKEN}, WRITTEN], ids=["heads", "written"])
def test_a_mixed_batch_has_the_gradient_of_its_tasks_one_by_one(method: tg.Method, kinds: dict[str, str]) -> None:
    backbone = tiny.writer() if kinds is WRITTEN else tiny.backbone()
    backbone.model.double()
    with loop_of(backbone, several(kinds), method) as loop:
        for parameter in tg.trainable(backbone.model).values():
            torch.nn.init.normal_(parameter, std=0.2)  # where nothing is zero by its initialisation
        alone = [gradient(loop, all_rows(loop, name)) for name in kinds]
        assert all(any(bool(value.any()) for value in each.values()) for each in alone)
        assert_close(gradient(loop, all_rows(loop)), weighted_sum(alone, [1.0] * len(kinds)))


@pytest.mark.parametrize("method", [PLUS, DAGGER], ids=lambda m: m.name)
def test_both_weightings_have_the_same_expected_gradient(method: tg.Method) -> None:
    backbone = tiny.backbone()
    backbone.model.double()
    with loop_of(backbone, several(POOLED, 30), method, temperature=3.0) as drawn:
        course = course_of(drawn)
        settings = dataclasses.replace(course.settings, weighting="loss")
        weighted = loop_over(backbone, list(course.parts.values()), settings)
        sampler = course_of(weighted).sampler
        assert sampler is not None
        expected, sizes = [], sampler.sizes
        for loop in (drawn, weighted):
            by = course_of(loop).sampler.drawn_by  # type: ignore[union-attr]
            means = [gradient(loop, all_rows(loop, name)) for name in course.parts]
            expected.append(weighted_sum(means, [q / n for q, n in zip(by, sizes, strict=True)]))
        assert_close(expected[1], expected[0])
        alone = {name: float(loss_of(drawn, all_rows(drawn, name)).detach()) for name in course.parts}
        weights = sampler.loss_weights
        assert len(set(weights.values())) == 3 and weights["mood"] < 1 < weights["both"]
        assert float(loss_of(weighted, all_rows(weighted)).detach()) == pytest.approx(
            sum(weights[name] * value for name, value in alone.items()), rel=1e-9
        )


def test_label_smoothing_reaches_written_answers() -> None:
    backbone, task = tiny.writer(), tiny.task("text", 6, "say")
    with loop_of(backbone, [task, tiny.task("text", 6, "more")], PLUS, label_smoothing=0.2) as loop:
        found = float(loss_of(loop, all_rows(loop, "say")).detach())
        by_hand = 0.0
        for row in task.splits["train"].to_pylist():
            inputs = backbone.tokenizer(row["text"], return_tensors="pt")
            labels = backbone.tokenizer(row["label"], return_tensors="pt")["input_ids"]
            with tg.rows(backbone.model, "say"), torch.no_grad():
                chances = backbone.model(**inputs, labels=labels).logits[0].log_softmax(-1)
            right = chances[torch.arange(labels.shape[1]), labels[0]]
            by_hand -= float((0.8 * right + 0.2 * chances.mean(-1)).mean())
    assert found == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("method", [PLUS, DAGGER, tg.FullFineTuning()], ids=lambda m: m.name)
def test_names_come_before_texts_where_nothing_else_tells_tasks_apart(method: tg.Method) -> None:
    backbone = tiny.writer()
    backbone.tokenizer.add_tokens(["mood", "say", "sentence", ":"])
    tasks = several({"mood": "classification", "say": "text"}, 12)
    with loop_of(backbone, tasks, method) as loop:
        for task, column in zip(tasks, ("sentence : ", ""), strict=True):
            encoded = course_of(loop).parts[task.name].encoded["train"]
            read = [
                backbone.tokenizer.decode(encoded.inputs["input_ids"][row].tolist(), skip_special_tokens=True)
                for row in range(len(encoded))
            ]
            name = f"{task.name} " if method.trains_backbone else ""
            wanted = [f"{name}{column}{text}" for text in task.splits["train"]["text"].to_pylist()]
            assert [text.split() for text in read] == [text.split() for text in wanted]
    joint = tg.train(backbone, tasks, method, **{**FAST, "epochs": 1})
    prefixes = {name: member.task["wording"]["prefix"] for name, member in joint.tasks.items()}
    assert prefixes == {task.name: task.name if method.trains_backbone else "" for task in tasks}


# -- steps


@pytest.mark.parametrize("method", [HYPER, PLUS, DAGGER, tg.FullFineTuning()], ids=lambda m: m.name)
def test_a_step_changes_the_tasks_with_rows_and_what_all_share_as_one_slot(method: tg.Method) -> None:
    backbone = tiny.backbone()
    with loop_of(backbone, several(POOLED), method, batches="single", learning_rate=1e-2) as loop:
        grafts = backbone.model.taskgraft

        def weights(name: str) -> dict[str, Tensor]:
            return {key: value.clone() for key, value in grafts.read(name).items()}

        shared = shared_by(list(POOLED))
        assert loop.optimizer.owners.count(shared) == 1 and set(loop.optimizer.owners) == {*POOLED, shared}
        for number, batch in enumerate(course_of(loop).sampler.epoch(0)[:4], start=1):  # type: ignore[union-attr]
            (present,) = batch.parts
            before = {name: weights(name) for name in POOLED}
            steps = dict(zip(loop.optimizer.owners, loop.optimizer.steps.tolist(), strict=True))
            step(loop, batch)
            common = grafts.shared_names(present)
            for name in POOLED:
                now, was = weights(name), before[name]
                own = [key for key in now if key not in common]
                assert all(torch.equal(now[key], was[key]) for key in own) == (name != present)
                assert all(not torch.equal(now[key], was[key]) for key in own if name == present and "norm" not in key)
                assert not common or any(not torch.equal(now[key], was[key]) for key in common)
            steps[present] += 1
            assert steps | {shared: number} == dict(
                zip(loop.optimizer.owners, loop.optimizer.steps.tolist(), strict=True)
            )


@pytest.mark.parametrize("method", [HYPER, DAGGER], ids=lambda m: m.name)
def test_what_is_a_tasks_own_may_have_another_rate(method: tg.Method) -> None:
    backbone = tiny.backbone()
    with loop_of(backbone, several(POOLED), method, learning_rate=1e-2, own_rate=1e-30, warmup=0.0) as loop:
        grafts = backbone.model.taskgraft
        before = {key: value.clone() for key, value in grafts.read("mood").items()}
        step(loop, all_rows(loop))
        moved = {key for key, value in grafts.read("mood").items() if (value - before[key]).abs().max() > 1e-20}
        assert moved and moved <= grafts.shared_names("mood")


def test_generators_move_from_the_first_steps_on() -> None:
    """Their gradients are small then, also beside AdamW's usual epsilon."""
    method = tg.HyperFormer.paper(shared=False, norms="none")

    def generators(**changes: Any) -> Tensor:
        settings = {**FAST, "learning_rate": 1e-3, "epochs": 1, "warmup": 0.0, "average": 0.0, **changes}
        tensors = tg.fit(tiny.backbone(), several(POOLED), method, **settings).joint.tensors
        return torch.cat([value.flatten() for name, value in tensors.items() if name.endswith("generator")])

    start = generators(learning_rate=1e-30)
    way = {epsilon: (generators(epsilon=epsilon) - start).abs().median() for epsilon in (None, 1e-8, 1e-6)}
    assert way[None] == way[1e-8] > 1.2 * way[1e-6] > 0


@pytest.mark.parametrize("method", [HYPER, PLUS, DAGGER], ids=lambda m: m.name)
def test_matrices_decay_and_hypernetworks_embeddings_and_norms_do_not(method: tg.Method) -> None:
    found = []
    for decay in (0.0, 5.0):
        backbone = tiny.backbone()
        with loop_of(backbone, several(POOLED), method, weight_decay=decay, warmup=0.0) as loop:
            step(loop, all_rows(loop))
            found.append(backbone.model.taskgraft.read("mood"))
    changed = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert changed == {name for name in found[0] if name == "head.weight" or name.endswith((".down", ".up"))}
    assert any(name.startswith("hypernet.generator") for name in found[0]) == (method is not DAGGER)


# -- choosing the epoch


def test_the_score_is_the_mean_over_all_metrics_of_all_tasks() -> None:
    mood, price = several({"mood": "classification", "price": "regression"}, 60)
    mood = dataclasses.replace(mood, metrics=("accuracy", "macro_f1"))
    price = dataclasses.replace(price, splits={key: price.splits[key] for key in ("train", "validation")})
    run = tg.fit(tiny.backbone(), [mood, price], PLUS, **FAST)
    for entry in run.history:
        assert set(entry["tasks"]) == {"mood", "price"}
        columns = [entry["tasks"]["mood"][metric] for metric in mood.metrics] + [entry["tasks"]["price"]["pearson"]]
        assert entry["score"] == pytest.approx(sum(columns) / 3, abs=1e-12)
    test, validation = run.results["mood"]["test"], run.results["price"]["validation"]
    assert run.results["price"]["split"] == "validation" and run.results["price"]["test"] == {}
    assert run.score == pytest.approx((test["accuracy"] + test["macro_f1"] + validation["pearson"]) / 3)


def test_the_last_epoch_near_the_best_is_kept_and_patience_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([(0.4, 0.6), (1.0, 0.8), (0.84, 0.9), (0.6, 0.6), (0.5, 0.5), (0.5, 0.5)])
    seen: list[dict[str, Tensor]] = []

    def validated(self: Loop, course: Course, split: str, weights: Any) -> dict[str, dict[str, float]]:
        seen.append({name: value.clone() for name, value in weights.items()})
        one, other = next(scores)
        return {"mood": {"accuracy": one}, "tone": {"accuracy": other}}

    monkeypatch.setattr(Loop, "evaluate", validated)
    monkeypatch.setattr(Loop, "predictions", lambda self, course, split: {})  # no test rows: validation is what counts
    tasks = several({"mood": "classification", "tone": "classification"}, 90)  # 30 and 25 rows to validate
    run = tg.fit(tiny.backbone(), tasks, PLUS, **{**FAST, "patience": 3, "epochs": 9})
    assert run.epochs == 5, "three epochs without a better score"
    assert run.epoch == 3, "a mean of 0.87 is within a standard error (0.04) of 0.9; 0.6 is not"
    assert run.results["mood"]["score"] == 0.84 and run.score == pytest.approx(0.87)
    kept = {name.rpartition(".")[2]: value for name, value in seen[2].items() if ".shared." in name}
    assert torch.equal(run.joint.tensors["*/hypernet.generator"], kept["generator"][0])


# -- the same bits


class Told(Quiet):
    """Raises what a second Ctrl-C does at a step, before its state is saved."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.first, self.metric = at, -1, ""

    def begin(self, name: str, steps: int, done: int) -> None:
        self.first = done

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        if done == self.at:
            raise KeyboardInterrupt

    def epoch(self, epoch: int, metric: str, score: float) -> None:
        self.metric = metric


@pytest.mark.parametrize(
    ("method", "batches", "at"),
    [(PLUS, "mixed", 5), (PLUS, "single", 6), (HYPER, "mixed", 2), (DAGGER, "mixed", 7)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    method: tg.Method, batches: str, at: int, tmp_path: Path
) -> None:
    tasks = several(POOLED, 36)
    options = {**FAST, "epochs": 2, "batches": batches, "accumulation": 1, "checkpoint_seconds": 0.0}

    def run(listener: Told, folder: str | None = "run", given: Sequence[tg.Task] = tasks, **changes: Any) -> Any:
        place = None if folder is None else tmp_path / folder
        return tg.fit(tiny.backbone(), given, method, run=place, **{**options, "progress": listener, **changes})

    with pytest.raises(Stopped, match=f"'mood, price, both' was stopped at step {at} of .* goes on from step {at - 1}"):
        run(Told(at))
    again, whole = Told(), Told()
    resumed, unbroken = run(again), run(whole, None)
    assert (again.first, whole.first, whole.metric) == (at - 1, 0, "mean score")
    assert equal(resumed.joint.tensors, unbroken.joint.tensors)
    assert resumed.history == unbroken.history and resumed.results == unbroken.results
    if at == 5:
        others: list[dict[str, Any]] = [{"temperature": 2.0}, {"weighting": "loss"}, {"batches": "single"}]
        others.append({"epoch_steps": 7})
        for other in [*others, {"given": tasks[::-1]}, {"given": tasks[:2]}]:
            listener = Told(1)
            with pytest.raises(Stopped):
                run(listener, **other)
            assert listener.first == 0, f"the state of another run was taken up with {other}"


def test_an_epoch_has_as_many_steps_as_asked_for() -> None:
    tasks = several(POOLED)
    run = tg.fit(tiny.backbone(), tasks, PLUS, **{**FAST, "epochs": 2, "epoch_steps": 3, "accumulation": 2})
    assert (run.steps, run.epochs) == (6, 2)
    assert {name: len(given) for name, given in run.answers.items()} == {
        task.name: task.splits["test"].num_rows for task in tasks if "test" in task.splits
    }


def test_the_seed_decides_and_nothing_else_that_is_random() -> None:
    tasks = several(POOLED)
    found = []
    for disturbance, seed in ((1, 0), (2, 0), (2, 1)):
        backbone = tiny.backbone()
        np.random.seed(disturbance)
        torch.manual_seed(disturbance)
        found.append(tg.fit(backbone, tasks, PLUS, **{**FAST, "seed": seed}))
        drawn = np.random.random(), float(torch.rand(()))
        np.random.seed(disturbance)
        torch.manual_seed(disturbance)
        assert drawn == (np.random.random(), float(torch.rand(()))), "the caller's numbers go on as they would have"
    one, same, other = found
    assert equal(one.joint.tensors, same.joint.tensors) and one.history == same.history
    assert not equal(one.joint.tensors, other.joint.tensors)


# -- what cannot be trained together


def only_bad(task: tg.Task) -> tg.Task:
    """A classification of one class."""
    splits = {
        split: pa.Table.from_pylist([{**row, "label": 0} for row in table.to_pylist()], table.schema)
        for split, table in task.splits.items()
    }
    return dataclasses.replace(task, labels=("bad",), splits=splits)


MOOD, PRICE, BOTH = several(POOLED)
SAY = tiny.task("text", 12, "say")
BAD: list[tuple[bool, list[tg.Task], dict[str, Any], str]] = [
    (False, [], {}, "0 tasks were given to be trained together: give two or more, or one alone"),
    (False, [MOOD], {}, "1 tasks were given to be trained together"),
    (False, [MOOD, dataclasses.replace(PRICE, name="mood")], {}, "two tasks are called 'mood': give each a name"),
    (False, [MOOD, dataclasses.replace(PRICE, name="a/b")], {}, "task name 'a/b' cannot be used"),
    (False, [MOOD, dataclasses.replace(PRICE, splits={"test": PRICE.splits["test"]})], {}, "'price' has no train rows"),
    (False, [MOOD, PRICE], {"method": tg.HeadOnly()}, "tasks with a head alone share nothing: train them one by one"),
    (False, [MOOD, PRICE], {"temperature": 0.0}, r"temperature=0\.0 must be above 0"),
    (False, [MOOD, PRICE], {"temperature": -1.0}, r"temperature=-1\.0 must be above 0"),
    (False, [MOOD, PRICE], {"temperature": math.nan}, "temperature=nan must be above 0"),
    (False, [MOOD, PRICE], {"batches": "x"}, "batches='x' is unknown: use mixed, single"),
    (False, [MOOD, PRICE], {"weighting": "x"}, "weighting='x' is unknown: use sampling, loss"),
    (False, [MOOD, PRICE], {"decoding": "x"}, "decoding='x' is unknown: use auto, labels, greedy"),
    (False, [MOOD, PRICE], {"seed": -1}, "seed=-1 must be a whole number of at least 0"),
    (False, [MOOD, PRICE], {"balance_classes": True}, "balance_classes is for classification, and task 'price'"),
    (False, [MOOD, SAY], {}, "task 'say' is text to text and tiny does not read and write"),
    (False, [PRICE, only_bad(MOOD)], {}, "a classification head needs at least 2 labels and got 1"),
    (True, [PRICE, only_bad(MOOD)], {}, r"task 'mood' has the classes \['bad'\]: give it two or more"),
    (True, [MOOD, BOTH], {}, "kind 'multilabel' cannot be put into words for a model that writes"),
    (True, [MOOD, PRICE], {"balance_classes": True}, "balance_classes is for tasks with heads, and tiny-t5 writes"),
    (False, [MOOD, PRICE], {"learning_rate": 1e30, "clip_norm": 1e30}, "loss of 'mood, price' became (nan|inf)"),
]


@pytest.mark.parametrize(("writes", "tasks", "options", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_bad_input_is_one_sentence_and_the_model_is_as_it_was(
    writes: bool, tasks: list[tg.Task], options: dict[str, Any], sentence: str
) -> None:
    backbone = tiny.writer() if writes else tiny.backbone()
    before = state(backbone.model)
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        tg.fit(backbone, tasks, **{**FAST, **options})
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert equal(before, state(backbone.model)) and not hasattr(backbone.model, "taskgraft")
