"""Requests to a server: to one in this process, and to one behind a socket."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import taskgraft as tg
from taskgraft.grafts.graft import encode
from taskgraft.serving import serve as serving

from serving import SECONDS

ADMIN = {"Authorization": "Bearer boss"}
PREDICT, MIXED = "/v1/tasks/mood/predict", "/v1/predict"


def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """One request, in this process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asyncio.wait_for(send(), SECONDS))


def error_of(response: httpx.Response) -> tuple[int, str]:
    found = response.json()
    assert list(found) == ["error"] and {"type", "message"} <= set(found["error"]) <= {"type", "message", "id"}
    assert len(found["error"]["message"]) > 10
    return response.status_code, found["error"]["type"]


def zipped(graft: tg.Graft, folder: str = "") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in encode(graft).items():
            archive.writestr(folder + name, content)
    return made.getvalue()


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The app on a port of this machine, on a thread."""
    listening, ready = serving.listen("127.0.0.1", 0), threading.Event()
    server = serving.server_of(app, ready.set)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    port = listening.getsockname()[1]
    thread.start()
    assert ready.wait(SECONDS)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def connection(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), SECONDS)


def head(method: str, path: str, length: int) -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return lines.encode() + b"\r\n\r\n"


def received(sender: socket.socket) -> bytes:
    found = b""
    while part := sender.recv(10_000):
        found += part
    return found
