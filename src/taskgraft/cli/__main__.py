"""`python -m taskgraft.cli`, which is `taskgraft`."""

from taskgraft.cli import app

app()
