"""`taskgraft compare`: methods and sizes on one task, over several seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_named
from taskgraft.cli.options import BackboneName, Columns, Json, Reading, Source, Splits, Training, grouped
from taskgraft.cli.reading import read_text, task_from
from taskgraft.errors import GraftError, Stopped
from taskgraft.methods import method_named

if TYPE_CHECKING:
    from taskgraft.tasks.task import Task

METHODS = ("head", "norms", "top-1", "top-2", "adapter-8", "adapter-64", "full")
Methods = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="METHOD",
        help="adapter-SIZE, paper-SIZE, norms, head, head-HIDDEN, top-K, full or automl; full@3e-5 sets the rate.",
        show_default=" ".join(METHODS),
    ),
]


@app.command(
    epilog="""Examples:
  taskgraft compare train.csv --text tweet --label belief
  taskgraft compare train.csv adapter-2 adapter-8 adapter-64 top-1 norms full@3e-5 automl --seeds 5 --out sizes

The folder gets runs.json, table.md, tradeoff.png and tradeoff.svg. The same command again repeats no run."""
)
@grouped
def compare(
    source: Source,
    columns: Columns,
    reading: Reading,
    splits: Splits,
    training: Training,
    methods: Methods = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = 3,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the results.", show_default="comparisons/TASK")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the task.", show_default="the file's name")] = None,
    backbone: BackboneName = None,
    json: Json = False,
) -> None:
    """Train a task by several methods with several seeds: a table with intervals, and the trade-off figure."""
    output = Output(json)
    settings = training.settings()

    from taskgraft.reports.tables import markdown, rich_table, score_text, seconds_text, summarise
    from taskgraft.training.compare import AUTOML
    from taskgraft.training.compare import compare as run_all

    wanted = list(dict.fromkeys(methods or METHODS))
    for method in wanted:
        if method != AUTOML:
            method_named(method)
    task = task_from(source, columns, reading, splits, name)
    folder = Path("comparisons") / task.name if out is None else out
    loaded = backbone_named(backbone)
    output.say(read_text(task))
    make(folder)
    done: list[dict[str, Any]] = []

    def said(run: dict[str, Any]) -> None:
        done.append(run)
        found = f"{score_text(run['score'])} in {seconds_text(run['seconds'])}"
        output.say(f"  {len(done)} of {len(wanted) * seeds}: {run['method']}, seed {run['seed']}: {found}")

    try:
        runs = run_all(loaded, task, wanted, seeds=range(seeds), results=folder / "runs.json", on_run=said, **settings)
    except Stopped as error:
        raise Stopped(
            f"stopped with {len(done)} of {len(wanted) * seeds} runs in {folder / 'runs.json'}: "
            "the same command does the others."
        ) from error
    lines = summarise(runs)
    metric = metric_text(task, runs[0]["split"])
    files = {
        "runs": folder / "runs.json",
        "table": folder / "table.md",
        **draw(runs, folder, task, metric, loaded.name),
    }
    files["table"].write_text(markdown(lines, metric), encoding="utf-8")
    output.say()
    output.say(rich_table(lines, metric, task.name))
    output.say(f"Written: {', '.join(map(str, files.values()))}")
    output.finish(
        {
            "task": task.name,
            "metrics": list(task.metrics),
            "split": runs[0]["split"],
            "methods": [{**dataclasses.asdict(line), "share": line.share} for line in lines],
            "files": {what: str(path) for what, path in files.items()},
        }
    )


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GraftError(f"the folder {folder} could not be made ({error}): name another with --out.") from error


def metric_text(task: Task, split: str) -> str:
    names = " and ".join(task.metrics)
    return f"{f'mean of {names}' if len(task.metrics) > 1 else names} ({split})"


def draw(runs: list[dict[str, Any]], folder: Path, task: Task, metric: str, backbone: str) -> dict[str, Path]:
    """The trade-off figure, unless no method has trained parameters to put on its axis."""
    from taskgraft.reports.tradeoff import draw_tradeoff

    if not any(run["trained"] for run in runs):
        return {}
    files = {suffix: folder / f"tradeoff.{suffix}" for suffix in ("png", "svg")}
    rows = task.splits["train"].num_rows
    seeds = len({run["seed"] for run in runs})
    subtitle = f"{Path(backbone).name}, {rows:,} training rows, mean of {seeds} seed{'' if seeds == 1 else 's'}"
    for path in files.values():
        draw_tradeoff(runs, path, metric=metric, title=task.name, subtitle=subtitle)
    return files
