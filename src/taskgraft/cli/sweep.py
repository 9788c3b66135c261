"""`taskgraft sweep`: a grid of settings on one task or several, many runs in each pass; the best graft is kept."""

from __future__ import annotations

import functools
import json as json_text
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_named
from taskgraft.cli.compare import make
from taskgraft.cli.options import (
    BackboneName,
    Columns,
    Json,
    OnRay,
    Reading,
    Splits,
    StoreFolder,
    Training,
    grouped,
    option,
)
from taskgraft.cli.reading import read_text, task_from
from taskgraft.cli.runs import check_place
from taskgraft.cli.train import check_splits
from taskgraft.errors import GraftError, Stopped
from taskgraft.training.settings import Settings

if TYPE_CHECKING:
    from taskgraft.grafts.graft import Graft
    from taskgraft.grafts.store import Store
    from taskgraft.tasks.task import Task
    from taskgraft.training.many import Trial
    from taskgraft.training.sweep import Point, Sweep

GRID = "The grid"
EPOCHS = option(GRID, "Passes over the rows: 3,20.", default="by rows and method")
RATES = option(GRID, "Learning rates: 3e-5,3e-4,3e-3.", "--rates", default="by the method")
MOST_LETTERS = 60  # of a figure's title
MOST_FAILURES = 3  # that are said; table.md has all
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Runs(Training):
    """The settings of the runs: those that the grid has are lists."""

    epochs: Annotated[str | None, EPOCHS] = None  # type: ignore[assignment]
    learning_rate: Annotated[str | None, RATES] = None  # type: ignore[assignment]

    def settings(self) -> dict[str, Any]:
        """What all runs have in common, as fields of `Settings`, checked."""
        chosen = {key: value for key, value in asdict(self).items() if key not in ("epochs", "learning_rate")}
        Settings(**chosen)
        return chosen


@app.command(
    epilog="""Examples:
  taskgraft sweep train.csv --text tweet --label belief --sizes 8,64,256 --rates 3e-4,1e-3,3e-3
  taskgraft sweep reviews.csv tweets.csv --method adapter-64,norms --rates 1e-3,3e-3 --seeds 3
  taskgraft sweep glue/rte --data-dir data --paper
  taskgraft sweep glue/rte --data-dir data --paper --ray auto

The folder gets runs.json, table.md, sweep.png and sweep.svg. The same command again repeats no run, a stopped one
goes on, and a larger grid adds its runs to those that are there."""
)
@grouped
def sweep(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A file (CSV, TSV, JSONL, Parquet), a benchmark such as glue/rte, or a data set on the Hub. "
            "Several are swept side by side; what is said of columns, kind and splits holds for all.",
        ),
    ],
    columns: Columns,
    reading: Reading,
    splits: Splits,
    *,
    method: Annotated[
        str | None,
        option(GRID, "adapter, paper (as published), norms, head, or several: adapter-64,norms.", default="adapter"),
    ] = None,
    sizes: Annotated[str | None, option(GRID, "Sizes of the adapters: 8,64,256.", default="64")] = None,
    runs: Runs,
    cluster: OnRay,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each setting.", min=1, rich_help_panel=GRID, show_default="1")
    ] = None,
    paper: Annotated[
        bool,
        option(
            GRID,
            "The grid of Houlsby et al. and their settings, wherever a setting is left at its default; 5 seeds.",
            "--paper",
        ),
    ] = False,
    lanes: Annotated[
        int | None, typer.Option(help="Runs that share a pass.", min=1, show_default="by the memory")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the results.", show_default="sweeps/TASK")] = None,
    store: StoreFolder = Path("grafts"),
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep no graft but those of the runs.")] = False,
    name: Annotated[str | None, typer.Option(help="What to call the task.", show_default="the file's name")] = None,
    backbone: BackboneName = None,
    json: Json = False,
) -> None:
    """Try sizes, learning rates, epochs and seeds over one frozen backbone, and keep what validation likes best."""
    output = Output(json)
    axes: dict[str, Any] = {
        "methods": None if method is None else [word.strip() for word in method.split(",")],
        "sizes": numbers("--sizes", sizes, int, "8,64,256"),
        "rates": numbers("--rates", runs.learning_rate, float, "3e-4,1e-3"),
        "epochs": numbers("--epochs", runs.epochs, int, "3,20"),
        "seeds": seeds,
    }
    settings = Settings(**runs.settings())

    from taskgraft.grafts.store import Store
    from taskgraft.training.grid import Grid, trials_of

    grid, grafts = Grid.of(**axes), Store(store)
    grid.candidates()
    tasks = tasks_from(sources, columns, reading, splits, name)
    for task in tasks if not no_store else ():
        check_place(grafts, task.name)
    loaded = backbone_named(backbone)
    trials = trials_of(loaded, tasks, grid, settings, paper)
    for task in tasks:
        output.say(read_text(task))
    output.say(plan_text(trials, lanes))
    done: list[dict[str, Any]] = []

    def said(run: dict[str, Any]) -> None:
        done.append(run)
        if not sys.stderr.isatty():  # else the live table is there
            output.say(f"  {len(done)} of {len(trials)}: {run['name']}: {outcome_text(run)}")

    folder = out or Path("sweeps") / folder_name(tasks)
    with folder_for_results(folder):
        try:
            options: dict[str, Any] = {"run": folder, "lanes": lanes, "on_run": said}
            found = sweep_on(cluster)(loaded, tasks, **axes, paper=paper, settings=settings, **options)
        except Stopped as error:
            raise Stopped(
                f"stopped with {len(done)} of {len(trials)} runs in {folder / 'runs.json'}: "
                "the same command does the others."
            ) from error
        files = write(found, tasks, folder, loaded.name, output)
    report(output, found, tasks, None if no_store else grafts, files)


# -- what was asked for


def sweep_on(cluster: OnRay) -> Callable[..., Sweep]:
    """What trains the grid: this process, or a cluster."""
    from taskgraft.training.sweep import sweep as here

    if cluster.ray is None:
        return here
    from taskgraft.cluster import sweep as on_cluster

    return functools.partial(on_cluster, **asdict(cluster))


def numbers(option: str, text: str | None, kind: Callable[[str], N], example: str) -> list[N] | None:
    """The numbers of a list such as 8,64,256."""
    found = []
    for word in [] if text is None else text.split(","):
        try:
            found.append(kind(word.strip()))
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise GraftError(f"{option} {text} has {word.strip()!r}, which is not {what}: write {example}.") from error
    return found or None


def tasks_from(
    sources: Sequence[str], columns: Columns, reading: Reading, splits: Splits, name: str | None
) -> list[Task]:
    if len(sources) > 1:
        if name is not None:
            raise GraftError(f"--name {name} would be every task's: with several, each is called by its file.")
        check_splits(sources, splits)
    return [task_from(source, columns, reading, splits, name) for source in sources]


def folder_name(tasks: Sequence[Task]) -> str:
    return tasks[0].name if len(tasks) == 1 else f"{tasks[0].name} and {len(tasks) - 1} more"


def plan_text(trials: Sequence[Trial], lanes: int | None) -> str:
    """How many runs there will be, and of what; tasks whose grids differ have a line each."""
    grids: dict[str, list[str]] = {}
    for task in dict.fromkeys(trial.task.name for trial in trials):
        grids.setdefault(grid_text([trial for trial in trials if trial.task.name == task]), []).append(task)
    count = f"{len(trials):,} run{'' if len(trials) == 1 else 's'}"
    together = f"; {'as many as fit' if lanes is None else min(lanes, len(trials))} at a time"
    if len(grids) == 1:
        ((text, tasks),) = grids.items()
        return f"{count}: {f'{len(tasks)} tasks x ' if len(tasks) > 1 else ''}{text}{together}."
    return "\n".join([f"{count}{together}:", *(f"  {', '.join(tasks)}: {text}" for text, tasks in grids.items())])


def grid_text(trials: Sequence[Trial]) -> str:
    """3 sizes (8, 64, 256) x 2 rates (3e-4, 3e-3), 1 seed."""
    from taskgraft.methods import Adapter
    from taskgraft.reports.sweeps import rate_text
    from taskgraft.training.grid import label_of

    methods = list(dict.fromkeys(trial.method for trial in trials))
    sizes = [str(method.size) for method in methods if isinstance(method, Adapter) and method.size]
    labels = [label_of(method) for method in methods]
    kinds = {label.replace(f"-{size}", "", 1) for label, size in zip(labels, sizes, strict=False)}
    if len(methods) > 1 and len(sizes) == len(methods) and len(kinds) == 1:
        parts = [kinds.pop(), several("size", sizes)]
    else:
        parts = [several("method", labels)]
    parts.append(several("rate", [rate_text(trial.settings.learning_rate or 0) for trial in trials]))
    parts.append(several("epochs", [str(trial.settings.epochs) for trial in trials]))
    seeds = len({trial.settings.seed for trial in trials})
    return f"{' x '.join(parts)}, {seeds} seed{'' if seeds == 1 else 's'}"


def several(what: str, values: Sequence[str]) -> str:
    found = list(dict.fromkeys(values))
    if len(found) == 1:
        return found[0] if what == "method" else f"{what} {found[0]}"
    return f"{len(found)} {what}{'' if what.endswith('s') else 's'} ({', '.join(found)})"


@contextmanager
def folder_for_results(folder: Path) -> Iterator[None]:
    """The folder is made; if this command ends badly with nothing worth keeping in it, it goes again."""
    made = [place for place in (folder, folder.parent) if not place.exists()]
    make(folder)
    try:
        yield
    except BaseException:
        worth = any(path.suffix in (".json", ".safetensors") for path in folder.rglob("*"))
        if folder in made and not worth:
            shutil.rmtree(folder)
            with suppress(OSError):
                for place in made[1:]:
                    place.rmdir()
        raise


# -- what came of it


def outcome_text(run: dict[str, Any]) -> str:
    from taskgraft.reports.tables import score_text, seconds_text

    if run["error"] is not None:
        return str(run["error"])
    return f"validation {score_text(run['validation'])} in {seconds_text(run['seconds'])}"


def write(found: Sweep, tasks: Sequence[Task], folder: Path, backbone: str, output: Output) -> dict[str, Path]:
    """The table and the figure, in files; the tables also for people to read now."""
    from taskgraft.reports.sweeps import Ranking, draw_sweep, markdown, rich_table

    metrics = {task.name: " and ".join(task.metrics) for task in tasks}
    metrics = {name: f"mean of {text}" if " and " in text else text for name, text in metrics.items()}
    rankings = [Ranking(task.name, metrics[task.name], found.points(task.name)) for task in tasks]
    failures = [f"{run['name']}: {run['error']}" for run in found.runs if run["error"] is not None]
    files = {"runs": folder / "runs.json", "table": folder / "table.md"}
    files["table"].write_text(markdown(rankings, failures), encoding="utf-8")
    seeds = len({run["seed"] for run in found.runs})
    about = f"{Path(backbone).name}, validation score, " + ("1 seed" if seeds == 1 else f"mean of {seeds} seeds")
    about += f", {len(failures)} of {len(found.runs)} runs failed" if failures else ""
    names = ", ".join(found.tasks)
    title = names if len(names) <= MOST_LETTERS else folder_name(tasks)
    for suffix in ("png", "svg"):
        files[suffix] = folder / f"sweep.{suffix}"
        draw_sweep(rankings, files[suffix], title=title, subtitle=about)
    for ranking in rankings:
        output.say()
        output.say(rich_table(ranking))
    for sentence in failures[:MOST_FAILURES]:
        output.say(f"Failed: {sentence}")
    if len(failures) > MOST_FAILURES:
        output.say(f"{len(failures) - MOST_FAILURES} more failed: {files['table']} says why.")
    return files


def report(output: Output, found: Sweep, tasks: Sequence[Task], store: Store | None, files: dict[str, Path]) -> None:
    """The chosen setting of each task, where its graft is, and how to use it."""
    chosen: dict[str, Any] = {}
    missing: list[str] = []
    for task in tasks:
        try:
            best = found.best(task.name)
        except GraftError as error:
            missing.append(str(error))
            continue
        assert best.graft is not None
        chosen[task.name] = {**best.to_json(), "version": None if store is None else kept(store, best.graft)}
        output.say(best_text(best))
        if store is not None:
            version = chosen[task.name]["version"]
            output.say(f"Saved: {store.folder / task.name}, version {version}: the run {best.kept}")
    output.say(f"Written: {', '.join(map(str, files.values()))}")
    first = next((task for task in tasks if task.name in chosen), None)
    if store is not None and first is not None:
        where = "" if str(store.folder) == "grafts" else f" --store {shlex.quote(str(store.folder))}"
        pair = ' --pair "..."' if first.has_pairs else ""
        output.say(f'\nNext: taskgraft predict {shlex.quote(first.name)} "..."{pair}{where}')
    if missing:
        raise GraftError(missing[0])
    output.finish(
        {
            "tasks": chosen,
            "metrics": {task.name: list(task.metrics) for task in tasks},
            "runs": len(found.runs),
            "failed": sum(run["error"] is not None for run in found.runs),
            "store": None if store is None else str(store.folder),
            "files": {what: str(path) for what, path in files.items()},
        }
    )


def best_text(best: Point) -> str:
    from taskgraft.reports.sweeps import rate_text
    from taskgraft.reports.tables import score_text

    test = "" if best.test is None else f", test {score_text(best.test, best.error)}"
    seeds = f"{len(best.seeds)} seed{'' if len(best.seeds) == 1 else 's'}"
    return (
        f"Best for {best.task}, by validation: {best.method}, rate {rate_text(best.rate)}, epochs {best.epochs}: "
        f"validation {score_text(best.validation or 0)}{test} ({seeds})"
    )


def kept(store: Store, graft: Graft) -> int:
    """The version that a graft has in the store, where it is put unless it is the current one already."""

    def origin(some: Graft) -> str:
        return json_text.dumps([some.created, some.training], sort_keys=True)

    with suppress(GraftError):
        if graft.name in store and origin(store.get(graft.name)) == origin(graft):
            current = next(entry.version for entry in store.list() if entry.name == graft.name)
            if current is not None:
                return current
    return store.put(graft)
