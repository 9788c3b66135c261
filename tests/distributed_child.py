"""What the processes of tests/test_distributed.py do, each of them, together or alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.errors import Stopped
from taskgraft.training.course import Course
from taskgraft.training.progress import Quiet
from taskgraft.training.team import team_of

import tiny

BATCH = 10  # rows of a step, however many processes share them
ROWS = 41  # the last batch has one row, so that only one process has any
FAST: dict[str, Any] = {"learning_rate": 1e-2, "patience": 99, "progress": False}
DROPPED = tg.Adapter(size=4, head_dropout=0.3)


def together(rank: int, size: int, port: int, folder: Path) -> None:
    """Be one of the processes that a launcher started, and write down what came of it."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    torch.save(everything(folder), folder / f"process{rank}.pt")


def double(backbone: tg.Backbone) -> tg.Backbone:
    backbone.model.double()
    return backbone


def of_task(kind: str, method: tg.Method, **options: Any) -> Callable[[int], dict[str, Any]]:
    def run(batch_size: int) -> dict[str, Any]:
        backbone, task = double(tiny.backbone()), tiny.task(kind, ROWS)
        found = tg.fit(backbone, task, method, batch_size=batch_size, **{**FAST, "epochs": 2, **options})
        tensors = {} if found.graft is None else found.graft.tensors
        return {"tensors": tensors, "steps": found.steps, "history": found.history, "answers": found.answers}

    return run


def of_several(batch_size: int) -> dict[str, Any]:
    """Two tasks that share a hypernetwork; the smaller one is not in every batch."""
    tasks = [tiny.task("classification", 60, "mood"), tiny.task("regression", 21, "price", seed=1)]
    method = tg.HyperFormer(shared=True, size=4)
    found = tg.fit(double(tiny.backbone()), tasks, method, batch_size=batch_size, epochs=3, temperature=1.0, **FAST)
    tensors = {f"{name}.{key}": value for name, one in found.grafts.items() for key, value in one.tensors.items()}
    answers = [answer for own in found.answers.values() for answer in own]
    return {"tensors": tensors, "steps": found.steps, "history": found.history, "answers": answers}


def of_a_writer(batch_size: int) -> dict[str, Any]:
    task = tiny.task("classification", 31)
    method = tg.Adapter(size=4)
    found = tg.fit(double(tiny.writer()), task, method, batch_size=batch_size, epochs=2, max_length=12, **FAST)
    assert found.graft is not None
    return {"tensors": found.graft.tensors, "steps": found.steps, "history": found.history, "answers": found.answers}


STILL: dict[str, Any] = {"head_dropout": 0.0, "backbone_dropout": False}
PLAIN = tg.Adapter(size=4)
CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "adapter": of_task("classification", PLAIN, epochs=10, clip_norm=0.5),
    "accumulation": of_task("classification", PLAIN, accumulation=3, balance_classes=True),
    "regression": of_task("regression", PLAIN),
    "tokens": of_task("tokens", PLAIN),
    "spans": of_task("spans", PLAIN),
    "norms": of_task("multilabel", tg.NormsOnly(**STILL)),
    "head": of_task("classification", tg.HeadOnly(hidden=8, head_dropout=0.0)),
    "full": of_task("classification", tg.FullFineTuning(**STILL), learning_rate=1e-3),
    "several": of_several,
    "writer": of_a_writer,
}


def everything(folder: Path) -> dict[str, Any]:
    """All that two processes are asked for, in one start of them."""
    size = team_of().size
    cases = {name: case(BATCH // size) for name, case in CASES.items()}
    return {"cases": cases, "stopped": stopped_and_resumed(folder), "refused": refused()}


class Begun(Quiet):
    """Hears at which step a run begins, if it is told."""

    first: int | None = None

    def begin(self, name: str, steps: int, done: int) -> None:
        self.first = done


def signalled_at(step: int, rank: int) -> Callable[[Course, float], None]:
    """A course on which one process, and no other, is told to stop when it has heard of a step."""
    heard, here = Course.heard, team_of().rank == rank

    def listening(self: Course, loss: float) -> None:
        heard(self, loss)
        if here and self.steps == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return listening


def stopped_and_resumed(folder: Path) -> dict[str, Any]:
    """The process that does not write is told to stop; then all go on, with dropout, as if nothing had been."""
    options: dict[str, Any] = {**FAST, "batch_size": 5, "epochs": 3, "run": folder / "run"}
    said, heard, again = "", Course.heard, Begun()
    Course.heard = signalled_at(7, rank=1)  # type: ignore[method-assign]
    try:
        tg.fit(tiny.backbone(), tiny.task(count=ROWS), DROPPED, **options)
    except Stopped as error:
        said = str(error)
    Course.heard = heard  # type: ignore[method-assign]
    held = sorted(path.name for path in (folder / "run").iterdir())
    resumed = tg.train(tiny.backbone(), tiny.task(count=ROWS), DROPPED, **{**options, "progress": again})
    whole = tg.train(tiny.backbone(), tiny.task(count=ROWS), DROPPED, **{**options, "run": None})
    record = resumed.training["processes"], resumed.training["settings"]["batch_size"]
    return {
        "said": said,
        "held": held,
        "first": again.first,
        "record": record,
        "resumed": resumed.tensors,
        "whole": whole.tensors,
    }


def refused() -> list[str]:
    """What several processes cannot do, in sentences."""
    backbone, task, rank = tiny.backbone(), tiny.task(count=21), team_of().rank
    found = list[str]()
    for wrong in (
        lambda: tg.fit(backbone, tiny.task(count=21, seed=rank), PLAIN, epochs=1),
        lambda: tg.fit(backbone, task, tg.Adapter(size=4, norm_inside="batch"), epochs=1),
        lambda: tg.fit_many(backbone, [tg.Trial("a", task, settings=tg.Settings(epochs=1))]),
        lambda: tg.compare(backbone, task, ["norms"], epochs=1),
        lambda: tg.sweep(backbone, task, epochs=1),
    ):
        try:
            wrong()
        except tg.GraftError as error:
            found.append(str(error))
    return found


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0)
