"""`taskgraft tasks map`: the learned embeddings of tasks that were trained together, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from taskgraft.cli.options import Json, Name
from taskgraft.cli.tasks import Folder, of_group, require, tasks
from taskgraft.errors import GraftError


@tasks.command("map")
def task_map(
    context: typer.Context,
    name: Name,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the picture.", show_default="STORE's parent/maps/NAME")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="TASK=GROUP, once for each task that has one: coloured alike.")
    ] = None,
    method: Annotated[str, typer.Option(help="pca, tsne, or auto: t-SNE from 20 tasks on.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of t-SNE.")] = 0,
    store: Folder = None,
    json: Json = False,
) -> None:
    """Draw where the tasks of a HyperFormer lie among one another: task_map.png, .svg and .json."""
    from taskgraft.reports.taskmap import task_map as placed

    output, grafts = of_group(context, store, json)
    require(grafts, name)
    pairs = [given.partition("=") for given in group or []]
    bad = [f"{task}{sign}{into}" for task, sign, into in pairs if not (task and sign and into)]
    if bad:
        raise GraftError(f"--group {bad[0]!r} cannot be read: write TASK=GROUP.")
    embeddings = {task: value.numpy() for task, value in grafts.get_joint(name).embeddings().items()}
    found = placed(embeddings, method=method, groups={task: into for task, _, into in pairs}, seed=seed)
    folder = out or grafts.folder.parent / "maps" / name
    paths = found.save(folder)
    for task, others in found.neighbours.items():
        output.say(f"{task}: nearest {', '.join(others[:3])}")
    if found.separation is not None:
        output.say(f"Tasks of different groups lie {found.separation:.2f} times as far apart as those of one.")
    output.say(f"Drawn by {found.method}: {', '.join(str(path) for path in paths)}")
    output.finish({"files": [str(path) for path in paths], **found.to_json()})
