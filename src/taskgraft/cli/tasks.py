"""`taskgraft tasks`: what is in a store, and its upkeep."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.options import Json, Name, StoreFolder
from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.grafts.graft import Graft
    from taskgraft.grafts.joint import JointTask
    from taskgraft.grafts.store import Store
    from taskgraft.methods import Method

Folder = Annotated[Path | None, typer.Option("--store", help="The folder of grafts.", show_default="grafts")]
Version = Annotated[int | None, typer.Option(help="Its number.", show_default="the one before the current")]

tasks = typer.Typer(
    invoke_without_command=True,
    epilog="""Examples:
  taskgraft tasks
  taskgraft tasks show warming --store grafts
  taskgraft tasks rollback warming

Training a task again keeps its earlier versions, until they are pruned.""",
)
app.add_typer(tasks, name="tasks")


@tasks.callback()
def list_tasks(context: typer.Context, store: StoreFolder = Path("grafts"), json: Json = False) -> None:
    """List the tasks of a store, or show, rename, remove or roll back one."""
    if context.invoked_subcommand is not None:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from taskgraft.reports.tables import bytes_text, count_text

    output = Output(json)
    lines = listing(opened(store))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("task", "kind", "score", "parameters", "size", "version", "made"):
        table.add_column(title, justify="right" if title in ("parameters", "size", "version") else "left")
    for line in lines:
        if line["error"]:
            table.add_row(Text(line["name"]), Text("broken", style="red"))
            continue
        version = "-" if line["version"] is None else str(line["version"])
        shown = (line["name"], line["kind"], score_of(line), count_text(line["parameters"]), bytes_text(line["bytes"]),
                 version, line["created"][:16].replace("T", " "))  # fmt: skip
        table.add_row(*map(Text, shown))
    if lines:
        output.say(table)
    else:
        output.say(f"No tasks in {store} yet: `taskgraft train FILE --store {store}` makes one.")
    for line in lines:
        if line["error"]:
            output.say(f"{line['name']}: {line['error']}")
    output.finish({"store": str(store), "tasks": lines})


def listing(store: Store) -> list[dict[str, Any]]:
    """The store's entries, with the kind and the metrics of each task."""
    from taskgraft.grafts.graft import read_record

    lines = []
    for entry in store.list():
        line = {**dataclasses.asdict(entry), "kind": "", "metric": []}
        if entry.together:
            line |= {"kind": f"{len(entry.together)} tasks together", "metric": ["mean of all metrics"]}
        elif entry.error is None:
            record = read_record(entry.name, store.folder / entry.name)
            line |= {"kind": kind_of(record), "metric": record["task"].get("metrics", [])}
        lines.append(line)
    return lines


def score_of(line: dict[str, Any]) -> str:
    """A score with what it is and where it was measured."""
    score = line["metrics"].get("score")
    if not isinstance(score, float | int) or score != score:
        return "-"
    split = f" ({line['metrics']['split']})" if "split" in line["metrics"] else ""
    return f"{score:.3f} {' and '.join(line['metric'])}{split}"


def method_text(method: Method) -> str:
    """A method's name, and the fields in which it is not the default."""
    default = type(method)()
    chosen = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    return " ".join([method.name, *(f"{k}={v}" for k, v in chosen.items() if v != getattr(default, k))])


def kind_of(record: dict[str, Any]) -> str:
    return str(record["task"].get("kind") or (record["head"] or {}).get("kind") or "text")


@tasks.command()
def show(context: typer.Context, name: Name, store: Folder = None, json: Json = False) -> None:
    """Everything that is known of a task."""
    from taskgraft.grafts.graft import read_summary
    from taskgraft.grafts.store import is_joint
    from taskgraft.reports.tables import bytes_text, count_text, seconds_text, share_text

    output, grafts = of_group(context, store, json)
    require(grafts, name)
    if is_joint(grafts.folder / name):
        show_joint(output, grafts, name)
        return
    graft = graft_named(grafts.folder, name)
    record, size = read_summary(name, grafts.folder / name)
    versions, training = grafts.versions(name), graft.training
    total = training.get("backbone_parameters")
    share = f", {share_text(graft.parameters / total)} of the backbone's {count_text(total)}" if total else ""
    rows = ", ".join(f"{number:,} {split}" for split, number in graft.task.get("rows", {}).items())
    line = {"metrics": graft.metrics, "metric": graft.task.get("metrics", [])}
    facts = {
        "kind": kind_of(record),
        "labels": ", ".join(graft.head.labels if graft.head else graft.task.get("labels", ())),
        "score": score_of(line),
        "data": " ".join(filter(None, (graft.task.get("source"), f"({rows})" if rows else ""))),
        "columns": ", ".join(f"{role}: {column}" for role, column in graft.task.get("columns", {}).items()),
        "method": method_text(graft.method),
        "parameters": f"{count_text(graft.parameters)}{share}",
        "size": bytes_text(size),
        "trained": f"{training['epochs']} epochs in {seconds_text(training['seconds'])}"
        if "epochs" in training
        else "",
        "backbone": f"{graft.backbone['name']} (sha256 {graft.backbone['sha256'][:12]})",
        "made": graft.created,
        "pulled": " at ".join(map(str, graft.origin.values())),
        "versions": ", ".join(map(str, versions)) or "a plain folder",
        "notes": " ".join(graft.task.get("notes", [])),
    }
    output.say(name)
    for fact, value in facts.items():
        if value:
            output.say(f"  {fact:<11} {value}")
    output.finish({**record, "name": name, "kind": kind_of(record), "bytes": size, "versions": versions})


def show_joint(output: Output, store: Store, name: str) -> None:
    from taskgraft.reports.tables import count_text

    joint = store.get_joint(name)
    output.say(f"{name}: {len(joint.tasks)} tasks that were trained together")
    output.say(f"  {'method':<11} {method_text(joint.method)}")
    output.say(f"  {'parameters':<11} {count_text(joint.parameters)} for all tasks together")
    output.say(f"  {'backbone':<11} {joint.backbone['name']} (sha256 {joint.backbone['sha256'][:12]})")
    for task, member in joint.tasks.items():
        output.say(f"  {task:<11} {score_of({'metrics': member.metrics, 'metric': member.task.get('metrics', [])})}")
    members = {task: member.to_json() for task, member in joint.tasks.items()}
    about = {"parameters": joint.parameters, "metrics": joint.metrics, "backbone": joint.backbone}
    output.finish({"name": name, "tasks": members, "versions": store.versions(name), **about})


@tasks.command()
def rename(
    context: typer.Context,
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    store: Folder = None,
    json: Json = False,
) -> None:
    """Give a task, with all its versions, another name."""
    output, grafts = of_group(context, store, json)
    require(grafts, name)
    grafts.rename(name, new)
    output.say(f"{name} is now called {new}.")
    output.finish({"task": new, "was": name})


@tasks.command()
def remove(
    context: typer.Context,
    name: Name,
    store: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete a task and all its versions; on a terminal, it asks before it does."""
    output, grafts = of_group(context, store, json)
    require(grafts, name)
    removed = yes or not sys.stdin.isatty() or typer.confirm(f"Delete {grafts.folder / name} for good?", err=True)
    if removed:
        grafts.remove(name)
    output.say(f"{name} is removed." if removed else f"{name} is kept.")
    output.finish({"task": name, "removed": removed})


@tasks.command()
def rollback(
    context: typer.Context, name: Name, version: Version = None, store: Folder = None, json: Json = False
) -> None:
    """Make an earlier version of a task the current one."""
    output, grafts = of_group(context, store, json)
    require(grafts, name)
    now = grafts.rollback(name, version)
    output.say(f"{name} is at version {now}; the store has {', '.join(map(str, grafts.versions(name)))}.")
    output.finish({"task": name, "version": now, "versions": grafts.versions(name)})


@tasks.command()
def prune(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The task.", show_default="all of them")] = None,
    keep: Annotated[int, typer.Option(help="How many of the newest versions to keep, besides the current one.")] = 1,
    store: Folder = None,
    json: Json = False,
) -> None:
    """Delete earlier versions, and what killed writers have left."""
    output, grafts = of_group(context, store, json)
    if name is not None:
        require(grafts, name)
    pruned = grafts.prune(name, keep)
    output.say(f"{pruned} earlier version{'' if pruned == 1 else 's'} deleted.")
    output.finish({"pruned": pruned})


# -- grafts by name, for all commands


def of_group(context: typer.Context, store: Path | None, json: bool) -> tuple[Output, Store]:
    """What `taskgraft tasks --store A --json show NAME` says before the command's own name counts too."""
    before = context.parent.params if context.parent is not None else {}
    return Output(json or before.get("json", False)), opened(store or before.get("store", Path("grafts")))


def opened(folder: Path) -> Store:
    from taskgraft.grafts.store import Store

    if folder.exists() and not folder.is_dir():
        raise GraftError(f"the store {folder} is a file: name a folder with --store.")
    return Store(folder)


def require(store: Store, name: str) -> None:
    """Refuse a name that the store does not have, and say which it has."""
    if name in store:
        return
    names = store.names()
    if not names:
        raise GraftError(f"there is no task {name!r}: the store {store.folder} is empty; is it the right --store?")
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    raise GraftError(f"there is no task {name!r} in the store {store.folder}: it has {', '.join(names)}{meant}")


def graft_named(folder: Path, name: str, version: int | None = None) -> Graft:
    store = opened(folder)
    require(store, name)
    return store.get(name, version)


def task_named(folder: Path, name: str, version: int | None = None) -> Graft | JointTask:
    """The graft of this name; JOINT/TASK is one of the tasks that were trained together under a name."""
    together, slash, task = name.partition("/")
    if not slash:
        return graft_named(folder, name, version)
    store = opened(folder)
    require(store, together)
    return store.get_joint(together, version).task(task)
