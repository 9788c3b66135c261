"""`taskgraft train A B C`: several tasks that share a hypernetwork, norms or a fine-tuned backbone."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraft.cli.app import Output, process_number
from taskgraft.cli.backbone import backbone_named
from taskgraft.cli.reading import read_text
from taskgraft.cli.runs import RUNS, Announced, check_place, state_of_run
from taskgraft.errors import GraftError
from taskgraft.methods import Method, method_named
from taskgraft.training.progress import progress_for
from taskgraft.training.settings import Settings

if TYPE_CHECKING:
    from taskgraft.tasks.task import Task
    from taskgraft.training.joint import JointRun

NAME = "together"


def train_together(
    output: Output,
    tasks: list[Task],
    method: str | None,
    name: str | None,
    settings: Settings,
    store: Path,
    backbone: str | None,
    track: str | None,
) -> None:
    """Train tasks together; each goes into the store as a graft of its own, and all of them as one entry."""
    from taskgraft.grafts.store import Store
    from taskgraft.training.joint import check_tasks, default_method, fit_joint

    loaded = backbone_named(backbone)
    chosen: Method = default_method(loaded)
    if method is not None:
        chosen, rate = method_named(method)
        settings = settings if rate is None else dataclasses.replace(settings, learning_rate=rate)
    name, grafts = name or NAME, Store(store)
    check_tasks(tasks, chosen)
    if name in [task.name for task in tasks]:
        raise GraftError(f"{name!r} is the name of one of the tasks: give all of them together another with --name.")
    check_place(grafts, name, together=True)
    for task in tasks:
        check_place(grafts, task.name)
    for task in tasks:
        output.say(read_text(task))
    with state_of_run(store / RUNS / name) as folder:
        bar = Announced(progress_for(None), output.say)
        run = fit_joint(loaded, tasks, chosen, settings=settings, run=folder, progress=bar, track=track)
        if process_number():
            return
        version = grafts.put(run.joint, name)
        for graft in run.grafts.values():
            grafts.put(graft)
    report(output, tasks, run, grafts.folder, name, version)


def report(output: Output, tasks: list[Task], run: JointRun, store: Path, name: str, version: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from taskgraft.reports.tables import count_text, score_text, seconds_text, share_text

    for task in tasks:
        cut = [f"{n:,} {split} texts" for split, n in run.cut[task.name].items() if n]
        if cut:
            output.say(f"Cut at {run.settings.max_length} tokens (--max-length): {', '.join(cut)} of {task.name}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("task", "score", "metrics", "rows"):
        table.add_column(title)
    for task in tasks:
        found = run.results[task.name]
        score = "-" if found["score"] is None else score_text(found["score"])
        table.add_row(task.name, score, " and ".join(task.metrics), found["split"])
    output.say(table)
    if run.score is not None:
        output.say(f"Mean of all metrics: {score_text(run.score)}")
    share = share_text(run.trained / run.total / len(tasks))
    output.say(
        f"Trained: {count_text(run.trained)} parameters for {len(tasks)} tasks, {share} a task of the backbone's "
        f"{count_text(run.total)}, in {seconds_text(run.seconds)} (epoch {run.epoch} of {run.epochs} kept)"
    )
    where = "" if str(store) == "grafts" else f" --store {shlex.quote(str(store))}"
    alone = ", ".join(run.grafts) or "none of them alone, since the backbone itself was trained"
    output.say(f"Saved: {store / name} (version {version}: all tasks with what they share); as grafts: {alone}")
    if version > 1:
        output.say(f"`taskgraft tasks rollback {shlex.quote(name)}{where}` goes back to the version before.")
    called = shlex.quote(tasks[0].name if run.grafts else f"{name}/{tasks[0].name}")
    pair = ' --pair "..."' if tasks[0].has_pairs else ""
    output.say(f'\nNext: taskgraft predict {called} "..."{pair}{where}')
    start = shlex.quote(str(store / name))
    output.say(f"A new task from few examples: taskgraft train NEW.csv --from {start} --few-shot 16{where}")
    record: dict[str, Any] = {
        "name": name,
        "store": str(store),
        "version": version,
        "score": run.score,
        "tasks": {task.name: {**task.to_json(), **run.results[task.name]} for task in tasks},
        "grafts": list(run.grafts),
        "method": run.method.to_json(),
        "settings": run.settings.to_json(),
        "trained": run.trained,
        "total": run.total,
        "seconds": run.seconds,
        "epochs": run.epochs,
        "kept_epoch": run.epoch,
        "steps": run.steps,
    }
    output.finish(record)
