"""A grid of runs over one frozen backbone, many in each pass, and the setting that validation chooses for each task."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from taskgraft import __version__
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.grafts.graft import Graft
from taskgraft.grafts.store import sync
from taskgraft.methods import Adapter, Method
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.compare import content_hash
from taskgraft.training.fit import Run
from taskgraft.training.grid import Grid, label_of, trials_of
from taskgraft.training.many import Trial, fit_many
from taskgraft.training.progress import ManyProgress
from taskgraft.training.session import changed
from taskgraft.training.settings import Settings

RUNS = "runs"  # in the folder of a sweep: runs.json, and the states and grafts of the runs in runs/NAME
AXES = ("learning_rate", "epochs", "seed", "checkpoint_seconds")  # settings that may differ from run to run
OUTCOME = ("validation", "test", "metrics", "trained", "total", "steps", "seconds", "epoch", "error")
Record = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A setting of the grid: runs of a task that differ in the seed alone. Scores are means over those that ended."""

    task: str
    method: str
    size: int | None  # of an adapter
    rate: float
    epochs: int
    trained: int | None
    validation: float | None  # None where no run ended
    lowest: float | None  # validation score of a seed
    highest: float | None
    test: float | None  # None where the task has no test rows
    error: float | None  # the standard error of the test mean; one seed has none
    seconds: float
    seeds: tuple[int, ...]
    failed: tuple[int, ...]  # seeds whose run did not end
    kept: str | None  # the run with the highest validation score
    graft: Graft | None = field(default=None, repr=False, compare=False)  # its graft, where the setting was chosen

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "graft"}


@dataclass(frozen=True, eq=False)
class Sweep:
    """What came of a sweep: a record of every run, and of each task the settings, the best first."""

    tasks: tuple[str, ...]
    runs: list[Record] = field(repr=False)
    grafts: dict[str, Graft] = field(repr=False)  # of each task the chosen one

    def points(self, task: str) -> list[Point]:
        """A task's settings, by rank."""
        if task not in self.tasks:
            raise GraftError(f"task {task!r} is not in this sweep: {', '.join(self.tasks)} are.")
        return ranked([run for run in self.runs if run["task"] == task])

    def best(self, task: str | None = None) -> Point:
        """The setting with the highest mean validation score over its seeds, and the graft of its best seed there.

        Ties go to fewer parameters, then to fewer epochs. A setting with a failed seed is chosen only where every
        setting has one. The test score has no part in it.
        """
        if task is None and len(self.tasks) > 1:
            raise GraftError(f"the sweep has {len(self.tasks)} tasks: name one of {', '.join(self.tasks)}.")
        first = self.points(self.tasks[0] if task is None else task)[0]
        if first.kept is None:
            why = next(run["error"] for run in self.runs if run["task"] == first.task)
            raise GraftError(f"no run of task {first.task!r} ended, so there is none to choose: {why}")
        return dataclasses.replace(first, graft=self.grafts.get(first.task))


def sweep(
    backbone: Backbone,
    tasks: Task | Sequence[Task],
    *,
    methods: str | Method | Iterable[str | Method] | None = None,
    sizes: int | Iterable[int] | None = None,
    rates: float | Iterable[float] | None = None,
    epochs: int | Iterable[int] | None = None,
    seeds: int | Iterable[int] | None = None,
    paper: bool = False,
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    lanes: int | None = None,
    progress: ManyProgress | bool | None = None,
    on_run: Callable[[Record], Any] | None = None,
    many: Callable[..., dict[str, Run]] | None = None,
    **changes: Any,
) -> Sweep:
    """Train every combination of methods, sizes (of adapters), learning rates, epochs and seeds, for each task.

    What is not given is the default of the method and the task; `seeds` is a number of them, or a list. `paper` takes
    the grid of Houlsby et al. for what is not given. `run` is a folder: runs that ended there are not repeated, and
    the same call after a stop goes on. `lanes` is how many runs share a pass. `changes` are settings of all runs.
    `many` trains them elsewhere, in the place of `tg.fit_many`, as `taskgraft.cluster` does.
    """
    base = changed(settings, changes)
    given = list(tasks) if isinstance(tasks, Iterable) and not isinstance(tasks, str) else [tasks]
    grid = Grid.of(methods=methods, sizes=sizes, rates=rates, epochs=epochs, seeds=seeds)
    trials = trials_of(backbone, given, grid, base, paper)
    folder = None if run is None else Path(run)
    ledger = Ledger(folder, backbone, given, trials[0].settings)
    total = sum(p.numel() for p in backbone.model.parameters())
    width = int(backbone.model.config.hidden_size)
    told: set[str] = set()

    def tell(record: Record) -> None:
        ledger.add(record)
        if on_run is not None and record["name"] not in told:
            told.add(record["name"])
            on_run(record)

    def ended(trial: Trial, found: Run) -> None:
        tell({**about(trial, width), **outcome(trial.task, found)})

    def failed(trial: Trial, error: GraftError) -> None:
        tell({**about(trial, width), **dict.fromkeys(OUTCOME), "total": total, "error": str(error)})

    runs: dict[str, Run] = {}
    waiting = [trial for trial in trials if not ledger.has_failed(trial.name)]
    for trial in trials:
        if ledger.has_failed(trial.name):
            tell(ledger.runs[trial.name])
    for dropout in (False, True):  # the runs of a pass agree on the backbone's dropout
        group = [trial for trial in waiting if trial.method.backbone_dropout is dropout]
        if group:
            place = None if folder is None else folder / RUNS
            options: dict[str, Any] = {"run": place, "lanes": lanes, "progress": progress}
            runs |= (many or fit_many)(backbone, group, **options, on_run=ended, on_failure=failed)
    for trial in waiting:
        if trial.name in runs:
            ended(trial, runs[trial.name])
    records = [ledger.runs[trial.name] for trial in trials]
    if not runs:
        raise GraftError(f"none of the {len(trials)} runs of the sweep ended; the first: {records[0]['error']}")
    chosen = {task.name: ranked([r for r in records if r["task"] == task.name])[0] for task in given}
    ledger.finish({task: point.to_json() for task, point in chosen.items()})
    grafts = {task: graft_of(runs[point.kept], point, records) for task, point in chosen.items() if point.kept}
    return Sweep(tuple(task.name for task in given), records, grafts)


def about(trial: Trial, width: int) -> Record:
    """Which run it is."""
    method, settings = trial.method, trial.settings
    return {
        "name": trial.name,
        "task": trial.task.name,
        "method": label_of(method),
        "size": method.bottleneck_size(width) if isinstance(method, Adapter) else None,
        "rate": settings.learning_rate,
        "epochs": settings.epochs,
        "seed": settings.seed,
    }


def outcome(task: Task, run: Run) -> Record:
    """What came of it. `epoch` is the one that was kept."""
    return {
        "validation": score_of(task.metrics, run.validation),
        "test": score_of(task.metrics, run.test) if run.test else None,
        "metrics": {"validation": run.validation, "test": run.test},
        "trained": run.trained,
        "total": run.total,
        "steps": run.steps,
        "seconds": run.seconds,
        "epoch": run.epoch,
        "error": None,
    }


# -- choosing


def ranked(runs: Sequence[Record]) -> list[Point]:
    """The settings of one task's runs, the one to choose first, by validation alone."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for run in runs:
        groups.setdefault((run["method"], run["rate"], run["epochs"]), []).append(run)
    points = [point_of(group) for group in groups.values()]
    return sorted(points, key=rank)


def rank(point: Point) -> tuple[bool, bool, float, int, int]:
    score = -math.inf if point.validation is None else round(point.validation, 9)  # a mean's last bits are no reason
    return not point.seeds, bool(point.failed), -score, point.trained or 0, point.epochs


def point_of(group: Sequence[Record]) -> Point:
    first, ended = group[0], [run for run in group if run["error"] is None]
    scores = [run["validation"] for run in ended]
    tests = [run["test"] for run in ended if run["test"] is not None]
    return Point(
        **{key: first[key] for key in ("task", "method", "size", "rate", "epochs")},
        trained=ended[0]["trained"] if ended else None,
        validation=statistics.fmean(scores) if scores else None,
        lowest=min(scores, default=None),
        highest=max(scores, default=None),
        test=statistics.fmean(tests) if tests else None,
        error=statistics.stdev(tests) / math.sqrt(len(tests)) if len(tests) > 1 else None,
        seconds=math.fsum(run["seconds"] for run in ended),
        seeds=tuple(run["seed"] for run in ended),
        failed=tuple(run["seed"] for run in group if run["error"] is not None),
        kept=max(ended, key=lambda run: run["validation"])["name"] if ended else None,
    )


def graft_of(run: Run, point: Point, records: Sequence[Record]) -> Graft:
    """The chosen run's graft, with how it was chosen in its record."""
    assert run.graft is not None
    tried = sum(record["task"] == point.task for record in records)
    known = {key: value for key, value in point.to_json().items() if key not in ("task", "trained", "seconds")}
    chosen = {"runs": tried, "chosen_by": "validation", **json.loads(json.dumps(known))}
    return dataclasses.replace(run.graft, training={**run.graft.training, "sweep": chosen})


# -- on disk


class Ledger:
    """runs.json in the folder of a sweep: every run that ended, well or not, and what they are runs of."""

    def __init__(self, folder: Path | None, backbone: Backbone, tasks: Sequence[Task], settings: Settings) -> None:
        self.path = None if folder is None else folder / f"{RUNS}.json"
        self.runs: dict[str, Record] = {}
        rows = {task.name: {split: content_hash(table) for split, table in task.splits.items()} for task in tasks}
        made: dict[str, Any] = {
            "tasks": {task.name: {**task.to_json(), "sha256": rows[task.name]} for task in tasks},
            "backbone": [backbone.name, fingerprint(backbone.model).sha256],
            "settings": {key: value for key, value in settings.to_json().items() if key not in AXES},
            "version": __version__,
        }
        self.about: dict[str, Any] = json.loads(json.dumps(made))
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        """Take up the runs of an earlier sweep: of these tasks or others, but of the same rows, backbone, settings."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            before = {key: record[key] for key in self.about}
            self.runs = {run["name"]: run for run in record["runs"]}
            tasks = {**self.about["tasks"], **before["tasks"]}
        except (ValueError, KeyError, TypeError) as error:
            raise GraftError(f"{path} does not hold the runs of a sweep: use another folder.") from error
        for task, known in self.about["tasks"].items():
            if tasks[task] != known:
                raise GraftError(f"{path} holds runs of another task {task!r}: use another folder, or delete it.")
        for key in ("backbone", "settings", "version"):
            if before[key] != self.about[key]:
                what = "other settings" if key == "settings" else f"another {key}"
                raise GraftError(f"{path} holds runs of {what}: use another folder, or delete it.")
        self.about["tasks"] = tasks

    def has_failed(self, name: str) -> bool:
        return name in self.runs and self.runs[name]["error"] is not None

    def add(self, run: Record) -> None:
        if self.runs.get(run["name"]) != run:
            self.runs[run["name"]] = run
            self._write({})

    def finish(self, best: dict[str, Any]) -> None:
        """All runs, and what was chosen."""
        self._write({"best": best})

    def _write(self, more: dict[str, Any]) -> None:
        if self.path is None:
            return
        content = json.dumps({**self.about, **more, "runs": list(self.runs.values())}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".draft")
            draft.write_text(content, encoding="utf-8")
            sync(draft)
            draft.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            raise GraftError(f"{self.path} could not be written: {error}.") from error
