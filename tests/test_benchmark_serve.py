"""The serving benchmark runs, and notices a server that loses, swaps, repeats or delays answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serve  # noqa: E402
import serve_plots  # noqa: E402
from alternatives import MODELS, Request, first_with_its_task  # noqa: E402
from churn import Changes, Churn  # noqa: E402
from ledger import difference, latencies  # noqa: E402
from load import Load, Order  # noqa: E402
from wire import Reply  # noqa: E402

# -- the command


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "serve.py"), "--smoke", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.slow
def test_the_command_asks_a_real_server_and_writes_what_it_found(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "serve.json").read_text())
    sections = record["sections"]
    assert list(sections) == list(serve.SECTIONS)
    loads = [
        sections["closed"],
        sections["open"],
        sections["open"]["single"],
        *map(sections["churn"].get, ("closed", "open")),
    ]
    for load in loads:
        assert load["answers"] > 0 and load["throughput"] > 0 and load["p50_ms"] <= load["p99_ms"] <= load["max_ms"]
        assert serve_plots.mishaps(load) == 0, load["examples"]
        assert load["asked"] >= load["answers"] and load["largest_difference"] < 1e-4 and load["server_cores"] > 0
    assert sections["open"]["rate"] == pytest.approx(0.6 * sections["closed"]["throughput"])
    for loop in ("closed", "open"):
        churn = sections["churn"][loop]["churn"]
        assert churn["changes"] >= 5 and churn["asked"] >= 2 and churn["failed"] == 0, churn["examples"]
    trials = {trial["way"]: trial for trial in sections["alternatives"]["trials"]}
    assert trials[MODELS]["throughput"] > 0 and trials["taskgraft"]["rss_bytes"] > 50 << 20
    assert "give --peer-python" in trials[serve.SWAPPED]["skipped"]
    many = sections["many"]
    assert many["answers"] == many["tasks"] == serve.SMOKE.many and many["wrong"] == 0
    assert many["grafts_paged_out_total"] > 0 and 0 < many["resident_bytes"] <= many["budget_bytes"]
    table = (tmp_path / "serve.md").read_text()
    assert "| closed loop | requests lost, refused, answered twice or wrong: 0 | 0 | yes |" in table
    assert (tmp_path / "serve.png").read_bytes()[:4] == b"\x89PNG"

    target, setting = tmp_path / "serve.json", record["setting"]
    assert serve.opened(target, True, setting)["sections"] == sections
    with pytest.raises(SystemExit, match="holds another run \\(seconds differ\\)"):
        serve.opened(target, True, {**setting, "seconds": 60.0})
    with pytest.raises(SystemExit, match="holds another run"):
        serve.opened(target, False, setting)


def test_sections_are_chosen_by_name_and_need_what_they_build_on() -> None:
    assert serve.chosen(None, None, []) == ["offline", "closed", "open", "churn", "alternatives"]
    assert serve.chosen(None, 5000, [])[-1] == "many"
    assert serve.chosen("open,closed", None, []) == ["closed", "open"]
    assert serve.chosen("open", None, ["closed"]) == ["open"]
    with pytest.raises(SystemExit, match="section churn needs the figures of open"):
        serve.chosen("churn,closed", None, [])
    with pytest.raises(SystemExit, match="--only speed"):
        serve.chosen("speed", None, [])


# -- a load on servers that do not do what they should

RIGHT = {"task": "mood", "kind": "classification", "label": "good", "probabilities": {"good": 0.8, "bad": 0.2}}
Answering = Callable[[int, str], list[tuple[int, str, dict[str, Any]]]]  # replies to the n-th request, of this id


def loaded(tmp_path: Path, answering: Answering, delay: float = 0.0, **options: Any) -> dict[str, Any]:
    """What a load finds of a server that answers so; one answer at a time, each after a delay."""
    questions = [{"task": "mood", "text": f"text {number}", "answer": RIGHT} for number in range(20)]
    (tmp_path / "questions.json").write_text(json.dumps(questions))

    async def run() -> dict[str, Any]:
        count, turn = 0, asyncio.Lock()

        async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:-2])
                await reader.readexactly(int(fields["Content-Length"]))
                async with turn:
                    await asyncio.sleep(delay)
                    count += 1
                    replies = answering(count, fields["X-Request-Id"])
                if not replies:
                    writer.close()
                    return
                for status, id, answer in replies:
                    body = json.dumps(answer).encode()
                    writer.write(b"HTTP/1.1 %d X\r\nx-request-id: %s\r\n" % (status, id.encode()))
                    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))

        server = await asyncio.start_server(serving, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        order = Order(port, os.getpid(), str(tmp_path / "questions.json"), **{"clients": 3, **options})
        return await Load(order).run()

    return asyncio.run(run())


def test_a_good_server_is_asked_everything_once(tmp_path: Path) -> None:
    found = loaded(tmp_path, lambda n, id: [(200, id, RIGHT)])
    assert (found["asked"], found["answers"], serve_plots.mishaps(found)) == (20, 20, 0)
    assert found["throughput"] > 0 and found["examples"] == []


def test_a_closed_loop_keeps_its_clients_busy_for_its_time(tmp_path: Path) -> None:
    found = loaded(tmp_path, lambda n, id: [(200, id, RIGHT)], delay=0.01, seconds=0.6, warmup_s=0.2)
    assert found["seconds"] == pytest.approx(0.6) and 5 < found["answers"] < found["asked"] <= 90
    assert found["p50_ms"] > 25  # each waits for the two others
    assert serve_plots.mishaps(found) == 0


def test_an_open_loop_counts_from_when_a_request_was_due(tmp_path: Path) -> None:
    found = loaded(tmp_path, lambda n, id: [(200, id, RIGHT)], delay=0.05, seconds=1.0, rate=40.0, clients=1)
    assert found["answers"] <= 21 and found["p99_ms"] > 300  # twice as many come as are answered: they queue up
    assert serve_plots.mishaps(found) == 0 and found["asked"] > 25


def test_an_open_loop_that_was_held_up_itself_leaves_no_wait_out(tmp_path: Path) -> None:
    def answering(n: int, id: str) -> list[tuple[int, str, dict[str, Any]]]:
        time.sleep(0.5 if n == 3 else 0.0)  # nothing can be asked meanwhile, and much is due
        return [(200, id, RIGHT)]

    found = loaded(tmp_path, answering, seconds=1.0, rate=60.0)
    assert found["p95_ms"] > 200 and found["max_ms"] < 5000


@pytest.mark.parametrize(
    ("answering", "kind"),
    [
        (lambda n, id: [(200, id, RIGHT)] * (2 if n == 3 else 1), "duplicated"),
        (lambda n, id: [(200, "load-0" if n == 7 else id, RIGHT)], "duplicated"),
        (lambda n, id: [] if n == 3 else [(200, id, RIGHT)], "lost"),
        (lambda n, id: [(200, id, RIGHT | ({"label": "bad"} if n == 5 else {}))], "wrong"),
        (lambda n, id: [(200, id, RIGHT | ({"task": "topic"} if n == 5 else {}))], "wrong"),
    ],
)  # fmt: skip
def test_answers_that_are_lost_repeated_or_wrong_are_counted(tmp_path: Path, answering: Answering, kind: str) -> None:
    found = loaded(tmp_path, answering)
    assert found[kind] == 1 and found["examples"]
    assert serve_plots.mishaps(found) >= 1


def test_two_answers_that_reach_each_other_are_both_wrong(tmp_path: Path) -> None:
    swapped = {1: "load-1", 2: "load-0"}
    found = loaded(tmp_path, lambda n, id: [(200, swapped.get(n, id), RIGHT)], delay=0.01)
    assert (found["wrong"], found["lost"], found["duplicated"]) == (2, 0, 0)


def test_refusals_are_counted_by_their_status(tmp_path: Path) -> None:
    found = loaded(tmp_path, lambda n, id: [(429 if n % 2 else 200, id, RIGHT)])
    assert found["errors"] == {"429": 10} and found["answers"] == 10 and found["lost"] == 0


class Stuck:
    """A connection to a server that says it changes tasks, and keeps one that was removed."""

    lost = False

    async def call(self, data: bytes) -> Reply:
        if data.startswith(b"PUT"):
            assert b"Authorization: Bearer token\r\n" in data and data.endswith(b"\r\n\r\nzip")
            return Reply(201)
        if data.startswith(b"DELETE"):
            return Reply(204)
        return Reply(200, b"", json.dumps({**RIGHT, "task": data.split(b"/")[3].decode()}).encode())


def test_changes_that_have_no_effect_are_counted(tmp_path: Path) -> None:
    (tmp_path / "graft.zip").write_bytes(b"zip")
    churn = Churn("token", [(str(tmp_path / "graft.zip"), {"text": "x", "answer": RIGHT})], every_s=0.02)

    async def opened() -> Any:
        return Stuck()

    changes = Changes(churn, opened)
    asyncio.run(changes.run(time.perf_counter() + 0.4))
    found = changes.report()
    assert found["changes"] >= 4 and found["asked"] == 2 * found["failed"] > 0
    assert "churn_0, removed: 200" in found["examples"][0]


# -- judging


def test_an_answer_is_right_when_its_label_is_or_could_as_well_be() -> None:
    tie = {**RIGHT, "probabilities": {"good": 0.500002, "bad": 0.499998}}
    assert difference(RIGHT, RIGHT) == 0.0
    assert difference(tie, {**tie, "label": "bad"}) == 0.0
    assert difference(RIGHT, {**RIGHT, "label": "bad"}) is None
    value = {"task": "mood", "kind": "regression", "value": 2.0}
    assert difference(value, {**value, "value": 2.00001}) == pytest.approx(5e-6)
    assert difference(value, {**value, "value": 2.01}) is None and difference(value, RIGHT) is None


def test_percentiles_are_values_that_were_measured() -> None:
    found = latencies([number / 1000 for number in range(1, 201)])
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"], found["max_ms"]) == (100, 190, 198, 200)
    assert latencies([]) == dict.fromkeys(("p50_ms", "p95_ms", "p99_ms", "max_ms"))


def test_targets_are_judged_by_what_was_measured() -> None:
    clean = {"lost": 0, "duplicated": 0, "wrong": 0, "errors": {}}
    sections: dict[str, Any] = {
        "closed": {"throughput": 160.0, "p99_ms": 900.0, **clean},
        "open": {"throughput": 96.0, "p99_ms": 150.0, "single_ms": 10.0, **clean, "errors": {"429": 2}},
    }
    record = {"sections": sections, "setting": {"clients": 64}}

    def found() -> list[tuple[float | None, bool | None]]:
        return [(one["measured"], one["met"]) for one in serve_plots.targets(record)]

    assert found() == [(None, None), (2.25, False), (0, True), (15.0, False), (2, False)]
    sections["closed"] |= {"engine": 200.0, "p99_ms": 800.0}
    assert found()[:2] == [(0.8, True), (2.0, True)]
    sections["many"] = {"tasks": 9, "answers": 9, "resident_bytes": 11, "budget_bytes": 10, **clean, "wrong": 1}
    assert found()[-2:] == [(1, False), (1.1, False)]


def test_requests_of_one_task_are_run_together_and_the_others_wait_in_order() -> None:
    waiting = deque(Request(task, [0] * length) for task, length in [(1, 10), (2, 5), (1, 90), (1, 12), (2, 6), (1, 9)])
    batch = first_with_its_task(waiting, tokens=40)
    assert [len(one.ids) for one in batch] == [10, 9, 12] and {one.task for one in batch} == {1}
    assert [(one.task, len(one.ids)) for one in waiting] == [(2, 5), (1, 90), (2, 6)]
    assert [len(one.ids) for one in first_with_its_task(deque([Request(1, [0] * 99)]), tokens=40)] == [99]
