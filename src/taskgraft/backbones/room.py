"""How much memory the tasks on a model take, and keeping it under a budget as they come and go."""

from __future__ import annotations

from taskgraft.backbones.insert import Grafts
from taskgraft.methods import Method
from taskgraft.nn.heads import Head


def held(grafts: Grafts) -> int:
    """The bytes of all banks: what tasks take, and the room that is kept for more."""
    return sum(kind.bytes_with() for kind in grafts.kinds.values())


def used(grafts: Grafts) -> int:
    """The bytes that tasks, and the bare backbone's slots, take of it."""
    kinds = grafts.kinds.values()
    return sum(kind.bytes_with() // kind.capacity * (len(kind.slots.of) + 1) for kind in kinds)


def held_with(grafts: Grafts, method: Method, head: Head | None) -> int:
    """The bytes of all banks once they have grown as little as one more task needs."""
    try:
        plan = {kind.key: size for kind, size in grafts.planned(method, head)}
        return sum(kind.bytes_with(plan.get(key)) for key, kind in grafts.kinds.items())
    finally:
        grafts.banks.discard_empty()


def least(grafts: Grafts, method: Method, head: Head | None) -> int:
    """The bytes that a task takes with nobody beside it."""
    try:
        return sum(
            bank.bytes_of(size, 2) for kind, size in grafts.planned(method, head) for bank in kind.banks.values()
        )
    finally:
        grafts.banks.discard_empty()


def grow(grafts: Grafts, method: Method, head: Head | None, budget: int) -> None:
    """Before a task is added that fits: twice the room where there is none left, or as much as the budget allows."""
    spare = budget - held_with(grafts, method, head)
    full = []
    for kind, size in grafts.planned(method, head):
        if kind.slots.of and kind.capacity < len(kind.slots.of) + 2:
            kind.reserve([size])
            full.append(kind)
    slot = sum(kind.bytes_with() // kind.capacity for kind in full)  # shared by all: the next task needs each of them
    for kind in full:
        kind.resize(kind.capacity + min(kind.capacity, 1 + max(0, spare) // max(1, slot)))
    grafts.banks.discard_empty()


def compact(grafts: Grafts) -> None:
    """Give back all room that no task needs. Rows that were named before must be named again."""
    for kind in grafts.kinds.values():
        grafts.expire(set(kind.slots.of))
        kind.compact()
    grafts.refresh()
