"""Jobs handed to the workers of a cluster, each to one at a time, and to another if that one is lost.

A job counts as done once, when all of what came of it is here. Its worker may die with it or fall silent at any moment:
then nothing of it is kept, the worker is killed if it still lives, and the job begins again elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from taskgraft import __version__
from taskgraft.backbones.load import Backbone
from taskgraft.cluster.connect import Share, machines
from taskgraft.cluster.worker import Lines, Place, Work, Worker
from taskgraft.errors import GraftError
from taskgraft.tasks.task import Task
from taskgraft.training.progress import Interrupts

ATTEMPTS = 3  # of a job whose workers are lost
FAILED_STARTS = 3  # of workers, one after the other, without one that came up
TICK_S = 0.5
SILENT_S = 120.0  # without an answer, a worker counts as lost
ALONE_S = 300.0  # without a machine that could hold a worker


@dataclass(eq=False)
class Job:
    """Something to be done with tasks, under the names of the runs that it makes."""

    names: tuple[str, ...]
    tasks: tuple[Task, ...]
    work: Work = field(repr=False)
    attempts: int = 0


class Watch(Protocol):
    """What is told of jobs as they go, by the names of their runs."""

    def working(self, names: Sequence[str], worker: str, lines: Lines) -> None: ...
    def lost(self, names: Sequence[str], worker: str) -> None: ...


@dataclass(eq=False)
class Hand:
    """A worker, and what it was asked."""

    actor: Any
    coming: Any = None  # its place, until it is there
    place: Place | None = None
    job: Job | None = None
    result: Any = None
    progress: Any = None
    asked_at: float = 0.0

    @property
    def name(self) -> str:
        return "a worker that was starting" if self.place is None else self.place.name


class Schedule:
    """Jobs on their way. `done` takes what came of one; `failed` hears of one that cannot be done."""

    def __init__(
        self,
        ray: Any,
        backbone: Backbone,
        share: Share,
        watch: Watch,
        done: Callable[[Job, Any, str], None],
        failed: Callable[[Job, GraftError], None],
    ) -> None:
        if getattr(backbone.model, "taskgraft", None) is not None:
            raise GraftError(
                "the backbone carries grafts, and workers take a bare one: tg.ungraft(backbone.model) first."
            )
        self.ray, self.share, self.watch, self.done, self.failed = ray, share, watch, done, failed
        backbone.model.to("cpu")
        self.backbone = ray.put(backbone)
        self.waiting: deque[Job] = deque()
        self.hands: list[Hand] = []
        self.sent: dict[int, Any] = {}  # tasks in the cluster's memory, by their id here
        self.failed_starts = 0
        self.looked_at = 0.0
        self.alone_since: float | None = None

    @property
    def open(self) -> list[Job]:
        """Jobs that are not done."""
        return [*self.waiting, *(hand.job for hand in self.hands if hand.job is not None)]

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs. Ctrl-C comes out as KeyboardInterrupt; whatever happens, no worker is left behind."""
        self.waiting.extend(jobs)
        try:
            with Interrupts() as interrupts:
                while self.open:
                    self._staff()
                    self._hand_out()
                    self._hear()
                    if interrupts.asked:
                        raise KeyboardInterrupt
        finally:
            for hand in self.hands:
                self._kill(hand)

    # -- workers

    def _staff(self) -> None:
        """As many workers as the machines that are there can hold, and no more than there are jobs."""
        if time.monotonic() - self.looked_at < TICK_S:
            return
        self.looked_at, alive = time.monotonic(), machines(self.ray)
        for hand in [hand for hand in self.hands if hand.place is not None and hand.place.machine not in alive]:
            self._lose(hand, "its machine is gone")
        room = sum(self.share.fits(resources) for resources in alive.values())
        for _ in range(min(room, len(self.open)) - len(self.hands)):
            self._start()
        if room:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = time.monotonic()
        elif time.monotonic() - self.alone_since > ALONE_S:
            raise GraftError(
                f"the cluster has had no machine for a worker for {ALONE_S:.0f} seconds: add one, and give the same "
                "command again; what has ended is kept."
            )

    def _start(self) -> None:
        options: dict[str, Any] = {
            "num_cpus": self.share.cpus,
            "num_gpus": self.share.gpus,
            "max_restarts": 0,
            "max_concurrency": 2,
            "scheduling_strategy": "SPREAD",
        }
        actor = self.ray.remote(Worker).options(**options).remote(self.backbone, self.share.cpus, self.share.gpus > 0)
        self.hands.append(Hand(actor, coming=actor.place.remote()))

    def _lose(self, hand: Hand, why: str) -> None:
        """Let go of a worker, and let its job begin again, unless that was lost too often."""
        self._kill(hand)
        self.hands.remove(hand)
        job, hand.job = hand.job, None
        if job is None:
            return
        self.watch.lost(job.names, hand.name)
        if job.attempts < ATTEMPTS:
            self.waiting.appendleft(job)
            return
        error = GraftError(
            f"it was lost with its worker {job.attempts} times, the last time {hand.name}: {why}; it may need more "
            "memory than a worker has."
        )
        self._forget(job)
        self.failed(job, error)

    def _kill(self, hand: Hand) -> None:
        self.ray.kill(hand.actor, no_restart=True)

    # -- jobs

    def _hand_out(self) -> None:
        for hand in self.hands:
            if self.waiting and hand.place is not None and hand.job is None:
                hand.job = self.waiting.popleft()
                hand.job.attempts += 1
                hand.result = hand.actor.work.remote(hand.job.work, [self._sent(task) for task in hand.job.tasks])
                hand.progress, hand.asked_at = None, time.monotonic()
                self.watch.working(hand.job.names, hand.name, {})

    def _sent(self, task: Task) -> Any:
        """A task in the cluster's memory, where it is put once for all jobs with it."""
        if id(task) not in self.sent:
            self.sent[id(task)] = self.ray.put(task)
        return self.sent[id(task)]

    def _forget(self, job: Job) -> None:
        """Let go of tasks that no open job has."""
        needed = {id(task) for other in self.open for task in other.tasks}
        for task in job.tasks:
            if id(task) not in needed:
                self.sent.pop(id(task), None)

    def _hear(self) -> None:
        """Wait a moment for what workers have to say."""
        for hand in self.hands:
            if hand.job is not None and hand.progress is None and time.monotonic() - hand.asked_at >= TICK_S:
                hand.progress, hand.asked_at = hand.actor.progress.remote(), time.monotonic()
        asked = {
            ref: hand for hand in self.hands for ref in (hand.coming, hand.result, hand.progress) if ref is not None
        }
        if not asked:
            time.sleep(TICK_S)
            return
        self.ray.wait(list(asked), num_returns=1, timeout=TICK_S)
        for ref in self.ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
            hand = asked[ref]
            if hand in self.hands and ref in (hand.coming, hand.result, hand.progress):  # it still matters
                self._take(hand, ref)
        for hand in list(self.hands):
            if hand.progress is not None and time.monotonic() - hand.asked_at > SILENT_S:
                self._lose(hand, f"it said nothing for {SILENT_S:.0f} seconds")

    def _take(self, hand: Hand, ref: Any) -> None:
        from ray.exceptions import RayError

        try:
            value = self.ray.get(ref)
        except RayError as error:
            why = reason(error)
            if ref is hand.coming:
                self._failed_start(why)
            self._lose(hand, why)
            return
        if ref is hand.coming:
            self._arrived(hand, value)
        elif ref is hand.result:
            self._finished(hand, value)
        else:
            assert hand.job is not None
            hand.progress = None
            self.watch.working(hand.job.names, hand.name, value)

    def _arrived(self, hand: Hand, place: Place) -> None:
        if place.version != __version__:
            raise GraftError(
                f"{place.host} has taskgraft {place.version}, and {__version__} is here: install the same."
            )
        self.failed_starts, hand.coming, hand.place = 0, None, place

    def _failed_start(self, why: str) -> None:
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS:
            raise GraftError(
                f"workers do not start ({why}): every machine of the cluster needs taskgraft {__version__} with the "
                "packages that are here, and room for the backbone."
            )

    def _finished(self, hand: Hand, value: Any) -> None:
        job, hand.job, hand.result, hand.progress = hand.job, None, None, None
        assert job is not None
        if isinstance(value, GraftError):
            self.failed(job, value)
        else:
            self.done(job, value, hand.name)
        self._forget(job)


def reason(error: Exception) -> str:
    """Why something was lost, in a line: the last one of a traceback or of what Ray has to say."""
    cause = getattr(error, "cause", None)
    lines = str(error if cause is None else f"{type(cause).__name__}: {cause}").strip().splitlines()
    return (lines[-1].strip() if lines else type(error).__name__).rstrip(".")
