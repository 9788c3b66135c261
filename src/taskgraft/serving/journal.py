"""What is written down of each request: an id, a line of the log without the texts, and the metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taskgraft.serving.guard import header
from taskgraft.serving.metrics import Metrics
from taskgraft.serving.problems import Problem, problem_of

log = logging.getLogger("taskgraft.serving.requests")

ID = re.compile(rb"[A-Za-z0-9-]{1,64}")
ALWAYS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
LEFT = 499  # what is written down where a caller left before there was an answer
FRESH = (b"cache-control", b"no-store")


class Journal:
    """Around all else: whatever becomes of a request, it is written down, and answered."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: list[BaseRoute], state: Any) -> None:
        self.app, self.metrics, self.routes, self.state = app, metrics, routes, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        given = header(scope, b"x-request-id")
        id = given[0] if len(given) == 1 and ID.fullmatch(given[0]) else uuid.uuid4().hex.encode()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), *ALWAYS, (b"x-request-id", id)]
                names = {name for name, _ in headers}
                if FRESH[0] not in names:
                    headers.append(FRESH)
                if self.state.closing and b"connection" not in names:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        facts: dict[str, Any] = {}
        scope["taskgraft"] = facts
        try:
            await self.app(scope, receive, sending)
        except ClientDisconnect:
            status = status or LEFT
        except asyncio.CancelledError:  # it is made to end, with this unanswered
            if not status:
                told = Problem(503, "closing", "the server is shutting down: ask another one.")
                await told.response()(scope, receive, sending)
        except Exception as error:
            problem = problem_of(error)
            if not status:
                await problem.response()(scope, receive, sending)
        finally:
            seconds, route = time.perf_counter() - started, self.route_of(scope)
            self.metrics.request(route, scope["method"], status, seconds)
            if log.isEnabledFor(logging.INFO):
                line = {
                    "method": scope["method"][:16],
                    "route": route,
                    "status": status,
                    "ms": round(1000 * seconds, 3),
                }
                log.info("request", extra={"facts": {**line, "request_id": id.decode(), **facts}})

    def route_of(self, scope: Scope) -> str:
        """The path of a request with its names left out; those that lead nowhere are one."""
        route = scope.get("route")
        if route is None:  # refused before it was looked for
            route = next((route for route in self.routes if route.matches(scope)[0] is not Match.NONE), None)
        return str(getattr(route, "path_format", None) or "other")


class JsonLines(logging.Formatter):
    """A record of the log as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)
