"""What runs on the machines of a cluster: a worker holds one backbone, loaded once, and does one job at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from taskgraft import __version__
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.tasks.task import Task
from taskgraft.training.progress import ManyQuiet, Quiet


@dataclass(frozen=True)
class Line:
    """How far a run is. `score` is the best on validation rows so far."""

    step: int
    steps: int
    score: float | None


Lines = dict[str, Line]  # by run
Work = Callable[[Backbone, Sequence[Task], Lines], Any]  # what a job does, and says of its runs on the way


class OneLine(Quiet):
    """Writes down how far one run is."""

    def __init__(self, lines: Lines, name: str) -> None:
        self.lines, self.name, self.steps = lines, name, 0
        self.best: float | None = None

    def begin(self, name: str, steps: int, done: int) -> None:
        self.steps = steps

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        self.lines[self.name] = Line(done, self.steps, self.best)

    def epoch(self, epoch: int, metric: str, score: float) -> None:
        self.best = score if self.best is None else max(self.best, score)


class ManyLines(ManyQuiet):
    """Writes down how far each of many runs is."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def lane(self, name: str, step: int, steps: int, epoch: float, loss: float, score: float | None, rows: int) -> None:
        self.lines[name] = Line(step, steps, score)


@dataclass(frozen=True)
class Place:
    """Where a worker is, and what it runs."""

    machine: str  # its id in the cluster
    host: str
    process: int
    version: str

    @property
    def name(self) -> str:
        return f"{self.host}/{self.process}"


class Worker:
    """An actor. Two calls of it may run at a time: a job, and the question how far it is."""

    def __init__(self, backbone: Backbone, threads: int, on_gpu: bool) -> None:
        if not on_gpu:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        self.backbone, self.threads = backbone, threads
        self.lines: Lines = {}

    def place(self) -> Place:
        import ray

        return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid(), __version__)

    def progress(self) -> Lines:
        return dict(self.lines)

    def work(self, work: Work, tasks: Sequence[Any]) -> Any:
        """What came of a job. A mistake of the caller, which any worker would find, comes back as the error it is."""
        import ray
        import torch

        torch.set_num_threads(self.threads)
        self.lines = {}
        try:
            return work(self.backbone, ray.get(list(tasks)), self.lines)
        except GraftError as error:
            return GraftError(str(error))
