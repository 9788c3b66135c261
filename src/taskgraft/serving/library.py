"""The tasks of a store, as they are on disk at this moment.

The store is asked anew for every question, by the times of a few files: a graft that another process puts, rolls
back or removes is served, or not, from the next question on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, stat_result
from pathlib import Path
from typing import Any

from taskgraft.errors import GraftError, UnknownTask, Unreadable
from taskgraft.grafts import graft as files
from taskgraft.grafts import joint
from taskgraft.grafts.graft import Graft
from taskgraft.grafts.store import Store, is_joint
from taskgraft.tasks.wording import Wording
from taskgraft.training.evaluate import kind_of, labels_of, wording_of

NUMBERS = itertools.count(1)
Signature = tuple[Any, ...]  # of a graft's files: another one means that they have changed


@dataclass(eq=False)
class Version:
    """A task as it was on disk when it was asked for, whatever happens to its name and its files later."""

    name: str
    number: int | None  # None: a folder that no store wrote
    folder: Path
    signature: Signature
    record: dict[str, Any] = field(repr=False)
    graft: Graft = field(repr=False)  # what is known of it, without weights

    # What an engine knows of it, under the engine's lock.
    waiting: int = 0  # questions that need it
    loaded: Graft | joint.Joint | None = field(default=None, repr=False)  # read, and not on the model
    candidates: Sequence[Sequence[int]] | None = field(default=None, repr=False)  # what it may write, as tokens
    parked: list[Any] | None = field(default=None, repr=False)  # what waits for its weights, while they are read

    def __post_init__(self) -> None:
        self.kind = kind_of(self.graft)
        self.labels = labels_of(self.graft)
        self.wording: Wording | None = wording_of(self.graft)
        self.settings: dict[str, Any] = self.graft.training.get("settings") or {}
        length = self.settings.get("max_length")
        if length is not None and not (isinstance(length, int) and length > 0):
            raise GraftError(f"its settings have max_length={length!r}, which is no number of tokens: {files.AGAIN}.")
        self.key = f"served-{next(NUMBERS)}"  # its name on a model: versions of one task stand beside each other
        self.reads_pairs = bool(self.graft.task.get("columns", {}).get("pair")) or self.kind == "spans"

    @property
    def mode(self) -> str:
        """How the model is run for it; what is run in one way can be run together."""
        if self.wording is None:
            return "head"
        scored = bool(self.wording.candidates) and self.settings.get("decoding", "auto") != "greedy"
        return "scores" if scored else "writes"

    @property
    def joint_task(self) -> str | None:
        """Its name among tasks that were trained together."""
        return self.name.partition("/")[2] or None


class Library:
    """What a store holds, by name: its grafts, and JOINT/TASK for tasks that were trained together."""

    def __init__(self, store: Store | str | PathLike[str]) -> None:
        self.store = store if isinstance(store, Store) else Store(store)
        self._known: dict[str, Version] = {}
        self._lock = threading.Lock()

    def find(self, name: str, number: int | None = None) -> Version:
        """A task in its current version, or in an earlier one."""
        if not isinstance(name, str):
            raise GraftError(f"{name!r} is no name of a task: give a string.")
        base, slash, task = name.partition("/")
        if slash and not task:
            raise UnknownTask(f"{name!r} is no task: name one of those that were trained together, {base}/TASK.")
        key = name if number is None else f"{name}@{number}"
        try:
            found = self.store.locate(base, number)
        except GraftError:
            with self._lock:
                self._known.pop(key, None)
            raise
        signature = signature_of(found.folder)
        with self._lock:
            known = self._known.get(key)
        if known is not None and known.signature == signature:
            return known
        try:
            version = read(name, task, found.folder, found.version, signature)
        except UnknownTask:
            raise
        except Exception as error:
            again = self.store.locate(base, number)
            if again != found:  # replaced and pruned while it was read
                return self.find(name, number)
            reason = str(error) if isinstance(error, GraftError) else f"the record of task {name!r} is odd: {error!r}."
            raise Unreadable(reason) from error
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.signature == signature:
                return known  # another thread was faster
            self._known[key] = version
        return version

    def names(self) -> list[str]:
        """All tasks that can be asked, in order."""
        found: list[str] = []
        for name in self.store.names():
            try:
                folder = self.store.locate(name).folder
                if not is_joint(folder):
                    found.append(name)
                    continue
                record = joint.read_joint_record(name, folder)
                found += [f"{name}/{task}" for task in record["tasks"]]
            except GraftError:
                found.append(name)  # asking it tells why
        return found

    def forget(self, name: str) -> None:
        """Let go of what is known of tasks that have left."""
        with self._lock:
            for key in [key for key in self._known if key.partition("@")[0].partition("/")[0] == name]:
                del self._known[key]


def read(name: str, task: str, folder: Path, number: int | None, signature: Signature) -> Version:
    """What the record of a task says, without its weights."""
    if not is_joint(folder):
        if task:
            raise UnknownTask(f"{name!r} is no task: {name.partition('/')[0]!r} is one graft, to be asked by its name.")
        record = files.read_record(name, folder)
        graft = Graft.from_json(name, record, {})
        check_shares_backbone(name, graft)
        return Version(name, number, folder, signature, record, graft)
    base = name.partition("/")[0]
    record = joint.read_joint_record(base, folder)
    if task not in record["tasks"]:
        known = ", ".join(f"{base}/{one}" for one in record["tasks"])
        raise UnknownTask(f"{name!r} is no task: under {base!r} were trained together {known}.")
    try:
        graft = joint.Member.from_json(record["tasks"][task]).graft(task, record["backbone"], record["training"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraftError(f"joint.json of {base!r} does not hold task {task!r} ({error}): {files.AGAIN}.") from error
    check_shares_backbone(name, graft)
    return Version(name, number, folder, signature, record, graft)


def check_shares_backbone(name: str, graft: Graft) -> None:
    if graft.method.trains_backbone:
        raise GraftError(
            f"task {name!r} was trained by {graft.method.name!r}, which changes the backbone itself, so it cannot be "
            "served beside others: use it with tg.predict."
        )


def read_weights(version: Version) -> Graft | joint.Joint:
    """The weights of a version, or of all tasks it was trained with, once they are known to be whole."""
    if version.joint_task is not None:
        return joint.read_joint(version.name, version.folder)
    tensors = files.read_tensors(version.name, version.folder, files.TENSORS, version.record)
    return Graft.from_json(version.graft.name, version.record, tensors)


def signature_of(folder: Path) -> Signature:
    """Changes when a file of a graft does."""
    names = (files.RECORD, files.TENSORS, joint.RECORD, joint.TENSORS)
    return (str(folder), *(stamp for name in names if (stamp := stamp_of(folder / name)) is not None))


def stamp_of(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found: stat_result = path.stat()
    except OSError:
        return None
    return path.name, found.st_mtime_ns, found.st_size, found.st_ino
