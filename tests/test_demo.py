"""The demo, whole: minutes long, so it is for `make test-all`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import taskgraft as tg
from taskgraft.demo import TASKS

from test_cli import run


@pytest.mark.slow
def test_the_demo_trains_three_tasks_and_keeps_its_promises(tmp_path: Path) -> None:
    done = run("-m", "taskgraft.cli", "demo", "--store", str(tmp_path / "grafts"), "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["unchanged"] is True
    assert [line["task"] for line in record["lines"]] == [*TASKS, "review_sentiment", "review_sentiment"]
    assert all(line["score"] > 0.6 for line in record["lines"])
    assert done.stderr.count("the same to the bit") == 3 and "CHANGED" not in done.stderr
    store = tg.Store(tmp_path / "grafts")
    assert store.names() == sorted(TASKS)
    assert "taskgraft predict review_sentiment" in done.stderr
    card = (tmp_path / "grafts" / "tweet_mood" / "README.md").read_text()
    assert "# tweet\\_mood" in card and "pearson" in card
