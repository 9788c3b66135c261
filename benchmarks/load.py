"""A load on a server, from a process of its own: many connections, one text per request, every answer looked at.

Run by serve.py with an Order in a JSON file; prints what it found. It needs the standard library alone, and little of
the cores that it shares with the server.

A closed loop has so many clients, each of which asks again as soon as it is answered. An open loop asks at random times
(Poisson), however long the answers take, and counts an answer's time from the moment at which it was due to be asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from churn import Changes, Churn
from ledger import Ledger
from wire import Connection, request

DRAIN_S = 60.0  # after which an answer that has not come is lost
LONGEST_S = 3600.0
METRICS = ("resident_grafts", "resident_bytes", "budget_bytes", "grafts_paged_in_total", "grafts_paged_out_total")


@dataclass(frozen=True)
class Order:
    """What is asked for: clients in a closed loop or, where there is a rate, requests a second in an open one."""

    port: int
    pid: int  # of the server
    questions: str  # a file: tasks, texts and right answers
    clients: int
    seconds: float | None = None  # None: until each question was asked once
    warmup_s: float = 0.0  # before it, under the same load
    rate: float | None = None
    churn: Churn | None = None
    metrics: bool = False  # whether to look at the server's metrics every second
    seed: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Order:
        return cls(**{**record, "churn": Churn(**record["churn"]) if record["churn"] else None})


class Load:
    """One run of an order."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.ledger = Ledger(json.loads(Path(order.questions).read_text()))
        self.draw = random.Random(order.seed)
        self.idle: deque[Connection] = deque()  # used in turn, so that none is closed for being idle
        self.samples: list[dict[str, float]] = []

    async def open(self) -> Connection:
        return await Connection.open(self.order.port, self.ledger.stray)

    def numbers(self) -> Iterator[int]:
        """The questions, in an order that is drawn anew whenever all were asked."""
        count = len(self.ledger.questions)
        yield from self.draw.sample(range(count), count)
        while self.order.seconds is not None:
            yield from self.draw.sample(range(count), count)

    async def run(self) -> dict[str, Any]:
        order = self.order
        self.idle = deque([await self.open() for _ in range(order.clients)])
        first = time.perf_counter() + order.warmup_s
        last = first + (LONGEST_S if order.seconds is None else order.seconds)
        changes = Changes(order.churn, self.open) if order.churn else None
        beside = [asyncio.create_task(changes.run(last))] if changes else []
        sampling = asyncio.create_task(self.sample(await self.open())) if order.metrics else None
        load = asyncio.create_task(self.open_loop(last) if order.rate else self.closed_loop(last))
        await asyncio.sleep(order.warmup_s)
        before, since = cpu_seconds(order.pid), time.perf_counter()
        await asyncio.wait([load], timeout=max(0.0, last - since))
        now = time.perf_counter()
        after, last = cpu_seconds(order.pid), min(last, now)
        ended, late = await asyncio.wait([load, *beside], timeout=DRAIN_S)
        for task in ended:
            task.result()
        if late:
            self.ledger.note(f"an answer did not come within {DRAIN_S:g} s")
        if sampling is not None:
            sampling.cancel()
            await self.look(await self.open())
        found = self.ledger.report(first, last)
        found |= {f"{who}_cores": (after[who] - before[who]) / (now - since) for who in after}
        if changes is not None:
            found["churn"] = changes.report()
        return found | ({"metrics": self.samples} if order.metrics else {})

    async def closed_loop(self, last: float) -> None:
        numbers = self.numbers()

        async def client(connection: Connection) -> None:
            for number in numbers:
                await self.ledger.ask(connection, number, time.perf_counter())
                if connection.lost or time.perf_counter() >= last:
                    return

        await asyncio.gather(*map(client, self.idle))

    async def open_loop(self, last: float) -> None:
        numbers, due = self.numbers(), time.perf_counter()
        assert self.order.rate is not None

        async def one(number: int, due: float) -> None:
            connection = self.idle.popleft() if self.idle else await self.open()
            await self.ledger.ask(connection, number, due)
            if not connection.lost:
                self.idle.append(connection)

        running: set[asyncio.Task[None]] = set()
        while (due := due + self.draw.expovariate(self.order.rate)) < last:
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            task = asyncio.create_task(one(next(numbers), due))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def sample(self, connection: Connection) -> None:
        while True:
            await self.look(connection)
            await asyncio.sleep(1.0)

    async def look(self, connection: Connection) -> None:
        """What the server's metrics say of the grafts that are resident."""
        reply = await connection.call(request("GET", "/metrics"))
        lines = dict(line.rsplit(" ", 1) for line in reply.body.decode().splitlines() if line[:1] != "#")
        self.samples.append({key: float(lines[f"taskgraft_{key}"]) for key in METRICS})


def cpu_seconds(pid: int) -> dict[str, float]:
    """What the server and this process have used so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return {"server": ticks / os.sysconf("SC_CLK_TCK"), "client": own.ru_utime + own.ru_stime}


if __name__ == "__main__":
    ordered = Order.of(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps(asyncio.run(Load(ordered).run())))
