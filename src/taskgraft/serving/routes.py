"""What each route does: questions, the tasks there are and their upkeep, health, metrics and the page."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from taskgraft.errors import GraftError, UnknownTask
from taskgraft.serving import shapes
from taskgraft.serving.answers import Answer, Question
from taskgraft.serving.bodies import MEBIBYTE, Limits, check_media_type
from taskgraft.serving.engine import Engine
from taskgraft.serving.guard import MAY_CHANGE
from taskgraft.serving.listing import Listing
from taskgraft.serving.metrics import Metrics
from taskgraft.serving.problems import Json, Problem, Refused, is_name, problem_of
from taskgraft.serving.uploads import graft_in

log = logging.getLogger("taskgraft.serving")

PAGE = Path(__file__).parent / "page"
CSP = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(eq=False)
class Served:
    """All that the routes need."""

    engine: Engine
    metrics: Metrics
    listing: Listing
    limits: Limits
    changes: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))  # who waits for the store
    ready: bool = False  # the backbone has answered once
    closing: bool = False

    def problem(self, error: BaseException, task: str | None = None) -> Problem:
        return problem_of(error, task, str(self.engine.library.store.folder))


def served(request: Request) -> Served:
    found: Served = request.app.state.served
    return found


# -- questions


async def predict(request: Request, task: str, body: shapes.Ask) -> Response:
    """What a task says of a text, or of several."""
    if isinstance(body, shapes.AskOne):
        questions = [Question(task, body.text, body.pair)]
    else:
        if body.pairs is not None and len(body.pairs) != len(body.texts):
            few = f"{len(body.texts)} texts and {len(body.pairs)} pairs were given: give a pair with each text."
            raise Refused(422, "invalid_request", few)
        pairs: Sequence[str | None] = body.pairs or [None] * len(body.texts)
        questions = [Question(task, text, pair) for text, pair in zip(body.texts, pairs, strict=True)]
    answers = await ask(request, questions, body.timeout)
    for answer in answers:
        if isinstance(answer, BaseException):
            return served(request).problem(answer, task).response()
    made = [answer.to_json() for answer in answers if isinstance(answer, Answer)]
    return Json(made[0] if isinstance(body, shapes.AskOne) else {"answers": made})


async def predict_mixed(request: Request, body: shapes.AskMixed) -> Response:
    """What tasks say of texts, each of its own; what is wrong with one stands in its place."""
    questions = [Question(one.task, one.text, one.pair) for one in body.questions]
    answers = await ask(request, questions, body.timeout)
    of = served(request)
    made = [
        answer.to_json()
        if isinstance(answer, Answer)
        else {"task": question.task, "error": of.problem(answer, question.task).to_json()}
        for question, answer in zip(questions, answers, strict=True)
    ]
    return Json({"answers": made})


async def ask(request: Request, questions: Sequence[Question], timeout: float | None) -> list[Answer | BaseException]:
    """The answers, or what stands in the way of each; nothing goes on for a caller who has left."""
    of = served(request)
    check_size(questions, of)
    timeout = of.limits.timeout if timeout is None else timeout
    tasks = {question.task for question in questions}
    names = {task for task in tasks if is_name(task)}
    asked = [question for question in questions if question.task in names]
    futures = [asyncio.wrap_future(future) for future in of.engine.submit(asked, timeout=timeout)]
    leaving = asyncio.create_task(left(request))
    leaving.add_done_callback(lambda _: [future.cancel() for future in futures])
    try:
        if futures:
            await asyncio.wait(futures, timeout=timeout)
    finally:
        gone = leaving.done()
        leaving.cancel()
        for future in futures:
            future.cancel()
    if gone:
        raise ClientDisconnect
    found = iter([asyncio.CancelledError() if one.cancelled() else one.exception() or one.result() for one in futures])
    answers = [next(found) if question.task in names else UnknownTask(question.task) for question in questions]
    facts: dict[str, Any] = {"rows": len(questions)}
    if len(tasks) == 1 and isinstance(answers[0], Answer):
        facts["task"] = answers[0].task
    request.scope["taskgraft"] |= facts
    return answers


async def left(request: Request) -> None:
    """Returns when the caller has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_size(questions: Sequence[Question], of: Served) -> None:
    most = min(of.limits.texts, of.engine.most_waiting)
    if len(questions) > most:
        raise Refused(422, "invalid_request", f"{len(questions)} texts were given, and {most} a call is the most.")
    for number, question in enumerate(questions):
        words = [question.text] if isinstance(question.text, str) else question.text
        longest = max(sum(len(word) + 1 for word in words) - 1, len(question.pair or ""))
        if longest > of.limits.characters:
            raise Refused(
                422,
                "invalid_request",
                f"text {number} has {longest:,} characters, and {of.limits.characters:,} is the most: cut it.",
            )


# -- tasks


def list_tasks(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many on a page.")] = 100,
    after: Annotated[str | None, Query(description="The `next` of the page before.")] = None,
    prefix: Annotated[str, Query(description="What their names begin with.")] = "",
) -> Response:
    """The tasks there are, by name."""
    return Json(served(request).listing.page(limit, after, prefix))


def show_task(request: Request, task: str) -> Response:
    """All that is known of a task."""
    try:
        if not is_name(task):
            raise UnknownTask(task)
        return Json(served(request).listing.full(task))
    except Exception as error:
        return served(request).problem(error, task).response()


async def put_task(request: Request, task: str) -> Response:
    """Make a graft (a zip file of graft.json and graft.safetensors) the current version of a task."""
    check_change(request, task)
    check_media_type(request, "application/zip")
    of = served(request)
    with tempfile.TemporaryFile() as file:
        async for part in buffered(request.stream()):
            await run_in_threadpool(file.write, part)

        def put() -> int:
            graft = graft_in(file, task, of.limits.upload)
            try:
                return of.engine.put(graft, task)
            except GraftError:
                raise
            except Exception as error:
                log.warning("a graft for task %r cannot be used", task, exc_info=error)
                raise GraftError(f"the graft cannot be put on this backbone ({error}): train it again.") from error

        version = await changing(of, task, put)
    request.scope["taskgraft"]["task"] = task
    return Json({"task": task, "version": version}, 201 if version == 1 else 200)


async def roll_back(request: Request, task: str, body: shapes.Rollback) -> Response:
    """Make an earlier version of a task the current one."""
    check_change(request, task)
    of = served(request)
    version = await changing(of, task, lambda: of.engine.rollback(task, body.version))
    return Json({"task": task, "version": version})


async def remove_task(request: Request, task: str) -> Response:
    """Take a task out of the store, with all its versions."""
    check_change(request, task)
    of = served(request)
    await changing(of, task, lambda: of.engine.remove(task))
    return Response(status_code=204)


async def changing(of: Served, task: str, change: Callable[[], Any]) -> Any:
    """A change to the store, off the event loop; what stands in its way is a conflict."""
    try:
        return await anyio.to_thread.run_sync(change, limiter=of.changes)
    except GraftError as error:
        problem = of.problem(error, task)
        if problem.type in ("invalid_request", "unreadable"):
            raise Refused(409, "conflict", problem.message) from error
        raise Refused(problem.status, problem.type, problem.message, problem.headers) from error


def check_change(request: Request, task: str) -> None:
    """Nobody but an admin changes tasks, by whatever path; one of those trained together is changed with them."""
    if not request.scope.get(MAY_CHANGE):
        raise Refused(403, "forbidden", "changing tasks needs the admin token.")
    if "/" in task or not is_name(task):
        raise UnknownTask(f"{task!r} is no name of a task that can be changed: GET /v1/tasks tells which there are.")


async def buffered(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """In pieces that are worth a thread's while."""
    piece = bytearray()
    async for part in parts:
        piece += part
        if len(piece) >= MEBIBYTE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


# -- the server itself


async def health(request: Request) -> Response:
    """Whether the process lives."""
    return Json({"status": "ok"})


async def readiness(request: Request) -> Response:
    """Whether questions are answered."""
    of = served(request)
    if of.closing:
        return Problem(503, "closing", "the server is shutting down: ask another one.").response()
    if not of.ready:
        return Problem(503, "starting", "the backbone has not answered yet: ask again in a second.").response()
    return Json({"status": "ok"})


def metrics_text(request: Request) -> Response:
    """Counts and times, for Prometheus."""
    return Response(served(request).metrics.text(), media_type=PROMETHEUS)


def stats(request: Request) -> Response:
    """What the server is doing, in short."""
    of = served(request)
    return Json(of.metrics.stats(len(of.listing.names())))


def page(request: Request, file: str = "index.html") -> Response:
    """The page, and what it is made of."""
    path = next((path for path in PAGE.iterdir() if path.name == file and path.suffix in MEDIA_TYPES), None)
    if path is None:
        raise HTTPException(404)
    headers = {"Content-Security-Policy": CSP, "X-Frame-Options": "DENY", "Cache-Control": "no-cache"}
    return Response(path.read_bytes(), headers=headers, media_type=MEDIA_TYPES[path.suffix])


async def only_post(request: Request, task: str) -> Response:
    """`predict` and `rollback` end a path: they are no names of tasks there."""
    raise HTTPException(405)
