"""Tasks of every kind on tiny backbones, what each of them says alone, and engines that cannot hang a test run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import taskgraft as tg
from taskgraft.backbones import room
from taskgraft.grafts.graft import identity
from taskgraft.grafts.joint import JointTask
from taskgraft.serving import engine as engine_module
from taskgraft.serving.answers import Answer, Question, question_of
from taskgraft.serving.engine import Engine, Watch
from taskgraft.tasks.wording import Wording
from taskgraft.training.evaluate import graft_of, kind_of, labels_of

import tiny
from families import perturb

SECONDS = 20  # after which an answer that has not come never will
PAIR = {"columns": {"text": "premise", "pair": "hypothesis"}}
WORDS = [*tiny.GOOD, *tiny.BAD, *tiny.FILLER, *tiny.NUMBERS]


def reader() -> tg.Backbone:
    return tiny.backbone()


def writer() -> tg.Backbone:
    """A tiny T5 that writes different things of different texts; in float64, since it is made to be so touchy."""
    backbone = tiny.writer()
    backbone.model.double()
    with torch.no_grad():
        for path, parameter in backbone.model.named_parameters():
            if "EncDecAttention" in path or "shared" in path:
                parameter *= 5
    return backbone


def grafted(
    backbone: tg.Backbone,
    name: str,
    method: tg.Method,
    head: tg.Head | None = None,
    *,
    seed: int = 0,
    task: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> tg.Graft:
    """A graft that says something of its own, without training."""
    model = tg.graft(backbone.model, method, {name: head}, seed=seed)
    perturb(model, seed, 0.3, only=lambda path: path in tg.trainable(model))
    made = tg.get_graft(model, name, training=training, task_record=task)
    tg.ungraft(model)
    return made


def together(
    backbone: tg.Backbone, method: tg.Method, tasks: Mapping[str, tg.Head | None], records: Mapping[str, Any], seed: int
) -> tg.Joint:
    before = identity(backbone.model)
    model = tg.graft(backbone.model, method, tasks, seed=seed)
    perturb(model, seed, 0.2, only=lambda path: path in tg.trainable(model))
    made = tg.get_joint(model, records=records, backbone=before)
    tg.ungraft(model)
    return made


def readers(backbone: tg.Backbone) -> dict[str, tg.Graft]:
    """A task of every kind that a head answers, of methods that share as little as can be."""
    heads = {
        "mood": (tg.Adapter(size=4), tg.Head("classification", ("bad", "good"))),
        "topic": (tg.Adapter(size=6, pooling="cls"), tg.Head("classification", tuple("abcdefg"))),
        "flags": (tg.Adapter(size=3, activation="relu"), tg.Head("multilabel", ("one", "two", "three"))),
        "stars": (tg.NormsOnly(), tg.Head("regression")),
        "price": (tg.Adapter(size=4, norm_inside="layer", depth=2), tg.Head("regression")),
        "nli": (tg.Adapter(size=8, parallel=True), tg.Head("classification", ("yes", "no", "maybe"))),
        "entities": (tg.Adapter(size=5), tg.Head("tokens", ("B-good", "B-bad", "O"))),
        "parts": (tg.HeadOnly(), tg.Head("tokens", tuple("nvad"))),
        "where": (tg.Adapter(size=4, sites=("feedforward",)), tg.Head("spans")),
        "who": (tg.HeadOnly(hidden=6), tg.Head("spans")),
        "plain": (tg.HeadOnly(hidden=5, pooling="cls"), tg.Head("classification", ("x", "y"))),
    }
    records: dict[str, dict[str, Any]] = {"nli": PAIR}
    lengths = {"topic": 9, "where": 16}
    return {
        name: grafted(
            backbone,
            name,
            method,
            head,
            seed=seed,
            task={"kind": head.kind, "labels": list(head.labels), **records.get(name, {})},
            training={"settings": {"max_length": lengths[name]}} if name in lengths else {},
        )
        for seed, (name, (method, head)) in enumerate(heads.items())
    }


def writers(backbone: tg.Backbone) -> dict[str, tg.Graft]:
    """A task of every kind that a model which writes can have, with different answers and different limits."""
    wordings = {
        "binary": (Wording("classification", ("no", "yes"), ("sentence",)), {}),
        "many": (Wording("classification", tuple("abcdefghijkl"), ("text",), "many"), {}),
        "both": (Wording("classification", ("same", "other", "unclear"), ("premise", "hypothesis")), {}),
        "spoken": (Wording("classification", tuple("abc"), ("sentence",)), {"decoding": "greedy"}),
        "score": (Wording("regression", (), ("sentence",), "", 0.2, 2.5), {}),
        "short": (Wording("text", (), ()), {"max_length": 5}),
        "long": (Wording("text", (), ()), {"max_length": 30}),
    }
    return {
        name: grafted(
            backbone,
            name,
            tg.Adapter(size=4 + 2 * (seed % 3), activation=("gelu_new", "relu")[seed % 2]),
            seed=seed,
            task={
                "kind": wording.kind,
                "labels": list(wording.labels),
                "wording": wording.to_json(),
                **(PAIR if len(wording.columns) == 2 else {}),
            },
            training={"settings": settings},
        )
        for seed, (name, (wording, settings)) in enumerate(wordings.items())
    }


def small(backbone: tg.Backbone, number: int, size: int = 4, name: str | None = None) -> tg.Graft:
    """One of many tasks of one kind."""
    labels = [f"{number}-{label}" for label in "abc"]
    task = {"kind": "classification", "labels": labels}
    head = tg.Head("classification", tuple(labels))
    return grafted(backbone, name or f"t{number}", tg.Adapter(size=size), head, seed=number, task=task)


@dataclass
class World:
    """A store, and what its tasks say alone: on a backbone that no engine runs on."""

    folder: Path
    alone: tg.Backbone
    grafts: dict[str, tg.Graft | JointTask] = field(default_factory=dict)
    _said: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"World({self.folder})"

    @property
    def store(self) -> tg.Store:
        return tg.Store(self.folder)

    def put(self, graft: tg.Graft, name: str | None = None) -> int:
        name = name or graft.name
        self.grafts[name] = graft
        return self.store.put(graft, name)

    def put_joint(self, joint: tg.Joint, name: str) -> int:
        self.grafts |= {f"{name}/{task}": joint.task(task) for task in joint.tasks}
        return self.store.put(joint, name)

    def said(self, asking: Any, version: int | None = 1, graft: tg.Graft | JointTask | None = None) -> Answer:
        """What `tg.predict` says of a question alone."""
        question = question_of(asking)
        what = self.grafts[question.task] if graft is None else graft
        kind, text, pair = kind_of(graft_of(what)), question.text, question.pair
        if kind == "tokens" and isinstance(text, str):
            text = text.split()
        key = (id(what), repr(text), pair)
        if key not in self._said:
            found = tg.predict(self.alone, what, [text], None if pair is None else [pair])
            self._said[key] = (what, found[0])  # `what` is kept, so that its id stays its own
        return Answer.of(question.task, version, kind, labels_of(graft_of(what)), self._said[key][1])

    def check(self, answers: Sequence[Any], askings: Sequence[Any], version: int | None = 1) -> None:
        assert len(answers) == len(askings)
        for answer, asking in zip(answers, askings, strict=True):
            assert isinstance(answer, Answer), f"{asking} was answered by {answer!r}"
            same(answer, self.said(asking, version))


def same(got: Answer, wanted: Answer) -> None:
    """The same answer: labels unless they are as likely as each other, numbers to 1e-5."""
    about = f"{got}\n{wanted}"
    for name in ("task", "version", "kind", "tags", "answer", "start", "end"):
        assert getattr(got, name) == getattr(wanted, name), about
    assert (got.value is None) == (wanted.value is None), about
    if wanted.value is not None:
        assert got.value == pytest.approx(wanted.value, rel=1e-5, abs=1e-5), about
    if wanted.probabilities is None:
        assert got.probabilities is None and got.label == wanted.label, about
        return
    assert got.probabilities is not None
    assert got.probabilities == pytest.approx(wanted.probabilities, abs=1e-5), about
    chances = wanted.probabilities
    if wanted.kind == "multilabel":
        assert got.labels is not None and wanted.labels is not None
        assert all(abs(chances[label] - 0.5) < 1e-5 for label in {*got.labels} ^ {*wanted.labels}), about
    else:
        assert got.label is not None and wanted.label is not None
        assert got.label == wanted.label or abs(chances[got.label] - chances[wanted.label]) < 1e-5, about
        assert got.probability == got.probabilities[got.label], about


def sentence(draw: random.Random, least: int = 0, most: int = 45) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def asking_of(world: World, task: str, draw: random.Random, most: int = 45) -> tuple[Any, ...]:
    """A random question that a task can read."""
    what = graft_of(world.grafts[task])
    if kind_of(what) == "spans":
        return task, sentence(draw, 1, 6), sentence(draw, 1, most)
    if kind_of(what) == "tokens":
        text = sentence(draw, 1, most)
        return task, draw.choice([text, text.split()])
    if what.task.get("columns", {}).get("pair"):
        return task, sentence(draw, 0, most), sentence(draw, 0, most // 2)
    return task, sentence(draw, 0, most)


class Counted(Watch):
    """Counts what it is told, and the most bytes that grafts took after any batch."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.batches: list[tuple[int, int, int]] = []
        self.answers: list[tuple[str, BaseException | None]] = []
        self.most_bytes = self.most_held = self.differed = 0

    def batch(self, rows: int, tokens: int, padded: int, seconds: float) -> None:
        self.batches.append((rows, tokens, padded))
        if self.engine is not None:
            self.most_bytes = max(self.most_bytes, self.engine.residents.bytes)
            self.most_held = max(self.most_held, taken(self.engine))
            self.differed += self.engine.residents.bytes != taken(self.engine)

    def answered(self, asked: Any, error: BaseException | None) -> None:
        self.answers.append((asked.question.task, error))


def taken(engine: Engine) -> int:
    """The bytes of every tensor that a bank on the model has, counted one by one."""
    banks = [bank for kind in engine.residents.grafts.kinds.values() for bank in kind.all_banks]
    tensors = [value for bank in banks for value in (*bank.buffers(), *bank.parameters())]
    return sum(value.numel() * value.element_size() for value in tensors)


def bytes_of(backbone: tg.Backbone, *grafts: tg.Graft) -> int:
    """What these grafts take at least, all of them on a model at once."""
    tg.graft(backbone.model, tg.HeadOnly(), tasks=())
    for number, graft in enumerate(grafts):
        tg.add_graft(backbone.model, graft, f"g{number}")
    held = backbone.model.taskgraft
    room.compact(held)
    found = room.held(held)
    tg.ungraft(backbone.model)
    return found


@contextmanager
def engine_on(
    folder: Any, backbone: tg.Backbone | None = None, *, watch: Watch | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine that is closed in the end; one that cannot be closed fails the test."""
    engine = Engine(reader() if backbone is None else backbone, folder, watch=watch, **options)
    if isinstance(watch, Counted):
        watch.engine = engine
    try:
        yield engine
    finally:
        close(engine)


def close(engine: Engine) -> None:
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    if closing.is_alive():
        free(engine)
        pytest.fail("the engine cannot be closed: something that it took was never answered")


def free(engine: Engine) -> None:
    """Let all threads of an engine that is stuck go on, so that the test run can end."""
    before, engine_module.READ_AHEAD = engine_module.READ_AHEAD, 1 << 30
    with engine._changed:
        engine.waiting = 0
        engine._changed.notify_all()
    for thread in engine._threads:
        thread.join(1)
    engine._readers.shutdown(wait=True, cancel_futures=True)
    engine_module.READ_AHEAD = before


class Held:
    """Holds the thread that runs the model, before each batch, until it is let go."""

    def __init__(self, engine: Engine) -> None:
        self.entered, self.go, self.rows = threading.Event(), threading.Event(), []  # type: ignore[var-annotated]
        self.original = engine._forward
        engine._forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, rows: Sequence[Any]) -> int:
        self.rows.append(len(rows))
        self.entered.set()
        assert self.go.wait(SECONDS)
        return self.original(rows)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()


def results(futures: Sequence[Any]) -> list[Any]:
    """Each answer, or the error in its place; one that never comes fails the test."""
    found = []
    for future in futures:
        try:
            found.append(future.result(timeout=SECONDS))
        except TimeoutError:
            pytest.fail("a question was never answered")
        except Exception as error:
            found.append(error)
    return found


def ask(engine: Engine, askings: Sequence[Any], **options: Any) -> list[Any]:
    return results(engine.submit(askings, **options))


def until(condition: Callable[[], Any], what: str = "it") -> None:
    """Wait for something that another thread does."""
    pause = threading.Event()
    for _ in range(SECONDS * 100):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail(f"{what} never came")


def question(task: str, text: Any, pair: Any = None) -> Question:
    return Question(task, text, pair)
