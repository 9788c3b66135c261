"""The client says the same things as the engine, whatever happens to a server on the way."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import uvicorn

import taskgraft as tg
from taskgraft.errors import Closed, Expired, Failed, GraftError, Overloaded, UnknownTask, Unreadable
from taskgraft.serving import calls
from taskgraft.serving.answers import Answer, Question
from taskgraft.serving.app import create_app
from taskgraft.serving.client import AsyncClient, Client
from taskgraft.serving.guard import Tokens

import tiny
from serving import World, engine_on, reader, small, until

Handler = Callable[[httpx.Request], httpx.Response]
SPAM = {"task": "spam", "version": 2, "kind": "classification", "label": "yes", "probability": 0.75,
        "probabilities": {"yes": 0.75, "no": 0.25}}  # fmt: skip


class Awaited:
    """An AsyncClient that is called like a Client."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            async def run() -> Any:
                found = getattr(self.client, name)(*arguments, **options)
                return [one async for one in found] if hasattr(found, "__aiter__") else await found

            return asyncio.run(run())

        return call


class Server:
    """Answers by what it is told, and remembers what it was asked."""

    def __init__(self, *replies: httpx.Response | Exception | Handler) -> None:
        self.replies, self.seen, self.times = list(replies), list[httpx.Request](), list[float]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        self.times.append(time.monotonic())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, httpx.Response):
            return reply(request)
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)  # each is read once

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.seen]


@pytest.fixture(params=[Client, Awaited], ids=["blocking", "awaited"])
def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.delenv("TASKGRAFT_TOKEN", raising=False)
    monkeypatch.setattr(calls, "PAUSE", 0.001)
    return lambda server, **options: request.param(transport=httpx.MockTransport(server), **options)


def ok(record: Any = SPAM) -> httpx.Response:
    return httpx.Response(200, json=record)


def refusal(status: int, kind: str, wait: str | None = None, **more: str) -> httpx.Response:
    headers = {} if wait is None else {"Retry-After": wait}
    return httpx.Response(status, json={"error": {"type": kind, "message": f"It is {kind}.", **more}}, headers=headers)


def echo(request: httpx.Request) -> httpx.Response:
    """Every question's text comes back as its answer."""
    asked = json.loads(request.content)["questions"]
    return ok({"answers": [{"task": q["task"], "version": 1, "kind": "text", "answer": q["text"]} for q in asked]})


# -- asking


def test_a_question_and_its_answer(connect: Callable[..., Any]) -> None:
    server = Server(ok())
    answer = connect(server, url="https://grafts.example/base/", token=" secret\n").predict("spam", "Grüße")
    assert answer == Answer(**SPAM) and answer.label == "yes"
    (request,) = server.seen
    assert request.method == "POST" and str(request.url) == "https://grafts.example/base/v1/tasks/spam/predict"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"
    sent = json.loads(request.content)
    assert sent.pop("timeout") == pytest.approx(0.95 * 30, rel=0.01) and sent == {"text": "Grüße"}
    assert "Grüße".encode() in request.content, "not escaped: a body's size is limited"


def test_pairs_and_words(connect: Callable[..., Any]) -> None:
    server = Server(ok())
    client = connect(server)
    client.predict("nli", "a", "b")
    client.predict("names", ("Ada", "spoke"))
    assert [{**body, "timeout": 0} for body in server.bodies] == [
        {"text": "a", "pair": "b", "timeout": 0},
        {"text": ["Ada", "spoke"], "timeout": 0},
    ]
    assert "Authorization" not in server.seen[0].headers


@pytest.mark.parametrize("name", ["house/reviews", "two words", "Übung", "日本-1.b_c"])
def test_names_arrive_as_they_are(connect: Callable[..., Any], name: str) -> None:
    server = Server(ok())
    client = connect(server)
    client.predict(name, "x")
    client.task(name)
    assert [unquote(request.url.raw_path.decode()) for request in server.seen] == [
        f"/v1/tasks/{name}/predict",
        f"/v1/tasks/{name}",
    ]
    assert all(request.url.raw_path.isascii() and b" " not in request.url.raw_path for request in server.seen)


@pytest.mark.parametrize("name", ["", "..", "../stats", "a/../b", "a/b/c", "a?limit=1", "a#b", "/spam", "spam/", None])
def test_names_that_lead_elsewhere_are_not_sent(connect: Callable[..., Any], name: Any) -> None:
    server = Server(ok())
    client = connect(server)
    for ask in (lambda: client.predict(name, "x"), lambda: client.task(name), lambda: client.remove(name)):
        with pytest.raises(UnknownTask):
            ask()
    assert not server.seen


def test_many_questions_in_few_calls(connect: Callable[..., Any]) -> None:
    server = Server(echo)
    found = connect(server).predict_many([("spam", str(n)) for n in range(600)])
    assert [one.answer for one in found] == [str(n) for n in range(600)]
    assert [len(body["questions"]) for body in server.bodies] == [256, 256, 88]
    assert connect(Server(echo)).predict_many([]) == []


def test_calls_stay_under_the_limit_of_a_body(connect: Callable[..., Any]) -> None:
    server = Server(echo)
    texts = [letter * 90_000 for letter in "aéb日c" * 4]
    assert [one.answer for one in connect(server).predict_many(("spam", text) for text in texts)] == texts
    assert len(server.seen) > 1 and all(len(request.content) < 2**20 for request in server.seen)


def test_what_one_question_lacks_does_not_hurt_the_others(connect: Callable[..., Any]) -> None:
    gone = {"task": "tone", "error": {"type": "unknown_task", "message": "No such task."}}
    broke = {"task": "spam", "error": {"type": "failed", "message": "A batch failed.", "id": "ab12"}}
    asked = [("spam", "x"), ("tone", "x", None), Question("nli", "a", "b")]
    server = Server(ok({"answers": [SPAM, gone, broke]}))
    first, second, third = connect(server).predict_many(asked)
    assert first.label == "yes"
    assert type(second) is UnknownTask and str(second) == "No such task."
    assert type(third) is Failed and third.id == "ab12"
    assert server.bodies[0]["questions"] == [
        {"task": "spam", "text": "x"},
        {"task": "tone", "text": "x"},
        {"task": "nli", "text": "a", "pair": "b"},
    ]


@pytest.mark.parametrize("bad", ["spam", ("spam",), ("a", "b", "c", "d"), (1, "x"), ("spam", 7), ("spam", [1]), None])
def test_what_is_no_question_is_refused_before_anything_is_sent(connect: Callable[..., Any], bad: Any) -> None:
    server = Server(echo)
    with pytest.raises(GraftError, match=r"no question: give \(task, text\)|no text: give a string"):
        connect(server).predict_many([*[("spam", "x")] * 300, bad])
    assert not server.seen


def test_half_a_surrogate_pair_is_refused_before_anything_is_sent(connect: Callable[..., Any]) -> None:
    server = Server(echo)
    with pytest.raises(GraftError, match="holds half of a surrogate pair"):
        connect(server).predict("spam", "\ud83d")
    with pytest.raises(GraftError, match="text for task 'tone' holds half of a surrogate pair"):
        connect(server).predict_many([*[("spam", "x")] * 300, ("tone", "\ud83d")])
    assert not server.seen


# -- errors


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (404, "unknown_task", UnknownTask),
        (503, "unreadable", Unreadable),
        (504, "expired", Expired),
        (500, "failed", Failed),
        (422, "invalid_request", GraftError),
        (401, "unauthorized", GraftError),
        (403, "forbidden", GraftError),
        (409, "conflict", GraftError),
        (413, "too_large", GraftError),
        (404, "not_found", GraftError),
        (418, "of a later version", GraftError),
    ],
)
def test_errors_are_those_of_the_engine_and_final(
    connect: Callable[..., Any], status: int, kind: str, expected: type[GraftError]
) -> None:
    server = Server(refusal(status, kind, id="ab12"))
    with pytest.raises(GraftError, match=f"It is {kind}.") as found:
        connect(server).predict("spam", "x")
    assert type(found.value) is expected and len(server.seen) == 1
    assert getattr(found.value, "id", "ab12") == "ab12"


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(502, text="<h1>Bad Gateway</h1>"),
        httpx.Response(301, headers={"Location": "https://elsewhere.example/"}),
        httpx.Response(200, text="<h1>Welcome</h1>"),
        httpx.Response(200, content=b"\xff\xfe"),
        ok([SPAM]),
        ok({"hello": "world"}),
        httpx.Response(500, json={"error": "a word"}),
    ],
    ids=["proxy", "redirect", "page", "bytes", "list", "object", "error"],
)
def test_another_server_at_the_address_is_told_apart(connect: Callable[..., Any], reply: httpx.Response) -> None:
    server = Server(reply)
    with pytest.raises(GraftError, match=f"answered {reply.status_code} .*check the address"):
        connect(server, token="secret").predict("spam", "x")
    assert len(server.seen) == 1


def test_answers_that_are_too_few_are_not_taken_for_others(connect: Callable[..., Any]) -> None:
    for answers in ([SPAM], [SPAM, 7], None):
        with pytest.raises(GraftError, match="not as taskgraft's server does"):
            connect(Server(ok({"answers": answers}))).predict_many([("spam", "a"), ("spam", "b")])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://u:secret@x", "http://x?a=b", "", 7])
def test_addresses_are_checked(url: Any) -> None:
    with pytest.raises(GraftError, match=r"no address of a server: give one such as http://127\.0\.0\.1:8000"):
        Client(url)


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"timeout": 0}, {"timeout": float("nan")}, {"timeout": float("inf")}, {"retries": -1}):
        with pytest.raises(GraftError, match="give it time, and 0 retries or more"):
            Client(**options)  # type: ignore[arg-type]
    for token in ("schlüssel", "two\nlines", "two words"):
        with pytest.raises(GraftError, match="a space or a letter that is not ASCII") as found:
            Client(token=token)
        assert token not in str(found.value)


def test_the_token_of_the_environment(connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKGRAFT_TOKEN", "outside")
    server = Server(ok())
    connect(server).predict("spam", "x")
    connect(server, token="given").predict("spam", "x")
    connect(server, token="").predict("spam", "x")
    assert [request.headers.get("Authorization") for request in server.seen] == [
        "Bearer outside",
        "Bearer given",
        None,
    ]


# -- trying again


def test_overload_is_waited_out(connect: Callable[..., Any]) -> None:
    server = Server(refusal(429, "overloaded", "0.05"), httpx.Response(429, text="busy"), ok())
    assert connect(server).predict("spam", "x").label == "yes"
    assert len(server.seen) == 3
    assert server.times[1] - server.times[0] >= 0.05, "not before the server said"
    told = [body["timeout"] for body in server.bodies]
    assert told[0] > told[1] > told[2], "the server is told what time is left"


@pytest.mark.parametrize(("timeout", "longest"), [(100, 15), (11, 10.5)])
def test_waits_are_not_all_alike(timeout: float, longest: float) -> None:
    pauses = set()
    for _ in range(50):
        talk = calls.Calls(calls.URL, None, timeout, 4).stats()
        next(talk)
        pauses.add(talk.send(refusal(429, "overloaded", "10")).pause)
    assert len(pauses) == 50 and min(pauses) >= 10 and max(pauses) <= longest
    assert max(pauses) - min(pauses) > (longest - 10) / 2


def test_overload_that_lasts_is_raised(connect: Callable[..., Any]) -> None:
    server = Server(refusal(429, "overloaded", "0.01"))
    with pytest.raises(Overloaded, match="It is overloaded") as found:
        connect(server, retries=2).predict("spam", "x")
    assert found.value.retry_after == 0.01 and len(server.seen) == 3


def test_a_wait_beyond_the_timeout_is_not_begun(connect: Callable[..., Any]) -> None:
    server = Server(refusal(429, "overloaded", "60"))
    started = time.monotonic()
    with pytest.raises(Overloaded) as found:
        connect(server, timeout=5).predict("spam", "x")
    assert time.monotonic() - started < 2 and found.value.retry_after == 60 and len(server.seen) == 1


def test_all_tries_together_take_no_longer_than_the_timeout(connect: Callable[..., Any]) -> None:
    server = Server(refusal(429, "overloaded", "0.1"))
    started = time.monotonic()
    with pytest.raises(Overloaded):
        connect(server, timeout=0.5, retries=1000).predict("spam", "x")
    assert time.monotonic() - started < 5 and 2 <= len(server.seen) <= 5


BREAKS = [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("closed.")]


@pytest.mark.parametrize("trouble", [*BREAKS, refusal(503, "closing")])
def test_questions_outlive_a_restart(connect: Callable[..., Any], trouble: Any) -> None:
    server = Server(trouble, trouble, ok())
    assert connect(server).predict("spam", "x").label == "yes"
    server = Server(trouble, echo)
    assert connect(server).predict_many([("spam", "x")])[0].answer == "x"


def test_a_server_that_stays_away(connect: Callable[..., Any]) -> None:
    server = Server(httpx.ConnectError("[Errno 111] Connection refused"))
    with pytest.raises(GraftError, match=r"no server answers at http://127.*\(.*refused\): run `taskgraft serve`"):
        connect(server).predict("spam", "x")
    assert len(server.seen) == 5
    server = Server(refusal(503, "closing"))
    with pytest.raises(Closed, match="It is closing"):
        connect(server, retries=0).stats()
    assert len(server.seen) == 1


@pytest.mark.parametrize("trouble", BREAKS)
def test_changes_are_not_made_twice(connect: Callable[..., Any], trouble: Exception, tmp_path: Path) -> None:
    files_in(tmp_path)
    for change in (
        lambda client: client.put("spam", tmp_path),
        lambda client: client.rollback("spam"),
        lambda client: client.remove("spam"),
    ):
        server = Server(trouble)
        with pytest.raises(GraftError, match="no server answers"):
            change(connect(server))
        assert len(server.seen) == 1
    server = Server(refusal(503, "closing"), refusal(429, "overloaded", "0.01"), ok({"task": "spam", "version": 3}))
    assert connect(server).put("spam", tmp_path) == 3, "these say that nothing was done"


def test_an_answer_that_takes_too_long(connect: Callable[..., Any]) -> None:
    server = Server(httpx.ReadTimeout("slow"))
    with pytest.raises(Expired, match=r"no answer within 0\.5 seconds: ask again, or give it longer"):
        connect(server, timeout=0.5).predict("spam", "x")
    assert len(server.seen) == 1 and server.seen[0].extensions["timeout"]["read"] == pytest.approx(0.5, abs=0.1)
    server = Server(ok())
    connect(server, timeout=1000).predict("spam", "x")
    assert server.bodies[0]["timeout"] == 300, "the most that a server takes"


# -- tasks


def test_all_pages_of_tasks(connect: Callable[..., Any]) -> None:
    pages = {"": (["a", "b"], "b"), "b": (["c d"], "c d"), "c d": (["e"], None)}

    def reply(request: httpx.Request) -> httpx.Response:
        names, following = pages[request.url.params.get("after", "")]
        return ok({"tasks": [{"name": name} for name in names], "total": 4, "next": following})

    server = Server(reply)
    assert [task["name"] for task in connect(server).tasks()] == ["a", "b", "c d", "e"]
    assert len(list(connect(server).tasks(prefix="a&b"))) == 4
    assert [request.url.params.get("prefix") for request in server.seen] == [None] * 3 + ["a&b"] * 3


def files_in(folder: Path) -> dict[str, bytes]:
    files = {"graft.json": b"{}", "graft.safetensors": b"weights"}
    for name, content in {**files, "README.md": b"a card", "other.txt": b"mine"}.items():
        (folder / name).write_bytes(content)
    return files


def unzipped(request: httpx.Request) -> dict[str, bytes]:
    assert request.headers["Content-Type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(request.content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_folder_is_sent_as_its_two_files(connect: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / ".versions").mkdir()
    files = files_in(tmp_path / ".versions")
    (tmp_path / "spam").symlink_to(".versions")
    server = Server(httpx.Response(201, json={"task": "spam", "version": 3}))
    assert connect(server).put("spam", tmp_path / "spam") == 3
    assert server.seen[0].method == "PUT" and unzipped(server.seen[0]) == files
    for path, reason in ((tmp_path / "nowhere", "has no graft.json"), (tmp_path, "has no graft.json")):
        with pytest.raises(GraftError, match=reason):
            connect(server).put("spam", path)
    assert len(server.seen) == 1


def test_a_folder_that_is_replaced_meanwhile_is_sent_whole(
    connect: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        for file in ("graft.json", "graft.safetensors"):
            (tmp_path / version / file).write_text(version)
    link, read = tmp_path / "spam", Path.read_bytes
    link.symlink_to("1")

    def replaced_after(path: Path) -> bytes:
        found = read(path)
        link.unlink()
        link.symlink_to("2")
        return found

    monkeypatch.setattr(Path, "read_bytes", replaced_after)
    server = Server(ok({"task": "spam", "version": 3}))
    connect(server).put("spam", link)
    assert unzipped(server.seen[0]) == {"graft.json": b"1", "graft.safetensors": b"1"}


def test_a_graft_is_sent_from_memory(connect: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny.backbone().model
    tg.graft(model, tg.Adapter(size=2), {"mood": 2})
    graft = tg.get_graft(model, "mood")
    server = Server(httpx.Response(201, json={"task": "mood", "version": 1}))
    assert connect(server).put("mood", graft) == 1
    for name, content in unzipped(server.seen[0]).items():
        (tmp_path / "mood").mkdir(exist_ok=True)
        (tmp_path / "mood" / name).write_bytes(content)
    again = tg.load_graft(tmp_path / "mood")
    assert all(again.tensors[name].equal(value) for name, value in graft.tensors.items())


def test_rolling_back_and_removing(connect: Callable[..., Any]) -> None:
    server = Server(ok({"task": "a b", "version": 1}))
    client = connect(server)
    assert client.rollback("a b") == 1 and client.rollback("a b", 1) == 1
    assert server.bodies == [{}, {"version": 1}]
    assert [(r.method, r.url.raw_path) for r in server.seen] == [("POST", b"/v1/tasks/a%20b/rollback")] * 2
    server = Server(httpx.Response(204))
    assert connect(server).remove("a b") is None
    assert (server.seen[0].method, server.seen[0].url.raw_path) == ("DELETE", b"/v1/tasks/a%20b")


def test_stats_and_readiness(connect: Callable[..., Any]) -> None:
    assert connect(Server(ok({"waiting": 3}))).stats() == {"waiting": 3}
    assert connect(Server(ok({"status": "ok"}))).ready() is True
    for trouble in (refusal(503, "closing"), httpx.ConnectError("refused")):
        server = Server(trouble)
        assert connect(server).ready() is False
        assert len(server.seen) == 1, "whoever waits for a server asks again"


# -- what it needs


def test_a_client_needs_no_model_and_no_pytorch() -> None:
    code = "import sys; from taskgraft.serving.client import Client; Client(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_without_its_package_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "taskgraft.serving.calls")
    with pytest.raises(GraftError, match=r"pip install 'taskgraft\[serve\]'"):
        importlib.import_module("taskgraft.serving.calls")


# -- with the server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Two tasks in a store, one of them with a name that an address cannot hold as it is."""
    world = World(tmp_path_factory.mktemp("store"), reader())
    world.put(small(reader(), 1), "mood")
    world.put(small(reader(), 2), "zwei wörter")
    return world


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    with engine_on(world.folder) as engine:
        app = create_app(engine, tokens=Tokens.of(["ask"], ["change"]))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        until(lambda: server.started, "the server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_a_server_answers_as_its_engine_would(url: str, world: World) -> None:
    asked = [("mood", "the film was good"), ("zwei wörter", "we saw it"), ("mood", "bad " * 30)]
    with Client(url, "ask") as client:
        until(client.ready, "the server")
        world.check([client.predict(*question) for question in asked], asked)
        *found, unknown, unfit = client.predict_many([*asked, ("nothing", "x"), ("mood", "x", "y")])
        world.check(found, asked)
        assert type(unknown) is UnknownTask and "'nothing'" in str(unknown)
        assert type(unfit) is GraftError and "leave `pair` out" in str(unfit)
        assert [task["name"] for task in client.tasks()] == ["mood", "zwei wörter"]
        assert [task["name"] for task in client.tasks("zwei")] == ["zwei wörter"]
        assert client.task("zwei wörter")["labels"] == ["2-a", "2-b", "2-c"]
        assert client.stats()["tasks"] == 2
        with pytest.raises(UnknownTask, match="there is no task 'nothing'"):
            client.predict("nothing", "x")
        with pytest.raises(GraftError, match=r"100,000 is the most: cut it"):
            client.predict("mood", "x" * 100_001)
        with pytest.raises(GraftError, match="this token is for asking"):
            client.remove("mood")
    with Client(url, "wrong") as client, pytest.raises(GraftError, match="this needs a token"):
        client.predict("mood", "x")


def test_many_questions_at_a_time_on_an_event_loop(url: str, world: World) -> None:
    asked = [("mood" if number % 3 else "zwei wörter", f"it was {number}") for number in range(40)]

    async def run() -> None:
        async with AsyncClient(url, "ask") as client:
            world.check(await asyncio.gather(*(client.predict(*question) for question in asked)), asked)
            world.check(await client.predict_many(asked), asked)
            assert [task["name"] async for task in client.tasks()] == ["mood", "zwei wörter"]
            assert await client.ready()

    asyncio.run(run())


def test_tasks_come_change_and_leave(url: str, world: World) -> None:
    with Client(url, "change") as client:
        with pytest.raises(UnknownTask, match="no name of a task that can be changed"):
            client.put("neu/er", small(reader(), 3))
        assert client.put("neu er", small(reader(), 3)) == 1
        assert client.put("neu er", world.folder / "mood") == 2
        assert client.predict("neu er", "x").version == 2 and client.predict("neu er", "x").label[0] == "1"
        assert client.rollback("neu er") == 1 and client.predict("neu er", "x").label[0] == "3"
        assert client.rollback("neu er", 2) == 2 and client.task("neu er")["versions"] == [1, 2]
        with pytest.raises(GraftError, match="no version 9"):
            client.rollback("neu er", 9)
        client.remove("neu er")
        with pytest.raises(UnknownTask):
            client.predict("neu er", "x")
        with pytest.raises(GraftError, match="was made for another backbone"):
            client.put("fremd", alien())
        assert "fremd" not in world.store


def alien() -> tg.Graft:
    """A graft of another backbone."""
    other = reader()
    for parameter in other.model.parameters():
        parameter.data.mul_(2)
    return small(other, 4)


def test_a_connection_that_is_closed_before_the_answer() -> None:
    body = json.dumps(SPAM).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def serve(listening: socket.socket) -> None:
        for reply in (b"", answer[:60], answer):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        with Client(f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            assert client.predict("spam", "x").label == "yes"
        thread.join()


def test_a_server_that_has_gone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Client(gone, timeout=2, retries=1) as client:
        assert not client.ready()
        with pytest.raises(GraftError, match=f"no server answers at {gone} .*Connection refused"):
            client.predict("mood", "x")
