"""Grafts on a model: the tasks it carries, the banks their weights lie in, and which of them are being trained."""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.banks import Banks
from taskgraft.backbones.checkpoint import TASKS, TrainedTasks
from taskgraft.backbones.forward import grafted_forward, grafted_generate
from taskgraft.backbones.frozen import own_head
from taskgraft.backbones.join import install_joins, remove_joins
from taskgraft.backbones.kinds import HyperKind, Kind, check_given, check_weights, weights_like
from taskgraft.backbones.resolve import resolved
from taskgraft.backbones.sites import Family, family_of
from taskgraft.errors import GraftError
from taskgraft.methods import HyperFormer, Method
from taskgraft.names import check_task_name
from taskgraft.nn.bank import AdapterBank, Place
from taskgraft.nn.heads import Head
from taskgraft.nn.rows import Bound, Draft, Generated, Kernel, Packing, Route, Slots, numbered

ROUTES = threading.Lock()  # threads name rows while others change tasks


@dataclass(frozen=True)
class GraftedTask:
    """A task on a model: its method as resolved for this backbone, its head, and the kinds that hold its weights."""

    method: Method
    head: Head | None
    kinds: tuple[str, ...]
    number: int  # in `task_ids`; 0 is the bare backbone
    company: str = ""  # tasks that share a hypernetwork are of one


class Grafts:
    """Everything that taskgraft knows of one model. It hangs on the model as `model.taskgraft`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.family: Family = family_of(model.config)
        self.banks = Banks(model, self.family, self)
        self.backbone, self.kinds = self.banks.backbone, self.banks.kinds
        self.head_kinds, self.hyper_kinds = self.banks.head_kinds, self.banks.hyper_kinds
        self.base_model: Any = model.base_model
        self.is_base: bool = self.base_model is model and not hasattr(model, "lm_head")
        self.own_head: Head | None = own_head(model)
        self.arguments = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self.tasks: dict[str, GraftedTask] = {}
        self.trained: list[str] = []
        self.trains_shared = True  # whether what the trained tasks share is trained with them
        self.generation = 0  # how often the trained tasks have changed, and their Parameters with them
        self.kernel: Kernel = "auto"  # what computes bottlenecks and norms
        self.graphed: Any = None  # the `Graphed` through which this model is called now, if it is
        self.bound = Bound()
        self._routes: weakref.WeakSet[Route] = weakref.WeakSet()
        self._numbers = 0
        self._alone: Route | None = None

    # -- rows

    def route(self) -> Route:
        """The route in force on this thread; a model with one task goes through it when nothing is said."""
        route = self.bound.route
        if route is not None:
            if route.stale:
                raise GraftError(
                    "a task of these rows was removed, or began or ended to be trained, since they were named: "
                    "name them again with tg.rows."
                )
            return route
        if self._alone is None:
            raise GraftError(
                f"this model carries {len(self.tasks)} tasks and no row says which: "
                "run it inside `with tg.rows(model, [...])`, or put task_ids into the batch."
            )
        return self._alone

    def route_of(self, names: Sequence[str | None] | str | None, lengths: Sequence[int] | None = None) -> Route:
        """Where the weights of these rows lie: looked up on the host, and sent to the device in one transfer."""
        draft, packing = self.draft_of(names), None
        if lengths is not None:
            if len(lengths) != len(draft.names):
                raise GraftError(f"{len(lengths)} lengths were given for {len(draft.names)} rows.")
            packing = Packing.of(lengths, self.device)
        return self.issued(draft.route(draft.flat().to(self.device, non_blocking=True), packing))

    def draft_of(self, names: Sequence[str | None] | str | None, recorded: bool = False) -> Draft:
        """The route of these rows before it is on a device; to be `recorded`, it is one of few outlines."""
        every_row = names is None or isinstance(names, str)
        listed: tuple[str | None, ...] = (names,) if names is None or isinstance(names, str) else tuple(names)
        numbers = numbered(listed)
        for name in numbers:
            if name is not None and name not in self.tasks:
                known = ", ".join(sorted(self.tasks)) or "none"
                raise GraftError(f"task {name!r} is not on this model: it carries {known}.")
        if not listed:
            raise GraftError("rows are empty: name one task (or None) for each row of the batch.")
        found = {key: kind.slots.look_up(listed, numbers) for key, kind in self.kinds.items()}
        kinds = {key: lookup for key, lookup in found.items() if lookup is not None}
        made = {key: kind.rows(listed, numbers, recorded) for key, kind in self.hyper_kinds.items() if key in kinds}
        return Draft(listed, None if every_row else len(listed), kinds, made, self.kernel)

    def generated(self, route: Route) -> Generated:
        """What hypernetworks generate for the rows of a route, by kind."""
        return {key: self.hyper_kinds[key].generate(rows) for key, rows in route.generated_rows.items()}

    def issued(self, route: Route) -> Route:
        """Keep an eye on a route for as long as someone holds it."""
        with ROUTES:
            self._routes.add(route)
        return route

    def expire(self, tasks: set[str]) -> None:
        with ROUTES:
            for route in self._routes:
                route.stale = route.stale or not tasks.isdisjoint(route.names)

    def names_of(self, task_ids: Any) -> list[str | None]:
        numbers: dict[int, str | None] = {task.number: name for name, task in self.tasks.items()}
        numbers[0] = None
        ids = task_ids.tolist() if isinstance(task_ids, Tensor) else list(task_ids)
        unknown = sorted({i for i in ids if i not in numbers})
        if unknown:
            raise GraftError(f"task_ids {unknown} are of no task on this model: tg.task_ids gives those of names.")
        return [numbers[i] for i in ids]

    def names_in(self, route: Route | Draft, rows: int) -> tuple[str | None, ...]:
        """The task of each row of an output."""
        names = route.names * rows if route.length is None else route.names
        if len(names) != rows:
            raise GraftError(f"{len(names)} rows were named for an output of {rows}.")
        return names

    def heads_of(self, names: Sequence[str | None]) -> list[Head | None]:
        return [None if name is None else self.tasks[name].head for name in names]

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """That of the backbone, and so of new banks."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def layout(self) -> tuple[object, ...]:
        """Where all weights lie: what was recorded with another layout is void."""
        return tuple(bank.place for kind in self.kinds.values() for bank in kind.all_banks)

    def has_batch_norm(self, kinds: Iterable[str]) -> bool:
        """Whether rows of these kinds go through a batch norm, whose statistics change from call to call."""
        banks = [bank for key in kinds for bank in self.kinds[key].banks.values()]
        return any(isinstance(bank, AdapterBank) and bank.form.norm_inside == "batch" for bank in banks)

    # -- tasks

    @torch.inference_mode(False)  # banks outlive the mode that they were made in
    @torch.no_grad()
    def add(
        self,
        name: str,
        method: Method,
        head: Head | None,
        weights: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        like: str | None = None,
        company: str = "",
    ) -> None:
        """Put a task on the model, with fresh weights or with those given (by their names on disk).

        `like` names a task of the same method whose weights it starts from. Tasks share a hypernetwork with those of
        the same method and `company`.
        """
        check_task_name(name)
        if name in self.tasks:
            raise GraftError(f"a task named {name!r} is already on this model: choose another name, or remove it.")
        self.check_company(name, method)
        if like is not None:
            company = self.require(like).company
        method = resolved(method, head, self.backbone)
        try:
            plan = self.banks.plan(method, head, company)
            if weights is None:
                weights = self.banks.fresh_weights(method, plan, torch.Generator().manual_seed(seed))
                if like is not None:
                    weights |= weights_like(name, like, self.tasks[like].method, plan, head == self.tasks[like].head)
                    check_weights(name, plan, weights)
            else:
                check_given(name, plan, weights)
        except GraftError:
            self.banks.discard_empty()
            raise
        weights = sent(weights, self.device)
        added = []
        try:
            for kind, size in plan:
                kind.add(name, size, weights)
                added.append(kind)
        except RuntimeError:  # no memory
            for kind in added:
                kind.slots.release(name)
            self.banks.discard_empty()
            raise
        if head is not None:
            self.model.accepts_loss_kwargs = False  # transformers.Trainer: our loss is a mean over rows
        self._numbers += 1
        self.tasks[name] = GraftedTask(method, head, tuple(kind.key for kind, _ in plan), self._numbers, company)
        self.refresh()

    def has_banks(self, method: Method, head: Head | None) -> bool:
        """Whether a task of this method and head would lie in banks that are there."""
        keys = self.banks.keys(resolved(method, head, self.backbone), head, "")
        return all(key in self.kinds for key in keys)

    def check(self, name: str, method: Method, head: Head | None, weights: Mapping[str, Tensor]) -> None:
        """Refuse weights with which `add` could not put a task on the model."""
        try:
            check_given(name, self.banks.plan(resolved(method, head, self.backbone), head, ""), weights)
        finally:
            self.banks.discard_empty()

    def remove(self, name: str) -> None:
        self.require(name)
        if name in self.trained:
            self._train([task for task in self.trained if task != name], self.trains_shared)
        self.expire({name})
        for key in self.tasks.pop(name).kinds:
            self.kinds[key].slots.release(name)
        self.banks.discard_empty()
        if not any(task.method.trains_backbone for task in self.tasks.values()):
            self.backbone.restore()
        self.refresh()

    def swap(self, old: str, new: str, method: Method, head: Head | None, seed: int = 0) -> None:
        """Put a task of the same kinds where one that is being trained was: the Parameters and their memory stay."""
        check_task_name(new)
        before, method = self.require(old), resolved(method, head, self.backbone)
        plan = self.banks.plan(method, head, before.company)
        kinds = tuple(kind.key for kind, _ in plan)
        if new in self.tasks or kinds != before.kinds or before.method.backbone_dropout != method.backbone_dropout:
            self.banks.discard_empty()
            raise GraftError(f"task {new!r} cannot take the place of {old!r}: it needs another, or is there already.")
        weights = self.banks.fresh_weights(method, plan, torch.Generator().manual_seed(seed))
        self.expire({old})
        for kind, size in plan:
            kind.swap(old, new, size, weights)
        del self.tasks[old]
        self._numbers += 1
        self.tasks[new] = GraftedTask(method, head, kinds, self._numbers, before.company)
        self.trained[self.trained.index(old)] = new
        self.refresh()

    def train(self, names: Sequence[str], shared: bool = True) -> None:
        """Make exactly these tasks the trained ones. What was trained before is put to rest, to the bit.

        `shared=False` trains their own weights alone: an embedding, an adapter, a head; not a hypernetwork or norms
        that tasks share.
        """
        for name in names:
            self.require(name)
        if len(set(names)) != len(names):
            raise GraftError(f"{list(names)} names a task twice.")
        self.check_trained_together([self.tasks[name].method for name in names])
        for kind in self.kinds.values():
            if shared or not isinstance(kind, HyperKind):  # a hypernetwork at rest harms none of its other tasks
                kind.check_shared(names)
        if names and self.tasks[names[0]].method.trains_backbone and (len(names) < len(self.tasks) or not shared):
            left = next((task for task in self.tasks if task not in names), names[0])
            raise GraftError(
                f"tasks {names[0]!r} and {left!r} share a backbone that is fine-tuned: train all of its tasks together."
            )
        if names and not shared and not any(self._has_own_weights(name) for name in names):
            raise GraftError(f"{', '.join(names)} have no weights of their own: there is nothing to train.")
        self._train(names, shared)

    def _has_own_weights(self, name: str) -> bool:
        return any(
            not weight.shared
            for key in self.tasks[name].kinds
            for bank in self.kinds[key].banks.values()
            for weight in bank.weights.values()
        )

    @torch.inference_mode(False)
    def _train(self, names: Sequence[str], shared: bool) -> None:
        methods = [self.tasks[name].method for name in names]
        if (list(names), shared) != (self.trained, self.trains_shared):
            self.expire({*names, *self.trained})
            self.generation += 1
        for kind in self.kinds.values():
            kind.train(names, shared)
        self.trained, self.trains_shared = list(names), shared
        self.backbone.set_dropout(on=not methods or methods[0].backbone_dropout)
        self.backbone.train(methods)
        self.refresh()

    @staticmethod
    def check_trained_together(methods: Sequence[Method]) -> None:
        if len({method.backbone_dropout for method in methods}) > 1:
            raise GraftError("tasks with and without backbone_dropout cannot be trained together: make them agree.")

    def read(self, name: str) -> dict[str, Tensor]:
        """A task's weights under the names they have on disk."""
        task = self.require(name)
        values: dict[str, Tensor] = {}
        for key in task.kinds:
            values |= self.kinds[key].read(name)
        return values

    def places(self, name: str) -> dict[str, Place]:
        """Where the weights of a task lie that is being trained, by their names on disk."""
        kinds = [self.kinds[key] for key in self.require(name).kinds]
        return {tensor: place for kind in kinds for tensor, place in kind.places(name).items()}

    def written_out(self, name: str) -> tuple[Method, dict[str, Tensor]]:
        """A task as a graft that needs no other: its method and weights, with all that a hypernetwork generates."""
        method = self.require(name).method
        if method.trains_backbone:
            raise GraftError(
                f"task {name!r} was trained by {method.name!r}, which changes the backbone itself: "
                "it has no graft; save the model with save_pretrained after tg.ungraft(model, restore=False)."
            )
        values = self.read(name)
        if isinstance(method, HyperFormer):
            for key in self.tasks[name].kinds:
                if key in self.hyper_kinds:
                    for tensor in self.hyper_kinds[key].read(name):
                        del values[tensor]
                    values |= self.hyper_kinds[key].written_out(name, self.device)
            method = method.adapter
        return method, values

    def shared_names(self, name: str) -> set[str]:
        """Which of a task's weights, by their names on disk, it shares with those it is trained with."""
        return {tensor for key in self.require(name).kinds for tensor in self.kinds[key].shared_names}

    def require(self, name: str) -> GraftedTask:
        if name not in self.tasks:
            raise GraftError(
                f"task {name!r} is not on this model: it carries {', '.join(sorted(self.tasks)) or 'none'}."
            )
        return self.tasks[name]

    # -- what a task needs

    def needs(self, method: Method, head: Head | None) -> dict[str, int]:
        """The kinds of banks that a task would lie in, and its size in each."""
        try:
            return {kind.key: size for kind, size in self.planned(method, head)}
        finally:
            self.banks.discard_empty()

    def planned(self, method: Method, head: Head | None) -> list[tuple[Kind, int]]:
        """The same with the kinds themselves, made where they are new."""
        return self.banks.plan(resolved(method, head, self.backbone), head, company="")

    def check_company(self, name: str, method: Method) -> None:
        first = next(iter(self.tasks.values()), None)
        if first is None or not (first.method.trains_backbone or method.trains_backbone):
            return
        if first.method.name != method.name or self.trained:
            raise GraftError(
                f"task {name!r} cannot share the backbone with {', '.join(self.tasks)}: full fine-tuning and "
                "top-layers change the backbone's own weights, so such tasks have a model to themselves, and are put "
                "on it together."
            )

    @property
    def width(self) -> int:
        return self.banks.width

    def follow_device(self) -> None:
        """The model may have moved since the route of its only task was made."""
        if self._alone is not None and self._alone_on != self.device:
            self.refresh()

    def refresh(self) -> None:
        """Name the rows of a model that carries one task, or none, anew."""
        self._alone_on = self.device
        only = next(iter(self.tasks)) if len(self.tasks) == 1 else None
        self._alone = self.route_of(only) if only is not None or not self.tasks else None

    # -- putting in and taking out

    def install(self) -> None:
        model = self.model
        model.requires_grad_(False)
        model.taskgraft = self
        model.add_module(TASKS, TrainedTasks(self))
        install_joins(self)
        model.forward = types.MethodType(grafted_forward(type(model).forward), model)
        if callable(getattr(model, "generate", None)):
            model.generate = types.MethodType(grafted_generate(type(model).generate), model)

    def uninstall(self, restore: bool) -> None:
        model = self.model
        self.train([])
        for kind in self.kinds.values():
            kind.slots = Slots()
        self.banks.discard_empty()
        model._modules.pop(TASKS)
        remove_joins(self)
        self.backbone.give_back(restore)
        for attribute in ("taskgraft", "forward", "generate", "accepts_loss_kwargs"):
            model.__dict__.pop(attribute, None)


def sent(weights: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """A task's weights on a GPU, in one transfer where they come from the host in one precision."""
    values = list(weights.values())
    if device.type != "cuda" or len({(value.dtype, value.device.type) for value in values}) != 1 or values[0].is_cuda:
        return weights
    flat = torch.cat([value.reshape(-1) for value in values]).to(device, non_blocking=True)
    parts = torch.split(flat, [value.numel() for value in values])
    return {name: part.view(value.shape) for (name, value), part in zip(weights.items(), parts, strict=True)}
