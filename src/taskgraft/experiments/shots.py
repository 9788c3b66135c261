"""A new task from few examples, after a run of tasks in company: the runs of every method, task, size and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from taskgraft.errors import Diverged, GraftError
from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE, TRANSFER, judged_on
from taskgraft.experiments.lab import Job, Lab, Record, RunsDone, say, share_out
from taskgraft.experiments.study import TOGETHER
from taskgraft.tasks.task import Task
from taskgraft.training.few_shot import few_shot
from taskgraft.training.settings import Settings

TASKS = (*GLUE, *TRANSFER)
SIZES = (4, 16, 32, 100, 500, 1_000, 2_000)
FEW = 100  # up to here a size counts for the claim
JUDGED = 1_000  # test rows, drawn at random
BATCH, STEPS = 32, 100  # of a run, at least; no fewer than three passes over the examples
OTHERS = (company.FULL, company.DAGGER)
METHODS = (*OTHERS, company.PLUS)
Scores = Sequence[float | None]  # of each seed; None where a run failed


@dataclass(frozen=True)
class Way:
    """A table: how new tasks are learned, from how many examples, and after how long a run in company."""

    name: str
    title: str
    sizes: tuple[int, ...] = SIZES
    remapped: bool = False
    times: int = 1  # as many steps
    control: bool = False  # asked only of models that write
    company_steps: int | None = None  # None: as many as the setup has


@dataclass(frozen=True)
class Shot:
    """A new task, after a run in company, from so many examples drawn by a seed."""

    start: Job
    task: str
    rows: int
    seed: int
    remapped: bool
    times: int

    @property
    def name(self) -> str:
        ending = ".remapped" * self.remapped + ".longer" * (self.times > 1)
        return f"few-shot.{self.start.label}.{self.task}.{self.rows}.seed{self.seed}{ending}"


@dataclass(frozen=True, eq=False)
class Shots:
    """The runs of some ways, and what came of them."""

    lab: Lab
    ways: Sequence[Way]
    tasks: Sequence[str]  # the new ones
    starts: dict[int, dict[str, Job]]  # by steps in company and method
    found: dict[Shot, Record] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        return range(self.lab.setup.seeds)

    def sizes(self, way: Way, task: str) -> list[int]:
        """As far as the rows go, and the setup's limit."""
        rows = min(self.lab.task(task).split("train").num_rows, self.lab.setup.rows or SIZES[-1])
        return [size for size in SIZES if size <= rows and size in way.sizes]

    def shot(self, arm: str, way: Way, task: str, size: int, seed: int) -> Shot:
        start = self.starts[way.company_steps or self.lab.setup.steps][arm]
        return Shot(start, task, size, seed, way.remapped, way.times)

    def all(self) -> list[Shot]:
        """Seed by seed."""
        return [
            self.shot(arm, way, task, size, seed)
            for seed in self.seeds for arm in METHODS for way in self.ways for task in self.tasks
            for size in self.sizes(way, task)
        ]  # fmt: skip

    def scores(self, arm: str, way: Way, task: str, size: int) -> list[float]:
        """Of the seeds whose runs ended."""
        each = [self.found[self.shot(arm, way, task, size, seed)] for seed in self.seeds]
        ended = [record["score"] for record in each if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {arm!r} on {task!r} with {size} examples ended: {each[0]['error']}")
        return ended

    def few(self, arm: str, way: Way, tasks: Iterable[str]) -> Scores:
        """Of each seed the mean over tasks and few examples."""
        pairs = [(task, size) for task in tasks for size in self.sizes(way, task) if size <= FEW]
        means: list[float | None] = []
        for seed in self.seeds:
            scores = [self.found[self.shot(arm, way, *pair, seed)]["score"] for pair in pairs]
            means.append(None if None in scores else statistics.fmean(scores))
        return means


def run_shots(lab: Lab, ways: Sequence[Way]) -> Shots:
    """Do the runs, and those in company that they start from."""
    names = lab.chosen(TASKS)
    known, new = [name for name in names if name in GLUE], [name for name in names if name in TRANSFER]
    if len(known) < 2 or not new:
        raise GraftError("few-shot needs two or more tasks of GLUE to start from, and one of the others.")
    shots = Shots(lab, ways, new, starts_of(lab, known, [way.company_steps or lab.setup.steps for way in ways]))
    left = [shot for shot in shots.all() if not place_of(lab, shot).exists()]
    needed = list(dict.fromkeys(shot.start for shot in left))
    run_company(lab, needed)
    # Where another experiment kept no more than the record of a start:
    share_out(lab, needed, trained, key=lambda job: (lab.path(job), "weights"))
    share_out(lab, left, result_of)
    if lab.setup.runs_only:
        raise RunsDone
    shots.found.update({shot: result_of(lab, shot) for shot in shots.all()})
    return shots


def starts_of(lab: Lab, tasks: Sequence[str], lengths: Sequence[int]) -> dict[int, dict[str, Job]]:
    """By its steps each method's run in company on the first seed: all at the rate that the shortest does best at."""
    best = chosen(lab, tasks, min(lengths))
    return {
        steps: {
            name: replace(job, settings=lab.settings_together(job.settings.learning_rate, steps, 0))
            for name, job in best.items()
        }
        for steps in lengths
    }


def chosen(lab: Lab, tasks: Sequence[str], steps: int) -> dict[str, Job]:
    """Each method's run in company on the first seed, at its best rate by validation."""
    methods = company.together(lab)
    jobs = {
        name: [Job(TOGETHER, methods[name], lab.settings_together(rate, steps, 0), tuple(tasks))
               for rate in company.rates(lab, methods[name])]
        for name in METHODS
    }  # fmt: skip
    run_company(lab, [job for each in jobs.values() for job in each])
    best = {}
    for name, each in jobs.items():
        known = [(job, lab.known(job) or {}) for job in each]
        ended = [(record["validation"], job) for job, record in known if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {name!r} ended: {known[0][1]['error']}")
        best[name] = max(ended, key=lambda pair: float(pair[0]))[1]
    return best


def run_company(lab: Lab, jobs: Sequence[Job]) -> None:
    """Do those that have not been; what another experiment waits for as well is done once."""
    share_out(lab, [job for job in jobs if lab.known(job) is None], trained, key=lambda job: (lab.path(job),))


def trained(lab: Lab, job: Job) -> None:
    """A run in company, of which the weights are kept."""
    try:
        lab.joint(job)
    except Diverged as error:
        lab.keep_failed(job, error)


def place_of(lab: Lab, shot: Shot) -> Path:
    """Where what came of it is kept."""
    return lab.place(shot.name, what(lab, shot))


def result_of(lab: Lab, shot: Shot) -> Record:
    """What came of it, once."""
    return lab.once(shot.name, what(lab, shot), lambda: transferred(lab, shot))


def what(lab: Lab, shot: Shot) -> dict[str, Any]:
    """All that decides what comes of it."""
    return {**asdict(shot), "start": lab.path(shot.start).stem, "rows_of": lab.hash(shot.task)}


def settings_of(lab: Lab, start: Job, rows: int, times: int = 1) -> Settings:
    """Of a new task with so many examples, for so many times the steps."""
    passes = lab.setup.epochs or max(3, math.ceil(STEPS / math.ceil(rows / BATCH)))
    return replace(start.settings, epochs=times * passes, epoch_steps=None, batch_size=BATCH, warmup=0.1)


def transferred(lab: Lab, shot: Shot) -> Record:
    task = judged_on(lab.task(shot.task), JUDGED)
    settings = settings_of(lab, shot.start, shot.rows, shot.times)
    try:
        found = few_shot(
            lab.backbone, lab.joint(shot.start), remapped(task) if shot.remapped else task, shot.rows,
            seeds=[shot.seed], settings=settings, progress=False, drift=False,
        )  # fmt: skip
    except Diverged as error:
        return {"score": None, "error": str(error)}
    say(f"  {shot.name}: {found.score:.4f}")
    return {"score": found.score, "like": found.like[0], "steps": found.first.steps, "error": None}


def remapped(task: Task) -> Task:
    """The same task with its classes in another order, and so with other numbers."""
    draw = np.random.RandomState(len(task.labels))
    order = np.arange(len(task.labels))
    while (order == np.arange(len(order))).any():  # every class gets another number
        order = draw.permutation(len(task.labels))
    number = np.argsort(order)  # of each class before
    splits = {}
    for split, table in task.splits.items():
        labels = pa.array(number[table["label"].to_numpy()], table.schema.field("label").type)
        splits[split] = table.set_column(table.schema.get_field_index("label"), "label", labels)
    return replace(task, labels=tuple(task.labels[old] for old in order), splits=splits)
