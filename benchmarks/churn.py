"""Tasks that are added and removed while a load runs, through the server's own PUT and DELETE."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger import EXAMPLES, difference, latencies
from wire import Connection, Reply, asking, request

ASK_EVERY = 5  # tasks added, after which one is asked: at once when it is there, and again when it is gone


@dataclass(frozen=True)
class Churn:
    """One task is added or removed `every_s`; each graft is a zip file, and a question that it can answer."""

    token: str
    grafts: list[tuple[str, dict[str, Any]]]
    every_s: float = 0.1


class Changes:
    """The changes of one run. One that takes longer than its turn does not hold up the next."""

    def __init__(self, churn: Churn, open: Callable[[], Awaitable[Connection]]) -> None:
        self.churn, self.open = churn, open
        self.bodies = [Path(file).read_bytes() for file, _ in churn.grafts]
        self.idle: list[Connection] = []
        self.there: deque[int] = deque()  # tasks that were added, by number
        self.running: set[asyncio.Task[None]] = set()
        self.took: dict[str, list[float]] = {"PUT": [], "DELETE": []}
        self.asked = self.failed = 0
        self.examples: list[str] = []

    async def run(self, until: float) -> None:
        """Add and remove in turn, every so often, until a moment; then remove what is left."""
        added = itertools.count()
        due = time.perf_counter()
        for turn in itertools.count():
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if time.perf_counter() >= until:
                break
            change = self.remove(self.there.popleft()) if turn % 2 and self.there else self.add(next(added))
            task = asyncio.create_task(change)
            self.running.add(task)
            task.add_done_callback(self.running.discard)
            due += self.churn.every_s
        await asyncio.gather(*self.running)
        while self.there:
            await self.remove(self.there.popleft())

    async def add(self, number: int) -> None:
        body = self.bodies[number % len(self.bodies)]
        if await self.change("PUT", number, body, (200, 201), Content_Type="application/zip"):
            if number % ASK_EVERY == 0:
                await self.ask(number, there=True)
            self.there.append(number)

    async def remove(self, number: int) -> None:
        if await self.change("DELETE", number, b"", (204,)) and number % ASK_EVERY == 0:
            await self.ask(number, there=False)

    async def change(self, method: str, number: int, body: bytes, wanted: tuple[int, ...], **headers: str) -> bool:
        headers |= {"Authorization": f"Bearer {self.churn.token}"}
        start = time.perf_counter()
        reply = await self.call(request(method, f"/v1/tasks/{name(number)}", body, **headers))
        self.took[method].append(time.perf_counter() - start)
        if reply.status not in wanted:
            self.fail(f"{method} {name(number)}: {reply.status} {reply.body[:200]!r}")
        return reply.status in wanted

    async def ask(self, number: int, there: bool) -> None:
        """Ask a task that was just added, or just removed."""
        question = self.churn.grafts[number % len(self.bodies)][1]
        self.asked += 1
        reply = await self.call(asking(name(number), question["text"], f"churn-{self.asked}"))
        if not there:
            right = reply.status == 404
        else:
            answer = {**question["answer"], "task": name(number)}
            right = reply.status == 200 and difference(answer, json.loads(reply.body)) is not None
        if not right:
            self.fail(f"{name(number)}, {'added' if there else 'removed'}: {reply.status} {reply.body[:200]!r}")

    async def call(self, data: bytes) -> Reply:
        connection = self.idle.pop() if self.idle else await self.open()
        reply = await connection.call(data)
        if not connection.lost:
            self.idle.append(connection)
        return reply

    def fail(self, words: str) -> None:
        self.failed += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(words)

    def report(self) -> dict[str, Any]:
        return {
            "changes": sum(map(len, self.took.values())),
            "every_s": self.churn.every_s,
            **{method.lower(): latencies(found) for method, found in self.took.items()},
            "asked": self.asked,
            "failed": self.failed,
            "examples": self.examples,
        }


def name(number: int) -> str:
    return f"churn_{number}"
