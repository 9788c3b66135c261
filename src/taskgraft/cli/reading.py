"""From the options to a task, and what people are told of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from taskgraft.cli.options import Columns, Reading, Splits

if TYPE_CHECKING:
    from taskgraft.tasks.task import Task

PURPOSES = {"train": "to train on", "validation": "to validate", "test": "to test"}
SHOWN_LABELS = 12


def task_from(source: str, columns: Columns, reading: Reading, splits: Splits, name: str | None = None) -> Task:
    """The task that these options describe. How rows are split does not depend on the seed of training."""
    from taskgraft.tasks.load import load_task

    described = {**asdict(columns), **asdict(reading), **asdict(splits)}
    return load_task(source, name=name, metrics=described.pop("metric") or None, **described)


def read_text(task: Task) -> str:
    """The rows of each split, the kind, the classes, and what was done to the rows on the way."""
    rows = ", ".join(f"{table.num_rows:,} {PURPOSES[split]}" for split, table in task.splits.items())
    labels = ", ".join(task.labels[:SHOWN_LABELS]) + (", ..." if len(task.labels) > SHOWN_LABELS else "")
    classes = f", {len(task.labels)} classes ({labels})" if task.labels else ""
    return "\n".join(
        [f"{task.name}, from {task.source}: {rows}; {task.kind}{classes}.", *(f"  {n}" for n in task.notes)]
    )
