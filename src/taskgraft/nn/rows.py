"""Rows: which task each row of a batch goes through, and how that reaches the sites.

Rows are turned into slot numbers once per batch, on the host (`Route`), so a forward pass only indexes. They are
bound per thread (`Bound`): two threads on one model do not see each other's.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor

from taskgraft.errors import GraftError

Kernel = Literal["auto", "eager", "triton"]
Generated = dict[str, dict[str, dict[str, Tensor]]]  # kind of bank -> site -> tensor, each [tasks, ...]


@dataclass(frozen=True)
class Segments:
    """The rows of each slot: those of slot s are `order[starts[s]:starts[s + 1]]`."""

    order: Tensor  # [rows]
    starts: Tensor  # [slots + 1]

    @classmethod
    def of(cls, rows: Tensor, slots: int) -> Segments:
        """On the rows' own device, without looking at them."""
        ordered, order = torch.sort(rows, stable=True)
        return cls(order, torch.searchsorted(ordered, torch.arange(slots + 1, device=rows.device)))


@dataclass(frozen=True)
class RowIndex:
    """Where one kind's weights lie for each row. A length of 1 stands for every row of the batch.

    Rows take their weights from the store, from the trained weights, or from both; in the last case `stored` covers
    all rows and `trained` those at `positions`. Slot 0 of the store is the bare backbone.
    """

    stored: Tensor | None  # [rows] slots of the store
    trained: Tensor | None  # [rows] slots of the trained weights
    positions: Tensor | None  # which rows `trained` fills, when both are there
    sizes: Tensor  # [rows] each row's true size (bottleneck units, classes); 0 for bare rows
    group: Tensor  # [rows] number of the row's task among those of the batch
    groups: int
    member: Tensor | None  # [rows] whether the row's task is of this kind; None: all are
    only: int | None = None  # the one slot of the store that all rows share, where that is so
    segments: Segments | None = None  # the rows of each trained slot, where rows take their weights from those alone


class Slots:
    """Which task holds which slot; the same in every bank of one kind. Slot 0 is never given away."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.size: dict[str, int] = {}
        self._sizes: Counter[int] = Counter()
        self.trained: list[str] = []  # in the order of the trained weights
        self._free: list[int] = []

    def take(self, task: str, size: int) -> int:
        slot = self._free.pop() if self._free else len(self.of) + 1
        self.of[task], self.size[task] = slot, size
        self._sizes[size] += 1
        return slot

    def release(self, task: str) -> int:
        slot = self.of.pop(task)
        self._sizes[self.size.pop(task)] -= 1
        self._free.append(slot)
        return slot

    def compact(self) -> list[tuple[int, int]]:
        """Number the tasks 1, 2, ... without gaps; which slots that moves: (from, to)."""
        gaps = sorted(slot for slot in self._free if slot <= len(self.of))
        beyond = [task for task, slot in self.of.items() if slot > len(self.of)]
        moves = [(self.of[task], slot) for task, slot in zip(beyond, gaps, strict=True)]
        self.of.update(zip(beyond, gaps, strict=True))
        self._free = []
        return moves

    @property
    def sizes(self) -> set[int]:
        return {size for size, tasks in self._sizes.items() if tasks}

    def look_up(self, names: Sequence[str | None], numbers: Mapping[str | None, int]) -> Lookup | None:
        """The rows' places in this kind's banks, or None where no row is of this kind.

        `numbers` are those of the batch's tasks. It is done before every batch: loops over rows are kept bare.
        """
        of, size = cast(Mapping[str | None, int], self.of), cast(Mapping[str | None, int], self.size)
        mine = [name for name in numbers if name in of]
        if not mine:
            return None
        if len(numbers) == 1:
            names = names[:1]
        place: dict[str | None, int] = {task: number for number, task in enumerate(self.trained)}
        filled = [row for row, name in enumerate(names) if name in place] if place else []
        trained = [place[names[row]] for row in filled] if filled else None
        stored = order = starts = None
        if len(filled) < len(names):
            stored = [of.get(name, 0) for name in names]
            for row in filled:
                stored[row] = 0
        elif trained is not None and len(names) > 1:
            order, starts = segmented(trained, len(self.trained))
        return Lookup(
            stored=stored,
            trained=trained,
            positions=filled if trained is not None and stored is not None else None,
            sizes=[size.get(name, 0) for name in names],
            group=[numbers[name] for name in names],
            groups=len(numbers),
            member=[name in of for name in names] if len(mine) < len(numbers) else None,
            only=of[mine[0]] if len(numbers) == 1 and trained is None else None,
            order=order,
            starts=starts,
        )


def segmented(slots: list[int], count: int) -> tuple[list[int], list[int]]:
    """`Segments` of rows with these slots, of so many, on the host: their order, and where each slot's begin."""
    counts = Counter(slots)
    order = sorted(range(len(slots)), key=slots.__getitem__)
    return order, list(accumulate((counts[slot] for slot in range(count)), initial=0))


def numbered(names: Iterable[str | None]) -> dict[str | None, int]:
    """The tasks among these, in the order in which they first come."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


Integers = list[int] | None


@dataclass(frozen=True)
class Lookup:
    """A `RowIndex` before it is on a device: lists of integers that travel together."""

    stored: Integers
    trained: Integers
    positions: Integers
    sizes: Integers
    group: Integers
    member: Integers
    order: Integers
    starts: Integers
    groups: int
    only: int | None

    @property
    def lists(self) -> tuple[Integers, ...]:
        return (
            self.stored, self.trained, self.positions, self.sizes, self.group, self.member, self.order, self.starts
        )  # fmt: skip

    def index(self, tensors: Iterator[Tensor]) -> RowIndex:
        """With the next of the tensors in the place of each list."""
        stored, trained, positions, sizes, group, member, order, starts = (
            None if values is None else next(tensors) for values in self.lists
        )
        assert sizes is not None and group is not None
        return RowIndex(
            stored=stored,
            trained=trained,
            positions=positions,
            sizes=sizes,
            group=group,
            groups=self.groups,
            member=None if member is None else member.bool(),
            only=self.only,
            segments=None if order is None or starts is None else Segments(order, starts),
        )


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end without padding, and their places in a padded batch."""

    row: Tensor  # [tokens]
    column: Tensor  # [tokens]
    rows: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        column = torch.cat([torch.arange(n) for n in lengths])
        return cls(row.to(device), column.to(device), len(lengths), max(lengths))

    def pad(self, x: Tensor) -> Tensor:
        tokens = x.reshape(self.row.shape[0], *x.shape[1 if x.shape[0] == self.row.shape[0] else 2 :])
        return x.new_zeros(self.rows, self.longest, *tokens.shape[1:]).index_put((self.row, self.column), tokens)

    def unpad(self, padded: Tensor, like: Tensor) -> Tensor:
        return padded[self.row, self.column].reshape(like.shape)


@dataclass(frozen=True)
class GeneratedRows:
    """Rows whose weights a hypernetwork generates: for which tasks, and each row's place among them."""

    tasks: RowIndex  # where the embedding of each of the tasks lies
    rows: Tensor  # [rows] places among the generated; a length of 1 stands for every row
    blank: bool  # whether place 0 is the bare backbone, for rows of no task or of another kind
    segments: Segments | None  # the rows of each place, where there are several rows


@dataclass(frozen=True)
class GeneratedLookup:
    """`GeneratedRows` before they are on a device."""

    tasks: Lookup
    rows: list[int]
    blank: bool
    order: Integers
    starts: Integers

    @classmethod
    def of(cls, tasks: Lookup, places: int, rows: list[int], blank: bool) -> GeneratedLookup:
        order, starts = segmented(rows, places) if len(rows) > 1 else (None, None)
        return cls(tasks, rows, blank, order, starts)


@dataclass(frozen=True)
class Draft:
    """A `Route` before it is on a device: which lists there are, and what they hold."""

    names: tuple[str | None, ...]
    length: int | None
    kinds: dict[str, Lookup]
    generated: dict[str, GeneratedLookup]
    kernel: Kernel

    @property
    def _lists(self) -> Iterator[Integers]:
        for lookup in self.kinds.values():
            yield from lookup.lists
        for made in self.generated.values():
            yield from (*made.tasks.lists, made.rows, made.order, made.starts)

    @property
    def outline(self) -> tuple[object, ...]:
        """What routes have in common that differ in nothing but tasks: how long each list is."""
        lengths = tuple(-1 if values is None else len(values) for values in self._lists)
        return self.length, tuple(self.kinds), lengths, tuple(made.blank for made in self.generated.values())

    def flat(self) -> Tensor:
        """All lists end to end, so that they travel to a device together."""
        numbers = array("q")  # from which a tensor is made in an eighth of the time that it takes from a list
        for values in self._lists:
            numbers.fromlist(values or [])
        return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)

    def route(self, flat: Tensor, packing: Packing | None = None) -> Route:
        """The route whose indices are parts of `flat`."""
        sizes = [len(values) for values in self._lists if values is not None]
        tensors = iter(torch.split(flat, sizes))
        kinds = {key: lookup.index(tensors) for key, lookup in self.kinds.items()}
        made = {}
        for key, generated in self.generated.items():
            tasks = generated.tasks.index(tensors)
            rows = next(tensors)
            segments = None if generated.order is None else Segments(next(tensors), next(tensors))
            made[key] = GeneratedRows(tasks, rows, generated.blank, segments)
        return Route(self.names, self.length, kinds, packing=packing, generated_rows=made, kernel=self.kernel)


@dataclass(eq=False)
class Route:
    """The rows of one forward pass, resolved for every kind of bank on the model.

    It is `stale` once one of its tasks has left, or has begun or ended to be trained: its slots mean nothing then.
    """

    names: tuple[str | None, ...]
    length: int | None  # None: whatever the batch has
    kinds: dict[str, RowIndex]
    expanded: Route | None = None  # the same rows, repeated for the beams of `generate`
    generated_rows: dict[str, GeneratedRows] = field(default_factory=dict)  # by kind, of those in `kinds`
    packing: Packing | None = None
    recomputing: bool = False  # a checkpointed forward, run again in backward: change no state
    stale: bool = False
    kernel: Kernel = "auto"

    def for_batch(self, x: Tensor) -> Route:
        """The route that fits a batch of x's length; anything else is a mistake of the caller's."""
        if self.packing is not None:
            tokens = self.packing.row.shape[0]
            if x.shape[0] == tokens or (x.shape[0] == 1 and x.shape[1] == tokens):
                return self
            raise GraftError(f"the packed batch has shape {tuple(x.shape)}, but the lengths given sum to {tokens}.")
        if self.length is None or x.shape[0] == self.length:
            return self
        if self.expanded is not None and x.shape[0] == self.expanded.length:
            return self.expanded
        raise GraftError(
            f"{self.length} rows were named for a batch of {x.shape[0]}: name one task (or None) for each row."
        )

    def again(self) -> Route:
        return replace(self, recomputing=True)


class Bound(threading.local):
    """The route in force on this thread, None outside of any; and what sites find there while a model runs:
    the sub-layer inputs that parallel adapters await, and the weights that hypernetworks have generated."""

    def __init__(self) -> None:
        self.route: Route | None = None
        self.inputs: dict[str, Tensor] = {}
        self.generated: Generated = {}

    def __reduce__(self) -> Any:
        return Bound, ()


class bind:
    """Put a route in force on this thread for the length of a `with` block, and set aside what another's generated."""

    def __init__(self, bound: Bound, route: Route) -> None:
        self.bound, self.route = bound, route
        self.before: list[tuple[Route | None, Generated]] = []

    def __enter__(self) -> Route:
        self.before.append((self.bound.route, self.bound.generated))
        self.bound.route, self.bound.generated = self.route, {}
        return self.route

    def __exit__(self, *_: object) -> None:
        self.bound.route, self.bound.generated = self.before.pop()


class generating:
    """Let the sites of this thread find these generated weights for the length of a `with` block."""

    def __init__(self, bound: Bound, weights: Generated) -> None:
        self.bound, self.weights = bound, weights
        self.before: Generated = {}

    def __enter__(self) -> None:
        self.before, self.bound.generated = self.bound.generated, self.weights

    def __exit__(self, *_: object) -> None:
        self.bound.generated = self.before
