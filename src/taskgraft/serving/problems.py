"""What a caller over HTTP is told when something is wrong: one shape for everything, and a status for each kind."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from taskgraft.errors import Closed, Expired, Failed, GraftError, Overloaded, UnknownTask, Unreadable
from taskgraft.names import check_task_name
from taskgraft.serving.engine import failed

KINDS: dict[type[BaseException], tuple[int, str]] = {
    UnknownTask: (404, "unknown_task"),
    Overloaded: (429, "overloaded"),
    Failed: (500, "failed"),
    Unreadable: (503, "unreadable"),
    Closed: (503, "closing"),
    Expired: (504, "expired"),
    GraftError: (422, "invalid_request"),
}
STATUSES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
BRANCHES = ("one", "many", "str", "list[str]", "body")  # words of pydantic's that say nothing to a caller


class Json(JSONResponse):
    """JSON in UTF-8; never NaN, and never half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Problem:
    """An error as a caller sees it; `id` is what the log calls it."""

    status: int
    type: str
    message: str
    id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, str]:
        return {"type": self.type, "message": self.message} | ({} if self.id is None else {"id": self.id})

    def response(self) -> Response:
        return Json({"error": self.to_json()}, self.status, dict(self.headers))


class Refused(HTTPException):
    """A request that goes no further."""

    def __init__(self, status: int, type: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.problem = Problem(status, type, message, headers=dict(headers or {}))


def problem_of(error: BaseException, task: str | None = None, store: str | None = None) -> Problem:
    """The problem that an error is; `task` is the name that was asked for, `store` a path that callers need not see."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return Problem(
            error.status_code, STATUSES.get(error.status_code, "invalid_request"), sentence(error), headers=headers
        )
    if isinstance(error, asyncio.CancelledError):
        error = Expired("no answer within the time given.")
    elif not isinstance(error, GraftError):
        error = failed(error, "answering a request")
    if task is not None and isinstance(error, UnknownTask):
        error = UnknownTask(f"there is no task {task[:200]!r}: GET /v1/tasks tells which there are.")
    status, kind = next(KINDS[one] for one in type(error).__mro__ if one in KINDS)
    message = str(error) if store is None else str(error).replace(store, "the store")
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return Problem(status, kind, message, error.id if isinstance(error, Failed) else None, headers)


def is_name(task: str) -> bool:
    """Whether a task, or JOINT/TASK, may be called so."""
    try:
        for part in task.split("/", 1):
            check_task_name(part)
    except GraftError:
        return False
    return True


def sentence(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is nothing at this path: /openapi.json tells what there is."
    if error.status_code == 405:
        return "this path does not take this method: the Allow header tells which it takes."
    return str(error.detail)


def misshapen(error: ValidationError | Any) -> Problem:
    """A body or a parameter of the wrong shape: the first place where it is wrong, and in what way."""
    first = error.errors()[0]
    where = ".".join(str(part)[:80] for part in first["loc"] if part not in BRANCHES)
    what = str(first["msg"])
    place = f"{where!r} is wrong: " if where else "the body is wrong: "
    return Problem(422, "invalid_request", f"{place}{what[:1].lower()}{what[1:]}; /openapi.json has the shape.")
