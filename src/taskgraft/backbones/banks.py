"""The banks on a model: made where a task needs one, with the wrappers they hang on, and given back with the last."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.count import form_of, hidden_of, hypernet_plan
from taskgraft.backbones.frozen import FrozenBackbone, base_prefix
from taskgraft.backbones.kinds import HYPERNET, HeadsKind, HyperKind, Kind, float_dtype, kind_key
from taskgraft.backbones.sites import Family, FoundSite
from taskgraft.backbones.wrap import NormSite, Site, Unjoined, Wrapper, residual_of
from taskgraft.errors import GraftError
from taskgraft.methods import Adapter, HyperFormer, Method
from taskgraft.nn.bank import AdapterBank, Bank, fresh_bottleneck
from taskgraft.nn.heads import Head, HeadBank, fresh_head
from taskgraft.nn.hypernet import GeneratedAdapter, HypernetBank, embedding_layout, fresh_hypernet
from taskgraft.nn.norms import NormBank
from taskgraft.nn.rows import Bound

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts

HEADS, HYPERNETS = "taskgraft_heads", "taskgraft_hypernets"


class Banks:
    """The kinds of banks that the tasks of one model need."""

    def __init__(self, model: Any, family: Family, grafts: Grafts) -> None:
        self.model = model
        self.family = family
        self.grafts = grafts  # whom the wrappers ask for rows
        self.backbone = FrozenBackbone(model, family)
        self.kinds: dict[str, Kind] = {}
        self.head_kinds: dict[str, HeadsKind] = {}
        self.hyper_kinds: dict[str, HyperKind] = {}

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)

    def plan(self, method: Method, head: Head | None, company: str) -> list[tuple[Kind, int]]:
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

    def keys(self, method: Method, head: Head | None, company: str) -> list[str]:
        """Those of the kinds of a plan, which is not made."""
        keys = []
        if isinstance(method, HyperFormer):
            keys.append(hyper_key(method, company))
        if isinstance(method, Adapter):
            keys.append(adapter_key(method, self._sites(method.sites, method.layers)))
        if method.trained_norms != "none":
            keys.append(norm_key(method.trained_norms))
        if head is not None:
            keys.append(head_key(method, head))
        return keys

    def discard_empty(self) -> None:
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
            layer = self.model.get_submodule(site.layer_path)
            self.backbone.wrap(path, Site(self.model.get_submodule(path), self.grafts, site.name, site.place, layer))
        return self.backbone.wrappers[path]

    def _hyper_kind(self, method: HyperFormer, company: str) -> Kind:
        key = hyper_key(method, company)
        if key in self.kinds:
            return self.kinds[key]
        chosen = self._sites(method.sites)
        form = form_of(method)
        near = next(self.model.get_submodule(chosen[0].layer_path).parameters())
        device, dtype = near.device, float_dtype(near)
        plan = hypernet_plan(method, self.width, [site.name for site in chosen])
        kind = HyperKind(key, hypernet=HypernetBank(plan, device, dtype))
        size = method.bottleneck_size(self.width)
        kind.banks["task"] = Bank(embedding_layout(method.task_dim), size, device, dtype, blank=None)
        for site in chosen:
            self._wrapped(site).add_bank(key, GeneratedAdapter(form, key, site.name, self.grafts.bound))
        if not hasattr(self.model, HYPERNETS):
            self.model.add_module(HYPERNETS, nn.ModuleDict())
        banks = nn.ModuleDict({"task": kind.banks["task"], "shared": kind.shared_bank})
        getattr(self.model, HYPERNETS).add_module(key, banks.train(self.model.training))
        self.kinds[key] = self.hyper_kinds[key] = kind
        return kind

    def _adapter_kind(self, method: Adapter) -> Kind:
        chosen = self._sites(method.sites, method.layers)
        form, key = form_of(method), adapter_key(method, chosen)
        if key in self.kinds:
            return self.kinds[key]
        if form.needs_residual and not all(site.place.residual for site in chosen):
            raise GraftError(
                f"reads, keeps and joined are not known for model family {self.model.config.model_type!r}, whose "
                "layers join their residuals in another way: leave them out."
            )
        kind = self.kinds[key] = Kind(key)
        for site in chosen:
            near = next(self.model.get_submodule(site.layer_path).parameters())
            size = method.bottleneck_size(self.width)
            bank = AdapterBank(form, self.width, size, near.device, float_dtype(near))
            self._wrapped(site).add_bank(key, bank)
            kind.banks[site.name] = bank
            if form.parallel:
                self._remember(kind, f"{site.layer_path}.{site.place.reads}", site.name)
            if form.needs_residual:
                self._remember(kind, f"{site.layer_path}.{site.place.residual}", residual_of(site.name))
            if not form.joined and site.place.norm:
                self._wrapped_norm(f"{site.layer_path}.{site.place.norm}").add_bank(key, Unjoined())
        return kind

    def _remember(self, kind: Kind, path: str, name: str) -> None:
        hook = functools.partial(remember_input, self.grafts.bound, name)
        kind.handles.append(self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))

    def _wrapped_norm(self, path: str) -> Wrapper:
        """The wrapper at a norm, put there if it is not yet."""
        if path not in self.backbone.wrappers:
            self.backbone.wrap(path, NormSite(self.model.get_submodule(path), self.grafts, self.family.norm_offset))
        return self.backbone.wrappers[path]

    def _norm_kind(self, scope: str) -> Kind:
        key = norm_key(scope)
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
            wrapper = self._wrapped_norm(path)
            bank = NormBank(wrapper.base, shared=scope == "shared")
            wrapper.add_bank(key, bank)
            kind.banks[f"norm.{inner}"] = bank
        return kind

    def _head_kind(self, method: Method, head: Head) -> Kind:
        key = head_key(method, head)
        if key in self.head_kinds:
            return self.head_kinds[key]
        hidden, pooling = hidden_of(method), pooling_of(method, head)
        kind = HeadsKind(key, per_token=head.per_token, spans=head.kind == "spans", pooling=pooling)
        last = list(self.model.base_model.parameters())[-1]
        bank = HeadBank(self.width, hidden, method.head_dropout, head.width, last.device, float_dtype(last))
        if not hasattr(self.model, HEADS):
            self.model.add_module(HEADS, nn.ModuleDict())
        getattr(self.model, HEADS).add_module(key, bank.train(self.model.training))
        kind.banks["head"] = bank
        self.kinds[key] = self.head_kinds[key] = kind
        return kind

    def fresh_weights(
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


# -- what kinds are called


def hyper_key(method: HyperFormer, company: str) -> str:
    # What a task's own head reads and how it is regularised is not the hypernetwork's business.
    return kind_key("hyper", replace(method, pooling=None, head_dropout=0.0, backbone_dropout=False), company)


def adapter_key(method: Adapter, sites: Sequence[FoundSite]) -> str:
    form = form_of(method)
    return kind_key(form.activation, form, [site.name for site in sites])


def norm_key(scope: str) -> str:
    return f"norms_{scope}"


def head_key(method: Method, head: Head) -> str:
    group = head.kind if head.per_token else "pooled"
    return kind_key(f"{group}{pooling_of(method, head)}", hidden_of(method), method.head_dropout)


def pooling_of(method: Method, head: Head) -> str:
    return "" if head.per_token else str(method.pooling)


def remember_input(bound: Bound, site: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A routing hook: what a sub-layer reads, and what is added to it, for the adapters that read or keep it."""
    bound.inputs[site] = args[0] if args else kwargs["hidden_states"]
