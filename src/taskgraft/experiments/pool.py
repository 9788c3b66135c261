"""Processes that share a device. Experiments that run at the same time share them, and what two of them wait for is
done once; what the first of them wait for goes first."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing import get_context, parent_process
from typing import Any

MEMORY = 0.9  # of a GPU, for what all processes keep there; each has a context besides


@dataclass(frozen=True, eq=False)
class Call:
    """Something to do, in any of the processes: a function that is found there by its name, and what it is given.

    Calls with the same key do the same.
    """

    key: Hashable
    function: Callable[..., object]
    args: tuple[Any, ...]


@dataclass(order=True)
class Asked:
    """A call that has been asked for, and by how many."""

    rank: int  # the lowest goes first
    number: int  # of those with one rank, the first that was asked for
    call: Call = field(compare=False)
    future: Future[None] = field(compare=False, default_factory=Future)
    wanted: int = field(compare=False, default=1)


def hold_to_share(workers: int) -> None:
    """Let this process, one of so many, have its share of a GPU's memory, or of the cores, and no more."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(MEMORY / workers)
    else:  # threads of several processes on one core wait for one another
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def begin(workers: int) -> None:
    """What each process does first. It ends with the one that started it, however that ends."""
    hold_to_share(workers)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Pool:
    """So many processes, started when they are needed, for the length of a `with` block."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor = ProcessPoolExecutor(workers, get_context("spawn"), begin, (workers,))
        self._lock = threading.RLock()
        self._numbers = count()
        self._asked: dict[Hashable, Asked] = {}
        self._waiting: list[Asked] = []  # a heap
        self._running = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(join=error is None)

    def close(self, join: bool = False) -> None:
        """Leave undone what has not begun, and `join` the processes: return when they are gone."""
        with self._lock:
            for asked in self._waiting:
                asked.future.cancel()
                asked.future.set_running_or_notify_cancel()  # whoever waits for it
            self._waiting.clear()
        self._executor.shutdown(wait=join, cancel_futures=True)

    def do(self, calls: Iterable[Call], rank: int = 0) -> None:
        """Return when all are done. The first error ends the waiting; what nobody else waits for is left undone."""
        mine = [self._ask(call, rank) for call in calls]
        try:
            done, _ = wait([asked.future for asked in mine], return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            with self._lock:
                for asked in mine:
                    asked.wanted -= 1
                    if not asked.wanted and asked.future.cancel():
                        self._asked.pop(asked.call.key, None)
            raise

    def _ask(self, call: Call, rank: int) -> Asked:
        with self._lock:
            asked = self._asked.get(call.key)
            if asked is not None:
                asked.wanted += 1
                return asked
            asked = self._asked[call.key] = Asked(rank, next(self._numbers), call)
            heapq.heappush(self._waiting, asked)
            self._begin()
            return asked

    def _begin(self) -> None:
        """Give processes that are free what waits first."""
        while self._waiting and self._running < self.workers:
            asked = heapq.heappop(self._waiting)
            if not asked.future.set_running_or_notify_cancel():
                continue
            self._running += 1
            try:
                there = self._executor.submit(asked.call.function, *asked.call.args)
            except RuntimeError as error:  # the block has ended, or a process was killed
                self._end(asked, error)
            else:
                there.add_done_callback(partial(self._ended, asked))

    def _ended(self, asked: Asked, there: Future[object]) -> None:
        error = CancelledError() if there.cancelled() else there.exception()
        with self._lock:
            self._end(asked, error)
            self._begin()

    def _end(self, asked: Asked, error: BaseException | None) -> None:
        self._running -= 1
        if error is None:
            asked.future.set_result(None)
        else:
            self._asked.pop(asked.call.key, None)  # whoever asks again may have more luck
            asked.future.set_exception(error)
