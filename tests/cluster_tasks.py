"""Tasks for tests/test_cluster.py that wait, on their worker, until all workers are there, and then take a moment."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import taskgraft as tg

import tiny

TAKES_S, PATIENCE_S = 0.4, 120


class SlowTask(tg.Task):
    """A task that is unpickled once a file is there, and not at once."""

    gate: Path

    def __reduce__(self) -> Any:
        return arrived, (self.gate, fields_of(self))


def fields_of(task: tg.Task) -> tuple[Any, ...]:
    return tuple(getattr(task, field.name) for field in dataclasses.fields(tg.Task))


def arrived(gate: Path, values: tuple[Any, ...]) -> tg.Task:
    deadline = time.monotonic() + PATIENCE_S
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(TAKES_S)
    return tg.Task(*values)


def tasks(count: int) -> list[tg.Task]:
    return [tiny.task(count=20 + number, name=f"task{number:02}", seed=number) for number in range(count)]


def slow(task: tg.Task, gate: Path) -> tg.Task:
    made = SlowTask(*fields_of(task))
    object.__setattr__(made, "gate", gate)  # tasks are frozen
    return made
