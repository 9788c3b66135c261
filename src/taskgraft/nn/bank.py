"""A bank: the new weights of all tasks at one site, stacked by slot.

Storage is not training. Weights at rest are buffers of a growing store; those being trained are separate Parameters
`[k, ...]` and are written back when training ends. So an optimiser can only ever see what it is meant to change, and
adding a task costs one copy into the store (which doubles when full).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from taskgraft.nn.bottleneck import BatchStatistics, Form, Origin, bottleneck
from taskgraft.nn.rows import Route, RowIndex

# "matrix" is decayed by the optimiser; "vector" (biases, norms) is not; "state" (running statistics) has no gradient.
Role = Literal["matrix", "vector", "state"]


@dataclass(frozen=True)
class Weight:
    """One stacked tensor of a bank: what a slot of it holds."""

    shape: tuple[int, ...]
    role: Role
    shared: bool = False  # one trained copy for all tasks that are trained together


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor that trains lies: at a slot of a stack (None: it is all of it), and its true shape there."""

    stack: Tensor
    slot: int | None
    shape: tuple[int, ...]

    def of(self, stack: Tensor) -> Tensor:
        """This part of a stack, as a view: of the weights, or of what an optimiser keeps beside them."""
        return stack.detach() if self.slot is None else stack.detach()[self.slot]


# The weights of one slot, as a function of its size (bottleneck units, classes).
Layout = Callable[[int], dict[str, Weight]]


class Bank(nn.Module):
    """Stacked weights with slots. `blank` is what slot 0, the bare backbone, holds (zeros where it is silent)."""

    def __init__(
        self, layout: Layout, width: int, device: torch.device, dtype: torch.dtype, blank: Mapping[str, Tensor] | None
    ) -> None:
        super().__init__()
        self.layout: Layout = functools.cache(layout)
        self.width = width
        self.trained_slots: list[int] = []
        self.place = object()  # another one whenever its tensors have moved in memory
        for name, weight in layout(width).items():
            store = torch.zeros(1, *weight.shape, device=device, dtype=dtype)
            if blank is not None and name in blank:
                store[0] = blank[name].detach()
            self.register_buffer(f"store_{name}", store, persistent=False)
            self.register_parameter(name, None)

    @property
    def weights(self) -> dict[str, Weight]:
        return self.layout(self.width)

    @property
    def capacity(self) -> int:
        return self.store(next(iter(self.weights))).shape[0]

    def store(self, name: str) -> Tensor:
        store: Tensor = getattr(self, f"store_{name}")
        return store

    def trained(self, name: str) -> Tensor:
        """The trained copies of a weight; of one that stays at rest while others train, the one that all share."""
        trained: Tensor | None = getattr(self, name)
        return self.store(name)[self.trained_slots[0]][None] if trained is None else trained

    # -- slots: written and read whole, in their true sizes

    @torch.no_grad()
    def write(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill a slot of the store, growing the store (to twice its capacity) where it is too small."""
        for own, value in self.places_in_store(slot, tensors):
            own.copy_(value)

    def places_in_store(self, slot: int, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """A slot's tensors, made room for and zero where a smaller value leaves room, and the values that go there."""
        for name in self.weights:
            if slot >= self.store(name).shape[0]:
                self._resize(name, max(slot + 1, 2 * self.store(name).shape[0]))
            own, value = self.store(name)[slot], tensors[name]
            yield (own if own.shape == value.shape else corner(own.zero_(), value.shape)), value

    @torch.no_grad()
    def read(self, slot: int, size: int) -> dict[str, Tensor]:
        """A slot's weights in their true shapes, from wherever they are up to date."""
        values = {}
        for name, weight in self.layout(size).items():
            if slot in self.trained_slots:
                place = 0 if weight.shared else self.trained_slots.index(slot)
                source = self.trained(name)[place]
            else:
                source = self.store(name)[slot]
            values[name] = corner(source, weight.shape).clone()
        return values

    @torch.no_grad()
    def train_slots(self, slots: Sequence[int], shared: bool = True) -> None:
        """Write what was trained back to the store, then make `slots`, in this order, the trained ones.

        `shared=False` leaves at rest what tasks share.
        """
        names = self.weights
        for name, weight in names.items():
            for place, slot in enumerate(self.trained_slots):
                self.store(name)[slot] = self.trained(name)[0 if weight.shared else place]
        self.trained_slots = list(slots)
        self.place = object()
        for name, weight in names.items():
            delattr(self, name)
            if not slots or (weight.shared and not shared):
                self.register_parameter(name, None)
                continue
            values = self.store(name)[torch.tensor(slots[:1] if weight.shared else list(slots))].clone()
            if values.dtype in (torch.float16, torch.bfloat16):  # small steps are lost in half precision
                values = values.float()
            if weight.role == "state":
                self.register_buffer(name, values)
            else:
                self.register_parameter(name, nn.Parameter(values))

    def places(self, slot: int, size: int) -> dict[str, Place]:
        """Where the weights of a slot lie that is being trained."""
        at = self.trained_slots.index(slot)
        return {name: Place(self.trained(name), at, weight.shape) for name, weight in self.layout(size).items()}

    @torch.no_grad()
    def swap_trained(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Give a slot that is being trained other weights, in place: the Parameters and their memory stay."""
        for name, value in tensors.items():
            own = self.trained(name)[self.trained_slots.index(slot)]
            corner(own.zero_(), value.shape).copy_(value)

    @torch.no_grad()
    def widen(self, width: int) -> None:
        """Make room for larger slots: zero-padded, so that nothing that is there changes its result.

        Parameters stay the same objects, so that an optimiser that has them goes on training them.
        """
        for name, weight in self.layout(width).items():
            setattr(self, f"store_{name}", padded_to(weight.shape, self.store(name)))
            trained: Tensor | None = getattr(self, name)
            if trained is not None:
                trained.data = padded_to(weight.shape, trained.data)
                trained.grad = None
        self.width = width
        self.place = object()

    def _resize(self, name: str, capacity: int) -> None:
        store = self.store(name)
        kept = min(capacity, store.shape[0])
        resized = store.new_zeros(capacity, *store.shape[1:])
        resized[:kept] = store[:kept]
        setattr(self, f"store_{name}", resized)
        self.place = object()

    @torch.inference_mode(False)
    @torch.no_grad()
    def resize(self, capacity: int) -> None:
        """Make room for so many slots, slot 0 among them, or give back what lies beyond."""
        for name in self.weights:
            self._resize(name, capacity)

    @torch.no_grad()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy slots that are at rest to other places: (from, to)."""
        for name in self.weights:
            for old, new in moves:
                self.store(name)[new] = self.store(name)[old]

    def bytes_of(self, width: int, capacity: int) -> int:
        """What the store takes with so many slots of this width."""
        itemsize = self.store(next(iter(self.weights))).element_size()
        return capacity * itemsize * sum(math.prod(weight.shape) for weight in self.layout(width).values())

    @torch.no_grad()
    def narrow(self, width: int) -> None:
        """Give back the room that larger slots had, once they have left and nothing is being trained."""
        for name, weight in self.layout(width).items():
            setattr(self, f"store_{name}", corner(self.store(name), (self.capacity, *weight.shape)).clone())
        self.width = width
        self.place = object()

    def _apply(self, *args: Any, **kwargs: Any) -> Bank:
        """Called by every change of device or dtype."""
        self.place = object()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    # -- rows

    def stacked(self, index: RowIndex, *, cast: bool = True) -> tuple[dict[str, Tensor], Tensor | None]:
        """The stacked weights that the rows refer to, and each row's slot in them (None: already in row order).

        `cast=False`: trained weights in the precision they are trained in, for a kernel that casts what it reads.
        """
        names = self.weights
        if index.trained is None:
            # A graph must not depend on which task it is, and a kernel reads the slot where it lies.
            if torch.compiler.is_compiling() or index.only is None or index.sizes.is_cuda:
                return {name: self.store(name) for name in names}, index.stored
            only = {name: self.store(name)[index.only : index.only + 1] for name in names}
            return only, torch.zeros_like(index.sizes)
        stacks = {name: self.trained(name) for name in names}
        if cast or index.stored is not None:
            stacks = {name: values.to(self.store(name).dtype) for name, values in stacks.items()}
        if index.stored is None and all(weight.shared for weight in names.values()):
            return stacks, None  # one slot, which is every row's
        count = len(self.trained_slots)
        for name, values in stacks.items():
            if names[name].shared:
                stacks[name] = values.expand(count, *values.shape[1:])
        if index.stored is None:
            return stacks, index.trained
        assert index.positions is not None
        merged = {}
        for name, values in stacks.items():
            base = self.store(name).index_select(0, index.stored)
            merged[name] = base.index_copy(0, index.positions, values.index_select(0, index.trained))
        return merged, None


def corner(whole: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of `whole` that a smaller tensor of this shape fills, from index 0 on in every dimension."""
    return whole[tuple(slice(0, n) for n in shape)]


def padded_to(shape: Sequence[int], stack: Tensor) -> Tensor:
    """A stack whose slots are padded with zeros to a larger shape."""
    padded = stack.new_zeros(stack.shape[0], *shape)
    corner(padded, stack.shape).copy_(stack)
    return padded


def bottleneck_layout(d: int, form: Form) -> Layout:
    """The weights of an adapter of a form, for a backbone of width d: 2md + d + m for the plain one."""

    def layout(m: int) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        if form.depth:
            weights |= {"down": Weight((d, m), "matrix"), "down_bias": Weight((m,), "vector")}
            weights |= {"up": Weight((m, d), "matrix"), "up_bias": Weight((d,), "vector")}
        for i in range(form.depth - 1):
            weights |= {f"middle{i}": Weight((m, m), "matrix"), f"middle{i}_bias": Weight((m,), "vector")}
        if form.norm_before:
            weights |= {"before_weight": Weight((d,), "vector"), "before_bias": Weight((d,), "vector")}
        if form.norm_inside is not None:
            weights |= {"inside_weight": Weight((m,), "vector"), "inside_bias": Weight((m,), "vector")}
        if form.norm_inside == "batch":
            weights |= {"inside_mean": Weight((m,), "state"), "inside_var": Weight((m,), "state")}
        if form.norm_after is not None:
            shared = form.norm_after == "shared"
            weights |= {
                "after_weight": Weight((d,), "vector", shared),
                "after_bias": Weight((d,), "vector", shared),
            }
        return weights

    return layout


def fresh_bottleneck(d: int, m: int, form: Form, std: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Initial weights: matrices from a normal of this std cut at two sigma, norms at one, the rest zero."""
    values = {}
    for name, weight in bottleneck_layout(d, form)(m).items():
        value = torch.zeros(weight.shape)
        if weight.role == "matrix" and std > 0:
            nn.init.trunc_normal_(value, std=std, a=-2 * std, b=2 * std, generator=generator)
        elif name in ("before_weight", "inside_weight", "after_weight", "inside_var"):
            value.fill_(1.0)
        values[name] = value
    return values


class AdapterBank(Bank):
    """The bottlenecks of one form at one site."""

    def __init__(self, form: Form, d: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(bottleneck_layout(d, form), width, device, dtype, blank=None)
        self.form = form

    def forward(
        self, x: Tensor, index: RowIndex, route: Route, source: Tensor | None, origin: Origin | None = None
    ) -> Tensor:
        weights, rows = self.stacked(index, cast=not x.is_cuda)
        statistics = None
        if self.form.norm_inside == "batch" and self.training and index.trained is not None:
            statistics = self._statistics(index, weights, rows, update=not route.recomputing)
        return bottleneck(
            x,
            rows,
            weights,
            self.form,
            source=source,
            sizes=index.sizes if self.form.needs_mask else None,
            statistics=statistics,
            training=self.training,
            segments=index.segments,
            kernel=route.kernel,
            dtype=torch.promote_types(x.dtype, self.store(next(iter(weights))).dtype),
            origin=origin,
        )

    def _statistics(
        self, index: RowIndex, weights: Mapping[str, Tensor], rows: Tensor | None, update: bool
    ) -> BatchStatistics:
        """Batch norm while training: each trained task's rows by their own statistics, the others' by the running."""

        def statistics(h: Tensor) -> tuple[Tensor, Tensor]:
            assert index.trained is not None
            dtype, h = h.dtype, h.to(torch.promote_types(h.dtype, torch.float32))  # sums over many tokens
            uniform = index.group.shape[0] == 1
            group = index.group.expand(h.shape[0])
            count = h.new_zeros(index.groups).index_add(0, group, h.new_full(h.shape[:1], h.shape[1]))[:, None]
            total = h.new_zeros(index.groups, h.shape[-1]).index_add(0, group, h.sum(1))
            mean = total / count  # [groups, m]
            centred = (h - mean[group][:, None]).square().sum(1)
            variance = h.new_zeros(index.groups, h.shape[-1]).index_add(0, group, centred) / count
            filled = index.group if index.positions is None else index.group[index.positions]
            if update:
                self._move_running_statistics(
                    index.trained, mean.detach()[filled], variance.detach()[filled], count[filled]
                )
            mean, variance = mean.to(dtype), variance.to(dtype)
            if uniform:
                return mean[group[:1]][:, None], variance[group[:1]][:, None]
            if index.positions is None:
                return mean[group][:, None], variance[group][:, None]
            trains = torch.zeros(h.shape[0], dtype=torch.bool, device=h.device).index_fill(0, index.positions, True)
            frozen_mean, frozen_var = weights["inside_mean"], weights["inside_var"]  # merged: in row order
            pick = trains[:, None]
            return (
                torch.where(pick, mean[group], frozen_mean)[:, None],
                torch.where(pick, variance[group], frozen_var)[:, None],
            )

        return statistics

    @torch.no_grad()
    def _move_running_statistics(self, slots: Tensor, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        unbiased = variance * count / (count - 1).clamp(min=1)
        for name, value in (("inside_mean", mean), ("inside_var", unbiased)):
            running = self.trained(name)
            running.index_copy_(0, slots, running[slots].lerp(value.to(running.dtype), 0.1))
