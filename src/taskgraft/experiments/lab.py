"""Where experiments are run: tasks at their size, runs that are never repeated, and processes to share them.

A run is a task, a method and settings. What came of it lies in a file of the folder of runs, whose name says all that
decided it, so that experiments share runs, and the same command after a stop goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from taskgraft import __version__
from taskgraft.backbones.load import Backbone, load_backbone
from taskgraft.errors import Diverged, GraftError
from taskgraft.experiments.data import is_at_hand, judged_on, load
from taskgraft.experiments.names import Protocol
from taskgraft.experiments.pool import Call, Pool
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.grafts.joint import Joint, load_joint
from taskgraft.methods import HyperFormer, Method, Pooling
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training import sweep
from taskgraft.training.compare import content_hash
from taskgraft.training.fit import Run, fit
from taskgraft.training.grid import name_of
from taskgraft.training.joint import JointRun
from taskgraft.training.many import Trial, fit_many
from taskgraft.training.settings import Settings
from taskgraft.training.sweep import OUTCOME

Record = dict[str, Any]
Item = TypeVar("Item")
AUTOML = "automl"
MOST_STEPS = 4_000
VALIDATIONS = 4  # of a run of several tasks
PAPER_EPSILON = 1e-8  # of HyperFormer's released code, whatever the method
STILL = ("checkpoint_seconds",)  # settings that change nothing of a run


class RunsDone(Exception):  # noqa: N818 - nothing went wrong
    """All runs of an experiment are there, and no more was wanted."""


@dataclass(frozen=True)
class Setup:
    """What an experiment is told; a worker makes a lab of its own of it."""

    runs: Path
    backbone: str | None = None  # None: the embedded default
    data: Path | None = None  # a folder of benchmark files; None: from the Hub
    rows: int | None = 16_000  # of training, of each task, at most
    seeds: int = 3
    epochs: int | None = None  # at most
    trials: int | None = None  # of each method and task, at most
    steps: int = 5_000  # of a run of several tasks together
    tasks: tuple[str, ...] = ()  # of the experiment's own, if not all
    configurations: int = 200  # of the search without a backbone
    full: bool = False  # the paper's grid
    runs_only: bool = False  # no tables: the same command without it makes them of these runs
    pooling: Pooling | None = None  # None: the backbone's habit
    protocol: Protocol = "houlsby"  # which paper's splits and metrics
    draw: int = 0  # which rows, where there are more than `rows`
    judged: int | None = None  # test rows, at most
    note: str | None = None  # a sentence that every table has, as of what the backbone has seen before


@dataclass(frozen=True)
class Job:
    """One run. Without a method it is the search for the best model without a backbone.

    A run of several tasks together has them as its `company`, and goes by the name that `task` is.
    """

    task: str
    method: Method | None
    settings: Settings
    company: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.company or (self.task,)

    @property
    def label(self) -> str:
        if self.method is None:
            return f"{self.task}.{AUTOML}.seed{self.settings.seed}"
        return name_of(self.task, self.method, self.settings)


class Lab:
    """A backbone, tasks, and the runs of them that have ended.

    Those that have not are run here, or in the processes of a `pool`, where the labs of lower `rank` go first.
    """

    def __init__(self, setup: Setup, pool: Pool | None = None, rank: int = 0) -> None:
        self.setup, self.pool, self.rank = setup, pool, rank
        self._tasks: dict[str, Task] = {}
        self._hashes: dict[str, str] = {}
        self._joints: dict[Path, Joint] = {}
        self._others: dict[tuple[int, int, int | None], Lab] = {}

    @cached_property
    def backbone(self) -> Backbone:
        import torch

        return load_backbone(self.setup.backbone, dtype=torch.float32)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.backbone.model).sha256

    def at(self, rows: int, draw: int, judged: int | None) -> Lab:
        """The same with other rows."""
        if (rows, draw, judged) not in self._others:
            other = Lab(replace(self.setup, rows=rows, draw=draw, judged=judged), self.pool, self.rank)
            other.share_backbone([self])
            self._others[rows, draw, judged] = other
        return self._others[rows, draw, judged]

    def share_backbone(self, others: Iterable[Lab]) -> None:
        """Take over the backbone of the first of others that has the same."""
        other = next((lab for lab in others if lab.setup.backbone == self.setup.backbone), None)
        if other is not None:
            self.__dict__["backbone"], self.__dict__["fingerprint"] = other.backbone, other.fingerprint

    def task(self, name: str) -> Task:
        """A task's rows, at most as many as the setup has."""
        if name not in self._tasks:
            setup = self.setup
            task = load(name, setup.data, setup.rows, setup.protocol, setup.draw)
            task = self._tasks[name] = task if setup.judged is None else judged_on(task, setup.judged)
            rows = {split: content_hash(table) for split, table in task.splits.items()}
            self._hashes[name] = hashlib.sha256(json.dumps([rows, task.metrics]).encode()).hexdigest()
        return self._tasks[name]

    def hash(self, name: str) -> str:
        """Of a task's rows and metrics."""
        self.task(name)
        return self._hashes[name]

    def forget(self, name: str) -> None:
        """Let go of a task's rows."""
        self._tasks.pop(name, None)

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The tasks of an experiment: those that were asked for, or all whose rows can be had."""
        unknown = [name for name in self.setup.tasks if name not in names]
        if unknown:
            raise GraftError(f"task {unknown[0]!r} is not in this experiment: use {', '.join(names)}.")
        if self.setup.data is not None and not self.setup.data.is_dir():
            raise GraftError(f"--data-dir {self.setup.data} is no folder: name one of benchmark files.")
        missing = self.missing(names)
        if len(missing) == len(names):
            raise GraftError(f"none of the tasks of this experiment is in {self.setup.data}: {', '.join(names)}.")
        return [name for name in names if name not in missing and (not self.setup.tasks or name in self.setup.tasks)]

    def missing(self, names: Sequence[str]) -> list[str]:
        """The tasks that are left out because their rows cannot be had. Whoever asks for one is told why not."""
        return [] if self.setup.tasks else [name for name in names if not is_at_hand(name, self.setup.data)]

    # -- runs

    def path(self, job: Job) -> Path:
        """Where what came of a run lies. Rows, backbone, method, settings or version changed: another file."""
        settings = {key: value for key, value in job.settings.to_json().items() if key not in STILL}
        method = [AUTOML, self.setup.configurations] if job.method is None else [job.method.to_json(), self.fingerprint]
        rows = [self.hash(name) for name in job.tasks]
        about = json.dumps([rows, method, settings, __version__], sort_keys=True)
        return self.setup.runs / f"{job.label}.{hashlib.sha256(about.encode()).hexdigest()[:10]}.json"

    def known(self, job: Job) -> Record | None:
        """What came of it, by the name of its file: labels do not tell all runs apart."""
        path = self.path(job)
        try:
            return {**json.loads(path.read_bytes()), "name": path.stem} if path.exists() else None
        except ValueError as error:
            raise GraftError(f"{path} does not say what came of a run: delete it to do the run again.") from error

    def keep(self, job: Job, record: Record) -> None:
        write_json(self.path(job), record)

    def keep_failed(self, job: Job, error: GraftError) -> None:
        self.keep(job, {**about(job), **failed(error), "where": where()})

    def place(self, name: str, about: Any) -> Path:
        """Where `once` keeps what it was given."""
        key = hashlib.sha256(json.dumps([about, self.fingerprint, __version__]).encode()).hexdigest()[:10]
        return self.setup.runs / f"{name}.{key}.json"

    def once(self, name: str, about: Any, make: Callable[[], Record]) -> Record:
        """What `make` gave when it was called for the first time, for all that decided it."""
        path = self.place(name, about)
        if not path.exists():
            write_json(path, {**make(), "where": where()})
        found: Record = json.loads(path.read_bytes())
        return found

    def run(self, jobs: Iterable[Job]) -> dict[Job, Record]:
        """What came of each job; those that have not ended are run, side by side where they fit into one pass."""
        wanted = list(dict.fromkeys(jobs))
        left = [job for job in wanted if self.known(job) is None]
        say(f"{len(wanted)} runs, {len(left)} of them to do")
        together, alone = units_of(self, left)
        units = [*together, *([job] for job in alone)]
        share_out(self, units, do, key=lambda unit: tuple(map(self.path, unit)))
        found = {job: self.known(job) for job in wanted}
        return {job: record for job, record in found.items() if record is not None}

    def joint(self, job: Job) -> Joint:
        """The tasks of a run in company as they were trained: kept beside its record, or trained now."""
        folder = self.setup.runs / "joints" / self.path(job).stem
        if folder in self._joints:
            return self._joints[folder]
        if not folder.exists():
            run = fit_company(self, job)
            record = outcome_together([self.task(name) for name in job.company], run)
            self.keep(job, {**about(job), **record, "where": where()})
            say(f"  {job.label}: {record['test']:.4f}")
            run.joint.save(folder)
        self._joints[folder] = load_joint(folder)
        return self._joints[folder]

    def settings(
        self, task: str, rate: float | None, epochs: int | None, seed: int, *, steps: int | None = None, **changes: Any
    ) -> Settings:
        """Those of Houlsby et al.: batches of 32, 10 % warm-up, no running mean of weights, no early end.

        At the default size no run has more than some 4,000 steps: fewer passes over the rows of large tasks. `steps`
        asks for as many passes as have about so many.
        """
        fixed: dict[str, Any] = {"batch_size": 32, "average": 0.0, "patience": 1000, **changes}
        rows = self.task(task).split("train").num_rows
        if steps is not None:
            epochs = max(1, round(steps * fixed["batch_size"] / rows))
        if epochs is not None:
            most = epochs if self.setup.full else max(1, round(MOST_STEPS * 32 / rows))
            epochs = min(epochs, most, self.setup.epochs or epochs)
        return Settings(learning_rate=rate, epochs=epochs, seed=seed, **fixed)

    def settings_together(self, rate: float | None, steps: int | None, seed: int, **changes: Any) -> Settings:
        """Those of HyperFormer for tasks in company: temperature 10, 500 steps of warm-up, no decay, and on models that
        write smoothed labels; at the default size fewer steps of more rows, of several tasks each. Validated at some
        points of a run.
        """
        steps = self.setup.steps if steps is None else min(steps, self.setup.steps)
        points = min(VALIDATIONS, steps, self.setup.epochs or steps)
        writes = bool(self.backbone.model.config.is_encoder_decoder)
        paper = {"batch_size": 32, "batches": "single", "epsilon": PAPER_EPSILON}
        fixed: dict[str, Any] = {
            **(paper if self.setup.full else {"batch_size": 64}), "average": 0.0, "patience": 1000, "weight_decay": 0.0,
            "warmup": min(0.1, 500 / steps), "label_smoothing": 0.1 if writes else 0.0, **changes,
        }  # fmt: skip
        return Settings(learning_rate=rate, epochs=points, epoch_steps=steps // points, seed=seed, **fixed)


def write_json(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def where() -> dict[str, str]:
    """What a run ran on."""
    import torch
    import transformers

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


# -- units of work


def units_of(lab: Lab, jobs: Sequence[Job]) -> tuple[list[list[Job]], list[Job]]:
    """Grafts that agree on the backbone's dropout, which share passes; and whatever goes alone, the longest first."""
    together: dict[bool, list[Job]] = {}
    alone: list[Job] = []
    for job in sorted(jobs, key=lambda job: steps_of(lab, job), reverse=True):
        if job.method is None or job.method.trains_backbone or job.company:
            alone.append(job)
        else:
            together.setdefault(job.method.backbone_dropout, []).append(job)
    return list(together.values()), alone


def steps_of(lab: Lab, job: Job) -> int:
    rows = sum(int(lab.task(name).split("train").num_rows) for name in job.tasks)
    steps = (job.settings.epoch_steps if job.company else None) or -(-rows // job.settings.batch_size)
    return steps * (job.settings.epochs or 1)


def share_out(
    lab: Lab,
    items: Sequence[Item],
    work: Callable[[Lab, Item], object],
    key: Callable[[Item], Hashable] = lambda item: item,
) -> None:
    """Do each item's work, one after the other here, or in processes that share the device; `work` is found by name.

    Items with the same key are the same, whichever experiment asks for them.
    """
    if lab.pool is None:
        for item in items:
            work(lab, item)
    else:
        lab.pool.do([Call(key(item), there, (lab.setup, work, item)) for item in items], lab.rank)


THERE: dict[Setup, Lab] = {}  # in a process of a pool: a lab for each experiment


def there(setup: Setup, work: Callable[[Lab, Item], object], item: Item) -> None:
    if setup not in THERE:
        lab = Lab(setup)
        lab.share_backbone(THERE.values())
        THERE[setup] = lab
    work(THERE[setup], item)


def do(lab: Lab, unit: Sequence[Job]) -> None:
    """Run some jobs and keep what came of each as soon as it has ended. Another command may have run some meanwhile."""
    unit = [job for job in unit if lab.known(job) is None]
    if not unit:
        return
    start = time.perf_counter()

    def ended(job: Job, record: Record) -> None:
        # With whom it shared passes, and how long after they began it ended.
        record["passes"] = {"first": unit[0].label, "runs": len(unit), "seconds": time.perf_counter() - start}
        lab.keep(job, {**about(job), **record, "where": where()})
        score = "failed" if record["error"] else f"{record['test']:.4f}"
        say(f"  {job.label}: {score} after {record['passes']['seconds']:.0f} s")

    first = unit[0]
    if first.method is None:
        ended(first, searched(lab, first))
    elif first.method.trains_backbone or first.company:
        try:
            record = in_company(lab, first) if first.company else alone(lab, first)
        except Diverged as error:
            record = failed(error)
        ended(first, record)
    else:
        many(lab, unit, ended)


def alone(lab: Lab, job: Job) -> Record:
    task = lab.task(job.task)
    return outcome(task, fit(lab.backbone, task, method_of(job), settings=job.settings, progress=False))


def in_company(lab: Lab, job: Job) -> Record:
    return outcome_together([lab.task(name) for name in job.company], fit_company(lab, job))


def fit_company(lab: Lab, job: Job) -> JointRun:
    company = [lab.task(name) for name in job.company]
    return fit(lab.backbone, company, method_of(job), settings=job.settings, progress=False)


def outcome_together(company: Sequence[Task], run: JointRun) -> Record:
    """What came of tasks in company: the mean over their metrics, and each one's scores and answers under `tasks`."""
    each = {
        task.name: {
            "validation": score_of(task.metrics, run.results[task.name]["validation"]),
            "test": score_of(task.metrics, run.results[task.name]["test"]),
            "metrics": {split: run.results[task.name][split] for split in ("validation", "test")},
            "answers": run.answers[task.name],
        }
        for task in company
    }
    chosen = run.history[run.epoch - 1]
    return {
        **dict.fromkeys(OUTCOME),
        "validation": chosen["score"], "test": run.score, "trained": run.trained, "seconds": run.seconds,
        "steps": run.steps, "epoch": run.epoch, "answers": [], "tasks": each,
        "curve": [line["score"] for line in run.history],  # of validation
        "embeddings": {name: vector.tolist() for name, vector in run.joint.embeddings().items()}
        if isinstance(run.method, HyperFormer) else {},
    }  # fmt: skip


def many(lab: Lab, unit: Sequence[Job], ended: Callable[[Job, Record], None]) -> None:
    by_name = {job.label: job for job in unit}
    fit_many(
        lab.backbone,
        [Trial(name, lab.task(job.task), method_of(job), job.settings) for name, job in by_name.items()],
        progress=False,
        on_run=lambda trial, run: ended(by_name[trial.name], outcome(trial.task, run)),
        on_failure=lambda trial, error: ended(by_name[trial.name], failed(error)),
    )


def method_of(job: Job) -> Method:
    assert job.method is not None
    return job.method


# -- records


def about(job: Job) -> Record:
    """Which run it is."""
    method = AUTOML if job.method is None else job.method.to_json()
    settings = job.settings
    return {
        "name": job.label,
        "task": job.task,
        "method": method,
        "rate": settings.learning_rate,
        "epochs": settings.epochs,
        "seed": settings.seed,
        "settings": settings.to_json(),
    }


def searched(lab: Lab, job: Job) -> Record:
    from taskgraft.training.automl import automl

    task = lab.task(job.task)
    found = automl(task, configurations=lab.setup.configurations, seed=job.settings.seed)
    return {
        **dict.fromkeys(OUTCOME),
        "validation": score_of(task.metrics, found.validation),
        "test": score_of(task.metrics, found.test),
        "metrics": {"validation": found.validation, "test": found.test},
        "seconds": found.seconds,
        "answers": [],
        "winner": found.winner,
    }


def failed(error: GraftError) -> Record:
    return {**dict.fromkeys(OUTCOME), "error": str(error), "answers": []}


def outcome(task: Task, run: Run) -> Record:
    """What came of it, its answers to the test rows among it."""
    return {**sweep.outcome(task, run), "answers": run.answers}
