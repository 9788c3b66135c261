"""What the processes of tests/test_kill.py do: train a task, put its graft into a store."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import taskgraft as tg
from taskgraft.training import state

import tiny

SYNC = state.sync


def slow_sync(path: Path) -> None:
    """A disk that takes its time, so that many kills fall inside a write."""
    time.sleep(0.02)
    SYNC(path)


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    state.sync = slow_sync
    run = tg.fit(
        tiny.backbone(),
        tiny.task(count=64),
        tg.Adapter(size=256, head_dropout=0.1),  # random numbers, and a megabyte of state, which takes a while to write
        run=folder / "run",
        checkpoint_seconds=0,  # a state after every step
        epochs=4,
        batch_size=8,
        learning_rate=1e-2,
        patience=99,
    )
    assert run.graft is not None
    tg.Store(folder / "store").put(run.graft)
