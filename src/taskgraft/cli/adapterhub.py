"""`taskgraft import` and `taskgraft export`: adapters of the AdapterHub, in and out of a store."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_for, silence
from taskgraft.cli.options import Json, OwnBackbone, StoreFolder, TaskName
from taskgraft.cli.tasks import task_named
from taskgraft.errors import GraftError


@app.command(
    "import",
    epilog="""Examples:
  taskgraft import imdb-adapter --backbone bert-base-uncased
  taskgraft import imdb-adapter --name reviews --no-head
  taskgraft import AdapterHub/bert-base-uncased-pf-imdb

Bottleneck adapters of `adapters` 1.x and adapter-transformers, in every wiring,
for BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DeBERTa-v2, DistilBERT, T5, mT5 and BART.
A source does not hold the backbone's weights: name those it was trained on.""",
)
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder that `adapters` wrote, or OWNER/NAME on the Hub.")
    ],
    name: Annotated[str | None, typer.Option(help="The task's name here.", show_default="the adapter's")] = None,
    store: StoreFolder = Path("grafts"),
    backbone: Annotated[
        str | None, typer.Option(help="A model on the Hub, or a folder.", show_default="the one that the source names")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="A branch, a tag or a commit on the Hub.", show_default="main")
    ] = None,
    head: Annotated[bool, typer.Option("--head/--no-head", help="With its prediction head, if there is one.")] = True,
    json: Json = False,
) -> None:
    """Take an adapter that `adapters` saved into the store, as a task, or as a new version of the one of its name."""
    from taskgraft.grafts.adapterhub.reading import located, read_adapterhub, read_config
    from taskgraft.grafts.adapterhub.table import CONFIG
    from taskgraft.grafts.graft import add_graft
    from taskgraft.grafts.store import Store
    from taskgraft.training.written import writes

    output = Output(json)
    silence()
    folder = located(source, revision)
    record = read_config(folder / CONFIG)
    if backbone is None and not record.get("model_name"):
        raise GraftError(f"{source} does not say which backbone it is for: name it with --backbone.")
    loaded = backbone_for(str(record.get("name")), {"name": record.get("model_name")}, backbone)
    graft = read_adapterhub(loaded.model, folder, name, head=head)
    add_graft(loaded.model, graft)  # or it does not fit, and is not stored
    version = Store(store).put(graft)
    kind = "no head" if graft.head is None else graft.head.kind
    output.say(f"{graft.name}: version {version} in {store}, {graft.parameters:,} parameters, {kind}.")
    if graft.head is None and not writes(loaded.model):
        output.say("Without a head it has no answers of its own: it is for tg.add_graft, and for `export`.")
    output.finish({"task": graft.name, "version": version, "parameters": graft.parameters, "head": kind})


@app.command(
    epilog="""Examples:
  taskgraft export warming warming-adapter
  taskgraft export warming warming-adapter --drop-norms --drop-head

There, it is read by `model.load_adapter("warming-adapter", use_safetensors=True)`.
That format holds no tuned norms, and heads only on the first token or the pooler:
train with --method seq_bn (or double_seq_bn, par_bn) for a task that it can hold whole."""
)
def export(
    name: TaskName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder, new or empty.")],
    store: StoreFolder = Path("grafts"),
    version: Annotated[int | None, typer.Option(help="An earlier version.", show_default="the current one")] = None,
    backbone: OwnBackbone = None,
    drop_norms: Annotated[bool, typer.Option("--drop-norms", help="Leave tuned norms out: answers change.")] = False,
    drop_head: Annotated[bool, typer.Option("--drop-head", help="Leave the head out.")] = False,
    json: Json = False,
) -> None:
    """Write a task as a folder that `adapters` reads."""
    from taskgraft.grafts.adapterhub.writing import write_adapterhub
    from taskgraft.grafts.graft import Graft, add_graft, materialise
    from taskgraft.grafts.joint import add_joint

    output = Output(json)
    found = task_named(store, name, version)
    graft = found if isinstance(found, Graft) else found.graft
    loaded = backbone_for(name, graft.backbone, backbone)
    if isinstance(found, Graft):
        add_graft(loaded.model, graft)  # or it is not this backbone's
    else:
        add_joint(loaded.model, found.joint, [found.name])
        graft = materialise(loaded.model, found.name, backbone=graft.backbone["name"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        write_adapterhub(loaded.model, graft, folder, drop_norms=drop_norms, drop_head=drop_head)
    written = sorted(path.name for path in folder.iterdir())
    output.say(f"{graft.name}: written to {folder} ({', '.join(written)}).")
    for warning in said:
        output.say(f"Note: {warning.message}")
    output.finish({"task": graft.name, "folder": str(folder), "files": written})
