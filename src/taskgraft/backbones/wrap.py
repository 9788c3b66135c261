"""Wrappers that take the place of a backbone's modules, and give it back.

A wrapper shares the wrapped module's own tables of parameters, buffers and children, so every name and every
`state_dict` key of the backbone stays as it was; its banks are one further child, `bank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from taskgraft.nn.bank import AdapterBank
from taskgraft.nn.bottleneck import Origin
from taskgraft.nn.dropout import dropout
from taskgraft.nn.hypernet import GeneratedAdapter
from taskgraft.nn.norms import NormBank, task_norm

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


class Site(Wrapper):
    """A place for adapters: `adapter(base(x))`, or `base(adapter(x))` where the adapter comes before a dropout."""

    def __init__(self, base: nn.Module, grafts: Grafts, name: str, first: bool) -> None:
        super().__init__(base, grafts)
        self.name = name
        self.first = first

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.first:
            return dropout(self.base, self.adapt(x), *args, **kwargs)
        return self.adapt(dropout(self.base, x, *args, **kwargs))

    def adapt(self, x: Tensor, origin: Origin | None = None) -> Tensor:
        """x through each row's adapter; `origin` is of x as it comes."""
        route = self.grafts.route().for_batch(x)
        source = self.grafts.bound.inputs.pop(self.name, None)
        shape = x
        if route.packing is not None:
            x = route.packing.pad(x)
            source = None if source is None else route.packing.pad(source)
        for kind, bank in self.bank.items():
            index = route.kinds.get(kind)
            if index is not None:
                assert isinstance(bank, (AdapterBank, GeneratedAdapter))
                known = {"origin": origin} if isinstance(bank, AdapterBank) else {}
                x, origin = bank(x, index, route, source if bank.form.parallel else None, **known), None
        return x if route.packing is None else route.packing.unpad(x, shape)


class NormSite(Wrapper):
    """One of the backbone's norms, with each task's own weights."""

    def __init__(self, base: nn.Module, grafts: Grafts, offset: float) -> None:
        super().__init__(base, grafts)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        route = self.grafts.route().for_batch(x)
        banks: dict[str, NormBank] = {kind: bank for kind, bank in self.bank.items() if kind in route.kinds}
        if not banks:
            result: Tensor = self.base(x)
            return result
        if route.packing is None:
            return task_norm(self.base, banks, x, route, self.offset)
        padded = task_norm(self.base, banks, route.packing.pad(x), route, self.offset)
        return route.packing.unpad(padded, x)
