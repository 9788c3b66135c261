"""Grafts on a model: the tasks it carries, the banks their weights lie in, and which of them are being trained."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.checkpoint import TASKS, TrainedTasks
from taskgraft.backbones.count import form_of, hypernet_plan
from taskgraft.backbones.forward import grafted_forward, grafted_generate
from taskgraft.backbones.frozen import FrozenBackbone, base_prefix, own_head, top_layer_parameters
from taskgraft.backbones.kinds import HYPERNET, HeadsKind, HyperKind, Kind, check_weights, float_dtype, kind_key
from taskgraft.backbones.sites import Family, FoundSite, family_of
from taskgraft.backbones.wrap import NormSite, Site, Wrapper
from taskgraft.errors import GraftError
from taskgraft.methods import Adapter, HeadOnly, HyperFormer, Method, TopLayers
from taskgraft.names import check_task_name
from taskgraft.nn.bank import AdapterBank, Bank, fresh_bottleneck
from taskgraft.nn.heads import Head, HeadBank, fresh_head
from taskgraft.nn.hypernet import GeneratedAdapter, HypernetBank, embedding_layout, fresh_hypernet
from taskgraft.nn.norms import NormBank
from taskgraft.nn.rows import Bound, Generated, Packing, Route, RowIndex, Slots

HEADS, HYPERNETS = "taskgraft_heads", "taskgraft_hypernets"
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
        self.backbone = FrozenBackbone(model, self.family)
        self.base_model: Any = model.base_model
        self.is_base: bool = self.base_model is model and not hasattr(model, "lm_head")
        self.own_head: Head | None = own_head(model)
        self.arguments = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self.kinds: dict[str, Kind] = {}
        self.head_kinds: dict[str, HeadsKind] = {}
        self.hyper_kinds: dict[str, HyperKind] = {}
        self.tasks: dict[str, GraftedTask] = {}
        self.trained: list[str] = []
        self.trains_shared = True  # whether what the trained tasks share is trained with them
        self.generation = 0  # how often the trained tasks have changed, and their Parameters with them
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
        every_row = names is None or isinstance(names, str)
        listed: tuple[str | None, ...] = (names,) if names is None or isinstance(names, str) else tuple(names)
        for name in listed:
            if name is not None and name not in self.tasks:
                known = ", ".join(sorted(self.tasks)) or "none"
                raise GraftError(f"task {name!r} is not on this model: it carries {known}.")
        if not listed:
            raise GraftError("rows are empty: name one task (or None) for each row of the batch.")
        device = self.device
        packing = None
        if lengths is not None:
            if len(lengths) != len(listed):
                raise GraftError(f"{len(lengths)} lengths were given for {len(listed)} rows.")
            packing = Packing.of(lengths, device)
        kinds: dict[str, RowIndex] = {}
        for key, kind in self.kinds.items():
            index = kind.slots.index(listed, device)
            if index is not None:
                kinds[key] = index
        made = {key: kind.rows(listed, device) for key, kind in self.hyper_kinds.items() if key in kinds}
        length = None if every_row else len(listed)
        return self.issued(Route(listed, length, kinds, packing=packing, generated_rows=made))

    def generated(self, route: Route) -> Generated:
        """What hypernetworks generate for the rows of a route, by kind."""
        return {key: self.hyper_kinds[key].generate(rows) for key, rows in route.generated_rows.items()}

    def issued(self, route: Route) -> Route:
        """Keep an eye on a route for as long as someone holds it."""
        with ROUTES:
            self._routes.add(route)
        return route

    def _expire(self, tasks: set[str]) -> None:
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

    def names_in(self, route: Route, rows: int) -> tuple[str | None, ...]:
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

    # -- tasks

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
        method = self._resolve(method, head)
        try:
            plan = self._plan(method, head, company)
            if weights is None:
                weights = self._fresh_weights(method, plan, torch.Generator().manual_seed(seed))
                if like is not None:
                    weights |= self._weights_like(name, like, plan, head)
                    check_weights(name, plan, weights)
            else:
                check_weights(name, plan, weights)
                for kind, _ in plan:
                    kind.check_given(name, weights)
        except GraftError:
            self._discard_empty_kinds()
            raise
        for kind, size in plan:
            kind.add(name, size, weights)
        if head is not None:
            self.model.accepts_loss_kwargs = False  # transformers.Trainer: our loss is a mean over rows
        self._numbers += 1
        self.tasks[name] = GraftedTask(method, head, tuple(kind.key for kind, _ in plan), self._numbers, company)
        self._refresh()

    def remove(self, name: str) -> None:
        self.require(name)
        if name in self.trained:
            self._train([task for task in self.trained if task != name], self.trains_shared)
        self._expire({name})
        for key in self.tasks.pop(name).kinds:
            self.kinds[key].slots.release(name)
        self._discard_empty_kinds()
        if not any(task.method.trains_backbone for task in self.tasks.values()):
            self.backbone.restore()
        self._refresh()

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

    def _train(self, names: Sequence[str], shared: bool) -> None:
        methods = [self.tasks[name].method for name in names]
        if (list(names), shared) != (self.trained, self.trains_shared):
            self._expire({*names, *self.trained})
            self.generation += 1
        for kind in self.kinds.values():
            kind.train(names, shared)
        self.trained, self.trains_shared = list(names), shared
        self.backbone.set_dropout(on=not methods or methods[0].backbone_dropout)
        self.backbone.train(methods)
        self._refresh()

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

    def _resolve(self, method: Method, head: Head | None) -> Method:
        """The method with everything that depends on this backbone made explicit, or the reason why it cannot be."""
        d = self.width
        if isinstance(method, (Adapter, HyperFormer)):
            method.bottleneck_size(d)
        if isinstance(method, Adapter):
            depth = max(site.layer for site in self.backbone.sites) + 1
            beyond = [layer for layer in method.layers or () if not 0 <= layer < depth]
            if beyond:
                raise GraftError(f"layers {beyond} do not exist: this backbone has layers 0 to {depth - 1}.")
        if isinstance(method, TopLayers):
            top_layer_parameters(self.model, self.family, method.k)
        if head is None:
            return method
        if self.model.config.is_encoder_decoder and any(
            site.name.startswith("decoder") for site in self.backbone.sites
        ):
            raise GraftError(
                f"{type(self.model).__name__} writes text, so its tasks have no heads: leave the labels out, "
                "or graft the encoder alone (T5EncoderModel)."
            )
        if head.per_token:
            return method
        if method.pooling is None:
            return replace(method, pooling="last" if self.family.is_decoder else "mean")
        if method.pooling == "pooler":
            self._check_pooler()
        return method

    def _check_pooler(self) -> None:
        pooler = getattr(self.base_model, "pooler", None)
        name = type(self.base_model).__name__
        if pooler is None:
            raise GraftError(f"{name} has no pooler: use pooling='cls', 'mean' or 'last'.")
        loaded = [getattr(p, "_is_hf_initialized", False) for p in self.model.parameters()]
        if any(loaded) and not all(getattr(p, "_is_hf_initialized", False) for p in pooler.parameters()):
            raise GraftError(
                f"the pooler of this {name} was not in its checkpoint, so its weights are random and frozen: "
                "use pooling='cls', 'mean' or 'last'."
            )

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)

    def _plan(self, method: Method, head: Head | None, company: str) -> list[tuple[Kind, int]]:
        """The kinds that will hold a task of this method, made where they are new, and its size in each."""
        plan: list[tuple[Kind, int]] = []
        if isinstance(method, HyperFormer):
            plan.append((self._hyper_kind(method, company), method.bottleneck_size(self.width)))
        if isinstance(method, Adapter):
            plan.append((self._adapter_kind(method), method.bottleneck_size(self.width)))
        if method.trained_norms != "none":
            plan.append((self._norm_kind(method.trained_norms), 0))
        if head is not None:
            plan.append((self._head_kind(method, head), head.width))
        return plan

    def _discard_empty_kinds(self) -> None:
        """Give back the banks and wrappers that no task needs."""
        for key in [key for key, kind in self.kinds.items() if not kind.slots.of]:
            for handle in self.kinds[key].handles:
                handle.remove()
            if self.head_kinds.pop(key, None) is not None:
                del getattr(self.model, HEADS)[key]
            if self.hyper_kinds.pop(key, None) is not None:
                del getattr(self.model, HYPERNETS)[key]
            self.backbone.drop_banks(key)
            del self.kinds[key]
        if not self.head_kinds:
            self.model._modules.pop(HEADS, None)
        if not self.hyper_kinds:
            self.model._modules.pop(HYPERNETS, None)

    def _sites(self, wanted: Sequence[str], layers: Sequence[int] | None = None) -> list[FoundSite]:
        chosen = [
            site
            for site in self.backbone.sites
            if site.name.rpartition(".")[2] in wanted and (layers is None or site.layer in layers)
        ]
        if not chosen:
            raise GraftError(
                f"{type(self.model).__name__} has no site for sites={wanted} in the layers asked for: "
                "it has " + ", ".join(sorted({site.name.rpartition(".")[2] for site in self.backbone.sites})) + "."
            )
        return chosen

    def _wrapped(self, site: FoundSite) -> Wrapper:
        """The wrapper at a site, put there if it is not yet."""
        path = f"{site.layer_path}.{site.place.module}"
        if path not in self.backbone.wrappers:
            self.backbone.wrap(path, Site(self.model.get_submodule(path), self, site.name, site.place.first))
        return self.backbone.wrappers[path]

    def _hyper_kind(self, method: HyperFormer, company: str) -> Kind:
        chosen = self._sites(method.sites)
        # What a task's own head reads and how it is regularised is not the hypernetwork's business.
        key = kind_key("hyper", replace(method, pooling=None, head_dropout=0.0, backbone_dropout=False), company)
        if key in self.kinds:
            return self.kinds[key]
        form = form_of(method)
        near = next(self.model.get_submodule(chosen[0].layer_path).parameters())
        device, dtype = near.device, float_dtype(near)
        plan = hypernet_plan(method, self.width, [site.name for site in chosen])
        kind = HyperKind(key, hypernet=HypernetBank(plan, device, dtype))
        size = method.bottleneck_size(self.width)
        kind.banks["task"] = Bank(embedding_layout(method.task_dim), size, device, dtype, blank=None)
        for site in chosen:
            self._wrapped(site).add_bank(key, GeneratedAdapter(form, key, site.name, self.bound))
        if not hasattr(self.model, HYPERNETS):
            self.model.add_module(HYPERNETS, nn.ModuleDict())
        banks = nn.ModuleDict({"task": kind.banks["task"], "shared": kind.shared_bank})
        getattr(self.model, HYPERNETS).add_module(key, banks.train(self.model.training))
        self.kinds[key] = self.hyper_kinds[key] = kind
        return kind

    def _adapter_kind(self, method: Adapter) -> Kind:
        chosen = self._sites(method.sites, method.layers)
        form = form_of(method)
        key = kind_key(form.activation, form, [site.name for site in chosen])
        if key in self.kinds:
            return self.kinds[key]
        kind = self.kinds[key] = Kind(key)
        for site in chosen:
            near = next(self.model.get_submodule(site.layer_path).parameters())
            size = method.bottleneck_size(self.width)
            bank = AdapterBank(form, self.width, size, near.device, float_dtype(near))
            self._wrapped(site).add_bank(key, bank)
            kind.banks[site.name] = bank
            if form.parallel:
                reads = self.model.get_submodule(f"{site.layer_path}.{site.place.reads}")
                hook = functools.partial(remember_input, self.bound, site.name)
                kind.handles.append(reads.register_forward_pre_hook(hook, with_kwargs=True))
        return kind

    def _norm_kind(self, scope: str) -> Kind:
        key = f"norms_{scope}"
        if key in self.kinds:
            return self.kinds[key]
        kind = self.kinds[key] = Kind(key)
        prefix = base_prefix(self.model)
        layers = tuple(f"{site.layer_path}." for site in self.backbone.sites)
        for path in self.backbone.norms:
            inner = path.removeprefix(prefix)
            fixed = inner in self.family.fixed_norms
            if not path.startswith(prefix) or fixed or (scope == "layers" and not path.startswith(layers)):
                continue
            if path not in self.backbone.wrappers:
                module = self.model.get_submodule(path)
                self.backbone.wrap(path, NormSite(module, self, self.family.norm_offset))
            bank = NormBank(self.backbone.wrappers[path].base, shared=scope == "shared")
            self.backbone.wrappers[path].add_bank(key, bank)
            kind.banks[f"norm.{inner}"] = bank
        return kind

    def _head_kind(self, method: Method, head: Head) -> Kind:
        hidden = method.hidden if isinstance(method, HeadOnly) else None
        group = head.kind if head.per_token else "pooled"
        pooling = "" if head.per_token else str(method.pooling)
        key = kind_key(f"{group}{pooling}", hidden, method.head_dropout)
        if key in self.head_kinds:
            return self.head_kinds[key]
        kind = HeadsKind(key, per_token=head.per_token, spans=head.kind == "spans", pooling=pooling)
        last = list(self.base_model.parameters())[-1]
        bank = HeadBank(self.width, hidden, method.head_dropout, head.width, last.device, float_dtype(last))
        if not hasattr(self.model, HEADS):
            self.model.add_module(HEADS, nn.ModuleDict())
        getattr(self.model, HEADS).add_module(key, bank.train(self.model.training))
        kind.banks["head"] = bank
        self.kinds[key] = self.head_kinds[key] = kind
        return kind

    def _fresh_weights(
        self, method: Method, plan: Sequence[tuple[Kind, int]], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Initial weights, by name on disk: near-identity adapters, the backbone's own norms, a small head."""
        weights: dict[str, Tensor] = {}
        for kind, size in plan:
            if isinstance(kind, HyperKind):
                assert isinstance(method, HyperFormer)
                hypernet = kind.shared_bank
                new = not kind.slots.of
                values = fresh_hypernet(hypernet.plan, method.init_std, generator) if new else hypernet.read(0, 0)
                weights |= {f"{HYPERNET}.{name}": value for name, value in values.items()}
                weights["task.embedding"] = torch.randn(method.task_dim, generator=generator)
                continue
            for site, bank in kind.banks.items():
                if isinstance(bank, AdapterBank):
                    assert isinstance(method, Adapter)
                    values = fresh_bottleneck(self.width, size, bank.form, method.init_std, generator)
                elif isinstance(bank, HeadBank):
                    values = fresh_head(bank.layout, size, generator)
                else:
                    values = bank.read(0, 0)
                together = kind.slots.trained
                if together:  # a newcomer joins in what those being trained share
                    joint = bank.read(kind.slots.of[together[0]], kind.slots.size[together[0]])
                    values |= {name: joint[name] for name, weight in bank.weights.items() if weight.shared}
                weights |= {f"{site}.{name}": value for name, value in values.items()}
        return weights

    def _weights_like(
        self, name: str, like: str, plan: Sequence[tuple[Kind, int]], head: Head | None
    ) -> dict[str, Tensor]:
        """Another task's weights, as far as a newcomer can start from them: not its head, unless it is the same."""
        other, found = self.require(like), dict[str, Tensor]()
        for kind, size in plan:
            if kind.key in self.head_kinds:
                if head == other.head and kind.key in other.kinds:
                    found |= kind.read(like)
            elif kind.key not in other.kinds or kind.slots.size[like] != size:
                raise GraftError(
                    f"task {name!r} cannot start from {like!r}, whose method is another: {other.method}; "
                    "give it that one."
                )
            else:
                found |= kind.read(like)
        return found

    def follow_device(self) -> None:
        """The model may have moved since the route of its only task was made."""
        if self._alone is not None and self._alone_on != self.device:
            self._refresh()

    def _refresh(self) -> None:
        self._alone_on = self.device
        only = next(iter(self.tasks)) if len(self.tasks) == 1 else None
        self._alone = self.route_of(only) if only is not None or not self.tasks else None

    # -- putting in and taking out

    def install(self) -> None:
        model = self.model
        model.requires_grad_(False)
        model.taskgraft = self
        model.add_module(TASKS, TrainedTasks(self))
        model.forward = types.MethodType(grafted_forward(type(model).forward), model)
        if callable(getattr(model, "generate", None)):
            model.generate = types.MethodType(grafted_generate(type(model).generate), model)

    def uninstall(self, restore: bool) -> None:
        model = self.model
        self.train([])
        for kind in self.kinds.values():
            kind.slots = Slots()
        self._discard_empty_kinds()
        model._modules.pop(TASKS)
        self.backbone.give_back(restore)
        for attribute in ("taskgraft", "forward", "generate", "accepts_loss_kwargs"):
            model.__dict__.pop(attribute, None)


def remember_input(bound: Bound, site: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A routing hook: what the sub-layer reads is what its parallel adapter reads."""
    bound.inputs[site] = args[0] if args else kwargs["hidden_states"]
