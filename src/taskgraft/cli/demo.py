"""`taskgraft demo`: three tasks on the embedded default backbone, from files that come with the package."""

from __future__ import annotations

from pathlib import Path

from taskgraft.cli.app import Output, app
from taskgraft.cli.backbone import silence
from taskgraft.cli.options import Json, StoreFolder


@app.command()
def demo(store: StoreFolder = Path("grafts"), json: Json = False) -> None:
    """Train three small tasks one after the other on the embedded default backbone, and show what holds."""
    from taskgraft.demo import run

    output = Output(json)
    silence()
    output.finish(run(store=store, say=output.say))
