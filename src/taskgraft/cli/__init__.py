"""The command line. Each command is a module that adds itself to the app; what is slow to import is imported in it.

The order of the imports is help's."""

# isort: off
from taskgraft.cli.app import app
from taskgraft.cli import (
    train,
    evaluate,
    predict,
    serve,
    compare,
    sweep,
    tasks,
    taskmap,
    params,
    hub,
    adapterhub,
    reproduce,
    demo,
)  # help's order

__all__ = [
    "adapterhub", "app", "compare", "demo", "evaluate", "hub", "params", "predict", "reproduce", "serve", "sweep",
    "taskmap", "tasks", "train",
]  # fmt: skip
