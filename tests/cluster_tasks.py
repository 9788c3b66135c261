"""Tasks for tests/test_cluster.py that take a while to arrive on a worker, so that there is time to kill it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import taskgraft as tg

import tiny

ARRIVES_S = 0.5


class SlowTask(tg.Task):
    """A task that is slow to be unpickled."""

    def __reduce__(self) -> Any:
        return arrived, (tuple(getattr(self, field.name) for field in dataclasses.fields(tg.Task)),)


def arrived(values: tuple[Any, ...]) -> tg.Task:
    time.sleep(ARRIVES_S)
    return tg.Task(*values)


def tasks(count: int) -> list[tg.Task]:
    return [tiny.task(count=20 + number, name=f"task{number:02}", seed=number) for number in range(count)]


def slow(task: tg.Task) -> tg.Task:
    return SlowTask(*(getattr(task, field.name) for field in dataclasses.fields(tg.Task)))
