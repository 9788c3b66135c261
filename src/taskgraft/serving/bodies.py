"""Bodies of requests: how much is read, for how long, and as what."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from taskgraft.serving.problems import Refused

MEBIBYTE = 1 << 20
LINGER_S = 2.0  # how long a refused body is read and thrown away, so that the sender hears why
LENGTH = re.compile(rb"\d{1,18}")
KEYS = 16  # of an object, which is more than any that is asked for has
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body: int = MEBIBYTE  # bytes
    upload: int = 512 * MEBIBYTE  # bytes of a graft, zipped and unzipped
    texts: int = 256  # of a call
    characters: int = 100_000  # of a text
    timeout: float = 30.0  # seconds, where a caller names none
    body_s: float = 30.0  # seconds in which a body must be here
    upload_s: float = 300.0  # and a graft


class Inflow:
    """A request's body as it comes in: refused when it is too long or too slow.

    Where an answer is sent before all of it has come, the rest is read for a moment, then the connection is closed: to
    close at once could cost the sender the answer.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limit: int, seconds: float) -> None:
        self._receive, self._send, self.limit, self.seconds = receive, send, limit, seconds
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self.stated = int(length) if LENGTH.fullmatch(length) else limit + 1
        self.ended = not self.stated and b"transfer-encoding" not in headers
        self.lingers = b"expect" not in headers
        self.deadline = asyncio.get_running_loop().time() + seconds
        self.size = 0

    def too_large(self) -> Refused:
        return Refused(413, "too_large", f"the body is larger than the {self.limit:,} bytes that are read: send less.")

    async def receive(self) -> Message:
        if self.ended:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self._receive()
        except TimeoutError as error:
            slow = f"the body did not come within {self.seconds:g} seconds: send it faster, or send less."
            raise Refused(408, "invalid_request", slow) from error
        self.size += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        if self.size > self.limit:
            raise self.too_large()
        return message

    async def send(self, message: Message) -> None:
        if self.ended:
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
        elif message.get("more_body"):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S if self.lingers else 0):
                    while (await self._receive()).get("more_body"):
                        pass
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def check_media_type(request: Request, wanted: str) -> None:
    """Refuse a body that does not say it is what is read here."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity")
    if given != wanted:
        message = f"the body's Content-Type is {given[:80] or 'not said'!r}: send {wanted}."
        raise Refused(415, "unsupported_media_type", message)
    if coding != "identity":
        raise Refused(415, "unsupported_media_type", f"the body is sent as {coding[:80]!r}: send it as it is.")


async def read_json(request: Request) -> Any:
    """The body as JSON, which the standard's letter is kept to: no NaN, no key twice, no half of a surrogate pair."""
    check_media_type(request, "application/json")
    raw = await request.body()
    try:
        text = raw.decode()
        found = json.loads(text, parse_constant=no_constant, object_pairs_hook=no_key_twice)
        if SURROGATE.search(raw):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Refused(400, "invalid_request", "the body is nested too deeply: send what /openapi.json asks.") from error
    except UnicodeError as error:
        raise Refused(400, "invalid_request", "the body is not UTF-8, or holds half of a surrogate pair.") from error
    except ValueError as error:
        reason = str(error)[:200]
        raise Refused(
            400, "invalid_request", f"the body is not JSON ({reason}): send what /openapi.json asks."
        ) from error
    return found


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > KEYS:
        raise ValueError(f"an object has {len(pairs):,} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found
