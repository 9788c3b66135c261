"""Tasks that were trained together, off their model, with all that they share: in memory and in two files.

A hypernetwork, norms that tasks share, or a fine-tuned backbone cannot be cut into one graft per task that could be
trained further. So they are kept here, whole; what serves alone is written out as plain grafts (`tg.materialise`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from taskgraft.backbones import api
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import check_backbone
from taskgraft.grafts.graft import (
    AGAIN,
    CARD,
    FORMAT,
    STATE,
    Graft,
    head_from_json,
    identity,
    materialise,
    now,
    package_versions,
    read_record,
    read_tensors,
    reads_pooler,
)
from taskgraft.grafts.graft import NEEDED as NEEDED_OF_ONE
from taskgraft.methods import Method, method_from_json
from taskgraft.nn.heads import Head
from taskgraft.reports.cards import card

RECORD, TENSORS = "joint.json", "joint.safetensors"
SHARED = "*"  # in a tensor's name, where a task's name would be; no task can be called so
BACKBONE = "backbone."  # before the names of the backbone's own weights, where those were trained

# What joint.json must hold: a dict of tasks, where graft.json has one.
NEEDED = {key: kind for key, kind in NEEDED_OF_ONE.items() if key.partition(".")[0] not in ("method", "head", "task")}
NEEDED["tasks"] = dict


@dataclass(frozen=True, eq=False)
class Member:
    """One of the tasks: its method as resolved for it, its head, its record and its metrics."""

    method: Method
    head: Head | None
    task: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        head = None if self.head is None else self.head.to_json()
        return {"method": self.method.to_json(), "head": head, "task": self.task, "metrics": self.metrics}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Member:
        method, head = method_from_json(record["method"]), head_from_json(record["head"])
        return cls(method, head, record["task"], record["metrics"])

    def graft(self, name: str, backbone: dict[str, Any], training: dict[str, Any]) -> Graft:
        """What is known of it, without weights."""
        return Graft(name, self.method, self.head, {}, backbone, self.metrics, training, self.task)


@dataclass(frozen=True, eq=False)
class Joint:
    """Tasks with what they share. `tensors` are called TASK/NAME, or */NAME where all tasks share them."""

    tasks: dict[str, Member]
    tensors: dict[str, Tensor] = field(repr=False)
    backbone: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=now)
    packages: dict[str, str] = field(default_factory=package_versions)  # as a graft's
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        return next(iter(self.tasks.values())).method

    @property
    def parameters(self) -> int:
        """How many numbers were trained, for all tasks together: what `tg.count` says."""
        return sum(value.numel() for name, value in self.tensors.items() if not name.endswith(STATE))

    @cached_property
    def company(self) -> str:
        """The same for joints that share the same weights, bit by bit."""
        return self.hash_of(SHARED)

    def hash_of(self, task: str) -> str:
        """Of a task's own tensors, or (SHARED) of those of all."""
        digest = hashlib.sha256()
        for name, value in sorted(self.part(task).items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:12]

    def part(self, task: str) -> dict[str, Tensor]:
        """A task's own tensors, or (SHARED) those of all, by their names on a model."""
        return {name.partition("/")[2]: t for name, t in self.tensors.items() if name.partition("/")[0] == task}

    def alone(self, task: str, name: str) -> Joint:
        """One of the tasks with what all share, under another name."""
        own = {f"{name}/{tensor}": value for tensor, value in self.part(task).items()}
        shared = {f"{SHARED}/{tensor}": value for tensor, value in self.part(SHARED).items()}
        return replace(self, tasks={name: self.tasks[task]}, tensors={**shared, **own})

    def task(self, name: str) -> JointTask:
        """One of the tasks, to predict and evaluate with."""
        if name not in self.tasks:
            raise GraftError(f"task {name!r} is not among those trained together: {', '.join(self.tasks)} are.")
        return JointTask(self, name)

    def embeddings(self) -> dict[str, Tensor]:
        """HyperFormer's task embeddings."""
        found = {task: self.part(task).get("task.embedding") for task in self.tasks}
        missing = [task for task, value in found.items() if value is None]
        if missing:
            raise GraftError(
                f"task {missing[0]!r} has no embedding, since it was trained by {self.method.name!r}: "
                "HyperFormer's tasks have one (--method hyperformer++)."
            )
        return {task: value for task, value in found.items() if value is not None}

    def save(self, path: str | PathLike[str]) -> int:
        """Write it as STORE/NAME and return the version it became; earlier versions of NAME are kept."""
        from taskgraft.grafts.store import Store

        folder = Path(path)
        return Store(folder.parent).put(self, name=folder.name)

    def files(self, name: str) -> dict[str, bytes]:
        """What is written, in full, before anything is written."""
        tensors = safetensors.torch.save(
            {key: value.detach().cpu().contiguous() for key, value in self.tensors.items()}, metadata={"format": "pt"}
        )
        record = {
            "format": FORMAT,
            "name": name,
            "tasks": {task: member.to_json() for task, member in self.tasks.items()},
            "metrics": self.metrics,
            "training": self.training,
            "created": self.created,
            "backbone": self.backbone,
            "parameters": self.parameters,
            "packages": self.packages,
            **({"origin": self.origin} if self.origin else {}),
            "tensors": {"file": TENSORS, "sha256": hashlib.sha256(tensors).hexdigest(), "bytes": len(tensors)},
        }
        try:
            written = json.dumps(record, indent=1, ensure_ascii=False).encode()
            return {RECORD: written, TENSORS: tensors, CARD: card(record).encode()}
        except (TypeError, ValueError) as error:
            raise GraftError(
                f"the metrics, training or task records of {name!r} cannot be written as JSON: {error}; "
                "use plain numbers, strings, lists and dicts."
            ) from error


@dataclass(frozen=True, eq=False)
class JointTask:
    """A task of a joint, used as it is there: with the hypernetwork, or with the fine-tuned backbone."""

    joint: Joint
    name: str

    @property
    def graft(self) -> Graft:
        """What is known of it, without weights."""
        return self.joint.tasks[self.name].graft(self.name, self.joint.backbone, self.joint.training)


def get_joint(
    model: Any,
    tasks: Sequence[str] | None = None,
    *,
    records: Mapping[str, Mapping[str, Any]] | None = None,
    metrics: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    backbone: Mapping[str, Any] | None = None,
) -> Joint:
    """Take a copy of tasks that are trained together (all of a model's, by default) off it, with all that they share.

    `records` has "task" and "metrics" for each task. A fine-tuned backbone is remembered by `backbone`, what
    `graft.identity` said of it before it was trained.
    """
    grafts = api.grafts_of(model)
    names = list(grafts.tasks if tasks is None else tasks)
    if not names:
        raise GraftError("there are no tasks to keep together: this model carries none.")
    first = grafts.require(names[0])
    tensors: dict[str, Tensor] = {}
    for name in names:
        shared = grafts.shared_names(name)
        if grafts.tasks[name].method.name != first.method.name or shared != grafts.shared_names(names[0]):
            raise GraftError(f"tasks {names[0]!r} and {name!r} are of different methods, so they share nothing.")
        for tensor, value in grafts.read(name).items():
            key = f"{SHARED if tensor in shared else name}/{tensor}"
            if key in tensors and not torch.equal(tensors[key], value.cpu()):
                raise GraftError(f"tasks {names[0]!r} and {name!r} differ in {tensor}: they were not trained together.")
            tensors[key] = tensors[key] if key in tensors else value.cpu().contiguous()
    if first.method.trains_backbone:
        if backbone is None:
            raise GraftError("the backbone was fine-tuned: give what identified it before that as backbone=.")
        for path, parameter in grafts.backbone.parameters_of(first.method).items():
            tensors[f"{SHARED}/{BACKBONE}{path}"] = parameter.detach().cpu().clone()
    about = records or {}
    return Joint(
        tasks={
            name: Member(grafts.tasks[name].method, grafts.tasks[name].head, **_copied(about.get(name, {})))
            for name in names
        },
        tensors=tensors,
        backbone=dict(backbone or identity(model)),
        metrics=dict(metrics or {}),
        training=dict(training or {}),
    )


def _copied(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(value) for key, value in record.items()}


def load_joint(path: str | PathLike[str]) -> Joint:
    """Read the tasks that were saved together as STORE/NAME, after checking that the files are whole."""
    from taskgraft.grafts.store import Store

    folder = Path(path)
    return Store(folder.parent).get_joint(folder.name)


def add_joint(
    model: Any,
    joint: Joint | str | PathLike[str],
    tasks: Sequence[str] | None = None,
    *,
    other_precision: bool = False,
) -> None:
    """Put tasks that were trained together on a model, at rest: all of them, or some.

    They go on sharing what they shared, so `tg.train_only` can train them further. A model that carries no grafts yet
    becomes a grafted one; one whose backbone was fine-tuned gets those weights until `tg.ungraft`.
    """
    joint = joint if isinstance(joint, Joint) else load_joint(joint)
    wanted = list(joint.tasks if tasks is None else tasks)
    unknown = [task for task in wanted if task not in joint.tasks]
    if unknown:
        raise GraftError(f"task {unknown[0]!r} is not among those saved together: {', '.join(joint.tasks)} are.")
    bare = getattr(model, "taskgraft", None) is None
    if bare:
        api.graft(model, joint.method, tasks=())
    grafts, added = api.grafts_of(model), []
    try:
        for task in wanted:
            member = joint.tasks[task]
            pooler = reads_pooler(member.method, member.head)
            if task == wanted[0] or pooler:
                check_backbone(model, task, joint.backbone, pooler, other_precision)
        shared = joint.part(SHARED)
        own_weights = {name.removeprefix(BACKBONE): t for name, t in shared.items() if name.startswith(BACKBONE)}
        shared = {name: t for name, t in shared.items() if not name.startswith(BACKBONE)}
        for task in wanted:
            member = joint.tasks[task]
            weights = {**shared, **joint.part(task)}
            grafts.add(task, member.method, member.head, weights=weights, company=joint.company)
            added.append(task)
        if own_weights:
            grafts.backbone.put(joint.method, own_weights)
    except Exception:
        for task in added:
            grafts.remove(task)
        if bare:
            api.ungraft(model)
        raise


def grafts_in(model: Any, joint: Joint) -> dict[str, Graft]:
    """Each of a joint's tasks, which are on the model, as a plain graft."""
    return {
        task: materialise(
            model,
            task,
            metrics=member.metrics,
            training={**joint.training, "together": list(joint.tasks), "method": joint.method.to_json()},
            task_record=member.task,
            backbone=joint.backbone["name"],
        )
        for task, member in joint.tasks.items()
    }


def read_joint_record(name: str, folder: Path) -> dict[str, Any]:
    """joint.json, once it is known to hold what is needed."""
    record = read_record(name, folder, RECORD, NEEDED)
    if not all(isinstance(task, dict) and isinstance(task.get("method"), dict) for task in record["tasks"].values()):
        raise GraftError(f"{RECORD} of {name!r} has a task without a method: {AGAIN}.")
    if not record["tasks"]:
        raise GraftError(f"{RECORD} of {name!r} names no tasks: {AGAIN}.")
    return record


def read_joint(name: str, folder: Path) -> Joint:
    """Both files of a folder, checked."""
    record = read_joint_record(name, folder)
    tensors = read_tensors(name, folder, TENSORS, record)
    try:
        tasks = {task: Member.from_json(member) for task, member in record["tasks"].items()}
        known = {key: record[key] for key in ("backbone", "metrics", "training", "created")}
        packages, origin = dict(record.get("packages", {})), dict(record.get("origin", {}))
        return Joint(tasks, tensors, **known, packages=packages, origin=origin)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraftError(f"{RECORD} of {name!r} does not hold tasks trained together ({error}): {AGAIN}.") from error
