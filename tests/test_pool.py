"""Processes that several share: what goes first, what is done once, and what happens when something goes wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from taskgraft.experiments.pool import Call, Pool


def note(file: Path, word: str) -> None:
    with file.open("a") as lines:
        lines.write(f"{word}\n")


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def fail(_: str) -> None:
    raise ValueError("no")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def notes(file: Path, *words: str) -> list[Call]:
    return [Call(word, note, (file, word)) for word in words]


def in_thread(pool: Pool, calls: list[Call], rank: int = 0) -> tuple[threading.Thread, list[Any]]:
    ends: list[Any] = []

    def run() -> None:
        try:
            pool.do(calls, rank)
            ends.append("done")
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def asked(pool: Pool, count: int) -> None:
    """Wait until so many calls have been asked for."""
    while len(pool._asked) < count:
        time.sleep(0.01)


def test_what_the_first_wait_for_goes_first_and_what_two_want_is_done_once(tmp_path: Path) -> None:
    file, go = tmp_path / "notes", tmp_path / "go"
    with Pool(1) as pool:
        waits, _ = in_thread(pool, [Call("wait", wait_for, (go,))])
        asked(pool, 1)
        later, _ = in_thread(pool, notes(file, "c", "d", "both"), rank=1)
        asked(pool, 4)
        sooner, ends = in_thread(pool, notes(file, "a", "b", "both"), rank=0)
        asked(pool, 6)
        go.touch()
        for thread in (waits, later, sooner):
            thread.join()
        pool.do(notes(file, "a"), 5)
    assert file.read_text().split() == ["a", "b", "c", "d", "both"] and ends == ["done"]


def test_an_error_ends_the_waiting_and_what_nobody_else_waits_for_is_left_undone(tmp_path: Path) -> None:
    file, go = tmp_path / "notes", tmp_path / "go"
    with Pool(1) as pool:
        waits, _ = in_thread(pool, [Call("wait", wait_for, (go,))])
        asked(pool, 1)
        mine = [f"mine{number}" for number in range(200)]
        fails, ends = in_thread(pool, [Call("fail", fail, ("",)), *notes(file, *mine, "both")])
        asked(pool, 203)
        other, _ = in_thread(pool, notes(file, "both", "other"), rank=1)
        asked(pool, 204)
        go.touch()
        for thread in (waits, fails, other):
            thread.join()
        done = file.read_text().split()
        assert isinstance(ends[0], ValueError) and done[-2:] == ["both", "other"] and len(done) < len(mine)
        with pytest.raises(ValueError, match="no"):  # it is tried again
            pool.do([Call("fail", fail, ("",))])
        pool.do(notes(file, mine[-1]))
    assert file.read_text().split() == [*done, mine[-1]]


def test_a_process_that_is_killed_is_told_to_all_who_wait(tmp_path: Path) -> None:
    with Pool(1) as pool:
        killed, first = in_thread(pool, [Call("kill", be_killed, ()), *notes(tmp_path / "notes", "a")])
        other, second = in_thread(pool, notes(tmp_path / "notes", "b"), rank=1)
        killed.join(60)
        other.join(60)
        assert isinstance(first[0], BrokenProcessPool) and isinstance(second[0], (BrokenProcessPool, str))


def test_when_it_is_closed_those_who_wait_hear_of_it(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Pool(1) as pool:
        waits, _ = in_thread(pool, [Call("wait", wait_for, (go,))])
        asked(pool, 1)
        other, ends = in_thread(pool, notes(tmp_path / "notes", "a"))
        asked(pool, 2)
        pool.close()
        other.join(60)
        assert isinstance(ends[0], CancelledError)
        go.touch()
        waits.join(60)


def test_after_the_block_its_processes_are_gone(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.do(notes(tmp_path / "notes", "a", "b"))
        assert active_children()
    assert not active_children()  # and the interpreter may end at once
