"""`taskgraft push` and `taskgraft pull`: grafts on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import backbone_named, silence
from taskgraft.cli.options import Json, Name, StoreFolder
from taskgraft.cli.tasks import opened, require

Repo = Annotated[str, typer.Argument(metavar="REPO", help="A model repository on the Hub, OWNER/NAME.")]
ACCESS = "Who you are is taken from HF_TOKEN, or from `hf auth login`."


@app.command(
    epilog=f"""Examples:
  taskgraft push warming me/warming
  taskgraft push warming me/warming --private --message "trained on May's tweets"

{ACCESS}
Where files lay on this machine is left out of what is pushed."""
)
def push(
    name: Name,
    repo: Repo,
    store: StoreFolder = Path("grafts"),
    private: Annotated[
        bool, typer.Option("--private", help="Keep it to yourself; refused if the repository is public.")
    ] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.", show_default="name and version")] = None,
    json: Json = False,
) -> None:
    """Put a task on the Hub, with its model card, in one commit."""
    from taskgraft.grafts import hub

    output, grafts = Output(json), opened(store)
    require(grafts, name)
    silence()
    done = hub.push(grafts.folder / name, repo, private=private, message=message)
    output.say(f"{name} is on the Hub: {done.url}")
    output.say(f"\nTo have exactly this one elsewhere: taskgraft pull {done.repo} --revision {done.commit}")
    output.finish({"task": name, **asdict(done)})


@app.command(
    epilog=f"""Examples:
  taskgraft pull me/warming
  taskgraft pull me/warming --revision v1 --name warming-v1
  HF_HUB_OFFLINE=1 taskgraft pull me/warming

{ACCESS}
Only a graft's files are downloaded, and they are stored once they are known to be whole."""
)
def pull(
    repo: Repo,
    store: StoreFolder = Path("grafts"),
    name: Annotated[str | None, typer.Option(help="What to call it in the store.", show_default="its own")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, a tag or a commit.", show_default="main")] = None,
    backbone: Annotated[str | None, typer.Option(help="Store it only if it fits this model or folder.")] = None,
    json: Json = False,
) -> None:
    """Save a task of the Hub in a store, as a new version if it is there already."""
    from taskgraft.grafts import hub

    output, grafts = Output(json), opened(store)
    silence()
    checked = None if backbone is None else backbone_named(backbone)
    done = hub.pull(repo, grafts.folder, name=name, revision=revision, backbone=checked)
    output.say(f"{repo} at {done.commit[:12]} is saved: {grafts.folder / done.name}, version {done.version}")
    output.finish({"task": done.name, **asdict(done)})
