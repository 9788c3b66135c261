"""kill -9 at any moment: the run goes on to the same bits, and the store holds whole grafts only."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import taskgraft as tg
from taskgraft.errors import Stopped
from taskgraft.training.loop import Loop
from taskgraft.training.progress import Quiet
from taskgraft.training.state import DRAFT, STATE, RunFolder

import kill_child
import tiny

KILLS, INSIDE_A_WRITE, PATIENCE = 20, 3, 120
FAST: dict[str, Any] = {"epochs": 4, "batch_size": 16, "learning_rate": 1e-2, "patience": 99}


def check_store(folder: Path) -> None:
    store = tg.Store(folder / "store")
    for entry in store.list():
        assert entry.error is None
        assert store.get(entry.name).tensors


def test_a_run_that_is_killed_anywhere_ends_with_the_same_bits(tmp_path: Path) -> None:
    processes = mp.get_context("forkserver")
    processes.set_forkserver_preload(["kill_child", "accelerate", "taskgraft.training.fit", "taskgraft.tasks.load"])

    def begin(folder: Path) -> Any:
        process = processes.Process(target=kill_child.train, args=(folder,))
        process.start()
        return process

    begin(tmp_path / "warm").join()
    started = time.perf_counter()
    whole = begin(tmp_path / "whole")
    whole.join()
    wall_s = time.perf_counter() - started
    assert whole.exitcode == 0
    expected = tg.load_graft(tmp_path / "whole" / "store" / "mood")

    draw = random.Random(0)
    kills = inside = 0
    rounds = 0
    while kills < KILLS or inside < INSIDE_A_WRITE:
        assert kills < PATIENCE, f"only {inside} of {kills} kills fell inside a write"
        folder = tmp_path / f"round{rounds}"
        rounds += 1
        while True:
            (folder / "run" / DRAFT).unlink(missing_ok=True)  # that of an earlier kill must not count again
            process = begin(folder)
            process.join(draw.uniform(0, wall_s))
            if process.exitcode is not None:
                break
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
            inside += (folder / "run" / DRAFT).exists()
            check_store(folder)
        assert process.exitcode == 0
        check_store(folder)
        found = tg.load_graft(folder / "store" / "mood")
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(value, found.tensors[name]) for name, value in expected.tensors.items())
        assert found.metrics == expected.metrics
        assert found.training["history"] == expected.training["history"]
    print(f"{kills} kills in {rounds} runs of {wall_s:.1f} s, {inside} of them inside a write")


def test_a_full_disk_is_said_and_the_last_state_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunFolder.write
    writes = 0

    def sometimes(self: RunFolder, *arguments: Any) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            monkeypatch.setattr("taskgraft.training.state.sync", full)
        write(self, *arguments)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", sometimes)
        with pytest.raises(tg.GraftError, match="the disk is full"):
            tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", **FAST)
    assert (tmp_path / "run" / STATE).exists() and not (tmp_path / "run" / DRAFT).exists()
    monkeypatch.undo()
    resumed = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", **FAST)
    whole = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **FAST)
    assert resumed.graft is not None and whole.graft is not None
    assert all(torch.equal(value, resumed.graft.tensors[name]) for name, value in whole.graft.tensors.items())


class InterruptedAt(Quiet):
    """Presses Ctrl-C at a step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.first: int | None = None

    def begin(self, name: str, steps: int, done: int) -> None:
        self.first = done

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        if done == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_the_step_it_was_at(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    stopped = InterruptedAt(7)
    with pytest.raises(Stopped, match="was stopped at step 7 of 60; the same command goes on from step 7"):
        tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", progress=stopped, **FAST)
    assert signal.getsignal(signal.SIGINT) is handler
    again = InterruptedAt(-1)
    resumed = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", progress=again, **FAST)
    whole = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **FAST)
    assert again.first == 7
    assert resumed.graft is not None and whole.graft is not None
    assert all(torch.equal(value, resumed.graft.tensors[name]) for name, value in whole.graft.tensors.items())
    with pytest.raises(Stopped, match="nothing was kept: give it a run folder"):
        tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), progress=InterruptedAt(3), **FAST)


def test_a_second_ctrl_c_leaves_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of validation, where the first one has to wait: what is on disk is the last whole state."""
    evaluate = Loop.evaluate
    calls = 0

    def impatient(self: Loop, *arguments: Any, **options: Any) -> dict[str, dict[str, float]]:
        nonlocal calls
        calls += 1
        if calls == 3:  # the second epoch's: each validation asks twice
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "evaluate", impatient)
        with pytest.raises(Stopped, match="was stopped at step 30 of 60; the same command goes on from step 15"):
            tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", **FAST)
    resumed = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", **FAST)
    whole = tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), **FAST)
    assert resumed.graft is not None and whole.graft is not None and resumed.history == whole.history
    assert all(torch.equal(value, resumed.graft.tensors[name]) for name, value in whole.graft.tensors.items())


@pytest.mark.parametrize("method", [tg.FullFineTuning(), tg.HeadOnly(), tg.Adapter(size=4, norm_inside="batch")])
def test_every_method_resumes_to_the_same_score(method: tg.Method, tmp_path: Path) -> None:
    options = {**FAST, "learning_rate": 1e-3}
    with pytest.raises(Stopped):
        tg.fit(tiny.backbone(), tiny.task(), method, run=tmp_path / "run", progress=InterruptedAt(22), **options)
    resumed = tg.fit(tiny.backbone(), tiny.task(), method, run=tmp_path / "run", **options)
    whole = tg.fit(tiny.backbone(), tiny.task(), method, **options)
    assert resumed.history == whole.history and resumed.test == whole.test


def test_a_state_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    def run(**options: Any) -> int:
        listener = InterruptedAt(10)
        with pytest.raises(Stopped):
            tg.fit(
                tiny.backbone(),
                options.pop("task", tiny.task()),
                options.pop("method", tg.Adapter(size=4)),
                run=tmp_path / "run",
                progress=listener,
                **{**FAST, **options},
            )
        assert listener.first is not None
        return listener.first

    assert run() == 0
    listener = InterruptedAt(20)
    with pytest.raises(Stopped):
        tg.fit(tiny.backbone(), tiny.task(), tg.Adapter(size=4), run=tmp_path / "run", progress=listener, **FAST)
    assert listener.first == 10
    assert run(learning_rate=1e-3) == 0
    assert run(method=tg.Adapter(size=8)) == 0
    assert run(task=tiny.task(seed=1)) == 0


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").held(), pytest.raises(tg.GraftError, match="another process is training in"):
        tg.fit(tiny.backbone(), tiny.task(count=16), tg.Adapter(size=4), run=tmp_path / "run", epochs=1)


def test_a_state_that_is_no_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STATE).write_bytes(b"something else")
    with pytest.raises(tg.GraftError, match=r"is not the state of a run .*: delete the folder"):
        tg.fit(tiny.backbone(), tiny.task(count=16), tg.Adapter(size=4), run=tmp_path / "run", epochs=1)
