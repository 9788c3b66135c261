"""A study: for each task and arm some settings on one seed, the best by validation, then that one on further seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from taskgraft.errors import GraftError
from taskgraft.experiments.lab import Job, Lab, Record, RunsDone
from taskgraft.methods import Method
from taskgraft.reports.bootstrap import Answers, Drawn, Interval, between, drawn

ALL = "all"  # the average of the tasks
TOGETHER = "together"  # the run of all tasks
Differences = dict[str, dict[str, Interval]]  # by arm, and by task or ALL


@dataclass(frozen=True)
class Option:
    """A setting that an arm may choose."""

    method: Method | None  # None: a search without a backbone
    rate: float | None = None
    epochs: int | None = None  # of tasks that are learned together, steps
    changes: tuple[tuple[str, Any], ...] = ()  # of what the lab makes other settings of


@dataclass(frozen=True)
class Arm:
    """One line of a table: a way to learn a task, and what it may choose from for each.

    `together`: all tasks are learned in one run, for which one option is chosen.
    """

    name: str
    options: tuple[Option, ...]
    together: bool = False


def options(methods: Sequence[Method], rates: Sequence[float], epochs: Sequence[int | None]) -> tuple[Option, ...]:
    return tuple(Option(*each) for each in product(methods, rates, epochs))


@dataclass(frozen=True, eq=False)
class Cell:
    """What an arm came to on a task: the option that validation chose, and its runs, one a seed."""

    arm: str
    task: str
    option: Option
    runs: list[Record]
    tried: list[Record]  # every option on the first seed

    @property
    def score(self) -> float:
        return statistics.fmean(run["test"] for run in self.runs)

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds."""
        scores = [run["test"] for run in self.runs]
        return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None

    @property
    def trained(self) -> int | None:
        """Parameters; of tasks that were trained together, an equal share of them."""
        found: int | None = self.runs[0]["trained"]
        return found

    def to_json(self) -> dict[str, Any]:
        method = None if self.option.method is None else self.option.method.to_json()
        return {
            "arm": self.arm,
            "task": self.task,
            "score": self.score,
            "standard_error": self.error,
            "trained": self.trained,
            "method": method,
            "rate": self.option.rate,
            "epochs": self.option.epochs,
            "changes": dict(self.option.changes),
            "runs": [run["name"] for run in self.runs],
        }


@dataclass(frozen=True, eq=False)
class Study:
    tasks: list[str]
    arms: list[str]
    cells: dict[tuple[str, str], Cell]  # by arm and task
    records: list[Record]
    lab: Lab
    columns: bool = False  # whether a task counts once for each of its metrics, in averages
    _drawn: dict[tuple[str, str], Drawn] = field(default_factory=dict)

    def cell(self, arm: str, task: str) -> Cell:
        return self.cells[arm, task]

    def row(self, arm: str) -> list[Cell]:
        return [self.cells[arm, task] for task in self.tasks]

    def average(self, arm: str) -> float:
        return statistics.fmean(self.averages(arm))

    def averages(self, arm: str) -> list[float]:
        """One a seed."""
        weights = self.weights(self.tasks)
        seeds = zip(*(cell.runs for cell in self.row(arm)), strict=True)
        return [
            math.fsum(weight * run["test"] for weight, run in zip(weights, runs, strict=True)) / sum(weights)
            for runs in seeds
        ]

    def weights(self, tasks: Sequence[str]) -> list[int]:
        """What each task counts for in an average."""
        return [len(self.lab.task(task).metrics) if self.columns else 1 for task in tasks]

    def trained(self, arm: str) -> float | None:
        """Mean over tasks."""
        found = [cell.trained for cell in self.row(arm)]
        return statistics.fmean(n for n in found if n is not None) if None not in found else None

    def difference(self, one: str, other: str, tasks: Sequence[str] | None = None) -> Interval:
        """The first arm's score less the second's, mean over tasks, with its interval over rows and seeds."""
        names = self.tasks if tasks is None else tasks
        firsts, seconds = ([self.drawn(arm, task) for task in names] for arm in (one, other))
        return between(firsts, seconds, self.weights(names))

    def growth(self, now: tuple[str, str], before: tuple[str, str], tasks: Sequence[str] | None = None) -> Interval:
        """By how much the lead of an arm over another is larger than that of two others."""
        names = self.tasks if tasks is None else tasks
        later, sooner = (
            [self.drawn(one, task).less(self.drawn(other, task)) for task in names] for one, other in (now, before)
        )
        return between(later, sooner, self.weights(names))

    def against(self, base: str, arms: Sequence[str] | None = None) -> Differences:
        """Arms less another, on the average and on each task."""
        others = [arm for arm in self.arms if arm != base] if arms is None else arms
        return {
            arm: {ALL: self.difference(arm, base), **{task: self.difference(arm, base, [task]) for task in self.tasks}}
            for arm in others
        }

    def best_seeds(self) -> Study:
        """The same with one run of each cell: the best by validation, as Houlsby et al. pick it."""
        best = {key: replace(cell, runs=[max(cell.runs, key=lambda run: run["validation"])])
                for key, cell in self.cells.items()}  # fmt: skip
        return Study(self.tasks, self.arms, best, self.records, self.lab, self.columns)

    def drawn(self, arm: str, task: str) -> Drawn:
        if (arm, task) not in self._drawn:
            self._drawn[arm, task] = drawn(self.answers(arm, task), self.tasks.index(task))
        return self._drawn[arm, task]

    def answers(self, arm: str, name: str) -> Answers:
        task = self.lab.task(name)
        right = task.split("test")["label"].to_pylist()
        return Answers(
            task.kind, task.labels, task.metrics, right, [run["answers"] for run in self.cell(arm, name).runs]
        )


def study(lab: Lab, tasks: Sequence[str], arms: Sequence[Arm], columns: bool = False) -> Study:
    """Run it. All arms' first seeds go into the same passes, then all winners' further seeds."""
    seeds = range(lab.setup.seeds)
    most = lab.setup.trials
    kept = {arm.name: arm.options[:most] for arm in arms}
    learned = {arm.name: [TOGETHER] if arm.together else list(tasks) for arm in arms}

    def job(task: str, option: Option, seed: int) -> Job:
        if task == TOGETHER:
            settings = lab.settings_together(option.rate, option.epochs, seed, **dict(option.changes))
            return Job(task, option.method, settings, tuple(tasks))
        return Job(task, option.method, lab.settings(task, option.rate, option.epochs, seed, **dict(option.changes)))

    first = lab.run(job(task, option, 0) for arm in arms for task in learned[arm.name] for option in kept[arm.name])
    winners: dict[tuple[str, str], Option] = {}
    for arm in arms:
        for task in learned[arm.name]:
            tried = [(first[job(task, option, 0)], option) for option in kept[arm.name]]
            ended = [(record["validation"], option) for record, option in tried if record["error"] is None]
            if not ended:
                raise GraftError(f"no run of {arm.name!r} on {task!r} ended: {tried[0][0]['error']}")
            winners[arm.name, task] = max(ended, key=lambda pair: pair[0])[1]
    rest = lab.run(job(task, option, seed) for (_, task), option in winners.items() for seed in seeds)
    if lab.setup.runs_only:
        raise RunsDone
    cells = {}
    for (arm_name, task), option in winners.items():
        runs = [rest[job(task, option, seed)] for seed in seeds]
        if broken := [run for run in runs if run["error"] is not None]:
            raise GraftError(f"run {broken[0]['name']} failed on a further seed: {broken[0]['error']}")
        tried_here = [first[job(task, other, 0)] for other in kept[arm_name]]
        for name in tasks if task == TOGETHER else [task]:
            own = [share_of(run, name) for run in runs] if task == TOGETHER else runs
            cells[arm_name, name] = Cell(arm_name, name, option, own, tried_here)
    records = list({**first, **rest}.values())
    return Study(list(tasks), [arm.name for arm in arms], cells, records, lab, columns)


def share_of(record: Record, task: str) -> Record:
    """What one task has of a run of several together: its own scores and answers, its share of what was trained."""
    share = round(record["trained"] / len(record["tasks"]))
    return {**record, **record["tasks"][task], "name": f"{record['name']}/{task}", "trained": share}
