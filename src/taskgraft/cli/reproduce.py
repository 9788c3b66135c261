"""`taskgraft reproduce`: an experiment of a paper, from its data to its table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.compare import make
from taskgraft.cli.options import BackboneName, Json
from taskgraft.errors import GraftError, Stopped
from taskgraft.experiments.names import EXPERIMENTS
from taskgraft.methods import Pooling

SIZE = "How much"
LIST = "".join(f"  {row.name:<16}{row.says}\n" for row in EXPERIMENTS.values())


def size(help: str, *names: str, default: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SIZE, show_default=default or True, **more)


@app.command(
    epilog=f"""The experiments:
{LIST}
Examples:
  taskgraft reproduce glue --data-dir data --workers 4
  taskgraft reproduce glue --full

The folder OUT/NAME gets results.json, table.md, the figures, the answers and the environment. Runs lie in OUT/runs, and
experiments share them: the same command again repeats none."""
)
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The experiment.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder of benchmark files.", show_default="from the Hub")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the results.")] = Path("results"),
    backbone: BackboneName = None,
    tasks: Annotated[str | None, size("Some of its tasks: cola,rte.", default="all")] = None,
    rows: Annotated[
        int | None, size("Training rows of a task, at most; 0 for all.", default="by the experiment", min=0)
    ] = None,
    seeds: Annotated[int | None, size("Runs of each chosen setting.", default="3; few-shot 5", min=1)] = None,
    trials: Annotated[int | None, size("Settings of a method and task to choose from.", default="6", min=1)] = None,
    epochs: Annotated[int | None, size("Passes over the rows, at most.", default="by the method", min=1)] = None,
    steps: Annotated[
        int | None, size("Of a run of several tasks together.", default="5000; 262144 with --full", min=1)
    ] = None,
    configurations: Annotated[int, size("That the search without a backbone tries.", min=1)] = 200,
    workers: Annotated[int, size("Processes for runs that cannot share passes.", min=1)] = 1,
    pooling: Annotated[
        str | None,
        typer.Option(help="What heads read: mean, cls, pooler or last.", show_default="mean; pooler with --full"),
    ] = None,
    note: Annotated[
        str | None, typer.Option(help="A sentence for the tables: what the backbone has seen before.", show_default="")
    ] = None,
    runs_only: Annotated[
        bool, typer.Option("--runs-only", help="No tables: the same command without it makes them of these runs.")
    ] = False,
    full: Annotated[bool, size("The paper's own grid, seeds, rows and backbone.", "--full")] = False,
    json: Json = False,
) -> None:
    """Run an experiment of the papers: a table, a figure, every run, and the environment."""
    output = Output(json)
    if name not in EXPERIMENTS:
        raise GraftError(f"the experiment {name!r} is unknown: use one of {', '.join(EXPERIMENTS)}.")
    experiment = EXPERIMENTS[name]
    if pooling is not None and pooling not in get_args(Pooling):
        raise GraftError(f"--pooling {pooling} is unknown: use {', '.join(get_args(Pooling))}.")

    from taskgraft.experiments.lab import Lab, RunsDone, Setup
    from taskgraft.experiments.report import write

    rows = experiment.rows if rows is None else rows
    chosen: dict[str, Any] = {"rows": rows or None, "backbone": backbone, "pooling": pooling or "mean"}
    chosen["seeds"] = seeds or (5 if full else experiment.seeds)
    if full:
        chosen |= {"rows": None, "backbone": backbone or experiment.paper_backbone}
        chosen["pooling"] = pooling or "pooler"
    folder = out / name
    setup = Setup(
        runs=out / "runs", data=data_dir, epochs=epochs, trials=trials, configurations=configurations,
        steps=steps or (2**18 if full else Setup.steps), protocol=experiment.protocol,
        tasks=() if tasks is None else tuple(tasks.split(",")), workers=workers, full=full, runs_only=runs_only,
        note=note, **chosen,
    )  # fmt: skip
    lab = Lab(setup)
    module = importlib.import_module(experiment.module)
    lab.chosen(module.TASKS)  # or it is told why there are none
    make(folder)
    if missing := lab.missing(module.TASKS):
        output.say(f"Not at hand, and left out: {', '.join(missing)}.")
    try:
        report = module.run(lab)
    except KeyboardInterrupt as error:
        raise Stopped(f"stopped: what ended is in {setup.runs}, and the same command does the rest.") from error
    except RunsDone:
        output.say(f"All runs are in {setup.runs}.")
        output.finish({"experiment": name, "runs": str(setup.runs)})
        return
    files = write(report, lab, module.TASKS, folder)
    output.say(files["table.md"].read_text(encoding="utf-8"))
    output.say(f"Written: {', '.join(map(str, files.values()))}")
    output.finish({"experiment": name, **report.found, "files": {what: str(path) for what, path in files.items()}})
