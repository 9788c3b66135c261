"""What an engine and its server do, counted for Prometheus and for the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from taskgraft.serving.asked import Asked
from taskgraft.serving.engine import Engine, Watch
from taskgraft.serving.problems import KINDS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
FILL = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
TASKS = 100  # that have a count of their own; those that come later share one
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
OTHER = "other"
LATELY_S, REMEMBERED = 10.0, 50_000


class Metrics(Watch):
    """Counts of one app. It watches an engine, beside whoever watched it before."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._before = engine, engine.watch
        self.registry = registry = CollectorRegistry()
        self.started = time.monotonic()
        self.answers = self.errors = 0
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, and after how many seconds
        self._tasks: set[str] = set()
        self._children: dict[tuple[str, str], Any] = {}
        self._requests = Counter(
            "taskgraft_requests", "Requests, by what became of them.", ("route", "method", "status"), registry=registry
        )
        self._request_s = Histogram(
            "taskgraft_request_seconds", "From a request to its answer.", ("route",), registry=registry, buckets=SECONDS
        )
        self._answer_s = Histogram(
            "taskgraft_answer_seconds", "From a question to its answer.", registry=registry, buckets=SECONDS
        )
        self._answers = Counter(
            "taskgraft_answers", "Questions, by what became of them.", ("task", "outcome"), registry=registry
        )
        self._rows = Histogram("taskgraft_batch_rows", "Rows of a batch.", registry=registry, buckets=ROWS)
        self._tokens = Histogram("taskgraft_batch_tokens", "Tokens of a batch.", registry=registry, buckets=TOKENS)
        self._fill = Histogram(
            "taskgraft_batch_fill", "Share of a batch that is not padding.", registry=registry, buckets=FILL
        )
        self._batch_s = Histogram(
            "taskgraft_batch_seconds", "Of a batch on the model.", registry=registry, buckets=SECONDS
        )
        registry.register(OfEngine(engine))
        engine.watch = self

    # -- what the engine tells, on its threads

    def batch(self, rows: int, tokens: int, padded: int, seconds: float) -> None:
        self._before.batch(rows, tokens, padded, seconds)
        self._rows.observe(rows)
        self._tokens.observe(tokens)
        self._fill.observe(tokens / max(padded, 1))
        self._batch_s.observe(seconds)

    def answered(self, asked: Asked, error: BaseException | None) -> None:
        self._before.answered(asked, error)
        now = time.monotonic()
        outcome = "ok" if error is None else "cancelled" if asked.future.cancelled() else outcome_of(error)
        with self._lock:
            child = self._child(asked, outcome)
            if error is None:
                self.answers += 1
                self._recent.append((now, now - asked.since))
            else:
                self.errors += 1
        child.inc()
        if error is None:
            self._answer_s.observe(now - asked.since)

    def _child(self, asked: Asked, outcome: str) -> Any:
        """The count of a task and an outcome. A name that is no task's takes no place from one that is."""
        task = OTHER if asked.version is None else asked.version.name
        if task not in self._tasks:
            if asked.version is None or len(self._tasks) >= TASKS:
                task = OTHER
            else:
                self._tasks.add(task)
        key = (task, outcome)
        if key not in self._children:
            self._children[key] = self._answers.labels(task, outcome)
        return self._children[key]

    # -- what the server tells

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method if method in METHODS else OTHER, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    # -- what both are asked

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def stats(self, tasks: int) -> dict[str, Any]:
        """In short, for the page."""
        now = time.monotonic()
        with self._lock:
            while self._recent and self._recent[0][0] < now - LATELY_S:
                self._recent.popleft()
            times, latencies = [when for when, _ in self._recent], [seconds for _, seconds in self._recent]
        span = min(LATELY_S, now - self.started)
        if len(times) == REMEMBERED:  # more than are remembered came: count from the first that is
            span = max(now - times[0], 1e-3)
        latencies.sort()
        residents = self.engine.residents
        return {
            "tasks": tasks,
            "resident": len(residents.order),
            "resident_bytes": residents.bytes,
            "budget_bytes": residents.budget,
            "waiting": self.engine.waiting,
            "answered": self.answers,
            "errors": self.errors,
            "rate": round(len(latencies) / max(span, 1e-3), 3),
            "latency_ms": {f"p{share}": percentile(latencies, share) for share in (50, 95, 99)},
            "uptime_s": round(now - self.started, 3),
        }


class OfEngine(Collector):
    """What an engine knows of itself, read when it is asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, residents = self.engine, self.engine.residents
        gauges = {
            "waiting": ("Questions that wait for an answer.", engine.waiting),
            "resident_grafts": ("Grafts on the device.", len(residents.order)),
            "resident_bytes": ("Bytes that grafts take on the device.", residents.bytes),
            "budget_bytes": ("Bytes that grafts may take on the device.", residents.budget),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(f"taskgraft_{name}", help, value)
        yield CounterMetricFamily("taskgraft_grafts_paged_in", "Grafts put on the device.", residents.arrived)
        yield CounterMetricFamily("taskgraft_grafts_paged_out", "Grafts taken off the device.", residents.departed)


def outcome_of(error: BaseException) -> str:
    return next((KINDS[one][1] for one in type(error).__mro__ if one in KINDS), "failed")


def percentile(ordered: list[float], share: int) -> float | None:
    """In milliseconds; None: there is nothing to take it of."""
    if not ordered:
        return None
    return round(1000 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 3)
