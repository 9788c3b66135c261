"""Who may ask what: tokens, the names that a server goes by, and no requests that another site's page has made."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from taskgraft.errors import GraftError
from taskgraft.serving.bodies import Inflow, Limits
from taskgraft.serving.problems import Refused

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN = ("/", "/healthz", "/readyz", "/openapi.json")  # and /page/...: nothing to protect
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::\d{1,5})?")
PORTS = {"http": ":80", "https": ":443"}
TOKEN = re.compile(r"[!-~]+")
MAY_CHANGE = "taskgraft.may_change"  # in a request's scope, for the routes that change tasks
NO_ADMIN = (
    "this server has no admin token, so tasks cannot be changed over HTTP: start it with TASKGRAFT_ADMIN_TOKEN set, "
    "or with --admin-token-file."
)


def digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@dataclass(frozen=True)
class Tokens:
    """The digests of tokens, those for asking and those that may change tasks too; none: anyone may ask."""

    predict: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, predict: Iterable[str] = (), admin: Iterable[str] = ()) -> Tokens:
        return cls(*(tuple(digest(checked(token).encode()) for token in tokens) for tokens in (predict, admin)))

    def role(self, authorization: Collection[bytes]) -> str:
        """What the sender of these headers is: admin, predict or nobody. It takes as long for any wrong token."""
        if len(authorization) != 1:
            return "nobody"
        scheme, _, token = next(iter(authorization)).partition(b" ")
        given = digest(token.strip())
        admin = [hmac.compare_digest(given, known) for known in self.admin]
        predict = [hmac.compare_digest(given, known) for known in self.predict]
        if scheme.lower() != b"bearer":
            return "nobody"
        return "admin" if any(admin) else "predict" if any(predict) else "nobody"


def checked(token: str) -> str:
    if not TOKEN.fullmatch(token):
        raise GraftError("a token holds a space or a letter that is not ASCII: make one with `openssl rand -hex 32`.")
    return token


def read_tokens(file: Path) -> list[str]:
    """The tokens of a file, one a line; # begins a comment."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise GraftError(f"the file of tokens {file} could not be read: {error}.") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise GraftError(
            f"the file of tokens {file} holds none: put one on a line of its own, or leave the option out."
        )
    return found


def tokens_from(token_file: Path | None, admin_token_file: Path | None) -> Tokens:
    """Of files and of the environment together."""
    found = []
    for file, variable in ((token_file, "TASKGRAFT_TOKEN"), (admin_token_file, "TASKGRAFT_ADMIN_TOKEN")):
        own = os.environ.get(variable, "").strip()
        found.append([*(read_tokens(file) if file else ()), *([own] if own else ())])
    return Tokens.of(*found)


class Guard:
    """Lets through what may pass, with its body under watch."""

    def __init__(self, app: ASGIApp, tokens: Tokens, hosts: Collection[str] | None, limits: Limits) -> None:
        self.app, self.tokens, self.limits = app, tokens, limits
        self.hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        upload = scope["method"] == "PUT"
        limit = self.limits.upload if upload else self.limits.body
        inflow = Inflow(scope, receive, send, limit, self.limits.upload_s if upload else self.limits.body_s)
        try:
            if not scope["path"].isprintable():  # a router overlooks the end of a line at the end of a path
                raise Refused(404, "not_found", "there is nothing at this path: it holds what no name may hold.")
            self.check_site(scope)
            self.check_token(scope)
            if inflow.stated > limit:
                raise inflow.too_large()
        except Refused as refused:
            await refused.problem.response()(scope, inflow.receive, inflow.send)
            return
        await self.app(scope, inflow.receive, inflow.send)

    def check_site(self, scope: Scope) -> None:
        """Refuse what a page of another site sends, also one whose name was made to lead here."""
        host = b"".join(header(scope, b"host")).decode("latin-1").lower()
        match = HOST.fullmatch(host)
        if self.hosts is not None and (match is None or match[1] not in self.hosts):
            raise Refused(
                403,
                "forbidden",
                f"the Host {host[:80]!r} is none that this server goes by: ask for it by one of "
                f"{', '.join(sorted(self.hosts))}, or start it with --allow-host.",
            )
        sites = header(scope, b"sec-fetch-site")
        guarded = scope["path"].startswith("/v1") or scope["path"] == "/metrics"
        if not all(same_site(origin, host) for origin in header(scope, b"origin")) or (
            guarded and b"cross-site" in sites
        ):
            raise Refused(403, "forbidden", "a page of another site has sent this: open the server's own page at /.")

    def check_token(self, scope: Scope) -> None:
        need = need_of(scope["method"], scope["path"])
        if need == "nothing" or (need == "token" and not self.tokens.predict):
            return
        role = self.tokens.role(header(scope, b"authorization"))
        if role == "nobody" and (self.tokens.predict or self.tokens.admin):
            message = "this needs a token that this server knows: send it as Authorization: Bearer TOKEN."
            raise Refused(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})
        if need == "admin" and role != "admin":
            message = "this token is for asking: changing tasks needs the admin token."
            raise Refused(403, "forbidden", message if self.tokens.admin else NO_ADMIN)
        scope[MAY_CHANGE] = role == "admin"


def need_of(method: str, path: str) -> str:
    """What a request needs: nothing, a token where the server has any, or the admin token."""
    if path in OPEN or path.startswith("/page/"):
        return "nothing"
    changes = method in ("PUT", "DELETE") or path.endswith("/rollback")
    return "admin" if changes and path.startswith("/v1/tasks/") else "token"


def header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def same_site(origin: bytes, host: str) -> bool:
    """Whether a page of this origin came from the server that it asks."""
    try:
        found = urlsplit(origin.decode("latin-1").lower())
    except ValueError:
        return False
    port = PORTS.get(found.scheme)
    return port is not None and found.netloc.removesuffix(port) == host.removesuffix(port)
