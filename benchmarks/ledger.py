"""What a load asked and what came back: each answer once, under the id of its question, and the right one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wire import Connection, Reply, asking

TIE = 1e-5  # between the two likeliest labels: either is right
CLOSE = 1e-4  # for a value, relative above 1
EXAMPLES = 5  # of what went wrong


def difference(right: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """How far an answer is from the right one, in its probabilities or its value; None: it is another answer."""
    if any(right[key] != found.get(key) for key in ("task", "kind")):
        return None
    if "probabilities" not in right:
        distance: float = abs(right["value"] - found["value"]) / max(1.0, abs(right["value"]))
        return distance if distance <= CLOSE else None
    chances, others = right["probabilities"], found["probabilities"]
    first, second = sorted(chances.values(), reverse=True)[:2]
    if chances.keys() != others.keys() or (right["label"] != found["label"] and first - second > TIE):
        return None
    return float(max(abs(chance - others[label]) for label, chance in chances.items()))


@dataclass(eq=False)
class Ledger:
    """Questions by number, those on their way by id, and what became of the others."""

    questions: Sequence[Mapping[str, Any]]
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)  # by id: the question, and since when
    times: list[tuple[float, float]] = field(default_factory=list)  # when an answer came, and after how many seconds
    asked: int = 0
    duplicated: int = 0
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    farthest: float = 0.0

    async def ask(self, connection: Connection, number: int, since: float) -> None:
        """Ask a question, and look at what comes back. Its time counts from `since` on."""
        id = f"load-{self.asked}"
        self.asked += 1
        self.waiting[id] = (number, since)
        question = self.questions[number]
        self.take(id, await connection.call(asking(question["task"], question["text"], id)), time.perf_counter())

    def take(self, id: str, reply: Reply, now: float) -> None:
        if reply.status == 0:
            self.count("connection lost", "a connection was closed before its answer came")
            return  # it stays among those that wait, and so is lost
        given = reply.id.decode("latin-1")
        if given not in self.waiting:
            self.duplicated += 1
            self.note(f"{given!r} was answered twice, or never asked")
            return
        number, since = self.waiting.pop(given)
        if reply.status != 200:
            self.count(str(reply.status), reply.body[:200].decode(errors="replace"))
            return
        self.times.append((now, now - since))
        right = self.questions[number]["answer"]
        far = difference(right, json.loads(reply.body)) if given == id else None
        if far is None:
            self.wrong += 1
            self.note(f"asked as {id!r}, answered as {given!r}: {reply.body[:200]!r} is not {right}")
        else:
            self.farthest = max(self.farthest, far)

    def stray(self) -> None:
        self.duplicated += 1
        self.note("an answer came that nobody waited for")

    def count(self, kind: str, example: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1
        self.note(f"{kind}: {example}")

    def note(self, words: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(words)

    def report(self, first: float, last: float) -> dict[str, Any]:
        """Throughput and latencies of the answers between two moments; of what went wrong, all."""
        seconds = sorted(took for when, took in self.times if first <= when < last)
        return {
            "seconds": last - first,
            "answers": len(seconds),
            "throughput": len(seconds) / (last - first),
            **latencies(seconds),
            "asked": self.asked,
            "lost": len(self.waiting),
            "duplicated": self.duplicated,
            "wrong": self.wrong,
            "errors": self.errors,
            "examples": self.examples,
            "largest_difference": self.farthest,
        }


def latencies(seconds: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds: the smallest value that so many percent do not exceed."""
    ordered = sorted(seconds)
    places = {f"p{share}_ms": math.ceil(len(ordered) * share / 100) - 1 for share in (50, 95, 99)}
    return {name: 1e3 * ordered[max(0, place)] if ordered else None for name, place in places.items()} | {
        "max_ms": 1e3 * ordered[-1] if ordered else None
    }
