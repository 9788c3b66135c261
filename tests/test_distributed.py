"""Several processes train one task: the graft is the one that a single process with as large a batch makes."""

from __future__ import annotations

import csv
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.cli import app
from taskgraft.training.progress import Interrupts
from taskgraft.training.sampling import Batch
from taskgraft.training.team import BUCKET_BYTES, buckets

import distributed_child as child
import tiny

PROCESSES = 2


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    processes = mp.get_context("forkserver")
    processes.set_forkserver_preload(["distributed_child", "accelerate", "taskgraft.training.fit"])
    port = free_port()
    started = [
        processes.Process(target=child.together, args=(rank, PROCESSES, port, folder)) for rank in range(PROCESSES)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in started] == [0] * PROCESSES
    return [torch.load(folder / f"process{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


def test_two_processes_make_the_graft_of_one_with_twice_the_batch(found: list[dict[str, Any]]) -> None:
    for case, alone in child.CASES.items():
        expected = alone(child.BATCH)
        assert expected["steps"] >= (50 if case == "adapter" else 4)
        for process in found:
            got = process["cases"][case]
            assert child.largest_difference(got["tensors"], expected["tensors"]) < 1e-9, case
            assert got["steps"] == expected["steps"], case
            assert all(map(alike, got["answers"], expected["answers"])), case
            for epoch, other in zip(got["history"], expected["history"], strict=True):
                assert epoch["loss"] == pytest.approx(other["loss"], rel=1e-5), case
                assert all(alike(epoch["tasks"][task], metrics) for task, metrics in other["tasks"].items()), case


def alike(one: Any, other: Any) -> bool:
    """Numbers, texts or lists of them that are the same to rounding."""
    return bool(one == other or one == pytest.approx(other))


def test_one_process_that_is_told_to_stop_stops_all_and_they_go_on_to_the_same_bits(found: Any) -> None:
    main, other = (process["stopped"] for process in found)
    assert "was stopped at step 8 of 15; the same command goes on from step 8" in main["said"]
    assert "was stopped at step 8 of 15" in other["said"]
    assert main["held"] == ["lock", "state.safetensors"]
    assert main["first"] == 8 and other["first"] is None, "one process shows progress"
    for process in (main, other):
        assert process["record"] == (2, 5)
        assert child.largest_difference(process["resumed"], process["whole"]) == 0.0
    assert child.largest_difference(main["whole"], other["whole"]) == 0.0


def test_what_several_processes_cannot_do_is_said(found: Any) -> None:
    for said in (process["refused"] for process in found):
        assert "process 1 of 2 has other rows, settings or another backbone than process 0" in said[0]
        assert "a batch norm takes its statistics from whole batches, and 2 processes have a part each" in said[1]
        assert len(said) == 5 and all("runs in one process, and 2 were started" in one for one in said[2:])


def write(path: Path, count: int) -> None:
    rows, labels = tiny.rows("classification", count)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], labels[row["label"]]] for row in rows)


ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"]


def launched(launcher: list[str], *words: str) -> subprocess.Popen[str]:
    """`accelerate launch -m taskgraft.cli` or torchrun, in two processes on the CPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, str(free_port()), "-m", "taskgraft.cli", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_command_under_accelerate_launch(tmp_path: Path) -> None:
    backbone = tiny.backbone()
    backbone.model.double().save_pretrained(tmp_path / "backbone")
    backbone.tokenizer.save_pretrained(tmp_path / "backbone")
    write(tmp_path / "mood.csv", 121)
    fixed = ["--backbone", str(tmp_path / "backbone"), "--method", "adapter-4", "--epochs", "7", "--patience", "99"]
    words = ["train", str(tmp_path / "mood.csv"), *fixed, "--learning-rate", "0.01", "--json"]
    process = launched(ACCELERATE, *words, "--batch-size", "6", "--store", str(tmp_path / "two"))
    done = CliRunner().invoke(app, [*words, "--batch-size", "12", "--store", str(tmp_path / "one")])
    assert done.exit_code == 0, done.output
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    (line,) = out.splitlines()
    two, one = tg.load_graft(tmp_path / "two" / "mood"), tg.load_graft(tmp_path / "one" / "mood")
    assert json.loads(line)["version"] == 1 and json.loads(line)["steps"] >= 50, "one process writes and speaks"
    assert two.training["processes"] == 2 and "processes" not in one.training
    assert next(iter(two.tensors.values())).dtype == torch.float64
    assert child.largest_difference(two.tensors, one.tensors) < 1e-9
    assert two.metrics == one.metrics
    assert not (tmp_path / "two" / ".runs").exists() and error.count("Saved:") == 1


@pytest.mark.slow
def test_ctrl_c_at_the_launcher_keeps_the_step(tmp_path: Path) -> None:
    tiny.backbone(tmp_path / "backbone")
    write(tmp_path / "mood.csv", 121)
    store, fixed = tmp_path / "grafts", ["--epochs", "2000", "--patience", "2000", "--checkpoint-seconds", "0.1"]
    words = ["train", str(tmp_path / "mood.csv"), "--backbone", str(tmp_path / "backbone"), *fixed]
    process = launched(TORCHRUN, *words, "--store", str(store))
    state = store / ".runs" / "mood" / "state.safetensors"
    deadline = time.monotonic() + 60
    while not state.exists():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to all that it started
    _, error = process.communicate(timeout=60)
    said = re.search(r"was stopped at step (\d+) of \d+; the same command goes on from step (\d+)\.", error)
    assert process.returncode != 0 and said is not None and said[1] == said[2], error
    assert state.exists() and not (store / "mood").exists()


def test_other_commands_and_launchers_are_refused_in_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(app, ["tasks", "--store", str(tmp_path)])
    assert done.exit_code == 2 and "`taskgraft tasks` runs in one process, and 2 were started" in done.stderr
    monkeypatch.setenv("RANK", "1")
    done = CliRunner().invoke(app, ["tasks", "--store", str(tmp_path), "--json"])
    assert done.stderr.startswith("taskgraft (process 1): ") and not done.stdout
    with pytest.raises(tg.GraftError, match="2 processes were started, and Accelerate was set up for one before"):
        tg.fit(tiny.backbone(), tiny.task(count=20), epochs=1)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # what `accelerate launch --cpu --num_processes 2` leaves
    with pytest.raises(tg.GraftError, match="asked for several processes on CPUs and has started one"):
        tg.fit(tiny.backbone(), tiny.task(count=20), epochs=1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_shares_of_a_batch_are_all_of_it_and_even(size: int) -> None:
    batch = Batch({"a": torch.arange(5).numpy(), "b": torch.arange(1).numpy(), "c": torch.arange(3).numpy()})
    shares = [batch.share(rank, size) for rank in range(size)]
    rows = [(task, int(row)) for share in shares for task, own in share.parts.items() for row in own]
    assert sorted(rows) == [(task, row) for task, own in batch.parts.items() for row in own]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gradients_are_sent_in_buckets_of_one_type() -> None:
    large = torch.nn.Parameter(torch.zeros(BUCKET_BYTES // 4 + 1))
    small, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert buckets([small, small, other, other, large, small]) == [(0, 2), (2, 4), (4, 5), (5, 6)]


def test_a_signal_that_a_launcher_passes_on_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    with Interrupts(launched=True) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked
        clock += 3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
