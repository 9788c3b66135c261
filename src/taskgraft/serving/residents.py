"""The grafts that are on the model, within a budget of bytes: one that is asked comes, the least recently used goes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from taskgraft.backbones import api, room
from taskgraft.errors import Unreadable
from taskgraft.grafts.fingerprint import check_backbone
from taskgraft.grafts.graft import Graft, add_graft, materialise, reads_pooler, unshared
from taskgraft.grafts.joint import Joint, add_joint
from taskgraft.serving.library import Version

LOW_WATER = 15 / 16  # of the budget: how much may be in use when room that nobody uses is given back


class Residents:
    """Versions on one model, the least recently used first. Whoever changes it has the model to itself."""

    def __init__(self, model: Any, budget: int, other_precision: bool, lock: threading.RLock) -> None:
        self.model, self.budget, self.other_precision, self.lock = model, budget, other_precision, lock
        self.grafts = api.grafts_of(model)
        self.order: OrderedDict[str, Version] = OrderedDict()
        self.bytes = self.arrived = self.departed = 0

    def place(self, version: Version, keep: Collection[Version] = ()) -> bool:
        """Put a version on the model, or find it there; False: there is no room beside those to keep."""
        if version.key in self.order:
            self.order.move_to_end(version.key)
            return True
        assert version.loaded is not None, "who is placed has been read"
        if isinstance(version.loaded, Joint):
            version.loaded = self._written_out(version, version.loaded)
        graft = version.loaded
        self._check(version.name, graft)
        if not self._make_room(graft, keep):
            if keep:
                return False
            raise Unreadable(
                f"task {version.name!r} does not fit beside what is on the model already: give the engine more memory."
            )
        room.grow(self.grafts, *shape_of(graft), self.budget)
        add_graft(self.model, graft, version.key, other_precision=self.other_precision)
        with self.lock:
            version.loaded = None
            self.order[version.key] = version
        self.bytes, self.arrived = room.held(self.grafts), self.arrived + 1
        return True

    def try_on(self, graft: Graft, *, new_banks: bool = False) -> bool:
        """Refuse a graft that does not fit the backbone, or the memory there is.

        False: that cannot be told without making banks of a kind that is not on the model yet (`new_banks`).
        """
        if not new_banks and not self.grafts.has_banks(*shape_of(graft)):
            return False
        self._check(graft.name, graft)
        self.grafts.check(graft.name, *shape_of(graft), graft.tensors)
        return True

    def _check(self, name: str, graft: Graft) -> None:
        """Refuse a graft of another backbone, or one that is larger than the budget by itself."""
        pooler = reads_pooler(graft.method, graft.head)
        check_backbone(self.model, name, graft.backbone, pooler, self.other_precision)
        least = room.least(self.grafts, *shape_of(graft))
        if least > self.budget:
            raise Unreadable(
                f"task {name!r} needs {least:,} bytes, and grafts may take {self.budget:,} in all: "
                "give the engine more memory."
            )

    def _make_room(self, graft: Graft, keep: Collection[Version]) -> bool:
        while room.held_with(self.grafts, *shape_of(graft)) > self.budget:
            others = [version for version in self.order.values() if version not in keep]
            victim = next((version for version in others if not version.waiting), next(iter(others), None))
            if victim is None:
                self._compact()
                return room.held_with(self.grafts, *shape_of(graft)) <= self.budget
            self.evict(victim)
            if room.used(self.grafts) < LOW_WATER * self.budget < room.held_with(self.grafts, *shape_of(graft)):
                self._compact()
        return True

    def _compact(self) -> None:
        room.compact(self.grafts)
        self.bytes = room.held(self.grafts)

    def evict(self, version: Version) -> None:
        """Take a version off the model; what waits for it finds its weights in memory, whatever became of its files."""
        with self.lock:
            if version.waiting:
                weights = {name: value.cpu() for name, value in self.grafts.read(version.key).items()}
                version.loaded = replace(version.graft, tensors=weights)
            del self.order[version.key]
        api.remove_task(self.model, version.key)
        self.bytes, self.departed = room.held(self.grafts), self.departed + 1

    def _written_out(self, version: Version, joint: Joint) -> Graft:
        """A task that was trained with others as a graft of its own: nothing is generated while it serves."""
        one = joint.alone(str(version.joint_task), version.key)
        add_joint(self.model, one, other_precision=self.other_precision)
        try:
            made = materialise(self.model, version.key)
        finally:
            api.remove_task(self.model, version.key)
        version.graft = replace(version.graft, method=made.method)
        return replace(version.graft, tensors=made.tensors)


def shape_of(graft: Graft) -> tuple[Any, Any]:
    """What decides how much room a graft needs."""
    return unshared(graft.method), graft.head
