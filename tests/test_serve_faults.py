"""A server in a process of its own, and what may happen to it: it is killed, its files break, its clients misbehave.

Whatever it is, every answer that comes is a right one, those who had nothing to do with it do not notice, and once it
is over nothing of it is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import uvloop
from fastapi import FastAPI

import taskgraft as tg
from taskgraft.cli import app as command_line
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import read_graft
from taskgraft.serving.answers import Answer
from taskgraft.serving.calls import zipped
from taskgraft.serving.serve import listen, server_of

from serve_process import (
    QUIET,
    RAISES,
    SLOW,
    Asked,
    Cut,
    Load,
    Reply,
    Server,
    connect,
    exchange,
    question,
    read,
    serving,
    until,
    written,
)
from serving import World, asking_of, grafted, reader, readers, same, together

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ADMIN = {"TASKGRAFT_ADMIN_TOKEN": "boss"}
BOSS = {"Authorization": "Bearer boss"}
GOOD_TIME_S = 2.0  # for an answer, on a machine that may be busy
SPARE = 40 << 20  # bytes of memory that may stay behind
Askings = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A store that tests copy, and what its tasks say alone."""
    made = World(tmp_path_factory.mktemp("store"), reader())
    for name, graft in readers(made.alone).items():
        if name in ("mood", "topic", "flags", "stars", "nli", "entities", "where"):
            made.put(graft)
    record = {"mood": {"task": {"kind": "classification", "labels": ["bad", "good"]}}}
    heads = {"mood": tg.Head("classification", ("bad", "good"))}
    made.put_joint(together(made.alone, tg.Adapter(size=4, norm_after="shared"), heads, record, 6), "joint")
    return made


@pytest.fixture(scope="module")
def askings(world: World) -> Askings:
    """Questions of every task, whose answers are known; none has a word that a planted backbone heeds."""
    draw, found = random.Random(0), Askings()
    while len(found) < 48:
        asking = asking_of(world, sorted(world.grafts)[len(found) % len(world.grafts)], draw, 20)
        words = {word for part in asking[1:] for word in (part.split() if isinstance(part, str) else part)}
        if not words & {RAISES, SLOW}:
            world.said(asking)
            found.append(asking)
    return found


@pytest.fixture
def store(world: World, tmp_path: Path) -> tg.Store:
    shutil.copytree(world.folder, tmp_path / "store", symlinks=True)
    return tg.Store(tmp_path / "store")


@pytest.fixture
def server(store: tg.Store, backbone: str, tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "server", store.folder, backbone, env=ADMIN, slow_s=0.25) as made:
        yield made


def wire(askings: Askings) -> list[tuple[Any, bytes]]:
    return [(asking, question(*asking)) for asking in askings]


def is_right(world: World, asking: Any, got: Any, version: int | None = 1) -> bool:
    assert isinstance(got, Reply) and got.status == 200, got
    same(Answer.from_json(got.json), world.said(asking, version))
    return True


def check_answers(world: World, asked: Sequence[Asked]) -> None:
    """All of them are right ones."""
    assert asked
    for one in asked:
        is_right(world, one.about, one.got)


def check_whole(store: tg.Store) -> None:
    """Every version that is there can be read, those that nothing leads to included."""
    for entry in store.list():
        assert entry.error is None, entry
    for folder in (store.folder / ".versions").glob("*/*"):
        if not (folder / "joint.json").exists():
            assert read_graft("any", folder).tensors and (folder / "README.md").exists()


def put(server: Server, name: str, graft: tg.Graft, seconds: float = 30) -> Reply:
    return server.ask("PUT", f"/v1/tasks/{name}", zipped(graft), seconds, Content_Type="application/zip", **BOSS)


def changed(world: World, name: str = "mood", seed: int = 77) -> tg.Graft:
    """Another version of a task, which says something else."""
    head = tg.Head("classification", ("bad", "good"))
    task = {"kind": "classification", "labels": ["bad", "good"]}
    return grafted(world.alone, name, tg.Adapter(size=4), head, seed=seed, task=task)


# -- it is killed


def test_a_server_that_is_killed_under_load_gives_no_wrong_answer_and_leaves_the_store_whole(
    world: World, askings: Askings, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "one", store.folder, backbone) as server, Load(server.port, wire(askings)) as load:
        load.wait(100)
        server.kill()
        time.sleep(0.2)
        asked = load.stop()
    failed = [one.got for one in asked if isinstance(one.got, Exception)]
    assert failed and all(isinstance(error, ConnectionError) for error in failed), failed
    check_answers(world, [one for one in asked if not isinstance(one.got, Exception)])
    check_whole(store)
    with serving(tmp_path / "two", store.folder, backbone) as again, Load(again.port, wire(askings)) as load:
        load.wait(50)
        check_answers(world, load.stop())


def test_grafts_that_were_sent_to_a_server_that_is_killed_are_whole_or_not_there(
    world: World, askings: Askings, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    """Each kill falls into a stream of uploads, on a disk that is slow. What was acknowledged is there."""
    draw, other = random.Random(0), changed(world)
    acknowledged: dict[str, int] = {}
    cut = 0
    for turn in range(4):
        with serving(tmp_path / f"server{turn}", store.folder, backbone, env=ADMIN, disk_s=0.01) as server:
            check_whole(store)

            def send(client: int, server: Server = server, turn: int = turn) -> int:
                for number in range(100):
                    name = "changing" if number % 2 else f"new-{turn}-{client}-{number}"
                    try:
                        reply = put(server, name, other)
                    except ConnectionError:
                        return 1
                    assert reply.status in (200, 201), reply
                    acknowledged[name] = max(acknowledged.get(name, 0), reply.json["version"])
                return 0

            with ThreadPoolExecutor(3) as pool:
                sending = [pool.submit(send, client) for client in range(3)]
                time.sleep(draw.uniform(0.3, 0.8))
                server.kill()
                cut += sum(one.result() for one in sending)
        check_whole(store)
        for name, version in acknowledged.items():
            assert max(store.versions(name)) >= version, f"{name} was acknowledged, and it is gone"
    assert cut > 4 and acknowledged
    with serving(tmp_path / "last", store.folder, backbone, env=ADMIN) as server:
        for asking in askings[:12]:
            is_right(world, asking, server.predict(*asking))
        for name, version in acknowledged.items():
            reply = server.predict(name, "it was good")
            assert reply.status == 200 and reply.json["version"] >= version
            same(Answer.from_json({**reply.json, "version": 1}), world.said((name, "it was good"), graft=other))
        assert put(server, "changing", other).json["version"] == max(store.versions("changing"))


# -- its files break


def cut_off(file: str) -> Callable[[Path, Path], None]:
    return lambda own, other: os.truncate(own / file, (own / file).stat().st_size // 2)


def garbage(file: str) -> Callable[[Path, Path], None]:
    """As long as what was there."""
    return lambda own, other: (own / file).write_bytes(random.Random(0).randbytes((own / file).stat().st_size)) and None


def flipped(file: str) -> Callable[[Path, Path], None]:
    """One bit of the last number."""

    def change(own: Path, other: Path) -> None:
        data = bytearray((own / file).read_bytes())
        data[-1] ^= 1
        (own / file).write_bytes(data)

    return change


def of_another(file: str) -> Callable[[Path, Path], None]:
    return lambda own, other: shutil.copy(other / file, own / file) and None


def saying(*place: str, value: Any) -> Callable[[Path, Path], None]:
    """A record that is JSON, and says something odd in one place."""

    def change(own: Path, other: Path) -> None:
        record = json.loads((own / "graft.json").read_text())
        holder = record
        for key in place[:-1]:
            holder = holder.setdefault(key, {})
        holder[place[-1]] = value
        (own / "graft.json").write_text(json.dumps(record))

    return change


def replaced(file: str, by: bytes | None) -> Callable[[Path, Path], None]:
    """Another file, or a folder, in its place."""

    def change(own: Path, other: Path) -> None:
        (own / file).unlink()
        (own / file).mkdir() if by is None else (own / file).write_bytes(by)

    return change


BREAKS: dict[str, Callable[[Path, Path], Any]] = {
    "tensors cut off": cut_off("graft.safetensors"),
    "tensors of garbage": garbage("graft.safetensors"),
    "tensors with a bit flipped": flipped("graft.safetensors"),
    "tensors of another graft": of_another("graft.safetensors"),
    "tensors empty": replaced("graft.safetensors", b""),
    "tensors that are a folder": replaced("graft.safetensors", None),
    "tensors gone": lambda own, other: (own / "graft.safetensors").unlink(),
    "a pickle": replaced("graft.safetensors", b"\x80\x04."),
    "record cut off": cut_off("graft.json"),
    "record of garbage": garbage("graft.json"),
    "record of another graft": of_another("graft.json"),
    "record empty": replaced("graft.json", b""),
    "record that is a list": replaced("graft.json", b"[1]"),
    "record that is deep": replaced("graft.json", b"[" * 100_000),
    "record that is a folder": replaced("graft.json", None),
    "record gone": lambda own, other: (own / "graft.json").unlink(),
    "record of a later format": saying("format", value=99),
    "no such method": saying("method", "method", value="magic"),
    "method of odd values": saying("method", "size", value="many"),
    "method of another size": saying("method", "size", value=5),
    "method of a huge size": saying("method", "size", value=10**9),
    "scaling by a word": saying("method", "scaling", value="x"),
    "labels that are no words": saying("head", "labels", value=[1, 2]),
    "labels that are too few": saying("head", "labels", value=["one"]),
    "settings that are none": saying("training", "settings", value=7),
    "a length that is none": saying("training", "settings", "max_length", value=-1),
    "columns that are none": saying("task", "columns", value=7),
    "another backbone's": saying("backbone", "sha256", value="0" * 64),
    "folder gone": lambda own, other: shutil.rmtree(own),
    "folder that is a file": lambda own, other: (shutil.rmtree(own), own.write_bytes(b"x")),
}


@pytest.fixture(scope="module")
def shared(world: World, backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, tg.Store]]:
    """A server that tests leave as they found it."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(world.folder, folder / "store", symlinks=True)
    with serving(folder / "server", folder / "store", backbone) as made:
        yield made, tg.Store(folder / "store")


@pytest.mark.parametrize("how", BREAKS)
def test_a_task_whose_files_break_says_so_and_the_others_do_not_notice(
    world: World, askings: Askings, shared: tuple[Server, tg.Store], how: str
) -> None:
    server, store = shared
    own, other = store.locate("topic").folder, store.locate("mood").folder
    broken, others = ("topic", "it was good"), [asking for asking in askings if asking[0] != "topic"]
    is_right(world, broken, server.predict(*broken))
    kept = own.with_name("kept")
    shutil.copytree(own, kept)
    try:
        with Load(server.port, wire(others), clients=4) as load:
            BREAKS[how](own, other)
            for _ in range(3):
                reply = server.predict(*broken)
                assert (reply.status, reply.error["type"]) == (503, "unreadable"), reply
                assert str(store.folder) not in reply.error["message"]
            answers = server.mixed(*others[:4], broken, *others[4:8])
            assert answers[4]["task"] == "topic" and answers[4]["error"]["type"] == "unreadable", answers
            world.check([Answer.from_json(one) for one in answers[:4] + answers[5:]], others[:8])
            assert server.ask("GET", "/v1/tasks/topic").status in (200, 503)  # of a task it shows the record alone
            assert "topic" in {line["name"] for line in server.ask("GET", "/v1/tasks").json["tasks"]}
            load.wait(5)
            check_answers(world, load.stop())
    finally:
        shutil.rmtree(own) if own.is_dir() else own.unlink(missing_ok=True)
        kept.rename(own)
    is_right(world, broken, server.predict(*broken))  # mended


def test_a_task_with_the_files_of_another_says_what_that_one_says(
    world: World, shared: tuple[Server, tg.Store]
) -> None:
    server, store = shared
    own, other = store.locate("stars").folder, store.locate("mood").folder
    kept = own.with_name("kept")
    shutil.copytree(own, kept)
    for file in ("graft.safetensors", "graft.json"):
        shutil.copy(other / file, own / file)
    reply = server.predict("stars", "it was good")
    same(Answer.from_json(reply.json), world.said(("stars", "it was good"), graft=world.grafts["mood"]))  # type: ignore[arg-type]
    shutil.rmtree(own)
    kept.rename(own)
    is_right(world, ("stars", "it was good"), server.predict("stars", "it was good"))


def test_a_task_whose_name_leaves_is_unknown_until_it_is_back(world: World, shared: tuple[Server, tg.Store]) -> None:
    server, store = shared
    (store.folder / "topic").rename(store.folder / ".away")
    reply = server.predict("topic", "good")
    assert (reply.status, reply.error["type"]) == (404, "unknown_task")
    assert server.predict("mood", "good").status == 200
    (store.folder / ".away").rename(store.folder / "topic")
    is_right(world, ("topic", "good"), server.predict("topic", "good"))


@pytest.mark.parametrize(
    ("place", "value"),
    [("depth", 10**9), ("depth", 10**5), ("size", 10**9), ("size", 2**62), ("scaling", "x"), ("scaling", 1e300)],
)
def test_a_record_that_asks_for_the_impossible_harms_its_own_task_alone(
    world: World, askings: Askings, server: Server, store: tg.Store, place: str, value: Any
) -> None:
    """Read for the first time and asked in one batch with the others."""
    before = server.rss
    saying("method", place, value=value)(store.locate("topic").folder, Path())
    others = [asking for asking in askings if asking[0] != "topic"][:12]
    mixed = others[:6] + [("topic", "it was good")] + others[6:]
    answers = server.mixed(*mixed)
    topic = answers.pop(6)
    assert topic["error"]["type"] in ("unreadable", "failed"), topic
    world.check([Answer.from_json(one) for one in answers], others)
    assert server.predict("mood", "good", seconds=5).seconds < GOOD_TIME_S
    assert server.rss - before < 200 << 20


def test_a_graft_that_asks_for_the_impossible_is_not_taken(world: World, server: Server, tmp_path: Path) -> None:
    for place, value in (("depth", 10**9), ("size", 10**9), ("scaling", "x")):
        folder = tmp_path / "graft"
        tg.Store(tmp_path / "own").put(changed(world))
        shutil.copytree(tmp_path / "own" / "mood", folder, dirs_exist_ok=True)
        saying("method", place, value=value)(folder, folder)
        body = zipped(folder)
        reply = server.ask("PUT", "/v1/tasks/odd", body, 10, Content_Type="application/zip", **BOSS)
        assert (reply.status, reply.error["type"]) == (409, "conflict"), (place, value, reply)
        is_right(world, ("mood", "good"), server.predict("mood", "good", seconds=5))


@pytest.mark.parametrize("how", ["record empty", "columns that are none", "scaling by a word", "folder gone"])
def test_a_server_starts_though_its_first_task_is_broken(
    world: World, store: tg.Store, backbone: str, tmp_path: Path, how: str
) -> None:
    first = store.names()[0]
    BREAKS[how](store.locate(first).folder, store.locate("mood").folder)
    with serving(tmp_path / "server", store.folder, backbone) as server:
        assert server.ask("GET", "/readyz").status == 200
        assert server.predict(first, "good").status == 503
        is_right(world, ("mood", "good"), server.predict("mood", "good"))


def test_asking_a_broken_task_for_ever_takes_no_memory(server: Server, store: tg.Store) -> None:
    cut_off("graft.json")(store.locate("topic").folder, Path())
    body = {"questions": [{"task": "topic", "text": "good"}] * 256}

    def ask(times: int) -> None:
        for _ in range(times):
            assert {one["error"]["type"] for one in server.ask("POST", "/v1/predict", body).json["answers"]} == {
                "unreadable"
            }

    ask(10)
    before = server.rss
    ask(60)
    assert server.rss - before < 20 << 20


# -- its clients misbehave


def others_are_answered(world: World, server: Server, askings: Askings, count: int = 10) -> None:
    for asking in askings[:count]:
        reply = server.predict(*asking, seconds=10)
        is_right(world, asking, reply)
        assert reply.seconds < GOOD_TIME_S


def back(server: Server, descriptors: int, seconds: float = 5) -> None:
    until(lambda: server.descriptors <= descriptors, f"{descriptors} descriptors (there are more)", seconds)


def test_a_body_that_comes_byte_by_byte_is_read(world: World, server: Server) -> None:
    data = question("mood", "it was good")
    with connect(server.port) as connection:
        for byte in data:
            connection.sendall(bytes([byte]))
        is_right(world, ("mood", "it was good"), read(connection))


def test_clients_that_send_too_slowly_are_cut_off_and_the_others_do_not_notice(
    world: World, askings: Askings, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    limits = {"body_s": 1.0, "upload_s": 1.0}
    with serving(tmp_path / "s", store.folder, backbone, env=ADMIN, limits=limits, waits={"HEADER_S": 1.0}) as server:
        others_are_answered(world, server, askings, 1)
        before = server.descriptors
        whole = written("POST", "/v1/tasks/mood/predict", {"text": "x" * 1000})
        upload = written("PUT", "/v1/tasks/new", b"x" * 1000, Content_Type="application/zip", **BOSS)
        chunked = written("POST", "/v1/tasks/mood/predict", b"", Content_Length="", Transfer_Encoding="chunked")
        beginnings = {
            "nothing": b"",
            "half a head": whole[:30],
            "a head alone": whole[:-1000],
            "half a body": whole[:-500],
            "half an upload": upload[:-500],
            "half a chunk": chunked + b"ff\r\nab",
        }
        connections = {name: [connect(server.port) for _ in range(10)] for name in beginnings}
        for name, some in connections.items():
            for connection in some:
                connection.sendall(beginnings[name])

        def drip() -> None:
            """One that goes on sending, a byte at a time, and always too little."""
            with connect(server.port) as connection:
                connection.sendall(whole[:-1000])
                for _ in range(1000):
                    try:
                        connection.sendall(b"x")
                    except ConnectionError:
                        return
                    time.sleep(0.02)

        dripping = [threading.Thread(target=drip, daemon=True) for _ in range(5)]
        for thread in dripping:
            thread.start()
        others_are_answered(world, server, askings, 20)
        for name, some in connections.items():
            for connection in some:
                connection.settimeout(8)
                try:
                    reply = read(connection)
                except Cut:
                    assert "head" in name or name == "nothing", name
                else:
                    assert (reply.status, reply.error["type"]) == (408, "invalid_request"), (name, reply)
                    assert reply.headers["connection"] == "close"
        for thread in dripping:
            thread.join(10)
            assert not thread.is_alive(), "a client that sends a byte at a time is served for ever"
        back(server, before)
        assert not server.lines(level="error")


def leave(connection: socket.socket) -> None:
    """Go without a word: what is on its way finds nobody."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_clients_that_leave_in_the_middle_leave_nothing_behind(world: World, askings: Askings, server: Server) -> None:
    others_are_answered(world, server, askings)
    before, memory = server.descriptors, server.rss
    slow, long = question("mood", f"good {SLOW}"), written("POST", "/v1/tasks/mood/predict", {"texts": ["good"] * 256})
    upload = written("PUT", "/v1/tasks/new", b"x" * 100_000, Content_Type="application/zip", **BOSS)
    for data, sent in ((slow, len(slow) - 5), (slow, len(slow)), (long, len(long)), (upload, 50_000)):
        for number in range(50):
            connection = connect(server.port)
            connection.sendall(data[:sent])
            if data is long:
                connection.recv(100)  # some of the answer
            leave(connection) if number % 2 else connection.close()
        others_are_answered(world, server, askings, 2 if data is slow else 5)
    back(server, before)
    until(lambda: server.ask("GET", "/v1/stats").json["waiting"] == 0, "the end of questions that nobody waits for")
    assert server.rss - memory < SPARE
    assert not server.lines(status=500) and not server.lines(level="error"), "to leave is no failure of the server"
    assert 'status="500"' not in server.ask("GET", "/metrics").body.decode()
    assert server.ask("GET", "/v1/tasks/new").status == 404


def test_those_who_leave_take_nobody_with_them(world: World, server: Server) -> None:
    """Questions that wait in the same batch as those of a client who leaves meanwhile, or has no more time."""
    first = connect(server.port)
    first.sendall(question("mood", f"good {SLOW}"))
    time.sleep(0.1)  # it is in the model; the others wait
    impatient = written("POST", "/v1/tasks/mood/predict", {"text": "bad", "timeout": 0.02})
    going, hurrying, staying = ([connect(server.port) for _ in range(5)] for _ in range(3))
    for some, data in ((going, question("mood", "good")), (hurrying, impatient), (staying, question("mood", "good"))):
        for connection in some:
            connection.sendall(data)
    time.sleep(0.05)
    for connection in going:
        leave(connection)
    for connection in staying:
        is_right(world, ("mood", "good"), read(connection))
    for connection in hurrying:
        reply = read(connection)
        assert (reply.status, reply.error["type"]) == (504, "expired"), reply
    is_right(world, ("mood", f"good {SLOW}"), read(first))
    assert not server.lines(level="error")


def test_questions_of_those_who_left_make_room_for_others(
    world: World, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "server", store.folder, backbone, "--queue", "8", slow_s=0.5) as server:
        for _ in range(3):
            gone = [connect(server.port) for _ in range(8)]
            for connection in gone:
                connection.sendall(question("mood", f"good {SLOW}"))
            time.sleep(0.1)
            for connection in gone:
                leave(connection)
        until(lambda: server.ask("GET", "/v1/stats").json["waiting"] == 0, "an empty queue", 10)
        is_right(world, ("mood", "good"), server.predict("mood", "good"))


def test_a_flood_of_connections_is_answered(world: World, askings: Askings, server: Server) -> None:
    others_are_answered(world, server, askings)
    before, memory = server.descriptors, []
    for _ in range(2):
        many = [(asking, connect(server.port)) for asking in (askings * 11)[:500]]
        assert len({connection.fileno() for _, connection in many}) == 500
        for asking, connection in many:
            connection.sendall(question(*asking))
        assert server.ask("GET", "/healthz").seconds < GOOD_TIME_S
        is_right(world, askings[0], server.predict(*askings[0]))
        for asking, connection in many:
            is_right(world, asking, read(connection))
        for _, connection in many:
            connection.close()
        back(server, before)
        others_are_answered(world, server, askings)
        memory.append(server.rss)
    assert memory[1] - memory[0] < SPARE  # what a flood takes is there for the next one


@pytest.mark.parametrize("ends", [b"", b"\r\n"], ids=["one line", "many lines"])
def test_a_head_without_end_is_cut_off(world: World, askings: Askings, server: Server, ends: bytes) -> None:
    others_are_answered(world, server, askings)
    memory = server.rss
    with connect(server.port) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(b"".join(b"X-%d: " % number + b"a" * 65_536 + ends for number in range(400)))
    others_are_answered(world, server, askings)
    assert server.rss - memory < SPARE / 2  # 25 MB were on their way


def test_more_connections_than_there_are_descriptors_do_no_lasting_harm(
    world: World, askings: Askings, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "server", store.folder, backbone, descriptors=64) as server:
        before = server.descriptors
        kept = connect(server.port)
        kept.sendall(question("mood", "good"))
        is_right(world, ("mood", "good"), read(kept))
        many = [connect(server.port) for _ in range(100)]
        until(lambda: server.descriptors > 60, "the flood")
        for asking in askings[:16]:  # of tasks that are read now, for the first time
            kept.sendall(question(*asking))
            assert read(kept).status in (200, 503)
        for connection in [*many, kept]:
            connection.close()
        back(server, before)
        others_are_answered(world, server, askings, 16)


def deaf(port: int) -> socket.socket:
    """A client that asks and asks, and never reads: what it is owed is more than the system holds for it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    data = written("GET", "/openapi.json") * 2000
    started = time.monotonic()
    while data and time.monotonic() - started < 0.5:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            time.sleep(0.01)
    return connection


def owed(server: Server) -> int:
    return len(server.lines(message="request", route="/openapi.json"))


def is_stuck(server: Server) -> None:
    """Until it can send no more to those who do not read."""
    seen = -1
    while seen != (seen := owed(server)):
        time.sleep(0.5)
    assert 0 < seen < 2000


def test_clients_that_never_read_hold_up_nobody_and_not_for_ever(
    world: World, askings: Askings, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "server", store.folder, backbone, waits={"UNREAD_S": 1.5}) as server:
        others_are_answered(world, server, askings)
        before, memory = server.descriptors, server.rss
        some = [deaf(server.port) for _ in range(5)]
        others_are_answered(world, server, askings, 20)
        assert server.rss - memory < SPARE
        try:
            back(server, before, 10)
        finally:
            for connection in some:
                connection.close()
            back(server, before)


# -- there is more than it can do


def test_a_full_queue_refuses_at_once_and_answers_what_it_took(
    world: World, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "server", store.folder, backbone, "--queue", "8", slow_s=1.0) as server:
        asking = ("mood", f"it was good {SLOW}")
        first = connect(server.port)
        first.sendall(question(*asking))
        time.sleep(0.3)  # it is in the model
        many = [connect(server.port) for _ in range(40)]
        waiting = []
        refused = []
        for connection in many:
            started = time.monotonic()
            connection.sendall(question(*asking))
            connection.settimeout(0.05 if len(waiting) < 7 else 5)
            try:
                refused.append(read(connection, started))
            except TimeoutError:
                waiting.append(connection)
        assert len(waiting) == 7 and len(refused) == 33
        for reply in refused:
            assert (reply.status, reply.error["type"]) == (429, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        times = [reply.seconds for reply in refused]
        assert statistics.median(times) < 0.1 and max(times) < 0.5
        assert server.ask("GET", "/healthz").seconds < 0.5
        for connection in [first, *waiting]:
            connection.settimeout(10)
            is_right(world, asking, read(connection))
        is_right(world, ("mood", "good"), server.predict("mood", "good"))


def test_a_batch_in_which_the_backbone_raises_is_a_500_and_the_next_one_works(
    world: World, askings: Askings, server: Server
) -> None:
    reply = server.predict("mood", f"it was good {RAISES}")
    assert (reply.status, reply.error["type"]) == (500, "failed")
    failures = server.lines(level="error")
    assert len(failures) == 1 and reply.error["id"] in failures[0]["message"]
    assert "a fault that was planted" in failures[0]["trace"] and "planted" not in reply.body.decode()
    others_are_answered(world, server, askings)

    bad = [(("topic", f"{word} {RAISES}"), question("topic", f"{word} {RAISES}")) for word in ("good", "bad")]
    with Load(server.port, [*wire(askings), *bad]) as load:
        load.wait(300)
        asked = load.stop()
    log = server.log
    failed = 0
    for one in asked:
        assert isinstance(one.got, Reply)
        if one.got.status == 500:  # it, or something in the same batch
            assert one.got.error["type"] == "failed" and one.got.error["id"] in log
            failed += 1
        else:
            assert RAISES not in one.about[1]
            is_right(world, one.about, one.got)
    assert 0 < failed < len(asked) / 2
    answers = server.mixed(("mood", f"good {RAISES}"), ("none", "good"))
    assert answers[0]["error"]["type"] == "failed" and answers[0]["error"]["id"] in server.log
    others_are_answered(world, server, askings)


# -- it is asked to stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("again", [(), (signal.SIGTERM,)])
def test_all_that_was_sent_before_the_signal_is_answered(
    world: World, askings: Askings, server: Server, number: signal.Signals, again: tuple[signal.Signals, ...]
) -> None:
    slow = [("mood", f"{word} {SLOW}") for word in ("good", "bad", "the", "film")]
    for asking in slow:
        world.said(asking)
    with Load(server.port, wire(askings + slow), clients=16) as load:
        load.wait(60)
        server.signal(number)
        stopped = time.monotonic()
        for one in again:
            time.sleep(0.1)
            server.signal(one)
        assert server.ended(10) == 0
        assert time.monotonic() - stopped < 5
        with pytest.raises(ConnectionRefusedError):
            connect(server.port)
        asked = load.stop()
    before = [one for one in asked if one.sent is not None and one.sent < stopped]
    check_answers(world, before)
    answered = [one for one in asked if not isinstance(one.got, Exception)]
    check_answers(world, answered)
    for one in asked:
        assert not isinstance(one.got, Exception) or isinstance(one.got, ConnectionError), one.got
    assert not server.lines(level="error")


def test_connections_that_wait_to_be_taken_are_answered_too(world: World, server: Server) -> None:
    """The server is held still while they come, so that they and the signal are there when it goes on."""
    is_right(world, ("mood", "good"), server.predict("mood", "good"))
    server.signal(signal.SIGSTOP)
    waiting = [connect(server.port) for _ in range(20)]
    for connection in waiting:
        connection.sendall(question("mood", "good"))
    server.signal(signal.SIGTERM)
    server.signal(signal.SIGCONT)
    for connection in waiting:
        is_right(world, ("mood", "good"), read(connection))
    assert server.ended(5) == 0


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_a_stop_that_comes_before_the_loop_has_looked_takes_them_all_the_same(loop: ModuleType) -> None:
    """They wait in the socket, unseen, as the server begins to stop."""
    app = FastAPI()
    app.get("/")(lambda: "here")
    app.state.served = SimpleNamespace(closing=False)

    async def run() -> list[socket.socket]:
        app.state.warming = asyncio.sleep(0)
        listening = listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        stopping = server_of(app, lambda: None)
        stopping.config.load()
        stopping.lifespan = stopping.config.lifespan_class(stopping.config)
        await stopping.startup([listening])
        waiting = [connect(port) for _ in range(20)]
        for connection in waiting:
            connection.sendall(written("GET", "/"))
        await stopping.shutdown([listening])
        return waiting

    with asyncio.Runner(loop_factory=loop.new_event_loop) as runner:
        for connection in runner.run(run()):
            assert read(connection).body == b'"here"'


def test_answers_that_take_long_are_waited_for(world: World, store: tg.Store, backbone: str, tmp_path: Path) -> None:
    asking = ("mood", f"good {SLOW}")
    with serving(tmp_path / "server", store.folder, backbone, "--batch-tokens", "8", slow_s=0.7) as server:
        waiting = [connect(server.port) for _ in range(4)]
        for connection in waiting:
            connection.sendall(question(*asking))
        time.sleep(0.2)
        server.signal(signal.SIGTERM)
        for connection in waiting:
            is_right(world, asking, read(connection))
        assert server.ended(3) == 0


def stuck_body(server: Server) -> list[socket.socket]:
    upload = written("PUT", "/v1/tasks/new", b"x" * 1000, Content_Type="application/zip", **BOSS)
    made = [connect(server.port) for _ in range(2)]
    for connection, data in zip(made, (question("mood", "good"), upload), strict=True):
        connection.sendall(data[:-5])
    return made


def deaf_client(server: Server) -> list[socket.socket]:
    made = [deaf(server.port)]
    is_stuck(server)
    return made


def idle_clients(server: Server) -> list[socket.socket]:
    made = [connect(server.port) for _ in range(3)]
    made[0].sendall(question("mood", "good"))
    read(made[0])
    made[1].sendall(b"POST /v1/ta")
    return made


@pytest.mark.parametrize("client", [stuck_body, deaf_client, idle_clients])
def test_a_client_that_is_stuck_does_not_keep_the_server_from_ending(
    server: Server, client: Callable[[Server], list[socket.socket]]
) -> None:
    """Whoever started it gives it some seconds, and then kills it: docker ten, Kubernetes thirty."""
    connections = client(server)
    server.signal(signal.SIGTERM)
    started = time.monotonic()
    assert server.ended(15) == 0
    assert time.monotonic() - started < 9
    for connection in connections:
        connection.close()


def test_ctrl_c_for_the_second_time_ends_it_at_once(
    world: World, store: tg.Store, backbone: str, tmp_path: Path
) -> None:
    with serving(tmp_path / "server", store.folder, backbone, slow_s=1.5) as server:
        waiting = [connect(server.port) for _ in range(3)]
        for connection in waiting:
            connection.sendall(question("mood", f"good {SLOW}"))
        time.sleep(0.3)
        server.signal(signal.SIGINT)
        time.sleep(0.8)
        server.signal(signal.SIGINT)
        assert server.ended(6) is not None
        for connection in waiting:
            with suppress(Cut):  # it may be cut off, or told so
                reply = read(connection)
                assert reply.status == 503 or is_right(world, ("mood", f"good {SLOW}"), reply)
                assert reply.status == 200 or reply.error["type"] == "closing"
        check_whole(store)


def test_the_command_itself_ends_with_0(store: tg.Store, backbone: str) -> None:
    command = [sys.executable, "-m", "taskgraft.cli", "serve", "--store", str(store.folder), "--backbone", backbone]
    process = subprocess.Popen(
        [*command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **QUIET},
    )
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        assert exchange(port, question("mood", "good")).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()


# -- others change its store


def test_two_servers_on_one_store_serve_the_same(world: World, store: tg.Store, backbone: str, tmp_path: Path) -> None:
    other = changed(world)
    text = "it was good"
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(serving(tmp_path / name, store.folder, backbone, env=ADMIN)) for name in ("one", "two")
        )
        is_right(world, ("mood", text), two.predict("mood", text))
        assert put(one, "mood", other).json == {"task": "mood", "version": 2}
        same(Answer.from_json(two.predict("mood", text).json), world.said(("mood", text), 2, graft=other))
        assert two.ask("POST", "/v1/tasks/mood/rollback", {}, **BOSS).json == {"task": "mood", "version": 1}
        is_right(world, ("mood", text), one.predict("mood", text))
        assert one.ask("DELETE", "/v1/tasks/mood", **BOSS).status == 204
        assert two.predict("mood", text).status == 404
        with ThreadPoolExecutor(4) as pool:  # both at once
            replies = list(pool.map(lambda n: put((one, two)[n % 2], "new", other), range(12)))
        assert sorted(reply.json["version"] for reply in replies) == list(range(1, 13))
    check_whole(store)


def test_tasks_that_another_process_changes_are_served_as_they_are_at_that_moment(
    world: World, askings: Askings, server: Server, store: tg.Store
) -> None:
    """Versions come, go back and are pruned while the task is asked: each answer is that of the version it names."""
    texts = ["it was good", "the film was bad", "a", "we saw it again today"]
    versions = [world.grafts["mood"], changed(world, seed=77), changed(world, seed=78)]
    said = {
        (n, text): world.said(("mood", text), n, graft=versions[(n - 1) % 3]) for n in range(1, 40) for text in texts
    }  # type: ignore[arg-type]
    mood = [(("mood", text), question("mood", text)) for text in texts]
    others = [asking for asking in askings if asking[0] != "mood"]
    latest = 1
    with Load(server.port, mood + wire(others)) as load:
        for _ in range(4):
            for _ in range(3):
                latest = store.put(versions[latest % 3], "mood")  # type: ignore[arg-type]
                reply = server.predict("mood", texts[0])
                assert reply.json["version"] == latest
                load.wait(8)
            taskgraft("tasks", "rollback", "mood", "--store", str(store.folder))
            assert server.predict("mood", texts[0]).json["version"] == latest - 1
            load.wait(8)
            store.rollback("mood", latest)
            store.prune("mood", keep=0)
            load.wait(8)
        for number in range(8):
            store.put(changed(world, f"more-{number}", number))
            assert server.predict(f"more-{number}", "good").status == 200
            store.remove(f"more-{number}")
            assert server.predict(f"more-{number}", "good").status == 404
        asked = load.stop()
    seen = set()
    for one in asked:
        if one.about[0] != "mood":
            is_right(world, one.about, one.got)
            continue
        assert isinstance(one.got, Reply) and one.got.status == 200, one.got
        answer = Answer.from_json(one.got.json)
        seen.add(answer.version)
        same(answer, said[answer.version, one.about[1]])  # type: ignore[index]
    assert len(seen) >= 8


def taskgraft(*words: str) -> None:
    with pytest.raises(SystemExit) as left:
        command_line(list(words))
    assert not left.value.code


def test_a_task_that_leaves_under_load_is_right_or_unknown(world: World, server: Server, store: tg.Store) -> None:
    kept = store.get("mood")
    joint = store.get_joint("joint")
    names = {"mood": ("mood", "it was good"), "joint": ("joint/mood", "it was good")}
    with Load(server.port, wire(list(names.values()))) as load:
        for _ in range(6):
            load.wait(20)
            for name in names:
                assert server.ask("DELETE", f"/v1/tasks/{name}", **BOSS).status == 204
            load.wait(20)
            store.put(kept)
            store.put(joint, "joint")
        for _ in range(150):  # and as fast as it can
            store.remove("mood")
            store.put(kept)
        asked = load.stop()
    statuses = set()
    for one in asked:
        assert isinstance(one.got, Reply)
        statuses.add(one.got.status)
        if one.got.status == 404:
            assert one.got.error["type"] == "unknown_task"
        else:
            is_right(world, one.about, one.got)
    assert statuses == {200, 404}


def test_a_store_that_is_locked_by_another_process_holds_up_no_questions(
    world: World, askings: Askings, server: Server, store: tg.Store
) -> None:
    other = changed(world)
    with ThreadPoolExecutor(45) as pool:
        with (store.folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            sending = [pool.submit(put, server, "new", other) for _ in range(45)]
            time.sleep(0.5)
            others_are_answered(world, server, askings)
            for path in ("/v1/tasks", "/metrics", "/v1/stats", "/readyz", "/v1/tasks/mood"):
                assert server.ask("GET", path, seconds=3).status == 200, path
        assert sorted(one.result().json["version"] for one in sending) == list(range(1, 46))


def test_a_store_that_cannot_be_written_is_a_sentence(world: World, server: Server, store: tg.Store) -> None:
    shutil.rmtree(store.folder / ".tmp", ignore_errors=True)
    (store.folder / ".tmp").write_text("in the way")
    reply = put(server, "new", changed(world))
    assert reply.status in (409, 503) and str(store.folder) not in reply.error["message"], reply
    (store.folder / ".tmp").unlink()
    assert put(server, "new", changed(world)).status == 201
    with pytest.raises(GraftError, match="no version 9"):
        store.get("new", 9)
