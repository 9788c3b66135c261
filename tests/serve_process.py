"""Servers in processes of their own, with faults planted where a test asks for it, and plain ways to talk to them.

A process that has imported everything forks each server, which is then there in a second instead of ten. Whatever
becomes of a test, or of the test run, its servers end: each of them dies with the process that started it.
"""

from __future__ import annotations

import atexit
import ctypes
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

SECONDS = 30  # after which what has not come never will
RAISES, SLOW = "9", "8"  # words at which a planted backbone raises, or takes its time
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


# -- in the process that forks


def fork_servers() -> None:
    """Fork a server for each line of stdin, which says how; the server's parent waits and writes its exit code down."""
    import transformers.models.bert.modeling_bert  # noqa: F401

    import taskgraft.cli
    import taskgraft.cli.serve
    import taskgraft.serving.app
    import taskgraft.serving.serve
    import taskgraft.training.predict  # noqa: F401

    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        wanted = json.loads(line)
        folder = Path(wanted["folder"])
        pid = os.fork()
        if not pid:
            be_server(wanted, folder)
        write_whole(folder / "pid", str(pid))
        write_whole(folder / "code", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)


def be_server(wanted: Mapping[str, Any], folder: Path) -> None:
    die_with_parent()
    code: Any = 70
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(wanted["env"])
        if wanted["descriptors"]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted["descriptors"],) * 2)
        plant(**wanted["plants"])
        from taskgraft.cli import app

        app(["serve", *wanted["options"]])
    except SystemExit as left:
        code = left.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def plant(
    slow_s: float = 0,
    disk_s: float = 0,
    limits: Mapping[str, float] | None = None,
    waits: Mapping[str, float] | None = None,
) -> None:
    """A backbone with faults, a disk that takes its time, limits that the command has no options for, shorter waits."""
    import taskgraft.cli.serve as command
    from taskgraft.grafts import store
    from taskgraft.serving import app, serve
    from taskgraft.serving.bodies import Limits

    if limits:
        app.Limits = partial(Limits, **limits)  # type: ignore[misc, assignment, arg-type]
    for name, seconds in (waits or {}).items():
        setattr(serve, name, seconds)
    if disk_s:
        sync = store.sync
        store.sync = lambda path: (time.sleep(disk_s), sync(path))[1]  # type: ignore[assignment]
    if slow_s:
        load = command.backbone_of
        command.backbone_of = lambda *given: planted(load(*given), slow_s)  # type: ignore[assignment]


def planted(backbone: Any, slow_s: float) -> Any:
    """A backbone that raises at one word and is slow at another."""
    raises, slow = backbone.tokenizer.convert_tokens_to_ids([RAISES, SLOW])

    def look(model: Any, given: Any, named: Mapping[str, Any]) -> None:
        ids = named["input_ids"]
        if (ids == slow).any():
            time.sleep(slow_s)
        if (ids == raises).any():
            raise RuntimeError("a fault that was planted")

    backbone.model.register_forward_pre_hook(look, with_kwargs=True)
    return backbone


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


# -- in the process of the tests


@cache
def forker() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET},
        start_new_session=True,  # Ctrl-C is for the tests
    )
    atexit.register(process.communicate)
    return process


@dataclass
class Server:
    """A `taskgraft serve` that runs."""

    folder: Path  # of what it writes
    pid: int = 0
    port: int = 0
    tasks: int = 0

    @property
    def code(self) -> int | None:
        """How it ended; None: it has not."""
        path = self.folder / "code"
        return int(path.read_text()) if path.exists() else None

    @property
    def log(self) -> str:
        return (self.folder / "stderr").read_text()

    def lines(self, **wanted: Any) -> list[dict[str, Any]]:
        """The lines of its log that hold these values."""
        found = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in found if all(line.get(key) == value for key, value in wanted.items())]

    @property
    def rss(self) -> int:
        """Bytes of memory that it has."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def ended(self, seconds: float = SECONDS) -> int:
        """Its exit code, once it has ended by itself."""
        until(lambda: self.code is not None, f"the end of the server; its log ends {self.log[-2000:]!r}", seconds)
        assert self.code is not None
        return self.code

    def end(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended()

    def ask(self, method: str, path: str, body: Any = None, seconds: float = SECONDS, **headers: str) -> Reply:
        """One request on a connection of its own; underscores in names of headers are dashes."""
        return exchange(self.port, written(method, path, body, **headers), seconds)

    def predict(self, task: str, text: Any, pair: str | None = None, seconds: float = SECONDS) -> Reply:
        return exchange(self.port, question(task, text, pair), seconds)

    def mixed(self, *askings: tuple[Any, ...]) -> Any:
        """What the route for any tasks says of (task, text, pair), in order."""
        body = {"questions": [asked_of(*asking) for asking in askings], "timeout": 10}
        reply = self.ask("POST", "/v1/predict", body)
        assert reply.status == 200, reply
        return reply.json["answers"]


@contextmanager
def serving(
    folder: Path,
    store: Path,
    backbone: str | Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    descriptors: int = 0,
    **plants: Any,
) -> Iterator[Server]:
    """A server that is ready; it is killed in the end if it still runs."""
    folder.mkdir(parents=True)
    words = ["--store", str(store), "--backbone", str(backbone), "--port", "0", "--json", *options]
    known = {"TASKGRAFT_TOKEN": "", "TASKGRAFT_ADMIN_TOKEN": "", **(env or {})}
    wanted = {"folder": str(folder), "options": words, "env": known, "descriptors": descriptors, "plants": plants}
    stdin = forker().stdin
    assert stdin is not None
    stdin.write(json.dumps(wanted) + "\n")
    stdin.flush()
    server = Server(folder)
    started = (folder / "pid").exists
    until(lambda: started() or forker().poll() is not None, "a process", 2 * SECONDS)  # all imports may be ahead of it
    assert started(), "no server can be started: what it imports cannot be imported"
    server.pid = int((folder / "pid").read_text())
    try:
        said = folder / "stdout"
        until(lambda: server.code is not None or (said.exists() and said.read_text().endswith("\n")), "a server")
        ready = json.loads(said.read_text() or "{}")
        assert "url" in ready, f"the server did not start: {ready} {server.log[-2000:]}"
        server.port, server.tasks = int(ready["url"].rpartition(":")[2]), ready["tasks"]
        yield server
    finally:
        server.kill()


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} seconds"
        time.sleep(0.01)


# -- talking to it


class Cut(ConnectionError):  # noqa: N818
    """A connection that ended before a whole answer was there."""


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What it says is wrong, in the one shape that this has."""
        error: dict[str, Any] = self.json["error"]
        assert set(self.json) == {"error"} and set(error) - {"id"} == {"type", "message"}, error
        assert error["message"].rstrip(".") and ("id" in error) == (self.status == 500), error
        return error


def written(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A request as it goes over the wire; a body that is no bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {"Host": "localhost"} | ({} if body is None else {"Content-Type": "application/json"})
    if body is not None or method in ("POST", "PUT"):
        named["Content-Length"] = str(len(raw))
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + raw


def asked_of(task: str, text: Any, pair: str | None = None) -> dict[str, Any]:
    return {"task": task, "text": text} | ({} if pair is None else {"pair": pair})


def question(task: str, text: Any, pair: str | None = None) -> bytes:
    """A question for a task, as it goes over the wire."""
    body = asked_of(task, text, pair)
    return written("POST", f"/v1/tasks/{body.pop('task')}/predict", body)


def connect(port: int, seconds: float = SECONDS) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), seconds)


def exchange(port: int, data: bytes, seconds: float = SECONDS) -> Reply:
    with connect(port, seconds) as connection:
        started = time.monotonic()
        with suppress(ConnectionError):  # refused before all of it was read: the reason may be there
            connection.sendall(data)
        return read(connection, started, data.partition(b" ")[0].decode("latin-1"))


def read(connection: socket.socket, started: float | None = None, method: str = "GET") -> Reply:
    """The answer that comes next; `Cut` if it is not a whole one."""
    started = time.monotonic() if started is None else started
    reply = http.client.HTTPResponse(connection, method=method)
    try:
        reply.begin()
        body = reply.read()
    except (http.client.HTTPException, ConnectionError) as error:
        raise Cut(f"{type(error).__name__}: {error}") from error
    finally:
        reply.close()
    headers = {name.lower(): value for name, value in reply.getheaders()}
    return Reply(reply.status, headers, body, time.monotonic() - started)


@dataclass(frozen=True)
class Asked:
    """A request of a load, and what became of it."""

    about: Any  # which question it was
    sent: float | None  # when all of it was on its way, in the seconds of time.monotonic; None: it never was
    got: Reply | Exception


class Load:
    """Clients who ask without pause, half of them on a connection that they keep, and write down what they get.

    `questions` gives, for each question, what it is about and the request as it goes over the wire.
    """

    def __init__(self, port: int, questions: Sequence[tuple[Any, bytes]], clients: int = 8) -> None:
        self.port, self.questions, self.asked = port, questions, list[Asked]()
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> list[Asked]:
        self.stopped.set()
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a client waits for ever"
        return self.asked

    def wait(self, more: int) -> None:
        """Until so many more have been answered."""
        wanted = len(self.asked) + more
        until(lambda: len(self.asked) >= wanted, f"{more} answers")

    def run(self, number: int) -> None:
        draw, keeps = random.Random(number), number % 2 == 0
        connection: socket.socket | None = None
        while not self.stopped.is_set():
            about, data = draw.choice(self.questions)
            sent = None
            try:
                connection = connection or connect(self.port)
                connection.sendall(data)
                sent = time.monotonic()
                got: Reply | Exception = read(connection)
            except Exception as error:
                got = error
            self.asked.append(Asked(about, sent, got))
            if not keeps or isinstance(got, Exception) or got.headers.get("connection") == "close":
                if connection is not None:
                    connection.close()
                connection = None
            if isinstance(got, Exception):
                self.stopped.wait(0.02)  # it would be refused thousands of times a second
        if connection is not None:
            connection.close()


if __name__ == "__main__":
    fork_servers()
