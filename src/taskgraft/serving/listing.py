"""What is known of a store's tasks, page by page: of those on a page alone is anything read."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from bisect import bisect_left, bisect_right
from typing import Any

from taskgraft.errors import UnknownTask
from taskgraft.grafts.graft import CARD
from taskgraft.serving.engine import Engine
from taskgraft.serving.library import Version
from taskgraft.serving.problems import problem_of

log = logging.getLogger("taskgraft.serving")

SETTLED_NS = 2_000_000_000  # a folder that was changed so long ago shows the next change by its time


class Listing:
    """The tasks of an engine, for people and pages."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.store = engine, engine.library.store
        self._lock = threading.Lock()
        self._names: tuple[int, list[str]] | None = None  # when the store's folder was changed last, and what it held

    def names(self) -> list[str]:
        """All tasks in order. The store's folder is looked through again only when something in it has changed."""
        try:
            changed = os.stat(self.store.folder).st_mtime_ns
        except OSError:
            return []
        with self._lock:
            if self._names is None or self._names[0] != changed:
                found = sorted(self.engine.library.names())
                if time.time_ns() - changed < SETTLED_NS:
                    return found
                self._names = (changed, found)
            return self._names[1]

    def page(self, limit: int, after: str | None, prefix: str) -> dict[str, Any]:
        """The tasks that come after a name, as many as are wanted."""
        names = self.names()
        if prefix:
            names = [name for name in names[bisect_left(names, prefix) :] if name.startswith(prefix)]
        first = 0 if after is None else bisect_right(names, after)
        some = names[first : first + limit]
        lines = [line for name in some if (line := self._line_or_error(name)) is not None]
        return {"tasks": lines, "total": len(names), "next": some[-1] if first + limit < len(names) else None}

    def _line_or_error(self, name: str) -> dict[str, Any] | None:
        """None: it has left since."""
        try:
            return self.line(self.engine.library.find(name))
        except UnknownTask:
            return None
        except Exception as error:
            return {"name": name, "error": problem_of(error, store=str(self.store.folder)).to_json()}

    def line(self, version: Version) -> dict[str, Any]:
        """What a task's record says of it."""
        record, graft = version.record, version.graft
        own = record if version.joint_task is None else record["tasks"][version.joint_task]
        metrics = finite(graft.metrics)
        score = metrics.get("score")
        return {
            "name": version.name,
            "version": version.number,
            "kind": version.kind,
            "labels": list(version.labels),
            "reads_pairs": version.reads_pairs,
            "method": own["method"]["method"],
            "parameters": record["parameters"],
            "bytes": record["tensors"]["bytes"],
            "score": score if isinstance(score, float | int) else None,
            "metrics": metrics,
            "created": record["created"],
            "resident": version.key in self.engine.residents.order,
        }

    def full(self, name: str) -> dict[str, Any]:
        """All that is known of a task."""
        version = self.engine.library.find(name)
        try:
            card: str | None = (version.folder / CARD).read_text(encoding="utf-8", errors="replace")
        except OSError:
            card = None
        versions = self.store.versions(name.partition("/")[0])
        return {
            **self.line(version),
            "card": card,
            "versions": versions,
            "backbone": version.record["backbone"]["name"],
        }


def finite(value: Any) -> Any:
    """The same, with None for what is no number: JSON has none of those."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def first_answer(engine: Engine) -> None:
    """Let the backbone answer once, for the first task that can: what is slow the first time is then done."""
    for name in engine.library.names():
        try:
            version = engine.library.find(name)
            engine.predict([(name, "ready", "ready" if version.reads_pairs else None)])
            return
        except Exception as error:
            log.warning("task %r does not answer: %s", name, error)
