"""Many runs over a Ray cluster: each worker trains its share of them in shared passes, as `tg.fit_many` does here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from taskgraft.backbones.load import Backbone
from taskgraft.cluster.board import Board
from taskgraft.cluster.connect import connected, machines, share_of
from taskgraft.cluster.schedule import Job, Schedule
from taskgraft.cluster.worker import Lines, ManyLines
from taskgraft.errors import GraftError, Stopped
from taskgraft.methods import Method
from taskgraft.tasks.task import Task
from taskgraft.training import many
from taskgraft.training import sweep as local
from taskgraft.training.ended import read_run, write_run
from taskgraft.training.fit import Run
from taskgraft.training.many import HELD, Trial
from taskgraft.training.passes import MOST_LANES
from taskgraft.training.session import device_of, lent
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder

SHARES = 2  # that each worker gets, one after the other: what is lost or slow on one, others make up for

Spec = tuple[str, int, Method, Settings]  # a trial without its task: that is one of the job's
Outcome = tuple[str, Run | GraftError]


def sweep(
    backbone: Backbone,
    tasks: Task | Sequence[Task],
    *,
    ray: str,
    worker_cpus: int | None = None,
    worker_gpus: float | None = None,
    **options: Any,
) -> local.Sweep:
    """`tg.sweep` over a Ray cluster, with the same runs, table and choice; `options` are those of `tg.sweep`.

    In a folder (`run=`) that one of the two has begun with, the other goes on.
    """
    spread = partial(fit_many, ray=ray, worker_cpus=worker_cpus, worker_gpus=worker_gpus)
    return local.sweep(backbone, tasks, many=spread, **options)


def fit_many(
    backbone: Backbone,
    trials: Sequence[Trial],
    *,
    ray: str,
    worker_cpus: int | None = None,
    worker_gpus: float | None = None,
    run: str | PathLike[str] | None = None,
    lanes: int | None = None,
    progress: bool | None = None,
    on_run: Callable[[Trial, Run], None] | None = None,
    on_failure: Callable[[Trial, GraftError], None] | None = None,
) -> dict[str, Run]:
    """`tg.fit_many` over the workers of a Ray cluster, each of which trains its share in passes of up to `lanes` runs.

    In the folder `run` each run is kept once it is here, as `tg.fit_many` keeps it. Runs that are lost with a worker
    begin again on another.
    """
    device_of()
    trials = list(trials)
    many.check(trials, lanes)
    with ExitStack() as stack:
        if run is not None:
            stack.enter_context(RunFolder(Path(run) / HELD).held())
        found = Found(places_of(backbone, trials, run), on_run, on_failure)
        if not found.missing:
            return found.runs
        cluster = stack.enter_context(connected(ray))
        share = share_of(cluster, worker_cpus, worker_gpus)
        workers = sum(share.fits(resources) for resources in machines(cluster).values())
        most = lanes or MOST_LANES["cuda" if share.gpus else "cpu"]
        size = min(most, math.ceil(len(found.missing) / (SHARES * workers)))
        found.board = stack.enter_context(Board("run", [trial.name for trial in trials], progress))
        for name, ended in found.runs.items():
            found.board.ended(name, "", ended.score)
        jobs = [job_of(found.missing[at : at + size], lanes) for at in range(0, len(found.missing), size)]
        try:
            Schedule(cluster, backbone, share, found.board, found.done, found.failed).run(jobs)
        except KeyboardInterrupt:
            how = "the same call trains the others"
            if run is None:
                how = "the others were not kept: give it a run folder to be able to go on"
            ends = len(found.runs) + len(found.failures)
            raise Stopped(f"training of {len(trials)} runs was stopped when {ends} had ended; {how}.") from None
    found.check()
    return {trial.name: found.runs[trial.name] for trial in trials if trial.name in found.runs}


@dataclass(frozen=True, eq=False)
class Kept:
    """A trial, and where its run is kept in `tg.fit_many`, with the key that says which run it is."""

    trial: Trial
    folder: RunFolder | None
    key: str

    def read(self) -> Run | None:
        return None if self.folder is None else read_run(self.folder, self.key)

    def write(self, run: Run) -> None:
        if self.folder is not None:
            write_run(self.folder, self.key, run)


def places_of(backbone: Backbone, trials: Sequence[Trial], run: str | PathLike[str] | None) -> list[Kept]:
    """The trials, once they are known to fit the backbone."""
    with lent(backbone.model) as grafts:
        ready = many.made_ready(backbone, grafts, trials, None if run is None else Path(run), device_of())
    return [Kept(each.trial, each.folder, each.key) for each in ready]


class Found:
    """What came of trials: runs, those that failed on their own, and those that no worker could train."""

    def __init__(
        self,
        places: Sequence[Kept],
        on_run: Callable[[Trial, Run], None] | None,
        on_failure: Callable[[Trial, GraftError], None] | None,
    ) -> None:
        self.places = {kept.trial.name: kept for kept in places}
        self.on_run, self.on_failure = on_run, on_failure
        self.runs = {name: run for name, kept in self.places.items() if (run := kept.read()) is not None}
        self.missing = [kept.trial for name, kept in self.places.items() if name not in self.runs]
        self.failures: dict[str, GraftError] = {}
        self.lost: dict[str, GraftError] = {}
        self.board: Board

    def done(self, job: Job, outcomes: Sequence[Outcome], worker: str) -> None:
        for name, outcome in outcomes:
            kept = self.places[name]
            if isinstance(outcome, GraftError):
                self.failures[name] = outcome
                self.board.ended(name, worker, None, "failed")
                if self.on_failure is not None:
                    self.on_failure(kept.trial, outcome)
                continue
            kept.write(outcome)
            self.runs[name] = outcome
            self.board.ended(name, worker, outcome.score)
            if self.on_run is not None:
                self.on_run(kept.trial, outcome)

    def failed(self, job: Job, error: GraftError) -> None:
        for name in job.names:
            self.lost[name] = error
            self.board.ended(name, "", None, "failed")

    def check(self) -> None:
        """Say what was not trained, now that all others have ended."""
        errors = self.lost if self.on_failure is not None else {**self.failures, **self.lost}
        if errors:
            said = "; ".join(f"{name!r}: {str(error).rstrip('.')}" for name, error in errors.items())
            raise GraftError(f"{len(errors)} of {len(self.places)} runs failed, the others ended: {said}.")


def job_of(trials: Sequence[Trial], lanes: int | None) -> Job:
    """One worker's share: its trials without their tasks, and each task once."""
    tasks = list({id(trial.task): trial.task for trial in trials}.values())
    number = {id(task): at for at, task in enumerate(tasks)}
    specs = [(trial.name, number[id(trial.task)], trial.method, trial.settings) for trial in trials]
    work = partial(train_share, specs=specs, lanes=lanes)
    return Job(tuple(trial.name for trial in trials), tuple(tasks), work)


def train_share(
    backbone: Backbone, tasks: Sequence[Task], lines: Lines, *, specs: Sequence[Spec], lanes: int | None
) -> list[Outcome]:
    """On a worker: the runs of a share, in shared passes."""
    failures: list[Outcome] = []

    def failed(trial: Trial, error: GraftError) -> None:
        failures.append((trial.name, GraftError(str(error))))

    trials = [Trial(name, tasks[number], method, settings) for name, number, method, settings in specs]
    runs = many.fit_many(backbone, trials, lanes=lanes, progress=ManyLines(lines), on_failure=failed)
    return [*runs.items(), *failures]
