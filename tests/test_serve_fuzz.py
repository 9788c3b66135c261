"""A server in a process of its own, and whatever may be sent to it: no 500, no hang, no growth, nothing let through."""

from __future__ import annotations

import io
import shutil
import socket
import stat
import threading
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import CacheConfig
from schemathesis.specs.openapi import checks

from taskgraft.serving.answers import Answer
from taskgraft.serving.app import create_app
from taskgraft.serving.calls import zipped
from taskgraft.serving.guard import Tokens

from malformed import BOSS, MIXED, PREDICT, SECRET, Mutator, packed
from serve_process import Cut, Reply, Server, connect, exchange, question, read, serving, written
from serving import World, engine_on, reader, readers, same, small

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = {"TASKGRAFT_TOKEN": "asking", "TASKGRAFT_ADMIN_TOKEN": "boss"}
ASK = {"Authorization": "Bearer asking"}
ZIP = {"Content_Type": "application/zip"}
GROWTH = 20 << 20  # bytes of memory that a fuzz may leave behind


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("world") / "store", reader())
    for name, graft in readers(made.alone).items():
        if name in ("mood", "nli", "entities", "where"):
            made.put(graft)
    return made


@pytest.fixture(scope="module")
def graft(world: World) -> bytes:
    return zipped(small(world.alone, 3, name="any"))


@contextmanager
def server_of(world: World, folder: Path, backbone: str, *options: str, **more: Any) -> Iterator[Server]:
    """A server on a copy of the store."""
    shutil.copytree(world.folder, folder / "place" / "store", symlinks=True)
    with serving(folder / "server", folder / "place" / "store", backbone, *options, **more) as made:
        yield made


# -- the description, and what is sent by it


@schemathesis.serializer("application/zip")
def as_bytes(context: Any, value: Any) -> bytes:
    return bytes(getattr(value, "data", str(value).encode()))


@pytest.mark.parametrize("guarded", [False, True], ids=["open", "guarded"])
def test_answers_are_as_the_description_says(world: World, tmp_path: Path, guarded: bool) -> None:
    """Requests that schemathesis makes of the description, right ones and wrong ones; half of them about a task."""
    shutil.copytree(world.folder, tmp_path / "store", symlinks=True)
    tokens, headers = (Tokens.of(["asking"], ["boss"]), BOSS) if guarded else (Tokens(), {})
    seen: Counter[int] = Counter()
    with engine_on(tmp_path / "store") as engine:
        schema = schemathesis.openapi.from_asgi(
            "/openapi.json",
            create_app(engine, tokens=tokens, hosts=None),
            config=schemathesis.Config(cache=CacheConfig(enabled=False), seed=0),
        )
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) >= 11
        for operation in operations:
            conforming = [
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
                *([checks.negative_data_rejection] if operation.method == "post" else []),
            ]

            @given(case=st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)))
            @settings(max_examples=40, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
            def run(case: Any) -> None:
                if case.path_parameters and case.method != "DELETE" and zlib.crc32(repr(case.body).encode()) % 2:
                    case.path_parameters["task"] = "mood"
                response = case.call(headers=headers)
                seen[response.status_code] += 1
                assert response.status_code < 500 or response.status_code == 504, response.text
                case.validate_response(response, checks=conforming, headers=headers)  # noqa: B023
                if response.status_code >= 400:
                    assert response.json()["error"]["message"]

            run()
    assert {200, 400, 404, 422} <= set(seen) and (401 in seen) == guarded, seen


# -- what is malformed


def check_reply(data: bytes, reply: Reply) -> None:
    """It is no failure of the server, and what is wrong is said in the one shape."""
    head = data[:200]
    assert reply.status < 500 or reply.status == 504, (head, data[-500:], reply)
    if reply.status >= 400 and not data.startswith(b"HEAD") and reply.headers["content-type"] == "application/json":
        assert reply.error, (head, reply)


class Sender:
    """Sends one request after the other on a connection that it keeps as long as the server does."""

    def __init__(self, server: Server) -> None:
        self.server, self.seen = server, Counter[int]()
        self.connection: socket.socket | None = None

    def send(self, data: bytes) -> Reply:
        fresh = self.connection is None
        self.connection = self.connection or connect(self.server.port, 20)
        try:
            with suppress(ConnectionError):
                self.connection.sendall(data)
            reply = read(self.connection, method=data.partition(b" ")[0].decode("latin-1"))
        except Cut:
            self.connection = None
            if fresh:
                raise
            return self.send(data)
        if reply.headers.get("connection") == "close":
            self.connection.close()
            self.connection = None
        check_reply(data, reply)
        self.seen[reply.status] += 1
        return reply


@contextmanager
def a_patient_client(world: World, server: Server) -> Iterator[None]:
    """Someone who asks all the while, and whose answers are right and come soon."""
    stopped, problems = threading.Event(), list[Any]()
    data, wanted = question("mood", "it was good"), world.said(("mood", "it was good"))
    data = data.replace(b"Host:", b"Authorization: Bearer asking\r\nHost:")

    def run() -> None:
        while not stopped.wait(0.05):
            try:
                reply = exchange(server.port, data, 10)
                same(Answer.from_json(reply.json), wanted)
                assert reply.seconds < 5
            except Exception as error:
                problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(20)
    assert not problems, problems


def fuzz(server: Server, world: World, make: Callable[[int], bytes], count: int, warm: int) -> Counter[int]:
    """Send so many; memory stays as it was after the first ones."""
    sender, before = Sender(server), 0
    with a_patient_client(world, server):
        for number in range(count):
            if number == warm:
                before = server.rss
            sender.send(make(number))
    assert server.rss - before < GROWTH, f"memory grew by {server.rss - before:,} bytes"
    assert SECRET not in server.log and "boss" not in server.log
    assert not server.lines(level="error")
    return sender.seen


@pytest.fixture(scope="module")
def fuzzed(world: World, backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(world, tmp_path_factory.mktemp("fuzzed"), backbone, env=TOKENS) as made:
        yield made


def test_malformed_questions(world: World, fuzzed: Server) -> None:
    mutator = Mutator(1)
    seen = fuzz(fuzzed, world, lambda number: mutator.question(), 1000, 400)
    assert {200, 400, 404, 415, 422} <= set(seen) and 500 < seen[400] + seen[422] < 950, seen


def test_places_that_are_not_there(world: World, fuzzed: Server) -> None:
    mutator = Mutator(2)
    seen = fuzz(fuzzed, world, lambda number: mutator.place(), 300, 100)
    assert {200, 404, 405} <= set(seen), seen


def test_malformed_grafts(world: World, fuzzed: Server, graft: bytes) -> None:
    """One that is taken in spite of all answers too, or says that it cannot be read."""
    mutator, asking = Mutator(3), Sender(fuzzed)

    def make(number: int) -> bytes:
        if number % 2:
            return mutator.upload(graft)
        body = {
            "questions": [{"task": f"fuzz{n}", "text": "good"} for n in range(5)] + [{"task": "mood", "text": "good"}]
        }
        return written("POST", MIXED, body, **ASK)

    seen = fuzz(fuzzed, world, make, 400, 150)
    assert {200, 201, 409} <= set(seen), seen
    for line in asking.send(written("GET", "/v1/tasks?limit=1000", **ASK)).json["tasks"]:
        answer = asking.send(
            written("POST", f"/v1/tasks/{line['name']}/predict", {"text": "good", "pair": "bad"}, **ASK)
        )
        assert answer.status in (200, 422, 503)


def test_ten_thousand_malformed_requests(world: World, backbone: str, tmp_path: Path, graft: bytes) -> None:
    mutator = Mutator(4)

    def make(number: int) -> bytes:
        way = mutator.draw.random()
        return mutator.question() if way < 0.8 else mutator.place() if way < 0.95 else mutator.upload(graft)

    with server_of(world, tmp_path, backbone, env=TOKENS) as server:
        descriptors = server.descriptors
        started = time.monotonic()
        seen = fuzz(server, world, make, 10_000, 2_000)
        assert sum(seen.values()) == 10_000 and seen[200] > 500, seen
        assert time.monotonic() - started < 300
        assert server.descriptors <= descriptors + 4
        assert server.ask("GET", "/v1/stats", **ASK).json["waiting"] == 0


# -- bodies that are meant to be dear


HOGS: dict[str, Callable[[], Any]] = {
    "texts that are none": lambda: {"texts": [1] * 300_000},
    "words that are none": lambda: {"text": [1] * 300_000},
    "keys that nobody knows": lambda: {f"k{n}": 1 for n in range(80_000)},
    "questions that are none": lambda: {"questions": [{"task": 1}] * 70_000},
    "a deep body": lambda: b"[" * 1_000_000,
    "a long number": lambda: b'{"text":' + b"1" * 1_000_000 + b"}",
    "many long numbers": lambda: b"[" + b",".join([b"1" * 4000] * 250) + b"]",
    "a long name": lambda: {"questions": [{"task": "\x00" * 150_000, "text": "a"}]},
    "many words": lambda: {"text": ["a"] * 49_000},
    "a long text": lambda: {"texts": ["\u0300" * 50_000] * 3},
    "escapes": lambda: b'{"text":"' + b"\\u0041" * 16_000 + b'"}',
}


@pytest.mark.parametrize("how", HOGS)
def test_a_body_of_a_megabyte_holds_up_nobody(fuzzed: Server, how: str) -> None:
    body = HOGS[how]()
    path = MIXED if how in ("questions that are none", "a long name") else PREDICT
    before, waited, stopped = fuzzed.rss, list[float](), threading.Event()

    def watch() -> None:
        while not waited or not stopped.wait(0.01):
            waited.append(fuzzed.ask("GET", "/healthz").seconds)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        for _ in range(2):
            reply = fuzzed.ask("POST", path, body, **ASK)
            assert reply.status in (200, 400, 422), reply
            assert len(reply.body) < (10_000 if reply.status != 200 else 2_000_000)
    finally:
        stopped.set()
        thread.join(20)
    assert max(waited) < 1, f"everybody waited for {max(waited):.1f} seconds"
    assert fuzzed.rss - before < 100 << 20


def test_a_question_of_many_windows_lets_others_pass(world: World, fuzzed: Server) -> None:
    """One call of less than a megabyte that makes thousands of rows; others do not stand behind all of them."""
    data = written(
        "POST", "/v1/tasks/where/predict", {"texts": ["who"] * 90, "pairs": ["good film " * 1000] * 90}, **ASK
    )
    with connect(fuzzed.port, 60) as connection:
        connection.sendall(data)
        time.sleep(0.5)
        reply = fuzzed.ask("POST", PREDICT, {"text": "it was good"}, **ASK)
        same(Answer.from_json(reply.json), world.said(("mood", "it was good")))
        assert reply.seconds < 2.5, f"it waited for {reply.seconds:.1f} seconds"
        assert read(connection).status == 200


# -- what must not pass


TRICKS = [
    "..",
    "../canary",
    "../../canary",
    "..%2fcanary",
    "%2e%2e%2fcanary",
    "%2e%2e/canary",
    "....//canary",
    "..%5ccanary",
    "%252e%252e%252fcanary",
    "/canary",
    "//canary",
    "mood/../../canary",
    "mood/..",
    "mood/.",
    ".versions",
    ".tmp",
    ".lock",
    "mood%00",
    "%00",
    "mood%00/../canary",
    "mood%0a",
    "mood%0d%0aX:y",
    "mood%20",
    "%20mood",
    "mood.",
    "mood%2f",
    "joint%2f%2fmood",
    "mood//x",
    "~",
    "~root",
    "$HOME",
    "%c0%ae%c0%ae%c0%afcanary",
    "..;/canary",
    "mood?x",
    "con:",
]
TRICKS += ["a" * 200, "a" * 5000]


@pytest.fixture(scope="module")
def guarded(
    world: World, backbone: str, tmp_path_factory: pytest.TempPathFactory, graft: bytes
) -> Iterator[tuple[Server, Path]]:
    """A server, and the folder its store is in, beside a graft and a file that are none of its business."""
    folder = tmp_path_factory.mktemp("guarded")
    with server_of(world, folder, backbone, env=TOKENS, limits={"upload": 4 << 20}) as made:
        place = folder / "place"
        shutil.copytree((place / "store" / "mood").resolve(), place / "canary")
        (place / "canary.txt").write_text("SONG")
        yield made, place


def tree(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("headers", [{}, ASK, BOSS], ids=["nobody", "asking", "admin"])
def test_names_that_lead_elsewhere_lead_nowhere(
    guarded: tuple[Server, Path], graft: bytes, headers: dict[str, str]
) -> None:
    server, place = guarded
    before = tree(place)
    for name in TRICKS:
        requests = {
            "predict": written("POST", f"/v1/tasks/{name}/predict", {"text": "good"}, **headers),
            "show": written("GET", f"/v1/tasks/{name}", **headers),
            "put": written("PUT", f"/v1/tasks/{name}", graft, **ZIP, **headers),
            "rollback": written("POST", f"/v1/tasks/{name}/rollback", {}, **headers),
            "remove": written("DELETE", f"/v1/tasks/{name}", **headers),
            "page": written("GET", f"/page/{name}", **headers),
            "root": written("GET", f"/{name}", **headers),
        }
        for what, data in requests.items():
            if name == "mood?x" and what in ("put", "remove", "show"):
                continue  # that is the task itself
            reply = exchange(server.port, data)
            assert reply.status in (400, 401, 403, 404, 405), (what, name, reply)
            assert b"SONG" not in reply.body and str(place).encode() not in reply.body
    body = {"questions": [{"task": name, "text": "good"} for name in [*TRICKS, "../canary", "\x00", "/etc", "mood/"]]}
    reply = server.ask("POST", MIXED, body, **headers)
    if headers:
        assert {one["error"]["type"] for one in reply.json["answers"]} == {"unknown_task"}
    else:
        assert reply.status == 401
    for path in (
        "/page/../routes.py",
        "/page/%2e%2e/routes.py",
        "/page/..%2froutes.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
    ):
        assert server.ask("GET", path).status == 404, path
    assert tree(place) == before


def test_tokens_are_asked_for_and_told_apart(guarded: tuple[Server, Path], graft: bytes) -> None:
    server, place = guarded
    before = tree(place)
    asks = [("POST", PREDICT, {"text": "good"}), ("POST", MIXED, {"questions": [{"task": "mood", "text": "good"}]})]
    asks += [
        ("GET", "/v1/tasks", None),
        ("GET", "/v1/tasks/mood", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/stats", None),
    ]
    changes = [
        ("PUT", "/v1/tasks/new", graft),
        ("POST", "/v1/tasks/mood/rollback", {}),
        ("DELETE", "/v1/tasks/mood", None),
    ]
    wrong = ["", "asking", "Bearer", "Bearer ", "Bearer wrong", "Bearer asking2", "Bearer askin", "Basic YXNraW5n"]
    wrong += ["Bearer asking, Bearer boss", "Token boss", "Bearer ASKING", "Bearer " + "x" * 5000]
    for method, path, body in [*asks, *changes]:
        kind = ZIP if isinstance(body, bytes) else {}
        for value in wrong:
            reply = server.ask(method, path, body, Authorization=value, **kind)
            assert (reply.status, reply.error["type"]) == (401, "unauthorized"), (method, path, value)
            assert reply.headers["www-authenticate"] == "Bearer"
    for method, path, body in changes:
        reply = server.ask(method, path, body, **ASK, **(ZIP if isinstance(body, bytes) else {}))
        assert (reply.status, reply.error["type"]) == (403, "forbidden"), (method, path)
    for method, path, body in asks:
        for who in (ASK, BOSS):
            assert server.ask(method, path, body, **who).status == 200, path
    for path in ("/", "/healthz", "/readyz", "/page/page.js"):
        assert server.ask("GET", path).status == 200, path
    twice = written("DELETE", "/v1/tasks/mood", **ASK).replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer boss\r\n\r\n")
    assert exchange(server.port, twice).status == 401
    assert tree(place) == before
    for word in ("asking", "boss", "wrong"):
        assert word not in server.log


def test_what_other_sites_and_other_names_send_is_refused(guarded: tuple[Server, Path], graft: bytes) -> None:
    server, place = guarded
    before = tree(place)
    foreign: list[dict[str, str]] = [
        {"Origin": origin} for origin in ("http://evil.example", "null", "https://localhost:444", "file://")
    ]
    foreign += [{"Origin": f"http://localhost:{server.port + 1}"}, {"Origin": "http://localhost.evil.example"}]
    foreign += [{"Sec_Fetch_Site": "cross-site"}]
    foreign += [
        {"Host": host}
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil", "0.0.0.0", "[::]", "x", "a b")
    ]
    for headers in foreign:
        for method, path, body in (
            ("POST", PREDICT, {"text": "a"}),
            ("GET", "/v1/tasks", None),
            ("GET", "/metrics", None),
            ("PUT", "/v1/tasks/new", graft),
        ):
            kind = ZIP if isinstance(body, bytes) else {}
            reply = server.ask(method, path, body, **BOSS, **kind, **headers)
            assert reply.status == 403 or (reply.status == 400 and "Host" in headers), (headers, path, reply)
            assert not any(name.startswith("access-control") for name in reply.headers)
    for host in ("", "localhost\r\nHost: localhost"):
        assert exchange(server.port, written("GET", "/v1/tasks", Host=host, **BOSS)).status in (400, 403)
    own = {
        "Origin": f"http://localhost:{server.port}",
        "Host": f"localhost:{server.port}",
        "Sec_Fetch_Site": "same-origin",
    }
    assert server.ask("POST", PREDICT, {"text": "a"}, **BOSS, **own).status == 200
    reply = server.ask("OPTIONS", PREDICT, Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert reply.status == 403 and not any(name.startswith("access-control") for name in reply.headers)
    assert tree(place) == before


def test_bodies_that_are_too_large_are_refused_and_not_kept(guarded: tuple[Server, Path]) -> None:
    server, place = guarded
    before, memory, files = tree(place), server.rss, server.descriptors
    big = b'{"text": "' + b"a" * (2 << 20) + b'"}'
    for method, path, body, kind in (("POST", PREDICT, big, {}), ("PUT", "/v1/tasks/new", b"x" * (5 << 20), ZIP)):
        stated = server.ask(method, path, body, **BOSS, **kind)
        head = written(method, path, b"", **BOSS, **kind, Content_Length="", Transfer_Encoding="chunked")
        chunks = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(len(body) // 65536)) + b"0\r\n\r\n"
        streamed = exchange(server.port, head + chunks)
        alone = exchange(server.port, written(method, path, b"", **BOSS, **kind, Content_Length=str(10**15)), 10)
        expecting = written(method, path, b"", **BOSS, **kind, Content_Length=str(10**9), Expect="100-continue")
        for reply in (stated, streamed, alone, exchange(server.port, expecting, 10)):
            assert (reply.status, reply.error["type"]) == (413, "too_large"), (method, reply)
    without = exchange(server.port, written("PUT", "/v1/tasks/new", big, **ZIP), 10)
    assert without.status == 401
    for length in ("-1", "1e3", "x", "5, 6", "9" * 30):
        assert exchange(server.port, written("POST", PREDICT, b"{}", Content_Length=length, **BOSS), 10).status in (
            400,
            413,
        )
    both = written(
        "POST", PREDICT, b"0\r\n\r\nDELETE /v1/tasks/mood HTTP/1.1\r\n\r\n", Transfer_Encoding="chunked", **BOSS
    )
    assert exchange(server.port, both, 10).status >= 400
    assert server.ask("POST", PREDICT, {"text": "good"}, **ASK).status == 200
    assert tree(place) == before
    assert server.rss - memory < GROWTH and server.descriptors <= files + 2


def test_zip_files_full_of_tricks_change_nothing(guarded: tuple[Server, Path], graft: bytes) -> None:
    server, place = guarded
    before, memory = tree(place), server.rss
    with zipfile.ZipFile(io.BytesIO(graft)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}

    whole = list(files.items())
    link = zipfile.ZipInfo("graft.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    bodies = {
        "beside": packed([*whole, ("../../canary.txt", b"x")]),
        "absolute": packed([*whole, (f"{place}/canary.txt", b"x")]),
        "a link": packed([(link, b"../../canary/graft.json"), *whole[1:]]),
        "a bomb": packed([(whole[0]), ("graft.safetensors", b"\0" * (64 << 20))]),
        "a bomb of a record": packed([("graft.json", b" " * (32 << 20)), whole[1]]),
        "many": packed([*whole, *((f"n{n}", b"") for n in range(5000))]),
        "code": packed([*whole, ("setup.py", b"raise SystemExit")]),
        "a pickle": packed([whole[0], ("graft.safetensors", b"\x80\x04cos\nsystem\n.")]),
        "twice": packed([*whole, whole[0]]),
        "nothing": b"",
        "no zip": b"PK" + b"x" * 100,
        "joint": packed([("joint.json", files["graft.json"]), ("joint.safetensors", files["graft.safetensors"])]),
    }
    for what, body in bodies.items():
        reply = server.ask("PUT", "/v1/tasks/new", body, **ZIP, **BOSS)
        assert (reply.status, reply.error["type"]) in ((409, "conflict"), (413, "too_large")), (what, reply)
        assert what == "absolute" or str(place) not in reply.error["message"]
    assert tree(place) == before
    assert server.rss - memory < 2 * GROWTH
    assert server.ask("PUT", "/v1/tasks/new", graft, **ZIP, **BOSS).status == 201
    assert server.ask("POST", "/v1/tasks/new/predict", {"text": "good"}, **ASK).json["version"] == 1
    assert server.ask("DELETE", "/v1/tasks/new", **BOSS).status == 204


def test_two_requests_in_one_are_two(world: World, guarded: tuple[Server, Path]) -> None:
    """What follows a body is another request, with a token of its own."""
    server, _ = guarded
    first = written("POST", PREDICT, {"text": "good"}, **ASK)
    with connect(server.port) as connection:
        connection.sendall(first + written("DELETE", "/v1/tasks/mood") + first)
        connection.settimeout(2)
        got = b""
        while got.count(b"HTTP/1.1 ") < 3 or got.count(b"probabilities") < 2:
            part = connection.recv(1 << 16)
            assert part, got
            got += part
    assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401", b"200"]
