"""`taskgraft train`: a file in, a graft out."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskgraft.cli.app import Output, app, process_number
from taskgraft.cli.backbone import backbone_named
from taskgraft.cli.each import train_each
from taskgraft.cli.few_shot import add_from_few
from taskgraft.cli.options import (
    BackboneName,
    Columns,
    FewShotOptions,
    Json,
    OnRay,
    Reading,
    Splits,
    StoreFolder,
    Together,
    Training,
    grouped,
)
from taskgraft.cli.reading import read_text, task_from
from taskgraft.cli.runs import RUNS, Announced, check_place, state_of_run
from taskgraft.cli.together import train_together
from taskgraft.errors import GraftError
from taskgraft.methods import Method, method_named
from taskgraft.training.progress import progress_for
from taskgraft.training.settings import Settings

if TYPE_CHECKING:
    from taskgraft.grafts.store import Store
    from taskgraft.tasks.task import Task
    from taskgraft.training.fit import Run


@app.command(
    epilog="""Examples:
  taskgraft train train.csv --text tweet --label belief --name warming
  taskgraft train pairs.csv --text premise --pair hypothesis --label relation --name nli --store grafts
  taskgraft train glue/rte --data-dir data --method adapter-256 --epochs 20 --seed 1
  taskgraft train reviews.csv tweets.csv complaints.csv --name house
  taskgraft train returns.csv --from grafts/house --few-shot 16 --seeds 5
  taskgraft train reviews.csv tweets.csv complaints.csv --each --ray auto

A run that was stopped or killed goes on where it was when the same command is given again.
`accelerate launch -m taskgraft.cli train ...` trains one task on several devices."""
)
@grouped
def train(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A file (CSV, TSV, JSONL, Parquet), a benchmark such as glue/rte, or a data set on the Hub. "
            "Several are trained together; what is said of columns, kind and splits holds for all.",
        ),
    ],
    columns: Columns,
    reading: Reading,
    splits: Splits,
    training: Training,
    together: Together,
    few: FewShotOptions,
    cluster: OnRay,
    name: Annotated[
        str | None,
        typer.Option(help="What to call the task, or several together.", show_default="the file's name; together"),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Train each of several alone; each has a graft of its own.")] = (
        False
    ),
    store: StoreFolder = Path("grafts"),
    backbone: BackboneName = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="adapter-SIZE, paper-SIZE (adapters as published), seq_bn, double_seq_bn or par_bn (as the AdapterHub "
            "has them), norms, head, or head-HIDDEN; for several tasks also hyperformer, hyperformer++, dagger, full.",
            show_default="adapter-64; for several hyperformer++-64, or hyperformer++ on T5",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the rows.")] = Settings.seed,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="The state of the run is saved this often, and after each epoch.")
    ] = Settings.checkpoint_seconds,
    track: Annotated[
        str | None, typer.Option(help="Log the run to tensorboard, mlflow or another tracker of Accelerate.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a task from a file and put its graft into the store; or several together, which share what they learn.

    The columns, the kind of task, its labels and its splits are found where they are clear, and said.
    """
    output = Output(json)
    chosen = {**training.settings(), **together.settings(), "seed": seed, "checkpoint_seconds": checkpoint_seconds}
    settings = Settings(**chosen)
    if few != FewShotOptions():
        if len(sources) > 1 or method is not None or track is not None or each or cluster != OnRay():
            raise GraftError(
                "--from starts one new task from tasks that were trained together, by their method: give one file, and "
                "leave --method, --track, --each and --ray out."
            )
        check_alone(together)
        add_from_few(output, task_from(sources[0], columns, reading, splits, name), few, settings, store, backbone)
    elif each or cluster != OnRay():
        check_each(sources, each, name, track)
        check_alone(together)
        check_splits(sources, splits)
        how, settings = method_for_graft(method or "adapter-64", settings)
        tasks = [task_from(source, columns, reading, splits, name) for source in sources]
        train_each(output, tasks, how, settings, store, backbone, cluster)
    elif len(sources) > 1:
        check_splits(sources, splits)
        tasks = [task_from(source, columns, reading, splits) for source in sources]
        train_together(output, tasks, method, name, settings, store, backbone, track)
    else:
        check_alone(together)
        how, settings = method_for_graft(method or "adapter-64", settings)
        task = task_from(sources[0], columns, reading, splits, name)
        train_one(output, task, how, settings, store, backbone, track)


def check_each(sources: Sequence[str], each: bool, name: str | None, track: str | None) -> None:
    """Refuse what does not go with tasks that are trained one by one, here or on a cluster."""
    if len(sources) > 1 and not each:
        raise GraftError(
            "several files are trained together, which a cluster does not do: add --each, and each is trained alone."
        )
    if len(sources) > 1 and name is not None:
        raise GraftError(f"--name {name} would be every task's: with --each, each is called by its file.")
    if track is not None:
        raise GraftError("--track follows one run, not many: leave it out, or train the task alone.")


def check_splits(sources: Sequence[str], splits: Splits) -> None:
    """Refuse a file of rows that would be held out for every task."""
    for option, value in (("--validation", splits.validation), ("--test", splits.test)):
        if len(sources) > 1 and not is_share(value):
            raise GraftError(
                f"{option} {value} would be every task's: with several files give a share, or each a split column."
            )


def check_alone(together: Together) -> None:
    """Refuse options that say how several tasks take turns, where there is one."""
    for option in ("temperature", "batches", "weighting", "epoch_steps"):
        if getattr(together, option) != getattr(Together(), option):
            flag = option.replace("_", "-")
            raise GraftError(f"--{flag} is for several tasks that are trained together, and there is one.")


def is_share(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def train_one(
    output: Output,
    task: Task,
    method: Method,
    settings: Settings,
    store: Path,
    backbone: str | None,
    track: str | None,
) -> None:
    from taskgraft.grafts.store import Store
    from taskgraft.training.fit import fit

    grafts = Store(store)
    check_place(grafts, task.name)
    loaded = backbone_named(backbone)
    output.say(read_text(task))
    with state_of_run(store / RUNS / task.name) as folder:
        bar = Announced(progress_for(None), output.say)
        run = fit(loaded, task, method, settings=settings, run=folder, progress=bar, track=track)
        assert run.graft is not None
        if process_number():
            return
        version = grafts.put(run.graft)
    report(output, task, run, grafts, version)
    if track is not None:
        output.say(f"The logs of {track} are in {folder}.")


def method_for_graft(name: str, settings: Settings) -> tuple[Method, Settings]:
    """The method of this name, and the settings with the learning rate that may be part of the name."""
    method, rate = method_named(name)
    if method.trains_backbone:
        raise GraftError(
            f"method {name!r} changes the backbone itself, so there is no graft of it to keep: measure it with "
            f"`taskgraft compare SOURCE {name}`, or train with --method adapter-64."
        )
    return method, settings if rate is None else dataclasses.replace(settings, learning_rate=rate)


def report(output: Output, task: Task, run: Run, store: Store, version: int) -> None:
    from taskgraft.grafts.graft import read_summary
    from taskgraft.reports.tables import bytes_text, count_text, score_text, seconds_text, share_text

    size = read_summary(task.name, store.folder / task.name)[1]
    cut = [f"{n:,} of {task.splits[split].num_rows:,} {split} texts" for split, n in run.cut.items() if n]
    if cut:
        output.say(f"Cut at {run.settings.max_length} tokens (--max-length): {', '.join(cut)}")
    if run.score is not None:
        output.say(f"Score: {score_text(run.score)} ({' and '.join(task.metrics)} on the {run.split} rows)")
    output.say(
        f"Trained: {count_text(run.trained)} parameters, {share_text(run.trained / run.total)} of the backbone's "
        f"{count_text(run.total)}, in {seconds_text(run.seconds)} (epoch {run.epoch} of {run.epochs} kept)"
    )
    again = f", version {version}: `taskgraft tasks rollback` goes back to the one before" if version > 1 else ""
    output.say(f"Saved: {store.folder / task.name}, {bytes_text(size)}{again}")
    pair = ' --pair "..."' if task.has_pairs else ""
    where = "" if str(store.folder) == "grafts" else f" --store {shlex.quote(str(store.folder))}"
    output.say(f'\nNext: taskgraft predict {shlex.quote(task.name)} "..."{pair}{where}')
    record: dict[str, Any] = {
        **task.to_json(),
        "task": task.name,
        "store": str(store.folder),
        "version": version,
        "score": run.score,
        "split": run.split,
        "test": run.test,
        "validation": run.validation,
        "method": run.method.to_json(),
        "settings": run.settings.to_json(),
        "trained": run.trained,
        "total": run.total,
        "bytes": size,
        "seconds": run.seconds,
        "epochs": run.epochs,
        "kept_epoch": run.epoch,
        "steps": run.steps,
        "cut": run.cut,
    }
    output.finish(record)
