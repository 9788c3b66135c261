"""`taskgraft train A B C --each`: each task alone, here or on a Ray cluster, its graft into one store."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraft.cli.app import Output
from taskgraft.cli.backbone import backbone_named
from taskgraft.cli.options import OnRay
from taskgraft.cli.reading import read_text
from taskgraft.cli.runs import RUNS, check_place
from taskgraft.errors import Stopped
from taskgraft.methods import Method
from taskgraft.training.settings import Settings

if TYPE_CHECKING:
    from taskgraft.cluster import Trained
    from taskgraft.tasks.task import Task

WAS_THERE = "in the store before"


def train_each(
    output: Output,
    tasks: list[Task],
    method: Method,
    settings: Settings,
    store: Path,
    backbone: str | None,
    cluster: OnRay,
) -> None:
    """Train tasks one by one; those that the same command has put into the store before are not trained again."""
    from taskgraft.cluster import train
    from taskgraft.grafts.store import Store

    grafts = Store(store)
    for task in tasks:
        check_place(grafts, task.name)
    loaded = backbone_named(backbone)
    for task in tasks:
        output.say(read_text(task))
    done: list[Trained] = []

    def said(trained: Trained) -> None:
        done.append(trained)
        if cluster.ray is None or not sys.stderr.isatty():  # else the live table is there
            output.say(f"  {len(done)} of {len(tasks)}: {trained.task}: {outcome_text(trained)}")

    try:
        train(loaded, tasks, grafts, method, settings=settings, run=store / RUNS, on_trained=said, **asdict(cluster))
    except Stopped as error:
        ended = f"{len(done)} of {len(tasks)} tasks"
        raise Stopped(f"stopped with {ended} in {store}: the same command trains the others.") from error
    report(output, tasks, {trained.task: trained for trained in done}, store)


def outcome_text(trained: Trained) -> str:
    from taskgraft.reports.tables import score_text

    score = trained.graft.metrics["score"]
    found = "trained" if score is None else f"score {score_text(score)}"
    return f"{found} ({WAS_THERE if trained.worker is None else trained.worker})"


def report(output: Output, tasks: list[Task], found: dict[str, Trained], store: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from taskgraft.reports.tables import score_text, seconds_text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("task", "score", "metrics", "rows", "worker", "time", "version"):
        table.add_column(title)
    for task in tasks:
        trained = found[task.name]
        metrics, seconds = trained.graft.metrics, seconds_text(trained.graft.training["seconds"])
        score = "-" if metrics["score"] is None else score_text(metrics["score"])
        worker = WAS_THERE if trained.worker is None else trained.worker
        table.add_row(
            task.name, score, " and ".join(task.metrics), metrics["split"], worker, seconds, str(trained.version)
        )
    output.say(table)
    where = "" if str(store) == "grafts" else f" --store {shlex.quote(str(store))}"
    pair = ' --pair "..."' if tasks[0].has_pairs else ""
    output.say(f'Next: taskgraft predict {shlex.quote(tasks[0].name)} "..."{pair}{where}')
    output.finish({"store": str(store), "tasks": {task.name: record_of(task, found[task.name]) for task in tasks}})


def record_of(task: Task, trained: Trained) -> dict[str, Any]:
    graft = trained.graft
    return {
        **task.to_json(),
        **graft.metrics,
        "method": graft.method.to_json(),
        "version": trained.version,
        "worker": trained.worker,
        **{key: graft.training[key] for key in ("settings", "seconds", "steps", "epochs", "kept_epoch")},
    }
