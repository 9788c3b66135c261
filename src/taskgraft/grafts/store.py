"""A folder of grafts that is whole at every moment, whoever is killed when.

    STORE/NAME -> .versions/<hex>/000002      a relative link to the version in use
    STORE/.versions/<hex>/000001/             graft.json and graft.safetensors, never changed once they are there
                                              (joint.json and joint.safetensors: tasks that were trained together)
    STORE/.tmp/                               what is being written or thrown away
    STORE/.lock                               held by a writer while it lives; readers never wait

There is no index: reading or writing one graft touches that graft alone, however many others there are.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from taskgraft.errors import GraftError, UnknownTask
from taskgraft.grafts.graft import Graft, encode, read_graft, read_record, read_summary, size_on_disk
from taskgraft.grafts.joint import RECORD as JOINT
from taskgraft.grafts.joint import TENSORS as JOINT_TENSORS
from taskgraft.grafts.joint import Joint, read_joint, read_joint_record
from taskgraft.names import check_task_name

LINK = re.compile(r"\.versions/([0-9a-f]{32})/(\d{6,})")

T = TypeVar("T")
Names = list[str]  # `list` is a method of the store
Versions = list[int]


@dataclass(frozen=True)
class Entry:
    """A line of the store's listing; `error` says why a graft cannot be read, and the rest is then empty."""

    name: str
    version: int | None = None  # None: a plain folder
    bytes: int = 0
    created: str = ""
    method: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    together: tuple[str, ...] = ()  # the tasks that were trained and saved together under this name
    error: str | None = None


Entries = list[Entry]


@dataclass(frozen=True)
class Found:
    """Where a name leads: the folder of its files and, if the store wrote it, the versions it is one of."""

    folder: Path
    lineage: Path | None = None
    version: int | None = None


class Store:
    """Grafts by name in a folder, which is made by the first `put`.

    Earlier versions of a name are kept: `rollback` goes back to one, `prune` throws them away.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)

    # -- reading

    def get(self, name: str, version: int | None = None) -> Graft:
        """The graft of this name, in its current version or in an earlier one, once its files are known to be whole."""
        return self._read(name, version, read_graft)[1]

    def get_joint(self, name: str, version: int | None = None) -> Joint:
        """The tasks that were trained together and saved under this name."""
        return self._read(name, version, read_joint)[1]

    def locate(self, name: str, version: int | None = None) -> Found:
        """Where a graft's files are, in its current version or in an earlier one, whatever they hold."""
        found = self._require(name)
        if version is None:
            return found
        kept = numbers(found.lineage)
        if found.lineage is None or version not in kept:
            known = ", ".join(map(str, kept)) or "no numbered versions"
            raise GraftError(f"graft {name!r} has no version {version}: the store has {known}.")
        return Found(version_folder(found.lineage, version), found.lineage, version)

    def made_for(self) -> tuple[str, dict[str, Any]] | None:
        """The first task whose record can be read, and the backbone it was made for; None where there is no task."""
        for name in self.names():
            try:
                folder = self.locate(name).folder
                record = read_joint_record(name, folder) if is_joint(folder) else read_record(name, folder)
            except GraftError:
                continue
            return name, record["backbone"]
        return None

    def names(self) -> Names:
        """What there is, in the order of the alphabet."""
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            return sorted(e.name for e in entries if e.name[0] != "." and (e.is_symlink() or e.is_dir()))

    def list(self) -> Entries:
        """What the store holds, by name, from each graft.json alone."""
        return [self._entry(name) for name in self.names()]

    def versions(self, name: str) -> Versions:
        """The versions that are kept of a graft, oldest first; a plain folder has none."""
        return numbers(self._require(name).lineage)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __len__(self) -> int:
        return len(self.names())

    # -- writing

    def put(self, what: Graft | Joint, name: str | None = None) -> int:
        """Write a graft, or tasks trained together, as the new current version of a name; return its number."""
        if name is None:
            if isinstance(what, Joint):
                raise GraftError("tasks that were trained together need a name to be saved under.")
            name = what.name
        self.check_place(name, isinstance(what, Joint))  # before the lock is made
        files = what.files(name) if isinstance(what, Joint) else encode(replace(what, name=name))
        with self._writing(create=True):
            lineage = self._lineage(name)
            draft = self._temporary()
            try:
                draft.mkdir()
                for file, content in files.items():
                    (draft / file).write_bytes(content)
                    sync(draft / file)
                sync(draft)
                lineage.mkdir(parents=True, exist_ok=True)
                version = max(numbers(lineage), default=0) + 1
                os.rename(draft, version_folder(lineage, version))
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            sync(lineage)
            sync(lineage.parent)
            self._point(name, lineage, version)
        return version

    def check_place(self, name: str, together: bool = False) -> None:
        """Refuse a name under which `put` could not write a graft (or tasks that were trained together)."""
        self._lineage(name)
        found = self._find(name)
        if found is not None and found.folder.is_dir() and is_joint(found.folder) != together:
            there = "one graft" if together else "tasks that were trained together"
            raise GraftError(
                f"{name!r} is {there} in the store {self.folder}: choose another name, or remove it first."
            )

    def rollback(self, name: str, version: int | None = None) -> int:
        """Make an earlier version the current one (the one before it, if none is named), and return its number."""
        with self._writing():
            found = self._require(name)
            if version is None:
                earlier = [n for n in numbers(found.lineage) if found.version is not None and n < found.version]
                if not earlier:
                    raise GraftError(f"graft {name!r} has no version before the current one to go back to.")
                version = earlier[-1]
            self._read(name, version, read_either)
            assert found.lineage is not None  # else `get` had no version to find
            self._point(name, found.lineage, version)
        return version

    def rename(self, old: str, new: str) -> None:
        """Give a graft, with all its versions, another name."""
        check_task_name(new)
        with self._writing():
            self._require(old)
            if os.path.lexists(self.folder / new):
                raise GraftError(f"{new!r} is already in the store {self.folder}: choose another name, or remove it.")
            os.rename(self.folder / old, self.folder / new)
            sync(self.folder)

    def remove(self, name: str) -> None:
        """Delete a graft and all its versions."""
        with self._writing():
            found = self._require(name)
            path = self.folder / name
            if path.is_symlink():
                os.unlink(path)
                sync(self.folder)
                if found.lineage is not None and found.lineage.is_dir() and found.lineage not in self._in_use():
                    self._discard(found.lineage)
            else:
                self._discard(path)

    def prune(self, name: str | None = None, keep: int = 1) -> int:
        """Delete all versions but the current and the newest `keep` of one graft or of all; return how many went.

        What killed writers left behind goes too.
        """
        if keep < 0:
            raise GraftError(f"keep={keep} must not be negative: 0 keeps the current version alone.")
        with self._writing():
            if name is not None:
                lineage = self._require(name).lineage
                lineages = [] if lineage is None else [lineage]
            else:
                lineages = contents(self.folder / ".versions")
            in_use, pruned = self._in_use(), 0
            for lineage in lineages:
                versions = numbers(lineage)
                if lineage not in in_use:  # its writer was killed before it had a name, or after it lost it
                    self._discard(lineage)
                    pruned += len(versions)
                    continue
                for version in versions[: max(len(versions) - keep, 0)]:
                    if version not in in_use[lineage]:
                        self._discard(version_folder(lineage, version))
                        pruned += 1
            shutil.rmtree(self.folder / ".tmp", ignore_errors=True)
        return pruned

    # -- names and versions

    def _find(self, name: str) -> Found | None:
        check_task_name(name)
        path = self.folder / name
        try:
            target = os.readlink(path)
        except FileNotFoundError:  # not to be looked for again: it may come just now, and as a link
            return None
        except OSError:  # not a link
            return Found(path) if path.is_dir() else None
        match = LINK.fullmatch(target)
        if match is None:
            return Found(self.folder / target)
        return Found(self.folder / target, self.folder / ".versions" / match[1], int(match[2]))

    def _require(self, name: str) -> Found:
        found = self._find(name)
        if found is None:
            raise UnknownTask(f"no graft named {name!r} is in the store {self.folder}: Store.names() tells which are.")
        return found

    def _lineage(self, name: str) -> Path:
        """Where the next version of a name goes."""
        found = self._find(name) or self._find(name)  # a writer may just have made the name that was not there
        if found is not None and found.lineage is not None:
            return found.lineage
        if os.path.lexists(self.folder / name):
            raise GraftError(
                f"{self.folder / name} was not written by a store, so it has no versions to add to: "
                "remove it or rename it first, or save under another name."
            )
        return self.folder / ".versions" / uuid.uuid4().hex

    def _in_use(self) -> dict[Path, set[int]]:
        """By lineage, the versions that names lead to: one for each, unless someone copied a link."""
        used: dict[Path, set[int]] = {}
        for path in contents(self.folder):
            match = LINK.fullmatch(os.readlink(path)) if path.is_symlink() else None
            if match is not None:
                used.setdefault(self.folder / ".versions" / match[1], set()).add(int(match[2]))
        return used

    def _read(self, name: str, version: int | None, read: Callable[[str, Path], T]) -> tuple[Found, T]:
        """What `read` makes of a graft's folder, which is looked up once, and again if it was pruned meanwhile."""
        found = self.locate(name, version)
        while True:
            try:
                return found, read(name, found.folder)
            except GraftError:
                again = self.locate(name, version)
                if again == found:
                    raise
                found = again

    def _entry(self, name: str) -> Entry:
        try:
            found = self._require(name)
            if is_joint(found.folder):
                found, (record, size) = self._read(name, None, read_joint_summary)
                tasks = record["tasks"]
                method = str(next(iter(tasks.values()))["method"].get("method"))
                facts = (record["created"], method, record["metrics"], record["parameters"], tuple(tasks))
                return Entry(name, found.version, size, *facts)
            found, (record, size) = self._read(name, None, read_summary)
        except GraftError as error:
            return Entry(name, error=str(error))
        method = str(record["method"].get("method"))
        return Entry(name, found.version, size, record["created"], method, record["metrics"], record["parameters"])

    # -- changes on disk

    @contextmanager
    def _writing(self, create: bool = False) -> Iterator[None]:
        """One writer at a time: the system lets go of the lock when a writer dies, so .tmp is then nobody's."""
        with ExitStack() as stack:
            try:
                if create and not self.folder.is_dir():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    sync(self.folder.parent)
                lock = self.folder / ".lock"
                if create or lock.exists():  # without one, no store has ever written here
                    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
                    stack.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            except OSError as error:
                raise GraftError(f"the store {self.folder} could not be changed: {error}.") from error

    def _temporary(self) -> Path:
        folder = self.folder / ".tmp"
        folder.mkdir(exist_ok=True)
        return folder / uuid.uuid4().hex

    def _point(self, name: str, lineage: Path, version: int) -> None:
        """Make a version the current one, in a single step."""
        link = self._temporary()
        os.symlink(os.path.join(".versions", lineage.name, f"{version:06d}"), link)
        os.replace(link, self.folder / name)
        sync(self.folder)

    def _discard(self, path: Path) -> None:
        """Take a folder away in a single step, then delete it."""
        trash = self._temporary()
        os.rename(path, trash)
        sync(path.parent)
        shutil.rmtree(trash)


def is_joint(folder: Path) -> bool:
    return (folder / JOINT).is_file()


def read_joint_summary(name: str, folder: Path) -> tuple[dict[str, Any], int]:
    """joint.json and the size of all its files in bytes, without reading the tensors."""
    record = read_joint_record(name, folder)
    return record, size_on_disk(name, folder, JOINT_TENSORS, record)


def read_either(name: str, folder: Path) -> Graft | Joint:
    return read_joint(name, folder) if is_joint(folder) else read_graft(name, folder)


def version_folder(lineage: Path, version: int) -> Path:
    return lineage / f"{version:06d}"


def numbers(lineage: Path | None) -> Versions:
    return sorted(int(path.name) for path in contents(lineage) if path.name.isdigit()) if lineage else []


def contents(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
