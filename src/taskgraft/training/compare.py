"""Several methods on one task over several seeds: the runs behind a table and the trade-off figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa

from taskgraft import __version__
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.grafts.graft import encode
from taskgraft.methods import Method, method_named
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.fit import fit
from taskgraft.training.progress import Progress
from taskgraft.training.session import device_of

AUTOML = "automl"


def compare(
    backbone: Backbone,
    task: Task,
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    results: str | PathLike[str] | None = None,
    on_run: Callable[[dict[str, Any]], Any] | None = None,
    progress: Progress | bool | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Train a task by each method with each seed. A run is a dict: method, seed, score, metrics, trained, seconds, ...

    `results` is a JSON file of the runs so far: those that are there are not repeated. `changes` are settings.
    """
    device_of()  # several processes would write the same results
    parsed = {name: None if name == AUTOML else method_named(name) for name in methods}
    if AUTOML in parsed:
        from taskgraft.training.automl import check

        check(task)
    if not task.splits.keys() - {"train"}:
        raise GraftError(f"task {task.name!r} has no rows to compare on: hold some out for validation or test.")
    done = Results(results, task, backbone, changes)
    runs = []
    for name, what in parsed.items():
        for seed in seeds:
            run = done.find(name, seed)
            if run is None:
                if what is None:
                    run = automl_run(task, seed)
                else:
                    method, rate = what
                    own = changes if rate is None else {**changes, "learning_rate": rate}
                    run = method_run(backbone, task, name, method, seed, progress, own)
                done.add(run)
            runs.append(run)
            if on_run is not None:
                on_run(run)
    return runs


def method_run(
    backbone: Backbone,
    task: Task,
    name: str,
    method: Method,
    seed: int,
    progress: Progress | bool | None,
    changes: dict[str, Any],
) -> dict[str, Any]:
    run = fit(backbone, task, method, progress=progress, **{**changes, "seed": seed})
    size = None if run.graft is None else sum(len(content) for content in encode(run.graft).values())
    return {
        "method": name,
        "family": method.name,
        "seed": seed,
        "score": run.score,
        "split": run.split,
        "metrics": run.test or run.validation,
        "validation": run.validation,
        "validation_score": score_of(task.metrics, run.validation) if run.validation else None,
        "trained": run.trained,
        "total": run.total,
        "seconds": run.seconds,
        "steps": run.steps,
        "epoch": run.epoch,
        "bytes": size,
        "settings": run.settings.to_json(),
    }


def automl_run(task: Task, seed: int) -> dict[str, Any]:
    from taskgraft.training.automl import automl

    found = automl(task, seed=seed)
    return {
        "method": AUTOML,
        "family": AUTOML,
        "seed": seed,
        "score": score_of(task.metrics, found.test or found.validation),
        "split": "test" if found.test else "validation",
        "metrics": found.test or found.validation,
        "validation": found.validation,
        "validation_score": score_of(task.metrics, found.validation),
        "trained": None,
        "total": None,
        "seconds": found.seconds,
        "bytes": None,
        "winner": found.winner,
    }


class Results:
    """The runs of a comparison in a file, with what they are runs of."""

    def __init__(
        self, path: str | PathLike[str] | None, task: Task, backbone: Backbone, changes: dict[str, Any]
    ) -> None:
        self.path = None if path is None else Path(path)
        data = {split: content_hash(table) for split, table in task.splits.items()}
        about = {
            "task": {**task.to_json(), "sha256": data},
            "backbone": [backbone.name, fingerprint(backbone.model).sha256],
            "settings": changes,
            "version": __version__,
        }
        self.about: dict[str, Any] = json.loads(json.dumps(about))
        self.runs: list[dict[str, Any]] = []
        if self.path is None or not self.path.exists():
            return
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            before, self.runs = {key: record[key] for key in self.about}, record["runs"]
        except (ValueError, KeyError, TypeError) as error:
            raise GraftError(f"{self.path} does not hold the runs of a comparison: write to another file.") from error
        if before != self.about:
            other = next(key for key in self.about if before[key] != self.about[key])
            raise GraftError(f"{self.path} holds runs of another {other}: write to another file, or delete it.")

    def find(self, method: str, seed: int) -> dict[str, Any] | None:
        return next((run for run in self.runs if (run["method"], run["seed"]) == (method, seed)), None)

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".draft")
            draft.write_text(json.dumps({**self.about, "runs": self.runs}, indent=1), encoding="utf-8")
            draft.replace(self.path)


def content_hash(table: pa.Table) -> str:
    """What rows hold, wherever they came from."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()
