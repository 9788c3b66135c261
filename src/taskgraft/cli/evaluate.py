"""`taskgraft evaluate`: a graft's scores on a file."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_for
from taskgraft.cli.options import Columns, Json, OwnBackbone, Reading, Source, StoreFolder, TaskName, grouped
from taskgraft.cli.tasks import task_named


@app.command(
    epilog="""Examples:
  taskgraft evaluate warming test.csv --text tweet --label belief
  taskgraft evaluate warming test.csv --json | tail -1 | jq .score

The score is the mean of the task's metrics."""
)
@grouped
def evaluate(
    name: TaskName,
    source: Source,
    columns: Columns,
    reading: Reading,
    store: StoreFolder = Path("grafts"),
    version: Annotated[int | None, typer.Option(help="An earlier version.", show_default="the current one")] = None,
    backbone: OwnBackbone = None,
    json: Json = False,
) -> None:
    """Measure a task on all rows of a file (of a benchmark or a data set: its test rows).

    Columns that are not named are called as they were in the file it was trained on, if this one has them.
    """
    from taskgraft.tasks.load import is_benchmark, load_task
    from taskgraft.training import evaluate as training

    output = Output(json)
    judged = task_named(store, name, version)
    graft = training.graft_of(judged)
    described: dict[str, Any] = {}
    if Path(source).is_file() or not is_benchmark(source):
        described["kind"] = training.kind_of(graft)
        described["labels"] = training.labels_of(graft) or None
        columns = with_defaults(columns, Path(source), reading, graft.task.get("columns") or {})
    task = load_task(source, name=graft.name, only="test", **asdict(columns), **asdict(reading), **described)
    scores = training.evaluate(backbone_for(name, graft.backbone, backbone), judged, task)
    rows = len(task)
    score = scores.pop("score")
    output.say("\n".join([f"{name} on {task.source}: {rows:,} rows", *(f"  {note}" for note in task.notes)]))
    for metric, value in scores.items():
        output.say(f"  {metric:<18} {value:.4f}")
    output.finish({"task": name, "source": task.source, "rows": rows, "score": score, "metrics": scores})


def with_defaults(columns: Columns, path: Path, reading: Reading, own: dict[str, str]) -> Columns:
    """The columns that were named, and the task's own where the file has them."""
    missing = {role: own[role] for role, column in asdict(columns).items() if column is None and role in own}
    if not missing or not path.is_file():
        return columns
    from taskgraft.tasks.files import read_rows

    names = read_rows(path, reading.encoding, reading.delimiter).table.column_names
    return replace(columns, **{role: column for role, column in missing.items() if column in names})
