"""Processes that several share: what goes first, what is done once, and what happens when something goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

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


def note_threads(file: Path) -> None:
    note(file, str(torch.get_num_threads()))


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="they share a GPU, not the cores")
def test_processes_share_the_cores(tmp_path: Path) -> None:
    with Pool(2) as pool:
        pool.do([Call("threads", note_threads, (tmp_path / "notes",))])
    assert int((tmp_path / "notes").read_text()) == max(1, torch.get_num_threads() // 2)


KILLED = """
import multiprocessing, threading, time
from taskgraft.experiments.pool import Call, Pool
pool = Pool(1)
threading.Thread(target=pool.do, args=([Call("sleeps", time.sleep, (600,))],), daemon=True).start()
while not multiprocessing.active_children():
    time.sleep(0.01)
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(600)
"""


def runs(process: int) -> bool:
    """Whether it is there, and not only waiting to be reaped."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_who_is_killed_leaves_no_processes_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert runs(worker)
        process.kill()
    end = time.monotonic() + 60
    while (goes_on := runs(worker)) and time.monotonic() < end:
        time.sleep(0.1)
    if goes_on:
        os.kill(worker, signal.SIGKILL)
    assert not goes_on
