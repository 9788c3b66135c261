"""Kinds: grafts that share banks, because they differ in nothing but size and values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.methods import Method
from taskgraft.nn.bank import Bank, Place
from taskgraft.nn.hypernet import HypernetBank, Sites, embeddings_of
from taskgraft.nn.rows import Draft, GeneratedLookup, GeneratedRows, Slots, numbered

HYPERNET = "hypernet"  # what its tensors' names begin with on disk
GENERATED_AT_ONCE = 16  # tasks of a recorded mixed batch, while they train: so many, or a multiple, or all there are


@dataclass
class Kind:
    """Grafts that share banks: one slot numbering, and a bank at each site the kind is at."""

    key: str
    slots: Slots = field(default_factory=Slots)
    banks: dict[str, Bank] = field(default_factory=dict)  # by the name their weights have on disk
    exact_width: bool = False  # heads: no rounding up of the padded size
    handles: list[Any] = field(default_factory=list)  # hooks that tell parallel adapters what their sub-layer reads
    trains_shared: bool = True

    @property
    def all_banks(self) -> list[Bank]:
        """Its banks, with what its tasks share."""
        return list(self.banks.values())

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make the banks as wide as tasks of these sizes need them, beside those that are there.

        That is the size itself while all are equal, else a power of two (heads: the largest).
        """
        width = self.width_with(sizes)
        for bank in self.banks.values():
            if width > bank.width:
                bank.widen(width)

    def width_with(self, sizes: Iterable[int]) -> int:
        all_sizes = self.slots.sizes | set(sizes)
        widest = max(all_sizes)
        return widest if len(all_sizes) == 1 or self.exact_width else 1 << (widest - 1).bit_length()

    @property
    def capacity(self) -> int:
        """How many tasks there is room for, and the bare backbone."""
        return max(bank.capacity for bank in self.banks.values())

    def bytes_with(self, size: int | None = None) -> int:
        """What its banks take, now or once they have grown as little as one more task of a size needs."""
        banks = self.banks.values()
        if size is None:
            return sum(bank.bytes_of(bank.width, bank.capacity) for bank in banks)
        width, capacity = self.width_with([size]), max(self.capacity, len(self.slots.of) + 2)
        return sum(bank.bytes_of(max(width, bank.width), capacity) for bank in banks)

    def resize(self, capacity: int) -> None:
        for bank in self.banks.values():
            bank.resize(capacity)

    def compact(self) -> None:
        """Give back the room that tasks had which have left: their slots, and the width that they alone needed."""
        assert not self.slots.trained, "what is being trained stays where it is"
        moves = self.slots.compact()
        for bank in self.banks.values():
            bank.move(moves)
            if self.width_with([]) < bank.width:
                bank.narrow(self.width_with([]))
            if bank.capacity > len(self.slots.of) + 1:
                bank.resize(len(self.slots.of) + 1)

    def add(self, task: str, size: int, weights: Mapping[str, Tensor]) -> None:
        self.reserve([size])
        slot = self.slots.take(task, size)
        pairs: list[tuple[Tensor, Tensor]] = []
        try:
            for name, bank in self.banks.items():
                pairs += bank.places_in_store(slot, {tensor: weights[f"{name}.{tensor}"] for tensor in bank.weights})
            torch._foreach_copy_([own for own, _ in pairs], [value for _, value in pairs])  # in few launches
        except RuntimeError:  # no memory to grow into
            self.slots.release(task)
            raise

    def check_given(self, task: str, weights: Mapping[str, Tensor]) -> None:
        """Refuse weights that do not agree with those that the tasks of this kind have in common at all times."""

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """What a task of this size has to bring, by name on disk."""
        return {
            f"{name}.{tensor}": weight.shape
            for name, bank in self.banks.items()
            for tensor, weight in bank.layout(size).items()
        }

    @property
    def shared_names(self) -> set[str]:
        """The names on disk of what its tasks share while they are trained together."""
        return {f"{name}.{t}" for name, bank in self.banks.items() for t, w in bank.weights.items() if w.shared}

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

    def train(self, tasks: Sequence[str], shared: bool = True) -> None:
        """Make these tasks, as far as they are of this kind, the trained ones; without what they share, if so asked."""
        mine = [task for task in tasks if task in self.slots.of]
        if (mine, shared) == (self.slots.trained, self.trains_shared):
            return
        for bank in self.banks.values():
            bank.train_slots([self.slots.of[task] for task in mine], shared)
        self.slots.trained, self.trains_shared = mine, shared

    def swap(self, old: str, new: str, size: int, weights: Mapping[str, Tensor]) -> None:
        """Give the place of a task that is being trained to another, with weights of its own; nothing moves."""
        place = self.slots.trained.index(old)
        self.slots.release(old)
        slot = self.slots.take(new, size)  # the one that was just released
        self.slots.trained[place] = new
        for name, bank in self.banks.items():
            assert size <= bank.width, "room for all that come is made when the first do"
            bank.swap_trained(slot, {tensor: weights[f"{name}.{tensor}"] for tensor in bank.weights})

    def places(self, task: str) -> dict[str, Place]:
        """Where the weights of a task lie that is being trained, by their names on disk."""
        slot, size = self.slots.of[task], self.slots.size[task]
        return {
            f"{name}.{tensor}": place
            for name, bank in self.banks.items()
            for tensor, place in bank.places(slot, size).items()
        }

    def read(self, task: str) -> dict[str, Tensor]:
        slot, size = self.slots.of[task], self.slots.size[task]
        return {
            f"{name}.{tensor}": value
            for name, bank in self.banks.items()
            for tensor, value in bank.read(slot, size).items()
        }


@dataclass
class HyperKind(Kind):
    """Tasks whose adapters one hypernetwork generates. A task's own are its embedding, in the bank "task"."""

    hypernet: HypernetBank | None = None

    @property
    def shared_bank(self) -> HypernetBank:
        assert self.hypernet is not None
        return self.hypernet

    @property
    def all_banks(self) -> list[Bank]:
        return [*self.banks.values(), self.shared_bank]

    def add(self, task: str, size: int, weights: Mapping[str, Tensor]) -> None:
        if not self.slots.of:
            self.shared_bank.write(0, {name: weights[f"{HYPERNET}.{name}"] for name in self.shared_bank.weights})
        super().add(task, size, weights)

    def check_given(self, task: str, weights: Mapping[str, Tensor]) -> None:
        for name, own in (self.shared_bank.read(0, 0) if self.slots.of else {}).items():
            if torch.equal(own.cpu(), weights[f"{HYPERNET}.{name}"].to("cpu", own.dtype)):
                continue
            raise GraftError(
                f"the hypernetwork of task {task!r} has been trained on for {next(iter(self.slots.of))!r} on this "
                "model, so they no longer share it: put all of its tasks on the model at once."
            )

    def shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        generated_by = {f"{HYPERNET}.{name}": weight.shape for name, weight in self.shared_bank.weights.items()}
        return super().shapes(size) | generated_by

    @property
    def shared_names(self) -> set[str]:
        return {f"{HYPERNET}.{name}" for name in self.shared_bank.weights}

    def check_shared(self, tasks: Sequence[str]) -> None:
        """Refuse to train the hypernetwork for some of its tasks: that would change the others."""
        left = [task for task in self.slots.of if task not in tasks]
        mine = [task for task in tasks if task in self.slots.of]
        if mine and left:
            raise GraftError(
                f"tasks {mine[0]!r} and {left[0]!r} share a hypernetwork, so training it for {mine[0]!r} alone would "
                f"change {left[0]!r}: train all of its tasks together, or the task's own weights alone (shared=False), "
                f"or write {left[0]!r} out with tg.materialise and remove it first."
            )

    def train(self, tasks: Sequence[str], shared: bool = True) -> None:
        super().train(tasks, shared)
        wanted = [0] if self.slots.trained and shared else []
        if wanted != self.shared_bank.trained_slots:  # else the Parameters stay, and an optimiser that has them
            self.shared_bank.train_slots(wanted)

    def read(self, task: str) -> dict[str, Tensor]:
        hypernet = self.shared_bank.read(0, 0)
        return super().read(task) | {f"{HYPERNET}.{name}": value for name, value in hypernet.items()}

    def rows(
        self, names: Sequence[str | None], numbers: Mapping[str | None, int], recorded: bool = False
    ) -> GeneratedLookup:
        """Which tasks of a batch are generated, and each row's place among them; arguments as for `Slots.look_up`.

        A recording is for a number of generated tasks. So that there are few of them, other trained tasks, whose
        weights nobody reads, fill that number up where it is to be `recorded`.
        """
        mine = [name for name in numbers if name in self.slots.of]
        blank = len(mine) < len(numbers)
        if recorded and len(numbers) > 1 and all(name in self.slots.trained for name in mine):
            mine += [name for name in self.slots.trained if name not in numbers][: -len(mine) % GENERATED_AT_ONCE]
        tasks = self.slots.look_up(mine, numbered(mine))
        assert tasks is not None
        place: dict[str | None, int] = {name: number + blank for number, name in enumerate(mine)}
        listed = names[:1] if len(numbers) == 1 else names
        return GeneratedLookup.of(tasks, len(mine) + blank, [place.get(name, 0) for name in listed], blank)

    def generate(self, rows: GeneratedRows) -> Sites:
        return self.shared_bank.generate(embeddings_of(self.banks["task"], rows.tasks), rows.blank)

    @torch.no_grad()
    def written_out(self, task: str, device: torch.device) -> dict[str, Tensor]:
        """A task's generated weights, by the names that those of a plain adapter have on disk."""
        draft = Draft((task,), None, {}, {self.key: self.rows([task], {task: 0})}, "auto")
        made = self.generate(draft.route(draft.flat().to(device)).generated_rows[self.key])
        return {f"{site}.{name}": value[0].clone() for site, parts in made.items() for name, value in parts.items()}


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


def check_given(name: str, plan: Sequence[tuple[Kind, int]], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a task which comes with its own cannot have."""
    check_weights(name, plan, weights)
    for kind, _ in plan:
        kind.check_given(name, weights)


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


def weights_like(
    name: str, like: str, method: Method, plan: Sequence[tuple[Kind, int]], same_head: bool
) -> dict[str, Tensor]:
    """Another task's weights, as far as a newcomer can start from them: not its head, unless it is the same."""
    found: dict[str, Tensor] = {}
    for kind, size in plan:
        if isinstance(kind, HeadsKind):
            if same_head and like in kind.slots.of:
                found |= kind.read(like)
        elif kind.slots.size.get(like) != size:
            raise GraftError(
                f"task {name!r} cannot start from {like!r}, whose method is another: {method}; give it that one."
            )
        else:
            found |= kind.read(like)
    return found


def kind_key(readable: str, *parts: Any) -> str:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    return f"{readable}_{digest}"


def float_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype for new weights beside a parameter: its own, or float32 beside quantised ones."""
    return parameter.dtype if parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1 else torch.float32
