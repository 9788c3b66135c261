"""The calls of the server's clients: what is sent, how a reply is read, and when it is worth another try.

Nothing is sent from here: `Client` and `AsyncClient` do that, each in its way.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import time
import zipfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from taskgraft import __version__
from taskgraft.errors import Closed, Expired, Failed, GraftError, Overloaded, UnknownTask, Unreadable
from taskgraft.names import check_task_name
from taskgraft.serving.answers import Answer, Asking, Question, Text, question_of

try:
    import httpx as httpx  # client.py takes it from here
except ImportError as error:
    raise GraftError("the client needs one more package: `pip install 'taskgraft[serve]'`.") from error

if TYPE_CHECKING:
    from taskgraft.grafts.graft import Graft

URL, TOKEN = "http://127.0.0.1:8000", "TASKGRAFT_TOKEN"  # a server of one's own; the token's variable
MOST_QUESTIONS, MOST_BYTES = 256, 1_000_000  # of one call: what a server takes by default
LONGEST = 300.0  # seconds that a server lets a question wait
MARGIN = 0.95  # of the time that is left, for the server: its answer has a way to go
PAUSE = 0.2  # seconds before the second try, where the server names none; then twice as many each time

KINDS = {"unknown_task": UnknownTask, "unreadable": Unreadable, "expired": Expired, "closing": Closed}
BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError)  # refused, or closed before there was an answer

T = TypeVar("T")
Reply = httpx.Response | httpx.RequestError


@dataclass(frozen=True)
class Call:
    """One of the server's routes, and what is sent to it."""

    method: str
    path: str
    record: Mapping[str, Any] | None = None  # sent as JSON
    archive: bytes | None = None  # sent as a zip file
    timed: bool = False  # the server is told how long the caller waits
    repeatable: bool = True  # doing it twice does the same as doing it once


@dataclass(frozen=True)
class Step:
    """What is to be done next: wait, then send."""

    request: httpx.Request
    pause: float = 0.0


Talk = Generator[Step, Reply, T]


class Calls:
    """All calls, each as a generator: it yields what to send, gets the reply, and returns what the caller wanted."""

    def __init__(self, url: str, token: str | None, timeout: float, retries: int) -> None:
        self.url, self.timeout, self.retries = checked_url(url), timeout, retries
        if not 0 < timeout < math.inf or retries < 0:
            raise GraftError(f"timeout={timeout} and retries={retries} cannot be: give it time, and 0 retries or more.")
        self.headers = {"Accept": "application/json", "User-Agent": f"taskgraft/{__version__}"}
        token = (os.environ.get(TOKEN, "") if token is None else token).strip()
        if not all("!" <= letter <= "~" for letter in token):
            raise GraftError("the token holds a space or a letter that is not ASCII: copy it again.")
        if token:
            self.headers["Authorization"] = f"Bearer {token}"

    def predict(self, task: str, text: Text, pair: str | None) -> Talk[Answer]:
        record = {name: value for name, value in record_of(Question(task, text, pair)).items() if name != "task"}
        reply = yield from self.sent(Call("POST", f"{path_of(task)}/predict", record, timed=True))
        return self.answer_in(reply, self.read(reply))

    def predict_many(self, questions: Iterable[Asking]) -> Talk[list[Answer | GraftError]]:
        found: list[Answer | GraftError] = []
        for part in list(parts([record_of(question_of(asking)) for asking in questions])):
            reply = yield from self.sent(Call("POST", "/v1/predict", {"questions": part}, timed=True))
            answers = self.field(reply, "answers", list)
            if len(answers) != len(part):
                raise self.foreign(reply)
            for one in answers:
                failed = one.get("error") if isinstance(one, dict) else None
                found.append(error_of(failed, 1.0) if isinstance(failed, dict) else self.answer_in(reply, one))
        return found

    def page(self, after: str | None, prefix: str) -> Talk[tuple[list[dict[str, Any]], str | None]]:
        """Some of the tasks, and the name after which the next ones come."""
        wanted = {"after": after, "prefix": prefix}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in wanted.items() if value)
        reply = yield from self.sent(Call("GET", f"/v1/tasks?{query}" if query else "/v1/tasks"))
        return self.field(reply, "tasks", list), self.read(reply).get("next")

    def task(self, name: str) -> Talk[dict[str, Any]]:
        return self.read((yield from self.sent(Call("GET", path_of(name)))))

    def put(self, name: str, archive: bytes) -> Talk[int]:
        reply = yield from self.sent(Call("PUT", path_of(name), archive=archive, repeatable=False))
        return self.field(reply, "version", int)

    def rollback(self, name: str, version: int | None) -> Talk[int]:
        record = {} if version is None else {"version": version}
        reply = yield from self.sent(Call("POST", f"{path_of(name)}/rollback", record, repeatable=False))
        return self.field(reply, "version", int)

    def remove(self, name: str) -> Talk[None]:
        yield from self.sent(Call("DELETE", path_of(name), repeatable=False))

    def stats(self) -> Talk[dict[str, Any]]:
        return self.read((yield from self.sent(Call("GET", "/v1/stats"))))

    def ready(self) -> Talk[bool]:
        reply = yield Step(self.request(Call("GET", "/readyz"), self.timeout))
        return isinstance(reply, httpx.Response) and reply.status_code == httpx.codes.OK

    # -- sending

    def sent(self, call: Call) -> Talk[httpx.Response]:
        """The reply to a call, tried again where that may help and there is time; what is in its way is raised."""
        deadline, pause, tries = time.monotonic() + self.timeout, 0.0, 0
        while True:
            reply = yield Step(self.request(call, deadline - time.monotonic() - pause), pause)
            if isinstance(reply, httpx.Response) and reply.is_success:
                return reply
            error = self.failure(reply)
            again = isinstance(error, Overloaded | Closed) or (call.repeatable and isinstance(reply, BROKEN))
            least, left = max(PAUSE * 2**tries, seconds_named(reply)), deadline - time.monotonic()
            if not again or tries == self.retries or least >= left:
                raise error from (reply if isinstance(reply, Exception) else None)
            pause = least + random.random() * min(least, left - least) / 2  # so that not all come back at once
            tries += 1

    def request(self, call: Call, left: float) -> httpx.Request:
        left = max(left, 0.001)
        headers, content = dict(self.headers), call.archive
        if call.archive is not None:
            headers["Content-Type"] = "application/zip"
        elif call.record is not None:
            headers["Content-Type"] = "application/json"
            waits = {"timeout": min(MARGIN * left, LONGEST)} if call.timed else {}
            content = written({**call.record, **waits})
        limits = {"timeout": httpx.Timeout(left).as_dict()}
        return httpx.Request(call.method, self.url + call.path, headers=headers, content=content, extensions=limits)

    # -- reading

    def read(self, reply: httpx.Response) -> dict[str, Any]:
        try:
            record = reply.json()
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise self.foreign(reply)
        return record

    def field(self, reply: httpx.Response, name: str, kind: type[T]) -> T:
        value = self.read(reply).get(name)
        if not isinstance(value, kind):
            raise self.foreign(reply)
        return value

    def answer_in(self, reply: httpx.Response, record: Any) -> Answer:
        try:
            return Answer.from_json(record)
        except TypeError:
            raise self.foreign(reply) from None

    def failure(self, reply: Reply) -> GraftError:
        """What a reply that is no answer means, as the engine would say it."""
        if isinstance(reply, httpx.TimeoutException) and not isinstance(reply, httpx.ConnectTimeout):
            return Expired(f"{self.url} gave no answer within {self.timeout:g} seconds: ask again, or give it longer.")
        if not isinstance(reply, httpx.Response):
            seen = str(reply).rstrip(".") or type(reply).__name__
            return GraftError(f"no server answers at {self.url} ({seen}): run `taskgraft serve`, or check the address.")
        wait = seconds_named(reply) or 1.0
        try:
            return error_of(self.field(reply, "error", dict), wait)
        except GraftError as foreign:
            busy = reply.status_code == httpx.codes.TOO_MANY_REQUESTS  # perhaps a proxy's
            return Overloaded(f"{self.url} is busy: ask again in {wait:g} seconds.", wait) if busy else foreign

    def foreign(self, reply: httpx.Response) -> GraftError:
        seen = f"{reply.status_code} {reply.reason_phrase}".strip()
        return GraftError(f"{self.url} answered {seen}, and not as taskgraft's server does: check the address.")


# -- what is sent


def checked_url(url: str) -> str:
    try:
        found = httpx.URL(url)
        usable = found.scheme in ("http", "https") and bool(found.host)
        usable = usable and not (found.userinfo or found.query or found.fragment)
    except (httpx.InvalidURL, TypeError):
        usable = False
    if not usable:
        raise GraftError(f"{url!r} is no address of a server: give one such as {URL}.")
    return url.rstrip("/")


def path_of(task: str) -> str:
    """The path of a task, TASK or JOINT/TASK; a name that no task can have could lead elsewhere."""
    try:
        for part in task.split("/", 1) if isinstance(task, str) else [task]:
            check_task_name(part)
    except GraftError as error:
        raise UnknownTask(str(error)) from None
    return f"/v1/tasks/{quote(task)}"


def record_of(question: Question) -> dict[str, Any]:
    text = question.text if isinstance(question.text, str) else words_of(question)
    record = {"task": question.task, "text": text}
    return record if question.pair is None else {**record, "pair": question.pair}


def words_of(question: Question) -> list[str]:
    words: list[Any] = list(question.text) if isinstance(question.text, Iterable) else [None]
    if not all(isinstance(word, str) for word in words):
        raise GraftError(f"task {question.task!r} was asked about no text: give a string, or a list of words.")
    return words


def parts(records: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """As many questions at a time as a server takes."""
    part: list[Mapping[str, Any]] = []
    room = MOST_BYTES
    for record in records:
        size = len(written(record)) + 1
        if part and (len(part) == MOST_QUESTIONS or size > room):
            yield part
            part, room = [], MOST_BYTES
        part.append(record)
        room -= size
    if part:
        yield part


def written(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        about = f"a text for task {record['task']!r}" if "task" in record else "a text"
        raise GraftError(f"{about} holds half of a surrogate pair: it is not Unicode.") from error
    except (TypeError, ValueError) as error:
        raise GraftError(f"a question cannot be written as JSON ({error}): give texts.") from error


def zipped(graft: Graft | str | PathLike[str]) -> bytes:
    """The two files of a graft in one, as the server takes them."""
    from taskgraft.grafts.graft import RECORD, TENSORS, Graft, encode, explained

    if isinstance(graft, Graft):
        files = encode(graft)
    else:
        files = {}
        folder = Path(graft).resolve()  # of one version, whatever is put under its name meanwhile
        for file in (RECORD, TENSORS):
            with explained(Path(graft).name, folder, file) as path:
                files[file] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in (RECORD, TENSORS):
            archive.writestr(file, files[file])
    return buffer.getvalue()


# -- what comes back


def error_of(record: Mapping[str, Any], wait: float) -> GraftError:
    """The error that a server describes."""
    kind, message = record.get("type"), str(record.get("message"))
    if kind == "overloaded":
        return Overloaded(message, wait)
    if kind == "failed":
        return Failed(message, str(record.get("id")))
    return KINDS.get(str(kind), GraftError)(message)


def seconds_named(reply: Reply) -> float:
    """How long a server wants to be left alone; 0 where it does not say so in seconds."""
    value = reply.headers.get("Retry-After", "") if isinstance(reply, httpx.Response) else ""
    return float(value) if value.replace(".", "", 1).isdecimal() else 0.0
