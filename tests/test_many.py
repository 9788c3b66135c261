"""Many runs in one pass: each ends as it would alone, whoever else is there, comes late, fails, or is interrupted."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import taskgraft as tg
from taskgraft.errors import Stopped
from taskgraft.training import loop as loops
from taskgraft.training import many, parts, passes
from taskgraft.training.loop import Loop
from taskgraft.training.progress import ManyQuiet, RunsTable
from taskgraft.training.state import STATE

import tiny

MOOD, PRICE = tiny.task(count=60), tiny.task("regression", 48, "price", seed=3)
SPLITS = [table.set_column(1, "label", [[i % 3 for i in range(table.num_rows)]]) for table in MOOD.splits.values()]
THREE = dataclasses.replace(
    MOOD, name="three", labels=("a", "b", "c"), splits=dict(zip(MOOD.splits, SPLITS, strict=True))
)


def backbone(dtype: torch.dtype = torch.float64, make: Callable[[], tg.Backbone] = tiny.backbone) -> tg.Backbone:
    made = make()
    made.model.to(dtype)
    return made


def trial(name: str, task: tg.Task = MOOD, method: tg.Method | int = 4, **settings: Any) -> tg.Trial:
    method = tg.Adapter(size=method) if isinstance(method, int) else method
    return tg.Trial(name, task, method, tg.Settings(**{"epochs": 3, "learning_rate": 1e-2, "patience": 99, **settings}))


def several() -> list[tg.Trial]:
    """Two sizes and three tasks, whose settings have nothing in common."""
    return [
        trial("small", batch_size=4, epochs=4, seed=1),
        trial("large", method=8, batch_size=16, epochs=13, learning_rate=3e-3, seed=2, warmup=0.3),
        trial("clipped", PRICE, batch_size=4, accumulation=3, epochs=13, seed=3, clip_norm=0.02, average=0.2),
        trial("balanced", THREE, 8, batch_size=6, epochs=9, seed=1, balance_classes=True, label_smoothing=0.1),
        trial("decayed", PRICE, 8, batch_size=5, epochs=5, learning_rate=5e-3, weight_decay=0.5),
        trial("impatient", THREE, batch_size=10, epochs=30, learning_rate=3e-2, seed=5, patience=2),
    ]


def alone(each: tg.Trial, on: tg.Backbone) -> tg.Run:
    return tg.fit(on, each.task, each.method, settings=each.settings, progress=False)


def difference(a: tg.Run, b: tg.Run) -> float:
    """The largest, between two runs that must have gone the same way."""
    assert a.graft is not None and b.graft is not None
    assert (a.steps, a.epoch, a.epochs, a.cut, a.trained) == (b.steps, b.epoch, b.epochs, b.cut, b.trained)
    assert a.graft.tensors.keys() == b.graft.tensors.keys()
    return max(float((value - b.graft.tensors[name]).abs().max()) for name, value in a.graft.tensors.items())


def assert_same(a: tg.Run, b: tg.Run, at_most: float = 1e-9) -> None:
    assert difference(a, b) <= at_most
    assert a.method == b.method and a.settings == b.settings and a.split == b.split and a.total == b.total
    assert a.score == pytest.approx(b.score, abs=at_most)
    for mine, other in zip(a.history, b.history, strict=True):
        assert mine["score"] == pytest.approx(other["score"], abs=at_most)
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)  # losses are added up in float32
        assert mine["tasks"].keys() == other["tasks"].keys()
    for found, wanted in ((a.validation, b.validation), (a.test, b.test)):
        assert found == pytest.approx(wanted, abs=at_most)


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def singles() -> dict[str, tg.Run]:
    """What `several` give, each trained alone."""
    torch.set_num_threads(1)
    return {each.name: alone(each, backbone()) for each in several()}


class Listener(ManyQuiet):
    """Hears everything, and does something at each call of `lane`."""

    def __init__(self, act: Callable[[int], None] = lambda _: None) -> None:
        self.act = act
        self.begun: list[tuple[list[str], list[str]]] = []
        self.lanes: list[tuple[str, int, int]] = []
        self.ended: list[str] = []

    def begin(self, names: Sequence[str], done: Sequence[str]) -> None:
        self.begun.append((list(names), list(done)))

    def lane(self, name: str, step: int, steps: int, epoch: float, loss: float, score: float | None, rows: int) -> None:
        self.lanes.append((name, step, steps))
        self.act(len(self.lanes))

    def run(self, name: str, score: float | None) -> None:
        self.ended.append(name)


# -- each as if alone


def test_trials_with_another_epsilon_of_the_optimiser_have_one_of_their_own() -> None:
    trials = [trial("usual"), trial("wide", epsilon=1e-2), trial("large", method=8)]
    runs = tg.fit_many(backbone(), trials, progress=False)
    for each in trials:
        assert_same(runs[each.name], alone(each, backbone()))
    assert difference(runs["usual"], runs["wide"]) > 1e-3


def test_runs_side_by_side_equal_each_trained_alone(singles: dict[str, tg.Run]) -> None:
    heard, told = Listener(), []
    found = tg.fit_many(backbone(), several(), lanes=3, progress=heard, on_run=lambda t, run: told.append((t, run)))
    assert list(found) == [each.name for each in several()]
    for each in several():
        run = found[each.name]
        assert_same(run, singles[each.name])
        assert run.task == run.graft.name == run.graft.task["name"] == each.task.name  # type: ignore[union-attr]
        assert list(run.history[0]["tasks"]) == [each.task.name] and run.seconds > 0
        steps = [step for name, step, _ in heard.lanes if name == each.name]
        assert steps == list(range(1, run.steps + 1))
    assert sum(run.steps >= 50 for run in found.values()) >= 3
    assert singles["impatient"].epochs < 30, "patience ends a run before its time"
    assert sorted(heard.ended) == sorted(found) and [run for _, run in told] == [found[t.name] for t, _ in told]
    first = {name for name, _, _ in heard.lanes[:3]}
    assert first == {"small", "large", "clipped"}, "the others wait"


def test_in_float32_too() -> None:
    trials = [
        trial(f"{size} {seed}", task, size, epochs=1, batch_size=12, seed=seed, learning_rate=1e-3)
        for size, seed, task in ((4, 0, MOOD), (8, 1, THREE), (8, 2, MOOD), (4, 3, THREE))
    ]
    found = tg.fit_many(backbone(torch.float32), trials, lanes=2, progress=False)
    for each in trials:
        run = alone(each, backbone(torch.float32))
        assert run.steps == 5 and difference(found[each.name], run) <= 1e-5


@pytest.mark.parametrize("tokens", [1, 10**9], ids=["a pass for each lane", "one pass for all"])
def test_how_lanes_are_packed_into_passes_changes_nothing(
    tokens: int, singles: dict[str, tg.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def watched(model: Any, some: Sequence[passes.LaneBatch], *rest: Any) -> Tensor:
        shapes.append([batch.lane for batch in some])
        return passes.losses_of(model, some, *rest)

    monkeypatch.setattr(passes, "CPU_TOKENS", tokens)
    monkeypatch.setattr(loops, "losses_of", watched)
    found = tg.fit_many(backbone(), several()[:4], progress=False)
    assert max(len(lanes) for lanes in shapes) == (1 if tokens == 1 else 4)
    for name, run in found.items():
        assert_same(run, singles[name])


def test_rows_of_similar_length_share_a_pass() -> None:
    part = many.part_of(tiny.backbone(), MOOD, trial("a").settings.resolved(tg.Adapter(), "classification", 60),
                        passes.CPU, prefix=False)  # fmt: skip
    order = part.encoded["train"].lengths.argsort()
    batches = [passes.LaneBatch(n, [passes.Piece(part, order[n * 10 : n * 10 + 10])], 10) for n in (5, 0, 3, 1)]
    lengths = {batch.lane: batch.length for batch in batches}
    assert lengths[0] < lengths[1] < lengths[5]
    packed = passes.packed(batches, 2 * 10 * lengths[1], same_length=False)
    assert [[batch.lane for batch in some] for some in packed] == [[0, 1], [3], [5]]
    for some in packed:
        assert len(some) == 1 or sum(batch.rows for batch in some) * max(b.length for b in some) <= 20 * lengths[1]
    assert len(passes.packed(batches, 10**9, same_length=False)) == 1
    assert len(passes.packed(batches, 10**9, same_length=True)) == len(set(lengths.values()))


@pytest.mark.parametrize("kind", ["tokens", "spans", "multilabel"])
def test_every_kind_of_head(kind: str) -> None:
    task = tiny.task(kind, 30, "other", seed=4)
    trials = [trial("a", task, batch_size=7), trial("b", task, 8, label_smoothing=0.1), trial("c", task, seed=9)]
    found = tg.fit_many(backbone(), trials, lanes=2, progress=False)
    for each in trials:
        assert_same(found[each.name], alone(each, backbone()))


@pytest.mark.parametrize(
    "method",
    [
        tg.NormsOnly(backbone_dropout=False, head_dropout=0.0),
        tg.Adapter(size=4, norm_inside="batch"),
        tg.Adapter(size=6, norm_inside="layer", norm_before=True, activation="sigmoid"),
        tg.Adapter(size=4, depth=2, parallel=True, norms="none"),
    ],
    ids=["norms", "batch norm", "layer norm", "parallel"],
)
def test_other_methods(method: tg.Method) -> None:
    larger = dataclasses.replace(method, size=8) if isinstance(method, tg.Adapter) else method
    trials = [trial("a", method=method, batch_size=7), trial("b", PRICE, larger), trial("c", method=method, seed=4)]
    found = tg.fit_many(backbone(), trials, lanes=2, progress=False)
    for each in trials:
        assert_same(found[each.name], alone(each, backbone()))


def test_a_model_that_writes() -> None:
    task = tiny.task("text", 30, "say")
    same: dict[str, Any] = {"max_length": 12, "learning_rate": 1e-3, "decoding": "greedy"}
    trials = [
        trial("a", task, epochs=1, batch_size=6, **same),
        trial("b", task, 8, epochs=2, batch_size=12, label_smoothing=0.1, **same),
        trial("c", dataclasses.replace(MOOD, splits=tiny.task(count=30).splits), epochs=1, batch_size=6, **same),
    ]
    found = tg.fit_many(backbone(make=tiny.writer), trials, lanes=2, progress=False)
    for each in trials:
        run = alone(each, backbone(make=tiny.writer))
        assert_same(found[each.name], run)
        assert found[each.name].test == pytest.approx(run.test)
    with pytest.raises(tg.GraftError, match="trial 'd' would train nothing: tasks have no heads on tiny-t5"):
        tg.fit_many(tiny.writer(), [trial("d", task, tg.HeadOnly())])


def test_trials_that_need_other_banks_and_heads_alone_take_their_turn() -> None:
    heads = tg.HeadOnly(head_dropout=0.0)
    trials = [
        trial("a"),
        trial("b", method=heads),
        trial("c", tiny.task("tokens", 30, "words")),
        trial("d", method=tg.Adapter(size=4, pooling="cls")),
        trial("e", tiny.task("tokens", 30, "words"), heads),
        trial("f", method=8),
    ]
    heard = Listener()
    found = tg.fit_many(backbone(), trials, progress=heard)
    for each in trials:
        assert_same(found[each.name], alone(each, backbone()))
    order = list(dict.fromkeys(name for name, _, _ in heard.lanes))
    assert order == ["a", "f", "b", "c", "d", "e"], "those of one kind run together"


def test_heads_train_side_by_side_on_features_that_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    cache = parts.cache_features

    def counted(model: Any, name: str, *rest: Any) -> None:
        made.append(name)
        cache(model, name, *rest)

    monkeypatch.setattr(parts, "cache_features", counted)
    heads = tg.HeadOnly(head_dropout=0.0)
    trials = [
        trial("a", method=heads),
        trial("b", method=heads, seed=1, batch_size=5, epochs=6),
        trial("c", PRICE, heads),
        trial("d", THREE, heads, balance_classes=True),
        trial("e", method=tg.HeadOnly(head_dropout=0.0, pooling="cls")),
        trial("f", method=tg.HeadOnly(head_dropout=0.0, hidden=6)),
        trial("g", method=4),  # reads the tokens of the task that others have the features of
    ]
    found = tg.fit_many(backbone(), trials, lanes=3, progress=False)
    assert len(made) == 3 * 4, "three splits of each task and pooling"
    for each in trials:
        assert_same(found[each.name], alone(each, backbone()))


def ahead(monkeypatch: pytest.MonkeyPatch, steps: int = 1) -> None:
    """Let loops ask for what came of a step only after the next ones, as on a GPU."""
    begin = Loop.__init__

    def patched(self: Loop, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self._steps_ahead = steps

    monkeypatch.setattr(Loop, "__init__", patched)


@pytest.mark.parametrize("steps", [1, 3])
def test_losses_that_are_heard_of_late_change_nothing(
    steps: int, singles: dict[str, tg.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead(monkeypatch, steps)
    failed: dict[str, tg.GraftError] = {}
    trials = [*several(), diverging("wild", batch_size=8)]
    heard = Listener()
    found = tg.fit_many(
        backbone(), trials, lanes=4, progress=heard, on_failure=lambda t, error: failed.update({t.name: error})
    )
    assert list(failed) == ["wild"] and "at step 2:" in str(failed["wild"])
    for name, run in found.items():
        assert_same(run, singles[name])
        assert [each for each, _, _ in heard.lanes].count(name) == run.steps, "of every step, once"


def test_a_stop_keeps_losses_that_were_not_heard_of_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead(monkeypatch)
    each = trial("a", batch_size=4, epochs=4)
    whole = alone(each, backbone())

    heard = Listener(lambda count: os.kill(os.getpid(), signal.SIGINT) if count == 20 else None)
    with pytest.raises(Stopped):
        tg.fit_many(backbone(), [each], run=tmp_path, progress=heard)
    assert_same(tg.fit_many(backbone(), [each], run=tmp_path, progress=False)["a"], whole)


# -- what stays as it was


def test_the_backbone_and_earlier_tasks_do_not_change_in_any_bit() -> None:
    on = backbone()
    tg.graft(on.model, tg.Adapter(size=4), {"mood": 2, "earlier": 3})
    tg.train_only(on.model, "earlier")
    with torch.no_grad():
        for parameter in tg.trainable(on.model).values():
            parameter.normal_()
    before, trained = state(on.model), list(on.model.taskgraft.trained)
    tasks = {name: on.model.taskgraft.read(name) for name in ("mood", "earlier")}
    trials = [trial("a", method=8), trial("b", PRICE), trial("c")]
    found = tg.fit_many(on, trials, lanes=2, progress=False)
    for each in trials:
        assert_same(found[each.name], alone(each, backbone()))

    def assert_as_found() -> None:
        assert equal(before, state(on.model)) and on.model.taskgraft.trained == trained and not on.model.training
        assert tg.tasks_of(on.model) == ["mood", "earlier"]
        assert all(equal(tasks[name], on.model.taskgraft.read(name)) for name in tasks)

    assert_as_found()

    def fail(_: int) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        tg.fit_many(on, trials, progress=Listener(fail))
    assert_as_found()
    tg.fit_many(on, [trial("a", method=tg.HeadOnly())])  # of a task that has the name of one on the model
    assert_as_found()
    bare = backbone()
    untouched = state(bare.model)
    tg.fit_many(bare, trials[:2], progress=False)
    with pytest.raises(RuntimeError, match="something else"):
        tg.fit_many(bare, trials, progress=Listener(fail))
    assert equal(untouched, state(bare.model)) and not hasattr(bare.model, "taskgraft")


def test_newcomers_take_places_and_memory_stays_where_it_is() -> None:
    on = backbone()
    seen: set[tuple[tuple[str, int, int, int], ...]] = set()
    left: list[list[Tensor]] = []

    def look(_: int) -> None:
        trained = tg.trainable(on.model)
        seen.add(tuple((name, id(p), p.data_ptr(), len(p)) for name, p in trained.items()))
        if len(heard.ended) == 4:  # one lane is left, and one without rows
            name = next(name for name, *_ in heard.lanes[::-1] if name != heard.lanes[-1][0])
            place = 0 if name in places[0] else 1
            left.append([p[place].clone() for p in trained.values()])

    trials = [trial(f"t{i}", (MOOD, THREE)[i % 2], 4 + 4 * (i % 2), epochs=1 + i, seed=i) for i in range(5)]
    places: list[set[str]] = [{"t0", "t2"}, {"t1", "t3", "t4"}]
    heard = Listener(look)
    tg.fit_many(on, trials, lanes=2, progress=heard)
    assert len(heard.ended) == 5
    assert len(seen) == 1, "five runs in the same two slots of the same Parameters"
    assert len(left) > 3 and all(all(map(torch.equal, left[0], each)) for each in left)


def test_a_route_of_a_task_that_left_is_stale() -> None:
    model = backbone().model
    tg.graft(model, tg.Adapter(size=8), {"a": 2, "b": 2})
    grafts = model.taskgraft
    route, other = grafts.route_of("a"), grafts.route_of("b")
    grafts.swap("a", "c", tg.Adapter(size=4), tg.Head.of(2), seed=7)
    assert route.stale and not other.stale and grafts.trained == ["c", "b"] and list(grafts.tasks) == ["b", "c"]
    fresh = backbone().model
    tg.graft(fresh, tg.Adapter(size=4), {"c": 2}, seed=7)
    assert equal(grafts.read("c"), fresh.taskgraft.read("c"))
    for name, method in (("b", tg.Adapter(size=4)), ("d", tg.NormsOnly())):
        with pytest.raises(tg.GraftError, match=f"task '{name}' cannot take the place of 'c'"):
            grafts.swap("c", name, method, tg.Head.of(2))


# -- what goes wrong


def diverging(name: str, **settings: Any) -> tg.Trial:
    return trial(name, learning_rate=1e30, clip_norm=1e30, epochs=6, **settings)


def test_a_run_that_diverges_harms_no_other(singles: dict[str, tg.Run]) -> None:
    small, large, _, balanced, *_ = several()
    trials = [small, diverging("wild", batch_size=8), large, diverging("later", batch_size=9), balanced]
    failed: dict[str, tg.GraftError] = {}
    heard = Listener()
    found = tg.fit_many(
        backbone(), trials, lanes=3, progress=heard, on_failure=lambda t, error: failed.update({t.name: error})
    )
    assert list(found) == ["small", "large", "balanced"] and sorted(failed) == ["later", "wild"]
    for name, run in found.items():
        assert_same(run, singles[name])
    assert "the loss of 'mood' became" in str(failed["wild"]) and "lower the learning rate" in str(failed["wild"])
    assert sorted(heard.ended) == sorted(each.name for each in trials)
    told: list[str] = []
    with pytest.raises(tg.GraftError, match=r"1 of 2 runs failed, the others ended: 'wild': the loss of") as caught:
        tg.fit_many(backbone(), [trials[1], small], progress=False, on_run=lambda t, _: told.append(t.name))
    assert told == ["small"] and str(caught.value).endswith("labels.") and "\n" not in str(caught.value)


def test_a_head_that_diverges_harms_no_other() -> None:
    regression = tiny.task("regression", 30, "far")
    wild = trial("wild", regression, tg.HeadOnly(), learning_rate=1e30, clip_norm=1e30)
    failed: list[str] = []
    found = tg.fit_many(
        backbone(), [wild, trial("calm")], progress=False, on_failure=lambda t, _: failed.append(t.name)
    )
    assert list(found) == ["calm"] and failed == ["wild"]


def test_a_pass_that_does_not_fit_into_memory_is_made_smaller(
    singles: dict[str, tg.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = 200
    refused: list[int] = []

    def scarce(model: Any, some: Sequence[passes.LaneBatch], *rest: Any) -> Tensor:
        found = passes.losses_of(model, some, *rest)
        tokens = sum(batch.rows for batch in some) * max(batch.length for batch in some)
        if tokens > fitting:
            found.sum().backward()  # type: ignore[no-untyped-call]
            refused.append(tokens)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(loops, "losses_of", scarce)
    trials = several()[:4]
    found = tg.fit_many(backbone(), trials, progress=False)
    assert 0 < len(refused) < 12, "it stays small"
    for name, run in found.items():
        assert_same(run, singles[name])
    fitting = 20
    with pytest.raises(tg.GraftError, match="out of memory with batches of 16 texts of up to 40 tokens: halve"):
        tg.fit_many(backbone(), trials, progress=False)


REFUSED: list[tuple[list[Any], str]] = [
    ([], "no trials were given"),
    ([trial("a"), trial("a")], "two trials are called 'a'"),
    ([trial("a/b")], "task name 'a/b' cannot be used"),
    ([MOOD], "is not a trial of a task"),
    ([tg.Trial("a", "mood.csv")], "is not a trial of a task"),  # type: ignore[arg-type]
    ([trial("a"), trial("b", method=tg.FullFineTuning())], r"trial 'b' trains weights that it would share .*\(full\)"),
    ([trial("a", method=tg.HyperFormer())], "trial 'a' trains weights that it would share"),
    ([trial("a", method=tg.Adapter(norm_after="shared"))], "trial 'a' trains weights that it would share"),
    ([trial("a", method=tg.NormsOnly(norms="shared"))], "trial 'a' trains weights that it would share"),
    ([trial("a"), trial("b", precision="bf16")], "trials 'a' and 'b' have precision='auto' and 'bf16'"),
    ([trial("a"), trial("b", method=tg.Adapter.paper(4))], "trials 'a' and 'b' have backbone_dropout=False and True"),
    ([trial("a"), trial("b", PRICE, balance_classes=True)], "balance_classes is for classification"),
    ([trial("a", tiny.task("text", 12))], "is text to text and tiny does not read and write"),
]


@pytest.mark.parametrize(("trials", "sentence"), REFUSED)
def test_what_cannot_be_trained_side_by_side_is_refused_before_anything_starts(
    trials: list[Any], sentence: str, tmp_path: Path
) -> None:
    on = tiny.backbone()
    before = state(on.model)
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        tg.fit_many(on, trials, run=tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    assert equal(before, state(on.model)) and not hasattr(on.model, "taskgraft")


def test_lanes_are_at_least_one_and_as_many_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tg.GraftError, match="lanes=0 must be a whole number of at least 1"):
        tg.fit_many(tiny.backbone(), [trial("a")], lanes=0)
    model = tiny.backbone().model
    tg.graft(model, tg.Adapter(size=4), {"a": 2})
    kinds = model.taskgraft.tasks["a"].kinds
    own_bytes = 4 * sum(value.numel() for value in model.taskgraft.read("a").values())
    assert passes.lanes_that_fit(model.taskgraft, kinds, passes.CPU) == passes.MOST_LANES["cpu"]
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if "SIZE" in name else 3 * 7 * own_bytes / passes.LANE_SHARE)
    assert passes.lanes_that_fit(model.taskgraft, kinds, passes.CPU) == 3
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    assert passes.lanes_that_fit(model.taskgraft, kinds, passes.CPU) == 1


# -- going on


def press_ctrl_c(_: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_runs_go_on_where_they_were(singles: dict[str, tg.Run], tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    stopped = Listener(lambda calls: press_ctrl_c(calls) if calls == 190 else None)
    with pytest.raises(Stopped, match=r"training of 6 runs was stopped when \d had ended; the same call goes on"):
        tg.fit_many(backbone(), several(), lanes=3, run=tmp_path / "run", progress=stopped)
    assert signal.getsignal(signal.SIGINT) is handler and 0 < len(stopped.ended) < 6
    at = {name: step for name, step, _ in stopped.lanes}
    again = Listener()
    found = tg.fit_many(backbone(), several(), lanes=2, run=tmp_path / "run", progress=again)
    assert again.begun == [([each.name for each in several()], [n for n in found if n in stopped.ended])]
    for name, run in found.items():
        assert_same(run, singles[name])
        first = next((step for lane, step, _ in again.lanes if lane == name), None)
        assert first == (None if name in stopped.ended else at.get(name, 0) + 1), "from the step it was stopped at"
    with pytest.raises(Stopped, match="the rest was not kept: give it a run folder"):
        tg.fit_many(backbone(), several(), progress=Listener(press_ctrl_c))


def test_killed_runs_go_on_and_ended_ones_are_not_repeated(singles: dict[str, tg.Run], tmp_path: Path) -> None:
    """Each from a state of its own: they need no common one, nor the same company."""

    def die(calls: int) -> None:
        if calls == 170:
            raise SystemExit("killed")

    trials = [
        dataclasses.replace(each, settings=dataclasses.replace(each.settings, checkpoint_seconds=wait))
        for each, wait in zip(several(), (0, 0, 0, 0, 1000, 0), strict=True)
    ]
    killed = Listener(die)
    with pytest.raises(SystemExit):
        tg.fit_many(backbone(), trials, lanes=3, run=tmp_path / "run", progress=killed)
    assert sorted(killed.ended) == ["clipped", "large"]
    begun = {name: (tmp_path / "run" / name / STATE).exists() for name in ("small", "balanced", "decayed")}
    assert begun == {"small": True, "balanced": True, "decayed": False}
    some = Listener()
    tg.fit_many(backbone(), [trials[0], trials[2]], run=tmp_path / "run", progress=some)  # narrower banks
    assert some.begun[0][1] == ["clipped"] and some.lanes[0][1] > 50, "from its last state"
    rest = Listener()
    told: list[str] = []
    found = tg.fit_many(
        backbone(), trials, lanes=4, run=tmp_path / "run", progress=rest, on_run=lambda t, _: told.append(t.name)
    )
    ended = {*killed.ended, *some.ended}
    assert set(rest.begun[0][1]) == ended and {name for name, *_ in rest.lanes} == set(told) == set(found) - ended
    for name, run in found.items():
        assert_same(run, dataclasses.replace(singles[name], settings=run.settings))
    first = {name: step for name, step, _ in reversed(rest.lanes)}
    assert first["balanced"] > 1 and first["decayed"] == 1


def test_what_ended_is_read_back_whole_and_another_run_is_not_taken_for_it(tmp_path: Path) -> None:
    trials = [trial("a"), trial("b", method=tg.HeadOnly(head_dropout=0.0))]
    first = tg.fit_many(backbone(), trials, run=tmp_path / "run", progress=False)
    heard = Listener()
    again = tg.fit_many(backbone(), trials, run=tmp_path / "run", progress=heard)
    assert heard.begun == [(["a", "b"], ["a", "b"])] and not heard.lanes
    for name, run in again.items():
        assert dataclasses.replace(run, graft=None).__dict__ == dataclasses.replace(first[name], graft=None).__dict__
        assert json.dumps(run.graft.training) == json.dumps(first[name].graft.training)  # type: ignore[union-attr]
        assert run.graft.metrics == first[name].graft.metrics  # type: ignore[union-attr]
        assert equal(run.graft.tensors, first[name].graft.tensors)  # type: ignore[union-attr]
        assert not (tmp_path / "run" / name / STATE).exists()
    assert equal(tg.load_graft(tmp_path / "run" / "a").tensors, first["a"].graft.tensors)  # type: ignore[union-attr]
    heard = Listener()
    tg.fit_many(backbone(), [trial("a", seed=1)], run=tmp_path / "run", progress=heard)
    assert len(heard.lanes) == 12 and json.loads((tmp_path / "run" / "a" / "run.json").read_text())["settings"]["seed"]
    (tmp_path / "run" / "a" / "run.json").write_text("{}")
    with pytest.raises(tg.GraftError, match=r"run.json does not say what came of a run .*: delete the folder"):
        tg.fit_many(backbone(), [trial("a")], run=tmp_path / "run")


def test_two_calls_do_not_share_a_folder(tmp_path: Path) -> None:
    def second(_: int) -> None:
        with pytest.raises(tg.GraftError, match="another process is training in"):
            tg.fit_many(tiny.backbone(), [trial("b")], run=tmp_path / "run")
        raise KeyboardInterrupt

    with pytest.raises(Stopped):
        tg.fit_many(backbone(), [trial("a")], run=tmp_path / "run", progress=Listener(second))


# -- what people see


def test_the_table_has_a_line_for_each_run_under_way(capfd: pytest.CaptureFixture[str]) -> None:
    table = RunsTable()
    table.begin(["a", "b", "c", "d"], ["d"])
    table.lane("a", 5, 10, 1.0, 0.25, 0.9, 16)
    table.lane("b", 1, 20, 0.1, 1.5, None, 16)
    shown = io.StringIO()
    Console(file=shown, width=90).print(table._table())
    lines = [line.split() for line in shown.getvalue().splitlines()]
    assert lines[0] == ["run", "epoch", "loss", "best"]
    assert lines[1][:4] == ["a", "1.0", "0.250", "0.900"] and lines[2][:4] == ["b", "0.1", "1.500", "-"]
    assert "1 of 4 done, 1 waiting" in shown.getvalue() and "rows/s" in shown.getvalue() and "left" in shown.getvalue()
    table.run("a", 0.9)
    assert table.footer().startswith("2 of 4 done, 1 waiting")
    table.end()
    capfd.readouterr()
    tg.fit_many(backbone(), [trial("a", epochs=1)])
    assert capfd.readouterr() == ("", ""), "nobody looks"


def test_bf16_is_a_matter_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[bool] = set()
    step = Loop._step

    def watched(self: Loop, watch: Any) -> None:
        seen.add(self.bf16)
        step(self, watch)

    monkeypatch.setattr(Loop, "_step", watched)
    trials = [trial("a", precision="bf16", epochs=1), trial("b", THREE, precision="bf16", epochs=1)]
    found = tg.fit_many(backbone(torch.float32), trials, progress=False)
    assert seen == {True} and all(torch.isfinite(v).all() for v in found["b"].graft.tensors.values())  # type: ignore[union-attr]


def test_a_head_that_could_not_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> tg.Run:
        raise tg.GraftError("the disk is full.")

    trials, failed = [trial("a", method=tg.HeadOnly())], list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(many, "write_run", full)
        with pytest.raises(tg.GraftError, match="disk is full"):
            tg.fit_many(backbone(), trials, run=tmp_path, on_failure=lambda each, _: failed.append(each.name))
    assert not failed
    assert tg.fit_many(backbone(), trials, run=tmp_path)["a"].graft is not None
