"""`taskgraft reproduce`: an experiment of a paper, from its data to its table."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.compare import make
from taskgraft.cli.options import BackboneName, Json
from taskgraft.errors import GraftError, Stopped
from taskgraft.experiments.names import EXPERIMENTS, Experiment
from taskgraft.methods import Pooling

if TYPE_CHECKING:
    from taskgraft.experiments.lab import Lab
    from taskgraft.experiments.pool import Pool
    from taskgraft.experiments.report import Report

SIZE = "How much"
LIST = "".join(f"  {row.name:<16}{row.says}\n" for row in EXPERIMENTS.values())


def size(help: str, *names: str, default: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=SIZE, show_default=default or True, **more)


@app.command(
    epilog=f"""The experiments:
{LIST}
Examples:
  taskgraft reproduce glue --data-dir data --workers 4
  taskgraft reproduce few-shot,hyper-glue,task-map --backbone t5-small --workers 8
  taskgraft reproduce glue --full

The folder OUT/NAME gets results.json, table.md, the figures, the answers and the environment. Runs lie in OUT/runs, and
experiments share them: the same command again repeats none. Several experiments share the processes, too: what the
first of them wait for goes first."""
)
def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The experiment, or several: glue,squad.")],
    data_dir: Annotated[
        Path | None, typer.Option(help="A folder of benchmark files.", show_default="from the Hub")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the results.")] = Path("results"),
    backbone: BackboneName = None,
    tasks: Annotated[str | None, size("Some of its tasks: cola,rte.", default="all")] = None,
    rows: Annotated[
        int | None, size("Training rows of a task, at most; 0 for all.", default="by the experiment", min=0)
    ] = None,
    seeds: Annotated[int | None, size("Runs of each chosen setting.", default="by the experiment", min=1)] = None,
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
    names = list(dict.fromkeys(name.split(",")))
    unknown = [each for each in names if each not in EXPERIMENTS]
    if unknown:
        raise GraftError(f"the experiment {unknown[0]!r} is unknown: use one of {', '.join(EXPERIMENTS)}.")
    if pooling is not None and pooling not in get_args(Pooling):
        raise GraftError(f"--pooling {pooling} is unknown: use {', '.join(get_args(Pooling))}.")

    from taskgraft.experiments.lab import Lab, Setup
    from taskgraft.experiments.pool import Pool

    def setup_of(experiment: Experiment) -> Setup:
        most = experiment.rows if rows is None else rows
        chosen: dict[str, Any] = {"rows": most or None, "backbone": backbone, "pooling": pooling or "mean"}
        chosen["seeds"] = seeds or (5 if full else experiment.seeds)
        if full:
            chosen |= {"rows": None, "backbone": backbone or experiment.paper_backbone}
            chosen["pooling"] = pooling or "pooler"
        return Setup(
            runs=out / "runs", data=data_dir, epochs=epochs, trials=trials, configurations=configurations,
            steps=steps or (2**18 if full else Setup.steps), protocol=experiment.protocol,
            tasks=() if tasks is None else tuple(tasks.split(",")), full=full, runs_only=runs_only, note=note, **chosen,
        )  # fmt: skip

    with ExitStack() as stack:
        pool = stack.enter_context(Pool(workers)) if workers > 1 else None
        labs = {each: Lab(setup_of(EXPERIMENTS[each]), pool, rank) for rank, each in enumerate(names)}
        modules = {each: importlib.import_module(EXPERIMENTS[each].module) for each in names}
        for each, lab in labs.items():
            lab.chosen(modules[each].TASKS)  # or it is told why there are none
            make(out / each)
            if missing := lab.missing(modules[each].TASKS):
                output.say(f"Not at hand, and left out: {', '.join(missing)}.")
        for lab in labs.values():
            lab.fingerprint  # noqa: B018 - of a backbone that each has to itself, loaded here: not by several threads at once
        try:
            made = reports(modules, labs, pool)
        except KeyboardInterrupt as error:
            raise Stopped(f"stopped: what ended is in {out / 'runs'}, and the same command does the rest.") from error
    found = [told(output, each, report, labs[each], modules[each], out) for each, report in made.items()]
    output.finish(found[0] if len(found) == 1 else {"experiments": found})


def reports(modules: dict[str, Any], labs: dict[str, Lab], pool: Pool | None) -> dict[str, Report | None]:
    """What came of each experiment, None where no tables are wanted; over a pool all of them run at the same time."""
    from taskgraft.experiments.lab import RunsDone

    def report(name: str) -> Report | None:
        try:
            found: Report = modules[name].run(labs[name])
        except RunsDone:
            return None
        return found

    if pool is None or len(labs) == 1:
        return {name: report(name) for name in labs}
    with ThreadPoolExecutor(len(labs)) as threads:
        waiting = {name: threads.submit(report, name) for name in labs}
        try:
            return {name: each.result() for name, each in waiting.items()}
        except BaseException:
            pool.close()  # the others hear of it
            raise


def told(output: Output, name: str, report: Report | None, lab: Lab, module: Any, out: Path) -> dict[str, Any]:
    """Write an experiment's files and say what is in them; the same for programs."""
    from taskgraft.experiments.report import write

    if report is None:
        output.say(f"All runs are in {lab.setup.runs}.")
        return {"experiment": name, "runs": str(lab.setup.runs)}
    files = write(report, lab, module.TASKS, out / name)
    output.say(files["table.md"].read_text(encoding="utf-8"))
    output.say(f"Written: {', '.join(map(str, files.values()))}")
    return {"experiment": name, **report.found, "files": {what: str(path) for what, path in files.items()}}
