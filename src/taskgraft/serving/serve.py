"""An app behind a socket, until it is asked to stop: then what was taken is answered, and nothing more is taken."""

from __future__ import annotations

import asyncio
import gc
import logging
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from taskgraft.errors import GraftError
from taskgraft.serving.journal import JsonLines

KEEP_ALIVE_S = 65
HEADER_S = 30  # in which the head of a request must be here
HEADER_BYTES = 64 << 10  # that it may have
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DRAIN_S = 0.5  # for requests that are on their way on connections already open
TURN_S = 0.005  # in which a loop that has nothing else to do turns more than once
LONGEST_S = 330  # a request's longest timeout, and some
UNREAD_S = 60  # in which a client must have read some of what it was sent
PATIENCE_S = 4  # with clients that are stuck, once the server is to end
BACKLOG = 2048


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection on which no whole request comes is closed: uvicorn itself would wait, and read on, for ever."""

    due: asyncio.TimerHandle | None = None
    read = 0  # of the head that is coming
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.due = self.loop.call_later(HEADER_S, transport.close)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self.due is None and (before is None or before.response_complete):
            self.due = self.loop.call_later(HEADER_S, self.transport.close)
            self.read = 0
        self.read += len(data)
        super().data_received(data)
        if self.cycle is not before:
            self.forget()
        elif self.due is not None and self.read > HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.forget()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def waits_for_its_client(self) -> bool:
        """Whether what is missing is the rest of a request, or that an answer is read."""
        return self.unread is not None or self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def forget(self) -> None:
        if self.due is not None:
            self.due.cancel()
            self.due = None


class Server(uvicorn.Server):
    """Tells when it is ready, and closes no connection on which a request may just be coming in."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.app, self.announce = app, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.app.state.warming
        self.announce()

    async def take_those_that_wait(self, sockets: list[socket.socket]) -> None:
        """A socket that is closed resets the connections that the loop has not taken from it; some take one a turn."""
        deadline = time.monotonic() + DRAIN_S
        with selectors.DefaultSelector() as waiting:
            for listening in sockets:
                waiting.register(listening, selectors.EVENT_READ)
            while True:
                await asyncio.sleep(TURN_S)
                if not waiting.select(0) or time.monotonic() > deadline:
                    return

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.served.closing = True  # answers say from now on that their connection ends
        await self.take_those_that_wait(sockets or [])
        for server in self.servers:
            server.close()
        await asyncio.sleep(DRAIN_S)
        loop = asyncio.get_running_loop()

        def cut_off() -> None:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Impatient) and connection.waits_for_its_client():
                    connection.transport.abort()
            loop.call_later(1, cut_off)

        loop.call_later(PATIENCE_S, cut_off)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is one that is free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise GraftError(f"the server cannot listen on {host}, port {port} ({error}): name another --port.") from error
    return made


def server_of(app: FastAPI, announce: Callable[[], None]) -> Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=Impatient,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LONGEST_S,
    )
    return Server(config, app, announce)


def serve(app: FastAPI, listening: socket.socket, announce: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; requests that were taken are answered before it returns."""

    def heard(number: int, frame: FrameType | None) -> None:
        """uvicorn raises the signal again once it has stopped; it has been answered then."""

    def ready() -> None:
        """What is loaded by now stays, and for the collector to look through all of it takes longer than a batch."""
        gc.collect()
        gc.freeze()
        announce()

    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server_of(app, ready).run([listening])
    finally:
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)


def log_to_stderr() -> None:
    """A line of JSON on stderr for each request, and for whatever else is worth it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("taskgraft", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
