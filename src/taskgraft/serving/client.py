"""A client of the server: the questions and answers of `Engine`, over HTTP, blocking or on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, cast

from taskgraft.errors import GraftError
from taskgraft.serving.answers import Answer, Text
from taskgraft.serving.calls import URL, Calls, Reply, Talk, httpx, zipped

if TYPE_CHECKING:
    from taskgraft.grafts.graft import Graft
    from taskgraft.serving.answers import Asking

TIMEOUT, RETRIES = 30.0, 4

T = TypeVar("T")


class Client:
    """The tasks of a server, for programs without PyTorch in memory; threads may share one.

    `token` may be in TASKGRAFT_TOKEN instead; `put`, `rollback` and `remove` want the admin token. `timeout` is for
    each call, with its retries. Those come after overload, while a server closes, and where a connection breaks that
    only asked. What an engine would raise is raised here. Use it in a `with` block, or close it.
    """

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._calls = Calls(url, token, timeout, retries)
        self._http = httpx.Client(transport=transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(self, task: str, text: Text, pair: str | None = None) -> Answer:
        """What a task says of a text, or of a pair of them."""
        return self._do(self._calls.predict(task, text, pair))

    def predict_many(self, questions: Iterable[Asking]) -> list[Answer | GraftError]:
        """The answers to questions of any tasks, in order; where one has none, the error stands in its place."""
        return self._do(self._calls.predict_many(questions))

    def tasks(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """What is known of each task whose name begins so, by name."""
        after: str | None = ""
        while after is not None:
            some, after = self._do(self._calls.page(after, prefix))
            yield from some

    def task(self, name: str) -> dict[str, Any]:
        """What is known of a task, with its card and its versions."""
        return self._do(self._calls.task(name))

    def put(self, name: str, graft: Graft | str | PathLike[str]) -> int:
        """Make a graft, or the one in the folder STORE/NAME, the current version of a task; return its number."""
        return self._do(self._calls.put(name, zipped(graft)))

    def rollback(self, name: str, version: int | None = None) -> int:
        """Make an earlier version of a task the current one (the one before it, if none is named)."""
        return self._do(self._calls.rollback(name, version))

    def remove(self, name: str) -> None:
        """Take a task out of the server's store, with all its versions."""
        self._do(self._calls.remove(name))

    def stats(self) -> dict[str, Any]:
        """What the server is doing: tasks, memory, questions waiting, answers a second, latencies."""
        return self._do(self._calls.stats())

    def ready(self) -> bool:
        """Whether the server is there and answers questions."""
        return self._do(self._calls.ready())

    def _do(self, talk: Talk[T]) -> T:
        try:
            step = next(talk)
            while True:
                time.sleep(step.pause)
                step = talk.send(self._reply(step.request))
        except StopIteration as done:
            return cast(T, done.value)

    def _reply(self, request: httpx.Request) -> Reply:
        try:
            return self._http.send(request)
        except httpx.RequestError as error:
            return error


class AsyncClient:
    """`Client` for programs on an event loop: the same calls, to be awaited."""

    def __init__(
        self,
        url: str = URL,
        token: str | None = None,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._calls = Calls(url, token, timeout, retries)
        self._http = httpx.AsyncClient(transport=transport)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def predict(self, task: str, text: Text, pair: str | None = None) -> Answer:
        """What a task says of a text, or of a pair of them."""
        return await self._do(self._calls.predict(task, text, pair))

    async def predict_many(self, questions: Iterable[Asking]) -> list[Answer | GraftError]:
        """The answers to questions of any tasks, in order; where one has none, the error stands in its place."""
        return await self._do(self._calls.predict_many(questions))

    async def tasks(self, prefix: str = "") -> AsyncIterator[dict[str, Any]]:
        """What is known of each task whose name begins so, by name."""
        after: str | None = ""
        while after is not None:
            some, after = await self._do(self._calls.page(after, prefix))
            for one in some:
                yield one

    async def task(self, name: str) -> dict[str, Any]:
        """What is known of a task, with its card and its versions."""
        return await self._do(self._calls.task(name))

    async def put(self, name: str, graft: Graft | str | PathLike[str]) -> int:
        """Make a graft, or the one in the folder STORE/NAME, the current version of a task; return its number."""
        return await self._do(self._calls.put(name, await asyncio.to_thread(zipped, graft)))

    async def rollback(self, name: str, version: int | None = None) -> int:
        """Make an earlier version of a task the current one (the one before it, if none is named)."""
        return await self._do(self._calls.rollback(name, version))

    async def remove(self, name: str) -> None:
        """Take a task out of the server's store, with all its versions."""
        await self._do(self._calls.remove(name))

    async def stats(self) -> dict[str, Any]:
        """What the server is doing: tasks, memory, questions waiting, answers a second, latencies."""
        return await self._do(self._calls.stats())

    async def ready(self) -> bool:
        """Whether the server is there and answers questions."""
        return await self._do(self._calls.ready())

    async def _do(self, talk: Talk[T]) -> T:
        try:
            step = next(talk)
            while True:
                await asyncio.sleep(step.pause)
                step = talk.send(await self._reply(step.request))
        except StopIteration as done:
            return cast(T, done.value)

    async def _reply(self, request: httpx.Request) -> Reply:
        try:
            return await self._http.send(request)
        except httpx.RequestError as error:
            return error
