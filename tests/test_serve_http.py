"""The server over HTTP: what it answers, what it says of mistakes, and how it begins and ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import taskgraft as tg
from taskgraft.errors import Expired
from taskgraft.serving import library
from taskgraft.serving import serve as serving
from taskgraft.serving.answers import Answer, Question
from taskgraft.serving.app import create_app
from taskgraft.serving.asked import Asked
from taskgraft.serving.bodies import Limits
from taskgraft.serving.engine import Engine
from taskgraft.serving.guard import Tokens
from taskgraft.serving.journal import JsonLines
from taskgraft.serving.routes import PAGE

import tiny
from over_http import ADMIN, MIXED, PREDICT, call, connection, error_of, head, received, running, zipped
from serving import SECONDS, Held, World, engine_on, reader, readers, same, small, together, until

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

HEADS: dict[str, tg.Head | None] = {"mood": tg.Head("classification", ("bad", "good"))}
RECORDS = {"mood": {"task": {"kind": "classification", "labels": ["bad", "good"]}}}
ASKED: dict[str, dict[str, Any]] = {
    "mood": {"text": "the film was good"},
    "flags": {"text": "a good phone"},
    "stars": {"text": "awful"},
    "nli": {"text": "it is good", "pair": "it was bad"},
    "entities": {"text": ["a", "good", "shop"]},
    "where": {"text": "it was", "pair": "we saw a lovely film"},
    "plain": {"text": ""},
    "hyper/mood": {"text": "very good"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A store that tests do not change."""
    made = World(tmp_path_factory.mktemp("store"), reader())
    for graft in readers(made.alone).values():
        made.put(graft)
    made.put_joint(together(made.alone, tg.HyperFormer(shared=True, size=4), HEADS, RECORDS, 5), "hyper")
    return made


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Engine]:
    with engine_on(world.folder) as made:
        yield made


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    return create_app(engine)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Engine, World]]:
    """A store of one's own, with two versions of one task."""
    made = World(tmp_path / "own", reader())
    made.put(small(made.alone, 1, name="mood"))
    made.put(small(made.alone, 2, name="mood"))
    with engine_on(made.folder) as running:
        yield running, made


# -- questions


@pytest.mark.parametrize("task", ASKED)
def test_each_kind_of_task_answers_what_the_engine_answers(app: Any, engine: Engine, task: str) -> None:
    body = ASKED[task]
    wanted = engine.predict([(task, body["text"], body.get("pair"))])[0]
    response = call(app, "POST", f"/v1/tasks/{task}/predict", json=body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    assert response.json().keys() == wanted.to_json().keys() and wanted.version == 1
    same(Answer.from_json(response.json()), wanted)
    encoded = call(app, "POST", f"/v1/tasks/{task.replace('/', '%2F')}/predict", json=body)
    same(Answer.from_json(encoded.json()), wanted)


def test_several_texts_of_a_task(app: Any, engine: Engine) -> None:
    texts, pairs = ["good", "bad", "awful"], ["a", "b", "c"]
    wanted = [answer.to_json() for answer in engine.predict([("mood", text) for text in texts])]
    found = call(app, "POST", "/v1/tasks/mood/predict", json={"texts": texts, "timeout": 20}).json()
    assert [answer["label"] for answer in found["answers"]] == [answer["label"] for answer in wanted]
    found = call(app, "POST", "/v1/tasks/nli/predict", json={"texts": texts, "pairs": pairs}).json()
    assert len(found["answers"]) == 3
    words = {"texts": [["a", "good", "film"], "it is"]}
    found = call(app, "POST", "/v1/tasks/entities/predict", json=words).json()
    assert [len(answer["tags"]) for answer in found["answers"]] == [3, 2]
    few = call(app, "POST", "/v1/tasks/nli/predict", json={"texts": texts, "pairs": ["a"]})
    assert error_of(few) == (422, "invalid_request") and "3 texts and 1 pairs" in few.text
    wrong = call(app, "POST", "/v1/tasks/mood/predict", json={"texts": ["good", ["a", "list"]]})
    assert error_of(wrong) == (422, "invalid_request")


def test_a_mixed_call_has_each_question_s_error_in_its_place(app: Any, engine: Engine) -> None:
    questions = [
        {"task": "mood", "text": "good"},
        {"task": "nope", "text": "good"},
        {"task": "nli", "text": "good"},
        {"task": "../mood", "text": "good"},
        {"task": "hyper/nope", "text": "good"},
        {"task": "nli", "text": "good", "pair": "bad"},
        {"task": "mood", "text": "good", "pair": "bad"},
    ]
    response = call(app, "POST", "/v1/predict", json={"questions": questions})
    assert response.status_code == 200
    answers = response.json()["answers"]
    assert [answer["task"] for answer in answers] == [question["task"] for question in questions]
    kinds = [answer["error"]["type"] if "error" in answer else "ok" for answer in answers]
    assert kinds == ["ok", "unknown_task", "invalid_request", "unknown_task", "unknown_task", "ok", "invalid_request"]
    same(Answer.from_json(answers[0]), engine.predict([("mood", "good")])[0])
    assert "pair" in answers[2]["error"]["message"]


# -- mistakes

MISTAKES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", PREDICT, {"json": {}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": []}, 422, "invalid_request"),
    ("POST", PREDICT, {"content": b"null"}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": 5}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": ["a", 5]}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "texts": ["a"]}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "more": 1}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "timeout": 0}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "timeout": 301}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "timeout": True}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a", "timeout": "5"}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"texts": []}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"texts": "a"}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": ["a"]}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"texts": ["a"] * 5}}, 422, "invalid_request"),
    ("POST", PREDICT, {"json": {"text": "a" * 51}}, 422, "invalid_request"),
    ("POST", "/v1/tasks/entities/predict", {"json": {"text": ["a"] * 26}}, 422, "invalid_request"),
    ("POST", "/v1/tasks/nli/predict", {"json": {"text": "a", "pair": "a" * 51}}, 422, "invalid_request"),
    ("POST", MIXED, {"json": {"questions": []}}, 422, "invalid_request"),
    ("POST", MIXED, {"json": {"questions": [{"text": "a"}]}}, 422, "invalid_request"),
    ("POST", MIXED, {"json": {"questions": [{"task": "mood", "text": "a"}] * 5}}, 422, "invalid_request"),
    ("POST", MIXED, {"json": {"questions": [{"task": "mood", "text": "a" * 51}]}}, 422, "invalid_request"),
    ("POST", PREDICT, {"content": b"{"}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b""}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "\xff"}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "\\ud800"}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "\\udfff": 1}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "timeout": NaN}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "timeout": -Infinity}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "timeout": 1e999}'}, 422, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "text": "b"}'}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": ' + b"[" * 90_000}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}"}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": ' + b"[" * 100 + b"]" * 100 + b"}"}, 422, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"timeout": ' + b"9" * 5000 + b"}"}, 400, "invalid_request"),
    ("POST", PREDICT, {"content": b'{"text": "a", "timeout": ' + b"9" * 4000 + b"}"}, 422, "invalid_request"),
    ("POST", PREDICT, {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_media_type"),
    ("POST", PREDICT, {"content": b"{}", "headers": {"Content-Type": ""}}, 415, "unsupported_media_type"),
    ("POST", PREDICT, {"json": {}, "headers": {"Content-Encoding": "gzip"}}, 415, "unsupported_media_type"),
    ("POST", "/v1/tasks/nope/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/hyper/nope/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/hyper/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/mood/mood/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/a/b/c/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/%2e%2e%2fmood/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/.versions/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("POST", "/v1/tasks/mood%00/predict", {"json": {"text": "a"}}, 404, "not_found"),
    ("POST", "/v1/tasks/mood%2f/predict", {"json": {"text": "a"}}, 404, "unknown_task"),
    ("GET", "/v1/tasks/mood%2f", {}, 404, "unknown_task"),
    ("GET", "/v1/tasks/mood%0A", {}, 404, "not_found"),
    ("GET", "/page/" + "a" * 5000, {}, 404, "not_found"),
    ("POST", PREDICT, {"json": {str(number): 1 for number in range(17)}}, 400, "invalid_request"),
    ("GET", "/v1/tasks/nope", {}, 404, "unknown_task"),
    ("GET", "/v1/tasks/..%2f..%2fetc%2fpasswd", {}, 404, "unknown_task"),
    ("GET", "/v1/tasks/", {}, 404, "unknown_task"),
    ("GET", "/v1/tasks?limit=0", {}, 422, "invalid_request"),
    ("GET", "/v1/tasks?limit=1001", {}, 422, "invalid_request"),
    ("GET", "/v1/tasks?limit=many", {}, 422, "invalid_request"),
    ("GET", "/nope", {}, 404, "not_found"),
    ("GET", "/docs", {}, 404, "not_found"),
    ("GET", "/page/nope.js", {}, 404, "not_found"),
    ("GET", "/page/..%2froutes.py", {}, 404, "not_found"),
    ("GET", PREDICT, {}, 405, "method_not_allowed"),
    ("PATCH", "/v1/tasks/mood", {}, 405, "method_not_allowed"),
    ("DELETE", "/healthz", {}, 405, "method_not_allowed"),
    ("POST", "/v1/tasks", {"json": {}}, 405, "method_not_allowed"),
    ("PUT", "/v1/tasks/new", {"json": {}, "headers": ADMIN}, 415, "unsupported_media_type"),
    ("PUT", "/v1/tasks/hyper%2Fmood", {"content": b"", "headers": ADMIN | {"Content-Type": "application/zip"}}, 404, "unknown_task"),  # noqa: E501
    ("DELETE", "/v1/tasks/nope", {"headers": ADMIN}, 404, "unknown_task"),
    ("DELETE", "/v1/tasks/.versions", {"headers": ADMIN}, 404, "unknown_task"),
    ("POST", "/v1/tasks/nope/rollback", {"json": {}, "headers": ADMIN}, 404, "unknown_task"),
    ("POST", "/v1/tasks/mood/rollback", {"json": {}, "headers": ADMIN}, 409, "conflict"),
    ("POST", "/v1/tasks/mood/rollback", {"json": {"version": 7}, "headers": ADMIN}, 409, "conflict"),
    ("POST", "/v1/tasks/mood/rollback", {"json": {"version": 0}, "headers": ADMIN}, 422, "invalid_request"),
    ("POST", "/v1/tasks/mood/rollback", {"json": {"version": "1"}, "headers": ADMIN}, 422, "invalid_request"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "options", "status", "type"), MISTAKES)
def test_a_mistake_gets_its_status_and_a_sentence(
    engine: Engine, world: World, method: str, path: str, options: dict[str, Any], status: int, type: str
) -> None:
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]), limits=Limits(texts=4, characters=50))
    if "content" in options:
        options = {**options, "headers": {"Content-Type": "application/json"} | options.get("headers", {})}
    response = call(app, method, path, **options)
    assert error_of(response) == (status, type)
    assert str(world.folder) not in response.text
    if status == 405:
        assert response.headers["allow"] and method not in response.headers["allow"].split(", ")


def test_the_error_of_a_wrong_shape_names_the_place(app: Any) -> None:
    body = {"questions": [{"task": "mood", "text": "a"}, {"task": "mood", "text": 7}]}
    assert "questions.1.text" in call(app, "POST", MIXED, json=body).json()["error"]["message"]


def test_a_broken_task_answers_503_and_the_others_do_not_notice(own: tuple[Engine, World]) -> None:
    engine, world = own
    world.put(small(world.alone, 3))
    (world.folder / "t3" / "graft.safetensors").resolve().write_bytes(b"no")
    app = create_app(engine)
    assert error_of(call(app, "POST", "/v1/tasks/t3/predict", json={"text": "a"})) == (503, "unreadable")
    body = {"questions": [{"task": "t3", "text": "a"}, {"task": "mood", "text": "a"}]}
    first, second = call(app, "POST", MIXED, json=body).json()["answers"]
    assert first["error"]["type"] == "unreadable" and second["label"]
    (world.folder / "t3" / "graft.json").resolve().write_bytes(b"{}")
    found = call(app, "GET", "/v1/tasks").json()
    assert [task["name"] for task in found["tasks"]] == ["mood", "t3"]
    assert found["tasks"][1]["error"]["type"] == "unreadable" and found["tasks"][0]["version"] == 2
    (world.folder / "t3" / "graft.json").resolve().unlink()
    shown = call(app, "GET", "/v1/tasks/t3")
    assert error_of(shown) == (503, "unreadable") and "graft.json" in shown.text
    assert str(world.folder) not in shown.text


def test_a_batch_that_fails_answers_500_with_the_id_of_the_log(
    own: tuple[Engine, World], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = own
    app = create_app(engine)
    works = engine._forward

    def breaks(rows: Any) -> int:
        raise RuntimeError("a broken backbone")

    monkeypatch.setattr(engine, "_forward", breaks)
    response = call(app, "POST", PREDICT, json={"text": "a"})
    assert error_of(response) == (500, "failed")
    assert response.json()["error"]["id"] in caplog.text and "a broken backbone" not in response.text
    monkeypatch.setattr(engine, "_forward", works)
    assert call(app, "POST", PREDICT, json={"text": "a"}).status_code == 200


def test_an_error_that_nobody_thought_of_is_a_500_with_an_id(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(engine)

    def breaks(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret text")

    monkeypatch.setattr(app.state.served.listing, "page", breaks)
    response = call(app, "GET", "/v1/tasks")
    assert error_of(response) == (500, "failed") and "a secret text" not in response.text
    assert response.json()["error"]["id"] in caplog.text and response.headers["x-request-id"]


# -- time and load


def test_a_full_queue_answers_429_at_once_and_loses_nothing(own: tuple[Engine, World]) -> None:
    engine, _ = own
    engine.most_waiting = 1
    app = create_app(engine)

    async def flood() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.create_task(client.post(PREDICT, json={"text": "a"}))
            while not engine.waiting:
                await asyncio.sleep(0.001)
            others = [await client.post(PREDICT, json={"text": "a"}) for _ in range(5)]
            mixed = await client.post(MIXED, json={"questions": [{"task": "nope", "text": "a"}]})
            held.go.set()
            return [await first, *others, mixed]

    with Held(engine) as held:
        first, *others = asyncio.run(asyncio.wait_for(flood(), SECONDS))
    assert first.status_code == 200
    for response in others:
        assert error_of(response) == (429, "overloaded") and int(response.headers["retry-after"]) >= 1
    assert call(app, "POST", PREDICT, json={"text": "a"}).status_code == 200


def test_no_answer_in_time_is_a_504(own: tuple[Engine, World]) -> None:
    engine, _ = own
    with Held(engine):
        hurried = create_app(engine, limits=Limits(timeout=0.05))
        assert error_of(call(hurried, "POST", PREDICT, json={"text": "a"})) == (504, "expired")
        app = create_app(engine)
        started = time.monotonic()
        assert error_of(call(app, "POST", PREDICT, json={"text": "a", "timeout": 0.05})) == (504, "expired")
        body = {"questions": [{"task": "mood", "text": "a"}, {"task": "nope", "text": "a"}], "timeout": 0.05}
        answers = call(app, "POST", MIXED, json=body).json()["answers"]
        assert [answer["error"]["type"] for answer in answers] == ["expired", "unknown_task"]
        assert time.monotonic() - started < 5
    until(lambda: engine.waiting == 0, "an empty queue")


def test_what_a_caller_who_left_asked_is_not_answered(own: tuple[Engine, World]) -> None:
    engine, _ = own
    app = create_app(engine)
    sent: list[Any] = []
    body = json.dumps({"texts": ["a"] * 20}).encode()

    async def leave() -> None:
        parts = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            if len(parts) == 1:
                await asyncio.to_thread(held.entered.wait, SECONDS)
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        scope = {"type": "http", "method": "POST", "path": PREDICT, "query_string": b"", "headers": headers}
        await asyncio.wait_for(app(scope, receive, send), SECONDS)

    engine.tokens = 6  # two short texts a batch
    with Held(engine) as held:
        asyncio.run(leave())
        assert engine.waiting > 10  # the model is held still
    until(lambda: engine.waiting == 0, "an empty queue")
    text = app.state.served.metrics.text().decode()
    assert 'outcome="cancelled",task="mood"' in text and len(held.rows) < 4
    assert not sent and 'status="499"' in text


def test_to_leave_before_all_is_said_is_no_failure(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]))
    for method, path in (("POST", PREDICT), ("PUT", "/v1/tasks/new")):

        async def leave(scope: dict[str, Any]) -> None:
            parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

            async def receive() -> Any:
                return parts.pop(0)

            await asyncio.wait_for(app(scope, receive, pytest.fail), SECONDS)

        kind = "application/json" if method == "POST" else "application/zip"
        facts = {"host": "localhost", "content-type": kind, "content-length": "50", "authorization": "Bearer boss"}
        headers = [(name.encode(), value.encode()) for name, value in facts.items()]
        asyncio.run(leave({"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert app.state.served.metrics.text().decode().count('status="499"') == 4  # with when each was seen first


def test_a_closed_engine_answers_503(tmp_path: Path) -> None:
    world = World(tmp_path / "store", reader())
    world.put(small(world.alone, 1))
    with engine_on(world.folder) as engine:
        app = create_app(engine)
    assert error_of(call(app, "POST", "/v1/tasks/t1/predict", json={"text": "a"})) == (503, "closing")
    headers = ADMIN | {"Content-Type": "application/zip"}
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]))
    sent = call(app, "PUT", "/v1/tasks/t2", content=zipped(small(world.alone, 2)), headers=headers)
    assert error_of(sent) == (503, "closing")


# -- tasks


def test_pages_hold_each_task_once_and_in_order(app: Any, engine: Engine) -> None:
    names, after, pages = [], "", 0
    while after is not None:
        found = call(app, "GET", "/v1/tasks", params={"limit": 4, "after": after}).json()
        assert found["total"] == 12 and len(found["tasks"]) <= 4
        names += [task["name"] for task in found["tasks"]]
        after, pages = found["next"], pages + 1
    assert names == sorted(engine.library.names()) and "hyper/mood" in names and pages == 3
    begins = call(app, "GET", "/v1/tasks", params={"prefix": "p", "limit": 2}).json()
    assert [task["name"] for task in begins["tasks"]] == ["parts", "plain"] and begins["total"] == 3
    assert begins["next"] == "plain"
    last = call(app, "GET", "/v1/tasks", params={"prefix": "p", "after": "plain"}).json()
    assert [task["name"] for task in last["tasks"]] == ["price"] and last["next"] is None
    assert call(app, "GET", "/v1/tasks", params={"after": "zzz"}).json()["tasks"] == []


def test_a_line_says_what_is_known_of_a_task(app: Any, world: World) -> None:
    call(app, "POST", "/v1/tasks/nli/predict", json={"text": "a", "pair": "b"})
    shown = call(app, "GET", "/v1/tasks/nli").json()
    line = next(task for task in call(app, "GET", "/v1/tasks").json()["tasks"] if task["name"] == "nli")
    assert {key: shown[key] for key in line} == line
    assert line["kind"] == "classification" and line["labels"] == ["yes", "no", "maybe"] and line["reads_pairs"]
    assert line["version"] == 1 and line["method"] == "adapter" and line["resident"] is True
    graft = world.grafts["nli"]
    assert isinstance(graft, tg.Graft) and line["parameters"] == graft.parameters and line["bytes"] > 1000
    assert shown["versions"] == [1] and shown["card"].startswith("---") and shown["backbone"] == graft.backbone["name"]
    joint = call(app, "GET", "/v1/tasks/hyper/mood").json()
    assert joint["method"] == "hyperformer" and joint["labels"] == ["bad", "good"]
    call(app, "POST", "/v1/tasks/hyper/mood/predict", json={"text": "a"})  # it is written out as an adapter
    assert call(app, "GET", "/v1/tasks/hyper/mood").json() == joint | {"resident": True}


def test_a_page_reads_the_files_of_its_own_tasks_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = library.read
    monkeypatch.setattr(library, "read", lambda name, *rest: read.append(name) or original(name, *rest))  # type: ignore[func-returns-value]
    with engine_on(world.folder) as engine:
        call(create_app(engine), "GET", "/v1/tasks?limit=3&after=flags")
    assert len(read) == 3


def test_a_listing_shows_what_changed_in_a_store_that_had_long_been_the_same(own: tuple[Engine, World]) -> None:
    engine, world = own
    app = create_app(engine)
    for number in (3, 4):
        os.utime(world.folder, (number, number))
        before = call(app, "GET", "/v1/stats").json()["tasks"]
        world.put(small(world.alone, number))
        assert call(app, "GET", "/v1/stats").json()["tasks"] == before + 1
        assert call(app, "GET", "/v1/tasks").json()["tasks"][-1]["name"] == f"t{number}"


def test_scores_that_are_no_numbers_are_null(own: tuple[Engine, World]) -> None:
    engine, world = own
    metrics = {"score": float("nan"), "test": {"accuracy": 0.5, "pearson": float("inf")}}
    world.put(dataclasses.replace(small(world.alone, 3), metrics=metrics))
    world.put(dataclasses.replace(small(world.alone, 4), metrics={"score": 0.75}))
    response = call(create_app(engine), "GET", "/v1/tasks?prefix=t")
    first, second = json.loads(response.text, parse_constant=pytest.fail)["tasks"]
    assert first["score"] is None and first["metrics"]["test"] == {"accuracy": 0.5, "pearson": None}
    assert second["score"] == 0.75


def test_tasks_come_change_and_leave(own: tuple[Engine, World]) -> None:
    engine, world = own
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]))
    headers = ADMIN | {"Content-Type": "application/zip"}
    ask = {"json": {"text": "a good film"}}
    assert call(app, "GET", "/v1/tasks").json()["total"] == 1
    for folder, status, version in (("", 201, 1), ("some folder/", 200, 2)):
        content = zipped(small(world.alone, 10 + version), folder)
        response = call(app, "PUT", "/v1/tasks/new one", content=content, headers=headers)
        assert (response.status_code, response.json()) == (status, {"task": "new one", "version": version})
        answer = call(app, "POST", "/v1/tasks/new one/predict", **ask).json()
        assert answer["version"] == version and answer["label"].startswith(f"{10 + version}-")
    assert call(app, "GET", "/v1/tasks/new one").json()["versions"] == [1, 2]
    assert [task["name"] for task in call(app, "GET", "/v1/tasks").json()["tasks"]] == ["mood", "new one"]
    response = call(app, "POST", "/v1/tasks/new one/rollback", json={}, headers=ADMIN)
    assert response.json() == {"task": "new one", "version": 1}
    assert call(app, "POST", "/v1/tasks/new one/predict", **ask).json()["label"].startswith("11-")
    response = call(app, "POST", "/v1/tasks/new one/rollback", json={"version": 2}, headers=ADMIN)
    assert response.json() == {"task": "new one", "version": 2}
    response = call(app, "DELETE", "/v1/tasks/new one", headers=ADMIN)
    assert (response.status_code, response.content) == (204, b"")
    assert error_of(call(app, "POST", "/v1/tasks/new one/predict", **ask)) == (404, "unknown_task")
    assert call(app, "GET", "/v1/tasks").json()["total"] == 1


# -- what is written down


def test_metrics_tell_what_has_happened(own: tuple[Engine, World]) -> None:
    engine, _ = own
    app = create_app(engine)
    call(app, "POST", PREDICT, json={"texts": ["a", "good film"]})
    call(app, "POST", "/v1/tasks/a-text-that-is-no-task/predict", json={"text": "a"})
    call(app, "GET", "/what/is/this?text=hidden")
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert lines['taskgraft_requests_total{method="POST",route="/v1/tasks/{task}/predict",status="200"}'] == "1.0"
    assert lines['taskgraft_requests_total{method="POST",route="/v1/tasks/{task}/predict",status="404"}'] == "1.0"
    assert lines['taskgraft_requests_total{method="GET",route="other",status="404"}'] == "1.0"
    assert lines['taskgraft_answers_total{outcome="ok",task="mood"}'] == "2.0"
    assert lines['taskgraft_answers_total{outcome="unknown_task",task="other"}'] == "1.0"
    assert lines["taskgraft_answer_seconds_count"] == "2.0"
    assert lines["taskgraft_batch_rows_sum"] == "2.0" and float(lines["taskgraft_batch_tokens_sum"]) == 3 + 4
    assert 0 < float(lines["taskgraft_batch_fill_sum"]) <= float(lines["taskgraft_batch_fill_count"])
    assert lines['taskgraft_request_seconds_count{route="/v1/tasks/{task}/predict"}'] == "2.0"
    assert lines["taskgraft_waiting"] == "0.0" and lines["taskgraft_resident_grafts"] == "1.0"
    assert 0 < float(lines["taskgraft_resident_bytes"]) <= float(lines["taskgraft_budget_bytes"])
    assert lines["taskgraft_grafts_paged_in_total"] == "1.0" and lines["taskgraft_grafts_paged_out_total"] == "0.0"
    assert float(lines["taskgraft_batch_seconds_count"]) >= 1
    assert "hidden" not in response.text and "no-task" not in response.text


def test_thousands_of_tasks_and_odd_requests_do_not_grow_the_metrics(engine: Engine) -> None:
    app = create_app(engine)
    metrics = app.state.served.metrics
    version = engine.library.find("mood")
    for number in range(1000):
        asked = Asked(Question(f"t{number}", "a"), None, version=dataclasses.replace(version, name=f"t{number}"))
        metrics.answered(asked, None if number % 2 else Expired("late"))
    for number in range(20):
        call(app, f"METHOD{number}", f"/path/{number}")
        call(app, "GET", f"/v1/tasks/no-{number}")
    counts = [line for line in metrics.text().decode().splitlines() if line.startswith("taskgraft_answers_total")]
    assert len(counts) == 102 and sum(float(line.rsplit(" ", 1)[1]) for line in counts) == 1000
    assert 'taskgraft_answers_total{outcome="ok",task="other"} 450.0' in counts
    requests = [line for line in metrics.text().decode().splitlines() if line.startswith("taskgraft_requests_total")]
    assert len(requests) == 2


def test_stats_for_the_page(own: tuple[Engine, World]) -> None:
    engine, _ = own
    app = create_app(engine)
    before = call(app, "GET", "/v1/stats").json()
    assert before["latency_ms"] == {"p50": None, "p95": None, "p99": None} and before["rate"] == 0
    call(app, "POST", PREDICT, json={"texts": ["a"] * 30})
    call(app, "POST", "/v1/tasks/nope/predict", json={"text": "a"})
    after = call(app, "GET", "/v1/stats").json()
    assert (after["tasks"], after["resident"], after["answered"], after["errors"]) == (1, 1, 30, 1)
    assert after["waiting"] == 0 and 0 < after["resident_bytes"] <= after["budget_bytes"]
    assert after["rate"] >= 3 and after["uptime_s"] > before["uptime_s"]
    times = after["latency_ms"]
    assert 0 < times["p50"] <= times["p95"] <= times["p99"]


def test_a_line_of_the_log_has_no_texts_and_no_tokens(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(engine, tokens=Tokens.of(["letmein"], ["boss"]))
    caplog.set_level(logging.INFO, "taskgraft.serving.requests")
    headers = {"Authorization": "Bearer letmein", "X-Request-Id": "abc-123"}
    call(app, "POST", PREDICT, json={"texts": ["secret words", "more"]}, headers=headers)
    call(app, "POST", "/v1/tasks/secret/predict?secret=1", json={"text": "secret"}, headers=headers)
    call(app, "POST", MIXED, content=b'{"secret', headers=headers | {"Content-Type": "application/json"})
    call(app, "GET", "/v1/tasks/secret", headers={"Authorization": "Bearer secret"})
    lines = [JsonLines().format(record) for record in caplog.records if record.name == "taskgraft.serving.requests"]
    assert len(lines) == 4 and not any("secret" in line or "letmein" in line or "\n" in line for line in lines)
    found = [json.loads(line) for line in lines]
    assert [line["status"] for line in found] == [200, 404, 400, 401]
    first = found[0]
    assert first["method"] == "POST" and first["route"] == "/v1/tasks/{task}/predict" and first["task"] == "mood"
    assert first["rows"] == 2 and first["request_id"] == "abc-123" and first["ms"] > 0 and first["time"][:2] == "20"
    assert found[3]["route"] == "/v1/tasks/{task}" and "task" not in found[1]


@pytest.mark.parametrize(("given", "kept"), [("abc-123", True), ("a" * 64, True), ("a" * 65, False), ("a b", False)])
def test_every_answer_has_a_request_id(app: Any, given: str, kept: bool) -> None:
    for path in ("/healthz", "/nope"):
        found = call(app, "GET", path, headers={"X-Request-Id": given}).headers["x-request-id"]
        assert (found == given) is kept and found
    assert call(app, "GET", "/healthz").headers["x-request-id"] != call(app, "GET", "/healthz").headers["x-request-id"]


# -- health, the description and the page


def test_ready_once_the_backbone_has_answered_and_until_it_closes(own: tuple[Engine, World]) -> None:
    engine, _ = own
    app = create_app(engine)

    async def live() -> list[tuple[int, int]]:
        seen = []
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def look() -> None:
                seen.append(((await client.get("/healthz")).status_code, (await client.get("/readyz")).status_code))

            async with app.router.lifespan_context(app):
                await asyncio.to_thread(held.entered.wait, SECONDS)
                await look()
                held.go.set()
                await app.state.warming
                await look()
            await look()
        return seen

    with Held(engine) as held:
        assert asyncio.run(asyncio.wait_for(live(), SECONDS)) == [(200, 503), (200, 200), (200, 503)]


def test_a_first_task_that_is_broken_does_not_keep_the_server_from_starting(own: tuple[Engine, World]) -> None:
    engine, world = own
    world.put(small(world.alone, 3, name="a first one"))
    record = (world.folder / "a first one" / "graft.json").resolve()
    record.write_text(json.dumps({**json.loads(record.read_text()), "training": {"settings": 5}}))
    app = create_app(engine)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            await app.state.warming

    asyncio.run(asyncio.wait_for(live(), SECONDS))
    assert app.state.served.ready and app.state.served.metrics.answers == 1


def test_an_empty_store_is_served_too(tmp_path: Path) -> None:
    with engine_on(tmp_path / "none") as engine:
        app = create_app(engine)

        async def live() -> None:
            async with app.router.lifespan_context(app):
                await app.state.warming

        asyncio.run(asyncio.wait_for(live(), SECONDS))
        assert app.state.served.ready
        assert call(app, "GET", "/v1/tasks").json() == {"tasks": [], "total": 0, "next": None}
        assert call(app, "GET", "/v1/stats").json()["tasks"] == 0


def test_the_description_has_examples_and_every_error(app: Any) -> None:
    found = call(app, "GET", "/openapi.json").json()
    paths = found["paths"]
    assert set(paths["/v1/tasks/{task}"]) == {"get", "put", "delete"} and "/v1/predict" in paths
    asked = {"400", "401", "403", "404", "408", "413", "415", "422", "429", "500", "503", "504", "200"}
    assert set(paths["/v1/tasks/{task}/predict"]["post"]["responses"]) == asked
    for path, operations in paths.items():
        for operation in operations.values():
            assert operation["summary"] and operation["description"], path
            for status, response in operation["responses"].items():
                wanted = {"$ref": "#/components/schemas/ErrorAnswer"}
                if int(status) >= 400:
                    assert response["content"]["application/json"]["schema"] == wanted, (path, status)
    shapes = found["components"]["schemas"]
    assert all(shapes[name]["examples"] for name in ("AskOne", "AskMany", "AskMixed", "OneAnswer"))
    assert shapes["AskMany"]["properties"]["texts"]["maxItems"] == 256
    assert "application/zip" in paths["/v1/tasks/{task}"]["put"]["requestBody"]["content"]


@pytest.mark.skipif(not (PAGE / "index.html").is_file(), reason="the page is not there")
def test_the_page_may_load_nothing_from_elsewhere(app: Any) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in PAGE.iterdir())):
        response = call(app, "GET", path)
        assert response.status_code == 200 and response.content
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
    assert call(app, "GET", "/").headers["content-type"].startswith("text/html")


# -- behind a socket


def test_slow_senders_are_cut_off(own: tuple[Engine, World], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = own
    monkeypatch.setattr(serving, "HEADER_S", 0.3)
    monkeypatch.setattr(serving, "DRAIN_S", 0.01)
    app = create_app(engine, limits=Limits(body_s=0.3))
    with running(app) as url:
        for start in (b"", b"POST /v1/predict HTTP/1.1\r\nHost: localh"):
            with connection(url) as sender:
                sender.sendall(start)
                assert sender.recv(1000) == b""  # closed
        with connection(url) as sender:
            sender.sendall(head("POST", PREDICT, 50) + b'{"text":')
            answer = received(sender)
        assert answer.startswith(b"HTTP/1.1 408") and b'"invalid_request"' in answer and b"connection: close" in answer
        assert httpx.post(url + PREDICT, json={"text": "a"}).status_code == 200


def test_the_collector_leaves_what_was_loaded_alone_while_it_serves(world: World) -> None:
    seen = []

    def announce() -> None:
        seen.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGTERM)

    with engine_on(world.folder) as engine:
        serving.serve(create_app(engine), serving.listen("127.0.0.1", 0), announce)
    assert seen[0] > 10_000 and gc.get_freeze_count() == 0


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(own: tuple[Engine, World]) -> None:
    engine, _ = own
    with running(create_app(engine)) as url, connection(url) as sender:
        sender.sendall(head("POST", PREDICT, 50 << 20))
        answer = received(sender)
    assert answer.startswith(b"HTTP/1.1 413") and b'"too_large"' in answer


def test_all_that_was_taken_is_answered_before_the_end(own: tuple[Engine, World]) -> None:
    engine, _ = own
    app = create_app(engine)
    answers: list[httpx.Response] = []
    with running(app) as url, Held(engine) as held:
        asking = [
            threading.Thread(
                target=lambda: answers.append(httpx.post(url + PREDICT, json={"text": "a"}, timeout=SECONDS))
            )
            for _ in range(8)
        ]
        for thread in asking:
            thread.start()
        until(lambda: engine.waiting == 8, "the questions")
        stopping = threading.Timer(1.0, held.go.set)
        stopping.start()
    for thread in asking:
        thread.join(SECONDS)
    assert [answer.status_code for answer in answers] == [200] * 8


def test_a_store_that_is_not_there_is_refused_unless_it_can_be_filled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "taskgraft.cli", "serve", "--store", str(tmp_path / "none"), "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TASKGRAFT_")}
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False)
    assert refused.returncode == 2 and "there is no store at" in refused.stderr and "--store" in refused.stderr
    command += ["--json", "--backbone", str(tmp_path / "backbone")]
    tiny.backbone(tmp_path / "backbone")
    environment["TASKGRAFT_ADMIN_TOKEN"] = "secret"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None and json.loads(process.stdout.readline())["tasks"] == 0
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()


def test_the_command_serves_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    folder = tmp_path / "backbone"
    backbone = tiny.backbone(folder)
    graft = small(backbone, 1, name="mood")
    tg.Store(tmp_path / "grafts").put(dataclasses.replace(graft, backbone={**graft.backbone, "name": str(folder)}))
    command = [
        sys.executable,
        "-m",
        "taskgraft.cli",
        "serve",
        "--store",
        str(tmp_path / "grafts"),
        "--port",
        "0",
        "--json",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TASKGRAFT_")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["tasks"] == 1 and said["url"].startswith("http://127.0.0.1:")
        with httpx.Client(base_url=said["url"]) as client:
            assert client.post(PREDICT, json={"text": "a secret"}).json()["version"] == 1
            assert client.get("/readyz").status_code == 200
        with connection(said["url"]) as sender:  # the body of a request that was begun comes after the signal
            sender.sendall(head("POST", PREDICT, 15) + b'{"text": ')
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            sender.sendall(b'"hot"}')
            assert received(sender).startswith(b"HTTP/1.1 200")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    written = (tmp_path / "log").read_text()
    assert "this machine alone" in written and "secret" not in written and "Traceback" not in written
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines] == [200, 200, 200]
