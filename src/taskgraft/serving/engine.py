"""Texts of any tasks, answered together: what waits is batched, and each batch runs once through the one backbone.

A question goes through three threads. One finds its task and tokenises it, with all that came with it; a pool reads
grafts that are not on the model; one runs the model, on as many rows as are waiting, up to a number of tokens. So a
question never waits for others to come, and no longer than those take that came before it. On a CPU several run the
model beside one another, each a batch of its own: that is faster than one batch on several threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from os import PathLike

import torch

from taskgraft.backbones import api
from taskgraft.backbones.graphs import forget_recordings, recorded
from taskgraft.backbones.load import Backbone
from taskgraft.errors import Closed, Expired, Failed, GraftError, Overloaded, Unreadable
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.grafts.graft import Graft
from taskgraft.grafts.store import Store
from taskgraft.methods import HeadOnly
from taskgraft.serving.answers import Answer, Asking, question_of
from taskgraft.serving.asked import Asked, Row, answer_of, candidates, check, encode_all
from taskgraft.serving.library import Library, Version, read_weights
from taskgraft.serving.passes import next_batch, through
from taskgraft.serving.residents import Residents
from taskgraft.serving.turns import Turns
from taskgraft.training.parts import positions
from taskgraft.training.session import device_of
from taskgraft.training.written import answers_nothing, writes

log = logging.getLogger("taskgraft.serving")

QUEUE = 1024  # questions that may wait
# Tokens of a batch, and how many more of padding it may have: about half of what another batch would cost. On a CPU
# larger batches are hardly faster, and a question waits for one that has begun.
TOKENS = {"cpu": 256, "cuda": 32_768}
PADDING = {"cpu": 24, "cuda": 4096}
TOGETHER = 256  # questions that are tokenised at a time
AT_ONCE = 8  # rows of one question that stand in line: one about a long context lets others pass
READ_AHEAD = 64  # grafts that have been read and are not yet on the model


class Watch:
    """Told of what an engine does; the server's metrics are one."""

    def batch(self, rows: int, tokens: int, padded: int, seconds: float) -> None: ...

    def answered(self, asked: Asked, error: BaseException | None) -> None: ...


class Engine:
    """All tasks of a store on one backbone, for any number of threads.

    `memory` is the number of bytes that grafts may take on the device: those beyond are read from disk when they are
    asked for, and the ones not asked for longest make room. `tokens` is the most that go through the backbone at a
    time, `waiting` the most questions that wait. `threads` is how many batches run beside one another on a CPU, on a
    thread each (None: one, on all threads that torch has). Grafts that come, change or leave in the store are served so
    from the next question on. Use it in a `with` block, or close it.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Store | str | PathLike[str],
        *,
        memory: int | None = None,
        tokens: int | None = None,
        waiting: int = QUEUE,
        device: torch.device | str | None = None,
        threads: int | None = None,
        other_precision: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.backbone, self.library = backbone, Library(store)
        self.model, self.tokenizer = backbone.model, backbone.tokenizer
        self.device = device_of() if device is None else torch.device(device)
        self._trained = [module for module in self.model.modules() if module.training]
        self.model.to(self.device).eval()
        self._bare = getattr(self.model, "taskgraft", None) is None
        if self._bare:
            api.graft(self.model, HeadOnly(), tasks=())
        fingerprint(self.model)  # before the first graft asks for it
        self.positions = positions(self.model.config)
        self._one_thread_each = threads is not None and self.device.type == "cpu"
        self.tokens = TOKENS[self.device.type] if tokens is None else tokens
        self.padding = PADDING[self.device.type]
        self.most_waiting = waiting
        self.watch = watch or Watch()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        budget = default_budget(self.device) if memory is None else memory
        self.residents = Residents(self.model, budget, other_precision, self._lock)
        self.waiting = 0  # questions that were taken and have no answer yet
        self._rate = 0.0  # questions a second, lately
        self._ready: deque[Row] = deque()
        self._turns = Turns()  # on the model
        self._unplaced: set[Version] = set()
        self._reading: dict[Version, str] = {}  # and the names in the store that they are read from
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._closed = False
        self._ended = threading.Event()
        self._tokenizing = threading.Lock()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="taskgraft-read")
        self._threads = [
            threading.Thread(target=self._encode, name="taskgraft-encode", daemon=True),
            *(
                threading.Thread(target=self._run, name=f"taskgraft-run-{number}", daemon=True)
                for number in range(threads or 1 if self._one_thread_each else 1)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- asking

    def predict(self, questions: Iterable[Asking], *, version: int | None = None) -> list[Answer]:
        """The answers to questions of any tasks, in order: ("spam", "WIN a prize"), ("nli", "text", "second text")."""
        futures: list[Future[Answer]] = []
        for question in questions:
            asked = Asked(question_of(question), None, version)
            with self._changed:
                self._changed.wait_for(lambda: self.waiting < self.most_waiting or self._closed)
                self._take([asked])
            futures.append(asked.future)
        return [future.result() for future in futures]

    def submit(self, questions: Iterable[Asking], *, timeout: float | None = None) -> list[Future[Answer]]:
        """A future for each answer; `Overloaded` at once if all of them cannot wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        asked = [Asked(question_of(question), deadline) for question in questions]
        if len(asked) > self.most_waiting:
            raise GraftError(f"{len(asked)} questions in one call, and {self.most_waiting} may wait: ask in parts.")
        with self._lock:
            over = self.waiting + len(asked) - self.most_waiting
            if over > 0 and not self._closed:
                seconds = max(0.1, over / self._rate) if self._rate else 1.0
                raise Overloaded(
                    f"{self.waiting} questions are waiting, and {self.most_waiting} is the most: ask again in "
                    f"{seconds:.1f} seconds.",
                    seconds,
                )
            self._take(asked)
        return [one.future for one in asked]

    async def ask(self, questions: Iterable[Asking], *, timeout: float | None = None) -> list[Answer | BaseException]:
        """The answers, or what stands in the way of each, without blocking an event loop."""
        futures = [asyncio.wrap_future(future) for future in self.submit(questions, timeout=timeout)]
        late = Expired(f"no answer within the {timeout} seconds given.")
        try:
            if futures:
                await asyncio.wait(futures, timeout=timeout)
            return [(one.exception() or one.result()) if one.done() else late for one in futures]
        finally:
            for one in futures:
                one.cancel()

    def _take(self, asked: Sequence[Asked]) -> None:
        if self._closed:
            raise Closed("this engine is closed: it takes no more questions.")
        self.waiting += len(asked)
        for one in asked:
            self._inbox.put(one)

    def _finish(self, asked: Asked, result: Answer | BaseException) -> None:
        """Give an answer, or the reason why there is none, once."""
        with self._changed:
            if asked.finished:
                return
            asked.finished = True
            self.waiting -= 1
            version = asked.version
            if version is not None:
                version.waiting -= 1
                if not version.waiting:  # what was read for nobody but those who have left
                    version.loaded = None
                    self._unplaced.discard(version)
            self._changed.notify_all()
        error = result if isinstance(result, BaseException) else None
        if not begun(asked.future):
            pass  # cancelled
        elif isinstance(result, BaseException):
            asked.future.set_exception(result)
        else:
            asked.future.set_result(result)
        self._tell(self.watch.answered, asked, error)

    def _tell(self, what: Callable[..., None], *about: object) -> None:
        """Nothing that a watch does may cost an answer."""
        try:
            what(*about)
        except Exception:
            log.exception("a watch failed")

    # -- tokenising, on a thread of its own

    def _encode(self) -> None:
        while (one := self._inbox.get()) is not None:
            some = [one]
            while len(some) < TOGETHER and not self._inbox.empty():
                if (more := self._inbox.get()) is None:
                    self._inbox.put(None)  # to be found again, after these
                    break
                some.append(more)
            self._prepare(some)

    def _prepare(self, some: Sequence[Asked]) -> None:
        known = []
        for one in some:
            try:
                version = self.library.find(one.question.task, one.number)
                one.question = check(one.question, version)
                if version.mode not in ("head", "scores") and not writes(self.model):
                    raise Unreadable(answers_nothing(self.model, version.name))
            except Exception as error:
                self._finish(one, error)
                continue
            with self._lock:
                one.version = version
                version.waiting += 1
            known.append(one)
        try:
            with self._tokenizing:
                encode_all(self.tokenizer, self.positions, known)
                for version in {one.task for one in known if one.task.mode == "scores"}:
                    version.candidates = version.candidates or candidates(self.tokenizer, version)
        except Exception as error:
            if len(known) > 1:  # let the others not suffer for it
                for one in known:
                    with self._lock:
                        one.task.waiting -= 1
                    one.version = None
                    self._prepare([one])
                return
            reason = error if isinstance(error, GraftError) else failed(error, "tokenising a text")
            self._finish(known[0], reason)
            return
        for one in known:
            self._route(one)

    def _route(self, asked: Asked) -> None:
        """To the model, if the task is there or has been read; else a reader is sent for it."""
        version = asked.task
        with self._changed:
            if version.parked is not None:
                version.parked.append(asked)
            elif version.loaded is None and version.key not in self.residents.order:
                version.parked = [asked]
                self._reading[version] = version.name.partition("/")[0]
                self._readers.submit(self._read, version)
            else:
                self._make_ready([asked])

    def _make_ready(self, asked: Iterable[Asked]) -> None:
        for one in asked:
            one.later = deque(Row(one, row) for row in one.rows)
            self._ready.extend(one.later.popleft() for _ in range(min(AT_ONCE, len(one.rows))))
        self._changed.notify_all()

    def _read(self, version: Version) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._unplaced) < READ_AHEAD)
            self._unplaced.add(version)
        try:
            loaded = read_weights(version)
        except Exception as error:
            with self._changed:
                parked, version.parked = version.parked or [], None
                self._unplaced.discard(version)
                del self._reading[version]
                self._changed.notify_all()
            for one in parked:
                self._ask_again(one, unreadable(version, error, "reading"))
            return
        with self._lock:
            version.loaded = loaded
            parked, version.parked = version.parked or [], None
            del self._reading[version]
            self._make_ready(parked)

    def _ask_again(self, asked: Asked, error: GraftError) -> None:
        """A version that could not be read may have been replaced or removed meanwhile: then that is the answer."""
        try:
            replaced = self.library.find(asked.task.name, asked.number) is not asked.task
        except GraftError as gone:
            self._finish(asked, gone)
            return
        if not replaced:
            self._finish(asked, error)
            return
        with self._lock:
            asked.task.waiting -= 1
            asked.version = None
        self._prepare([asked])

    # -- running the model, on threads of their own

    def _run(self) -> None:
        if self._one_thread_each:
            torch.set_num_threads(1)
        with ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))  # a thread begins with the first
                stack.enter_context(recorded(self.model))
            while (rows := self._next()) is not None:
                try:
                    self._answer(rows)
                except Exception as error:  # nothing of ours may end this thread
                    self._fail(rows, error)

    def _next(self) -> list[Row] | None:
        """The next batch; None when all is done and nothing will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or (self._closed and not self.waiting))
            return next_batch(self._ready, self.tokens, self.padding) or None

    def _answer(self, rows: Sequence[Row]) -> None:
        """Run a batch beside others; what is not on the model yet is put there alone, in parts if not all fits."""
        with self._turns.shared():
            if all(row.asked.task.key in self.residents.order for row in rows):
                placed, _ = self._placed(rows)
                self._run_batch(placed)
                return
        while rows:
            with self._turns.alone() as share:
                placed, rows = self._placed(rows)
                share()
                self._run_batch(placed)

    def _placed(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Rows whose grafts are on the model now, and those whose grafts find no room beside the others'."""
        fits: dict[Version, bool] = {}
        for row in rows:
            version = row.asked.task
            if self._still_wanted(row.asked) and version not in fits:
                try:
                    fits[version] = self._place(version, [one for one, there in fits.items() if there])
                except Exception as error:
                    self._finish(row.asked, unreadable(version, error, "placing"))
        wanted = [row for row in rows if not row.asked.finished and row.asked.task in fits]
        return [row for row in wanted if fits[row.asked.task]], [row for row in wanted if not fits[row.asked.task]]

    def _place(self, version: Version, keep: Sequence[Version]) -> bool:
        placed = self.residents.place(version, keep)
        if placed and version in self._unplaced:
            with self._changed:
                self._unplaced.discard(version)
                self._changed.notify_all()  # readers may go on
        return placed

    def _still_wanted(self, asked: Asked) -> bool:
        """Whether someone waits for it still, and in time."""
        if asked.finished:
            return False
        if not begun(asked.future):
            self._finish(asked, Expired("nobody waits for this answer any more."))
            return False
        if asked.deadline is not None and time.monotonic() > asked.deadline:
            waited = time.monotonic() - asked.since
            self._finish(asked, Expired(f"no answer within the time given: {waited:.2f} seconds have gone by."))
            return False
        return True

    def _run_batch(self, rows: Sequence[Row]) -> None:
        """One pass through the backbone for rows whose grafts are on it."""
        if not rows:
            return
        started = time.monotonic()
        try:
            padded = self._forward(rows)
        except torch.OutOfMemoryError as error:
            if len(rows) > 1:
                forget_recordings(self.model)
                torch.cuda.empty_cache()
                self._run_batch(rows[: len(rows) // 2])
                self._run_batch(rows[len(rows) // 2 :])
                return
            self._fail(rows, error)
            return
        except Exception as error:
            self._fail(rows, error)
            return
        seconds = time.monotonic() - started
        self._tell(self.watch.batch, len(rows), sum(row.length for row in rows), padded, seconds)
        questions = {row.asked: None for row in rows if len(row.asked.found) == len(row.asked.rows)}
        self._rate += 0.1 * (len(questions) / max(seconds, 1e-6) - self._rate)
        for asked in questions:
            try:
                self._finish(asked, answer_of(asked))
            except GraftError as error:
                self._finish(asked, Unreadable(str(error)))
            except Exception as error:
                self._finish(asked, failed(error, f"reading an answer of task {asked.task.name!r}"))

    def _fail(self, rows: Sequence[Row], error: BaseException) -> None:
        reason = failed(error, f"a batch of {len(rows)} rows")
        for row in rows:
            self._finish(row.asked, reason)

    def _forward(self, rows: Sequence[Row]) -> int:
        return through(self.model, self.tokenizer, self.device, rows, self.positions)

    # -- changing tasks

    def put(self, graft: Graft, name: str | None = None) -> int:
        """Save a graft as the new version of a task, once it is known to fit the backbone; return its number.

        Questions that are already here are answered by the version they came to.
        """
        with self._turns.shared():
            if self._closed:
                raise Closed("this engine is closed: it changes no more tasks.")
            tried = self.residents.try_on(graft)
        if not tried:
            with self._turns.alone():
                self.residents.try_on(graft, new_banks=True)
        return self.library.store.put(graft, name)

    def rollback(self, name: str, version: int | None = None) -> int:
        """Make an earlier version of a task the current one (the one before it, if none is named)."""
        return self.library.store.rollback(name, version)

    def remove(self, name: str) -> None:
        """Take a task out of the store, with all its versions; questions that are already here are still answered."""
        with self._changed:  # what waits for it has its weights in memory
            self._changed.wait_for(lambda: name not in self._reading.values())
        self.library.store.remove(name)
        self.library.forget(name)

    # -- the end

    def close(self) -> None:
        """Take nothing more, answer all that was taken, and give the backbone back as it was."""
        with self._changed:
            already, self._closed = self._closed, True
            self._changed.notify_all()
        if already:
            self._ended.wait()
            return
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._readers.shutdown()
        for version in list(self.residents.order.values()):
            self.residents.evict(version)
        if self._bare:
            api.ungraft(self.model)
        for module in self._trained:
            module.training = True
        self._ended.set()


def begun(future: Future[Answer]) -> bool:
    """Whether someone waits for it, who from now on cannot cancel it."""
    return not future.cancelled() and (future.running() or future.set_running_or_notify_cancel())


def unreadable(version: Version, error: Exception, doing: str) -> Unreadable:
    """Why a task cannot answer."""
    reason = error if isinstance(error, GraftError) else failed(error, f"{doing} task {version.name!r}")
    return Unreadable(str(reason).replace(version.key, version.name))


def failed(error: BaseException, what: str) -> Failed:
    """An error that is nobody's question's fault: logged under an id, by which it can be found."""
    id = uuid.uuid4().hex[:12]
    log.error("%s failed (%s)", what, id, exc_info=error)
    return Failed(f"{what} failed; the log has it under {id}.", id)


def default_budget(device: torch.device) -> int:
    """Half of the memory that a GPU has free beside the backbone, a quarter of a machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
