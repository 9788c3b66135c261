"""Kinds: grafts that share banks, because they differ in nothing but size and values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.nn.bank import Bank
from taskgraft.nn.rows import Slots


@dataclass
class Kind:
    """Grafts that share banks: one slot numbering, and a bank at each site the kind is at."""

    key: str
    slots: Slots = field(default_factory=Slots)
    banks: dict[str, Bank] = field(default_factory=dict)  # by the name their weights have on disk
    exact_width: bool = False  # heads: no rounding up of the padded size
    handles: list[Any] = field(default_factory=list)  # hooks that tell parallel adapters what their sub-layer reads

    def width_for(self, size: int) -> int:
        """The padded size of the banks: the size itself while all are equal, else a power of two (heads: largest)."""
        sizes = self.slots.sizes | {size}
        widest = max(sizes)
        return widest if len(sizes) == 1 or self.exact_width else 1 << (widest - 1).bit_length()

    def add(self, task: str, size: int, weights: Mapping[str, Tensor]) -> None:
        width = self.width_for(size)
        slot = self.slots.take(task, size)
        for name, bank in self.banks.items():
            if width > bank.width:
                bank.widen(width)
            bank.write(slot, {tensor: weights[f"{name}.{tensor}"] for tensor in bank.weights})

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """What a task of this size has to bring, by name on disk."""
        return {
            f"{name}.{tensor}": weight.shape
            for name, bank in self.banks.items()
            for tensor, weight in bank.layout(size).items()
        }

    def check_shared(self, tasks: Sequence[str]) -> None:
        """Refuse to train tasks together that share weights and were trained apart: they no longer agree on them."""
        mine = [task for task in tasks if task in self.slots.of]
        for bank in self.banks.values():
            shared = [name for name, weight in bank.weights.items() if weight.shared]
            if not shared or bank.store(shared[0]).is_meta:
                return
            first, *others = [bank.read(self.slots.of[task], self.slots.size[task]) for task in mine] or [{}]
            for task, values in zip(mine[1:], others, strict=True):
                if not all(torch.equal(first[name], values[name]) for name in shared):
                    raise GraftError(
                        f"tasks {mine[0]!r} and {task!r} share weights and were trained apart, so they differ in "
                        "them: train them together from the start, or give each its own."
                    )

    def train(self, tasks: Sequence[str]) -> None:
        mine = [task for task in tasks if task in self.slots.of]
        if mine == self.slots.trained:
            return
        for bank in self.banks.values():
            bank.train_slots([self.slots.of[task] for task in mine])
        self.slots.trained = mine

    def read(self, task: str) -> dict[str, Tensor]:
        slot, size = self.slots.of[task], self.slots.size[task]
        return {
            f"{name}.{tensor}": value
            for name, bank in self.banks.items()
            for tensor, value in bank.read(slot, size).items()
        }


@dataclass
class HeadsKind(Kind):
    """Heads that read the backbone in one way."""

    per_token: bool = False
    spans: bool = False
    pooling: str = "mean"
    exact_width: bool = True

    @property
    def bank(self) -> Bank:
        return self.banks["head"]


def check_weights(name: str, plan: Sequence[tuple[Kind, int]], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit by name and shape, before any of them reaches a model."""
    wanted: dict[str, tuple[int, ...]] = {}
    for kind, size in plan:
        wanted |= kind.shapes(size)
    missing, surplus = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or surplus:
        raise GraftError(
            f"the weights of {name!r} do not fit this backbone and method: "
            f"missing {missing[:3] or 'none'}, not expected {surplus[:3] or 'none'}."
        )
    for tensor, shape in wanted.items():
        if tuple(weights[tensor].shape) != shape:
            raise GraftError(
                f"{tensor} of {name!r} has shape {tuple(weights[tensor].shape)}, "
                f"but this backbone and method need {shape}."
            )


def kind_key(readable: str, *parts: Any) -> str:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    return f"{readable}_{digest}"


def float_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype for new weights beside a parameter: its own, or float32 beside quantised ones."""
    return parameter.dtype if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1 else torch.float32
