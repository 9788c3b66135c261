"""HTTP/1.1 for the load client: requests as bytes, and connections that are kept open. The standard library alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What came back; status 0: nothing, since the connection was lost."""

    status: int
    id: bytes = b""  # the request's, which the server repeats
    body: bytes = b""


class Connection(asyncio.Protocol):
    """A connection that is kept open, with one request on its way at a time."""

    def __init__(self, stray: Callable[[], None]) -> None:
        self.stray = stray  # told of an answer that nobody waits for
        self.buffer = bytearray()
        self.waiter: asyncio.Future[Reply] | None = None
        self.lost = False

    @classmethod
    async def open(cls, port: int, stray: Callable[[], None]) -> Connection:
        made = await asyncio.get_running_loop().create_connection(lambda: cls(stray), "127.0.0.1", port)
        return made[1]

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport

    async def call(self, request: bytes) -> Reply:
        assert self.waiter is None
        if self.lost:
            return Reply(0)
        self.waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.waiter

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (found := reply_in(self.buffer)) is not None:
            reply, size = found
            del self.buffer[:size]
            if self.waiter is None or self.waiter.done():
                self.stray()
            else:
                self.waiter.set_result(reply)
                self.waiter = None

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(Reply(0))


def reply_in(buffer: bytearray) -> tuple[Reply, int] | None:
    """The reply that a buffer begins with, and its length; None: it is not all there yet."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    first, *lines = bytes(buffer[:end]).split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    size = end + 4 + int(headers.get(b"content-length", b"0"))
    if len(buffer) < size:
        return None
    body = bytes(buffer[end + 4 : size])
    return Reply(int(first.split(b" ", 2)[1]), headers.get(b"x-request-id", b""), body), size


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def asking(task: str, text: str, id: str) -> bytes:
    """One text for one task."""
    body = json.dumps({"text": text}).encode()
    return request("POST", f"/v1/tasks/{task}/predict", body, Content_Type="application/json", X_Request_Id=id)
