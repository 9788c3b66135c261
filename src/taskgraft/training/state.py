"""A run's state on disk: one file, replaced in one step, so that whatever is killed when, a whole one is there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.grafts.store import sync

STATE, DRAFT, LOCK = "state.safetensors", "state.draft", "lock"
KEY = "taskgraft"


class RunFolder:
    """Where a run keeps its state. One process at a time holds it; a state of another run is not taken up."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others out for as long as this process lives."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise GraftError(f"the run folder {self.folder} could not be made: {error}.") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise GraftError(
                    f"another process is training in {self.folder}: wait for it, or train under another name."
                ) from error
            yield
        finally:
            os.close(descriptor)

    def write(self, run: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Replace the state. `run` says which run it is of; a reader sees the old one or the new one, whole."""
        draft = self.folder / DRAFT
        metadata = {KEY: json.dumps({"run": run, **record})}
        try:
            draft.write_bytes(safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, metadata))
            sync(draft)
            os.replace(draft, self.folder / STATE)
            sync(self.folder)
        except OSError as error:
            draft.unlink(missing_ok=True)
            full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            raise GraftError(
                f"the state of the run could not be written to {self.folder} ({full}): make room there and run the "
                "same command again; it goes on from the last state that was written."
            ) from error

    def read(self, run: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The state of this run; None when there is none, or only that of another one."""
        path = self.folder / STATE
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(path, "pt") as file:
                record = json.loads(file.metadata()[KEY])
                if record.pop("run") != run:
                    return None
                return record, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise GraftError(
                f"{path} is not the state of a run ({error}): delete the folder {self.folder} to begin again."
            ) from error

    def tidy(self, ended: bool) -> None:
        """Take away what has no use any more: the state of a run that has ended, and the lock where none is left."""
        with self.held():
            (self.folder / DRAFT).unlink(missing_ok=True)
            if ended:
                (self.folder / STATE).unlink(missing_ok=True)
            if not (self.folder / STATE).exists():
                (self.folder / LOCK).unlink()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The random generators that dropout draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["random.cpu"])
    if device.type == "cuda" and "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"], device)
