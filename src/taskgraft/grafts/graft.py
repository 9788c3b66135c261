"""A graft off its model: one task's weights and all that is needed to use them again, in memory and in two files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from taskgraft.backbones import api
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import backbone_name, check_backbone, fingerprint
from taskgraft.methods import Adapter, HyperFormer, Method, NormsOnly, method_from_json
from taskgraft.nn.heads import Head
from taskgraft.reports.cards import card

FORMAT = 1
RECORD, TENSORS, CARD = "graft.json", "graft.safetensors", "README.md"
STATE = (".inside_mean", ".inside_var")  # running statistics: saved, but not parameters
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
AGAIN = "copy the graft again, or train it again"
NEVER_PICKLES = "taskgraft never loads pickles, since they can run any code: ask for the graft as safetensors."

# What graft.json must hold for a graft to be read; further keys are welcome.
Needed = dict[str, type | tuple[type, ...]]
NEEDED: Needed = {
    "method": dict,
    "head": (dict, type(None)),
    "head.kind": str,
    "head.labels": list,
    "task": dict,
    "metrics": dict,
    "training": dict,
    "created": str,
    "parameters": int,
    "backbone": dict,
    "backbone.name": str,
    "backbone.sha256": str,
    "backbone.signs": str,
    "backbone.dtype": str,
    "tensors": dict,
    "tensors.sha256": str,
    "tensors.bytes": int,
}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def package_versions() -> dict[str, str]:
    known = {"python": platform.python_version()}
    for package in ("taskgraft", "torch", "transformers"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


@dataclass(frozen=True, eq=False)
class Graft:
    """One task, to be saved or put on a model: its weights by name, with its method, head, scores and history.

    `backbone` says which model it fits, by name and fingerprint; `task` what it was trained on.
    """

    name: str
    method: Method
    head: Head | None
    tensors: dict[str, Tensor] = field(repr=False)
    backbone: dict[str, Any]  # its name, and the fields of its Fingerprint
    metrics: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=now)
    packages: dict[str, str] = field(default_factory=package_versions)  # that it was made with
    origin: dict[str, Any] = field(default_factory=dict)  # the repository and commit that it was pulled from

    @property
    def parameters(self) -> int:
        """How many numbers were trained: what `tg.count` says of the method."""
        return sum(value.numel() for name, value in self.tensors.items() if not name.endswith(STATE))

    @property
    def sites(self) -> list[str]:
        """Where its weights go: "encoder.0.attention", "norm.embeddings.LayerNorm", "head"."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))

    def save(self, path: str | PathLike[str]) -> int:
        """Write it as STORE/NAME and return the version it became; earlier versions of NAME are kept."""
        from taskgraft.grafts.store import Store

        folder = Path(path)
        return Store(folder.parent).put(self, name=folder.name)

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, for graft.json."""
        return {
            "name": self.name,
            "method": self.method.to_json(),
            "head": None if self.head is None else self.head.to_json(),
            "sites": self.sites,
            "task": self.task,
            "metrics": self.metrics,
            "training": self.training,
            "created": self.created,
            "backbone": self.backbone,
            "parameters": self.parameters,
            "packages": self.packages,
            **({"origin": self.origin} if self.origin else {}),
        }

    @classmethod
    def from_json(cls, name: str, record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Graft:
        """From what `to_json` wrote, under the name that it has now."""
        return cls(
            name=name,
            method=method_from_json(record["method"]),
            head=head_from_json(record["head"]),
            tensors=tensors,
            packages=dict(record.get("packages", {})),
            origin=dict(record.get("origin", {})),
            **{key: record[key] for key in ("backbone", "metrics", "training", "task", "created")},
        )


def head_from_json(record: Mapping[str, Any] | None) -> Head | None:
    return None if record is None else Head(record["kind"], tuple(record["labels"]))


def get_graft(
    model: Any,
    task: str,
    *,
    metrics: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    task_record: Mapping[str, Any] | None = None,
    backbone: str | None = None,
) -> Graft:
    """Take a copy of a task off a grafted model, onto the CPU and ready to be saved; the model stays as it is.

    `backbone` is the name it should remember the backbone by; without one, what its configuration says.
    """
    if isinstance(api.grafts_of(model).require(task).method, HyperFormer):
        raise GraftError(
            f"the adapters of task {task!r} are generated by a hypernetwork that it shares: tg.materialise writes the "
            "task out as a plain graft, and tg.get_joint keeps all of its tasks together."
        )
    return materialise(model, task, metrics=metrics, training=training, task_record=task_record, backbone=backbone)


def materialise(
    model: Any,
    task: str,
    *,
    metrics: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    task_record: Mapping[str, Any] | None = None,
    backbone: str | None = None,
) -> Graft:
    """Write a task out as a plain graft: the same logits, and no hypernetwork is needed to serve it."""
    grafts = api.grafts_of(model)
    method, tensors = grafts.written_out(task)
    return Graft(
        name=task,
        method=method,
        head=grafts.require(task).head,
        tensors={name: value.cpu().contiguous() for name, value in tensors.items()},
        backbone=identity(model, backbone),
        metrics=dict(metrics or {}),
        training=dict(training or {}),
        task=dict(task_record or {}),
    )


def identity(model: Any, name: str | None = None) -> dict[str, Any]:
    """A backbone's name and fingerprint, as grafts remember it."""
    return {"name": name or backbone_name(model), **dataclasses.asdict(fingerprint(model))}


def load_graft(path: str | PathLike[str]) -> Graft:
    """Read the graft STORE/NAME, after checking that its files are whole."""
    from taskgraft.grafts.store import Store

    folder = Path(path)
    return Store(folder.parent).get(folder.name)


def add_graft(
    model: Any, graft: Graft | str | PathLike[str], name: str | None = None, *, other_precision: bool = False
) -> None:
    """Put a saved graft on a model, at rest: it serves, and trains only when `tg.train_only` says so.

    The backbone must be the one it was made for; `other_precision` also takes that one rounded to another float type.
    A model that carries no grafts yet becomes a grafted one.
    """
    if not isinstance(graft, Graft):
        graft = load_graft(graft)
    bare = getattr(model, "taskgraft", None) is None
    if bare:
        api.graft(model, graft.method, tasks=())
    try:
        check_backbone(model, graft.name, graft.backbone, reads_pooler(graft.method, graft.head), other_precision)
        method = unshared(graft.method)
        api.grafts_of(model).add(graft.name if name is None else name, method, graft.head, weights=graft.tensors)
    except Exception:
        if bare:
            api.ungraft(model)
        raise


def reads_pooler(method: Method, head: Head | None) -> bool:
    """Whether a task's head reads the backbone's own pooler, which many classes have none or a random one of."""
    return method.pooling == "pooler" and head is not None and not head.per_token


def unshared(method: Method) -> Method:
    """The method of a copy of its own: weights that were shared while training are saved with each task."""
    shared_norms = method.trained_norms == "shared"
    if isinstance(method, Adapter) and method.norm_after == "shared":
        method = dataclasses.replace(method, norm_after="own")
    if isinstance(method, (Adapter, NormsOnly)) and shared_norms:
        method = dataclasses.replace(method, norms="all")
    return method


# -- files


def encode(graft: Graft) -> dict[str, bytes]:
    """The files of a graft, in full, before anything is written: its record, its tensors, and a card for people."""
    tensors = safetensors.torch.save(graft.tensors, metadata={"format": "pt"})
    record = {
        "format": FORMAT,
        **graft.to_json(),
        "tensors": {"file": TENSORS, "sha256": hashlib.sha256(tensors).hexdigest(), "bytes": len(tensors)},
    }
    try:
        written = json.dumps(record, indent=1, ensure_ascii=False).encode()
        return {RECORD: written, TENSORS: tensors, CARD: card(record).encode()}
    except (TypeError, ValueError) as error:
        raise GraftError(
            f"the metrics, training or task record of graft {graft.name!r} cannot be written as JSON: {error}; "
            "use plain numbers, strings, lists and dicts."
        ) from error


def read_record(name: str, folder: Path, file: str = RECORD, needed: Needed = NEEDED) -> dict[str, Any]:
    """graft.json, once it is known to hold what a graft needs."""
    with explained(name, folder, file) as path:
        raw = path.read_bytes()
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise GraftError(f"{file} of graft {name!r} is not JSON ({error}): {AGAIN}.") from error
    written = record.get("format") if isinstance(record, dict) else None
    if not isinstance(written, int):
        raise GraftError(f"{file} of graft {name!r} does not say which format it is in: {AGAIN}.")
    if written > FORMAT:
        raise GraftError(f"graft {name!r} is in format {written} and this version reads {FORMAT}: update taskgraft.")
    for key, kind in needed.items():
        parent, _, child = key.rpartition(".")
        holder = record[parent] if parent else record
        if holder is not None and not isinstance(holder.get(child, ...), kind):  # None: no head
            raise GraftError(f"{file} of graft {name!r} has no valid {key!r}: {AGAIN}.")
    checked: dict[str, Any] = record
    return checked


def read_summary(name: str, folder: Path) -> tuple[dict[str, Any], int]:
    """graft.json and the size of all its files in bytes, without reading the tensors."""
    record = read_record(name, folder)
    return record, size_on_disk(name, folder, TENSORS, record)


def size_on_disk(name: str, folder: Path, tensors: str, record: Mapping[str, Any]) -> int:
    """All files of a folder, in bytes, once the tensors are known to be as long as they were written."""
    with explained(name, folder, tensors) as path:
        found = path.stat().st_size
        size = sum(file.stat().st_size for file in folder.iterdir())
    if found != record["tensors"]["bytes"]:
        raise GraftError(not_as_written(name, tensors, found, record))
    return size


def read_graft(name: str, folder: Path) -> Graft:
    """Both files of a folder, checked: nothing of a graft that is not whole gets past here."""
    record = read_record(name, folder)
    tensors = read_tensors(name, folder, TENSORS, record)
    try:
        return Graft.from_json(name, record, tensors)
    except GraftError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraftError(f"{RECORD} of graft {name!r} does not hold a graft's record ({error}): {AGAIN}.") from error


def read_tensors(name: str, folder: Path, file: str, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a folder, once they are known to be those that its record was written with."""
    with explained(name, folder, file) as path:
        data = path.read_bytes()
    if data.startswith((b"\x80", b"PK")) and not begins_like_safetensors(data):
        raise GraftError(f"{file} of graft {name!r} is a pickle: {NEVER_PICKLES}")
    stated = record["tensors"]
    if len(data) != stated["bytes"] or hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise GraftError(not_as_written(name, file, len(data), record))
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise GraftError(f"{file} of graft {name!r} is not a safetensors file ({error}): {AGAIN}.") from error


def not_as_written(name: str, file: str, size: int, record: Mapping[str, Any]) -> str:
    seen = f"{size} bytes, {record['tensors']['bytes']} were written"
    return f"{file} of graft {name!r} was truncated or changed since it was written ({seen}): {AGAIN}."


def begins_like_safetensors(data: bytes) -> bool:
    """Eight bytes of the header's length, which may be a pickle's first bytes by chance, then JSON."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data) - 8


@contextmanager
def explained(name: str, folder: Path, file: str) -> Iterator[Path]:
    """The path of a graft's file; if it cannot be read, a sentence that says why."""
    try:
        yield folder / file
    except (FileNotFoundError, NotADirectoryError) as error:
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        if file == RECORD and (folder / "joint.json").is_file():
            raise GraftError(
                f"{name!r} is not one graft but tasks that were trained together: name one of them, {name}/TASK, "
                "or load all with tg.load_joint."
            ) from error
        if file == "joint.json" and (folder / RECORD).is_file():
            raise GraftError(
                f"{name!r} is one graft, not tasks that were trained together: load it with tg.load_graft."
            ) from error
        reason = f"it has {pickles[0]}, and {NEVER_PICKLES}" if pickles else f"{AGAIN}."
        raise GraftError(f"graft {name!r} has no {file} in {folder}: {reason}") from error
    except OSError as error:
        raise GraftError(f"{file} of graft {name!r} could not be read: {error}.") from error
