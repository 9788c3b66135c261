"""Wrappers that take the place of a backbone's modules, and give it back.

A wrapper shares the wrapped module's own tables of parameters, buffers and children, so every name and every
`state_dict` key of the backbone stays as it was; its banks are one further child, `bank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.sites import Place
from taskgraft.errors import GraftError
from taskgraft.nn.bank import AdapterBank
from taskgraft.nn.bottleneck import Origin
from taskgraft.nn.dropout import dropout
from taskgraft.nn.hypernet import GeneratedAdapter
from taskgraft.nn.norms import NormBank, task_norm
from taskgraft.nn.rows import Route, RowIndex

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts

SHARED_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class Wrapper(nn.Module):
    """Stands where `base` stood and is indistinguishable from it by name; `bank` holds the tasks' weights by kind."""

    base: nn.Module
    grafts: Grafts

    def __init__(self, base: nn.Module, grafts: Grafts) -> None:
        super().__init__()
        self.training = base.training
        for table in SHARED_TABLES:
            self.__dict__[table] = base.__dict__[table]
        self.__dict__["base"] = base  # not registered: its contents are already here
        self.__dict__["grafts"] = grafts
        self._modules["bank"] = nn.ModuleDict()

    def add_bank(self, kind: str, bank: nn.Module) -> None:
        self.bank.add_module(kind, bank.train(self.training))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)

    def train(self, mode: bool = True) -> Wrapper:
        super().train(mode)
        self.base.training = mode
        return self

    def unwrap(self) -> nn.Module:
        """The original module, as it was."""
        del self._modules["bank"]
        return self.base


class Unjoined(nn.Module):
    """Stands among a norm's banks for a kind of adapters that end their sub-layer: its rows pass the norm untouched."""


def residual_of(site: str) -> str:
    """The name under which what is added to a sub-layer's output is remembered."""
    return f"{site}.residual"


class Site(Wrapper):
    """A place for adapters: `adapter(base(x))`, or `base(adapter(x))` where the adapter comes before a dropout."""

    def __init__(self, base: nn.Module, grafts: Grafts, name: str, place: Place, layer: nn.Module) -> None:
        super().__init__(base, grafts)
        self.name = name
        self.first = place.first
        self.norm = place.norm
        self.__dict__["layer"] = layer  # not registered: it holds this

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.first:
            return dropout(self.base, self.adapt(x), *args, **kwargs)
        return self.adapt(dropout(self.base, x, *args, **kwargs))

    def adapt(self, x: Tensor, origin: Origin | None = None) -> Tensor:
        """x through each row's adapter; `origin` is of x as it comes."""
        route = self.grafts.route().for_batch(x)
        source = self.grafts.bound.inputs.pop(self.name, None)
        residual = self.grafts.bound.inputs.pop(residual_of(self.name), None)
        shape = x
        if route.packing is not None:
            x = route.packing.pad(x)
            source = None if source is None else route.packing.pad(source)
        for kind, bank in self.bank.items():
            index = route.kinds.get(kind)
            if index is not None:
                assert isinstance(bank, (AdapterBank, GeneratedAdapter))
                if isinstance(bank, AdapterBank) and (bank.form.needs_residual or bank.form.norm_sum):
                    x, origin = self.wired(bank, x, index, route, source, residual), None
                    continue
                known = {"origin": origin} if isinstance(bank, AdapterBank) else {}
                x, origin = bank(x, index, route, source if bank.form.parallel else None, **known), None
        return x if route.packing is None else route.packing.unpad(x, shape)

    def wired(
        self,
        bank: AdapterBank,
        x: Tensor,
        index: RowIndex,
        route: Route,
        source: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """x through adapters that read, keep or end more than their sub-layer's output; other rows stay as they are."""
        form = bank.form
        kept, source = x, source if form.parallel else None
        if form.needs_residual:
            if route.packing is not None:
                raise GraftError("adapters with reads, keeps or joined=False take padded batches only: pad this one.")
            assert residual is not None
            total = x + residual
            normed = self.normed(total) if "norm" in (form.reads, form.keeps) else total
            kept = {"sum": total, "norm": normed}.get(form.keeps or "", x)
            source = {"residual": residual, "norm": normed}.get(form.reads or "", x if source is None else source)
        y: Tensor = bank(kept, index, route, source)
        if not form.joined and residual is not None:
            y = y - residual  # the backbone's own code adds it
        return y if index.member is None else torch.where(index.member[:, None, None], y, x)

    def normed(self, total: Tensor) -> Tensor:
        """The layer's own norm of a sum, with each task's weights; a layer that norms elsewhere leaves it as it is."""
        if not self.norm:
            return total
        norm = self.layer.get_submodule(self.norm)
        result: Tensor = norm.normed(total) if isinstance(norm, NormSite) else norm(total)
        return result


class NormSite(Wrapper):
    """One of the backbone's norms, with each task's own weights."""

    def __init__(self, base: nn.Module, grafts: Grafts, offset: float) -> None:
        super().__init__(base, grafts)
        self.offset = offset
        self.read_in: torch.dtype | None = None  # what all who read it cast it to, where they do

    def forward(self, x: Tensor) -> Tensor:
        y = self.normed(x)
        kinds = self.grafts.route().for_batch(x).kinds
        for kind, bank in self.bank.items():
            if isinstance(bank, Unjoined) and kind in kinds:
                member = kinds[kind].member
                y = x if member is None else torch.where(member[:, None, None], x, y)
        return y

    def normed(self, x: Tensor) -> Tensor:
        route = self.grafts.route().for_batch(x)
        banks: dict[str, NormBank] = {
            kind: bank for kind, bank in self.bank.items() if kind in route.kinds and isinstance(bank, NormBank)
        }
        if not banks:
            result: Tensor = self.base(x)
            return result
        if route.packing is None:
            return task_norm(self.base, banks, x, route, self.offset, self.read_in)
        padded = task_norm(self.base, banks, route.packing.pad(x), route, self.offset, self.read_in)
        return route.packing.unpad(padded, x)
