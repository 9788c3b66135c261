"""The backbone under the grafts: what stands where in it, what of it trains, and how it is given back as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.forward import KeepRows
from taskgraft.backbones.sites import Family, FoundSite, find_sites
from taskgraft.backbones.wrap import Wrapper
from taskgraft.errors import GraftError
from taskgraft.methods import FullFineTuning, Method, TopLayers
from taskgraft.nn.bank import Bank
from taskgraft.nn.heads import Head
from taskgraft.nn.norms import is_norm


class FrozenBackbone:
    """A model whose own weights do not train, with wrappers where modules were. `give_back` undoes everything."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model = model
        self.family = family
        self.sites: list[FoundSite] = find_sites(model, family)
        self.norms = [
            path
            for path, module in model.named_modules()
            if is_norm(module) and any(p.dim() == 1 for p in module.parameters(recurse=False))
        ]
        self.keys: set[str] = set(model.state_dict().keys())
        self.wrappers: dict[str, Wrapper] = {}
        self.checkpointed = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._required_grad = {path: p.requires_grad for path, p in model.named_parameters()}
        self._ignored_on_save = model._keys_to_ignore_on_save
        self._dropouts: list[tuple[nn.Module, str, float]] = []
        self._before_training: dict[str, Tensor] = {}

    # -- wrappers

    def wrap(self, path: str, wrapper: Wrapper) -> None:
        self._put(path, wrapper)
        self.wrappers[path] = wrapper

    def drop_banks(self, kind: str) -> None:
        """Take a kind's banks away, and with them the wrappers that held nothing else."""
        for path, wrapper in list(self.wrappers.items()):
            if kind in wrapper.bank:
                del wrapper.bank[kind]
            if not wrapper.bank:
                self._put(path, wrapper.unwrap())
                del self.wrappers[path]

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, child = path.rpartition(".")
        self.model.get_submodule(parent)._modules[child] = module

    # -- what trains

    def train(self, methods: Sequence[Method]) -> None:
        """Let a method that trains the backbone's own weights do so; remember them as they were."""
        trained = self.parameters_of(methods[0]) if methods else {}
        for path, parameter in self.model.named_parameters():
            if path in self._required_grad:
                parameter.requires_grad_(path in trained)
        self._before_training = self._before_training or {path: p.detach().clone() for path, p in trained.items()}
        # A checkpoint holds what trains. Where nothing does, what is saved is the backbone.
        self.model._keys_to_ignore_on_save = self.keys - set(trained) if methods else self._ignored_on_save

    def parameters_of(self, method: Method) -> dict[str, nn.Parameter]:
        """The backbone's own weights that a method trains."""
        if isinstance(method, FullFineTuning):
            prefix = base_prefix(self.model)
            return {
                path: parameter
                for path, parameter in self.model.named_parameters()
                if path in self._required_grad and path.startswith(prefix)
            }
        if isinstance(method, TopLayers):
            return top_layer_parameters(self.model, self.family, method.k)
        return {}

    @torch.no_grad()
    def put(self, method: Method, values: Mapping[str, Tensor]) -> None:
        """Give the backbone the weights that a method has trained of it; `restore` takes them off again."""
        own = self.parameters_of(method)
        wrong = sorted(set(own) ^ set(values)) or [p for p in own if own[p].shape != values[p].shape]
        if wrong:
            raise GraftError(f"the fine-tuned weights do not fit this model class: {wrong[0]} is on one side alone.")
        self._before_training = self._before_training or {path: p.detach().clone() for path, p in own.items()}
        for path, parameter in own.items():
            parameter.copy_(values[path])

    def restore(self) -> None:
        """Undo what full fine-tuning or top-layers did."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for path, value in self._before_training.items():
                parameters[path].copy_(value)
        self._before_training = {}

    def set_dropout(self, on: bool) -> None:
        """Turn the backbone's dropout off (every rate to 0), or back to what it was."""
        if on:
            for module, attribute, rate in self._dropouts:
                setattr(module, attribute, rate)
            self._dropouts = []
        elif not self._dropouts:
            for module in self.model.modules():
                module = module.base if isinstance(module, Wrapper) else module
                if isinstance(module, Bank):
                    continue
                for attribute, rate in list(vars(module).items()):
                    is_rate = "drop" in attribute or (attribute == "p" and isinstance(module, nn.Dropout))
                    if is_rate and isinstance(rate, float) and rate > 0:
                        self._dropouts.append((module, attribute, rate))
                        setattr(module, attribute, 0.0)

    # -- the end

    def give_back(self, restore: bool) -> None:
        """Leave the model as it was found; `restore=False` keeps what was trained of its own weights."""
        if restore:
            self.restore()
        self.set_dropout(on=True)
        for module in self.checkpointed:
            checkpoint = module.__dict__.get("_gradient_checkpointing_func")
            if isinstance(checkpoint, KeepRows):
                module.__dict__["_gradient_checkpointing_func"] = checkpoint.checkpoint
        for path, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._required_grad[path])
        self.model._keys_to_ignore_on_save = self._ignored_on_save


def top_layer_parameters(model: nn.Module, family: Family, k: int) -> dict[str, nn.Parameter]:
    """The parameters of the top k layers of each stack, and of the norm that follows a stack's last layer."""
    sites = find_sites(model, family)
    chosen: dict[str, nn.Parameter] = {}
    for stack in {site.name.partition(".")[0]: None for site in sites}:
        layers = list(dict.fromkeys(site.layer_path for site in sites if site.name.startswith(f"{stack}.")))
        if k > len(layers):
            raise GraftError(f"k={k} layers were asked for, but the {stack} has {len(layers)}.")
        for layer in layers[-k:]:
            module = model.get_submodule(layer)
            chosen |= {f"{layer}.{path}": p for path, p in module.named_parameters()}
        parent = layers[-1].rsplit(".", 2)[0] if layers[-1].count(".") > 1 else ""
        for path, module in model.get_submodule(parent).named_children():
            after = {"final_layer_norm", "final_norm", "ln_f", "norm"}
            if path in after and is_norm(module):
                name = f"{parent}.{path}" if parent else path
                chosen |= {f"{name}.{leaf}": p for leaf, p in module.named_parameters()}
    return chosen


def own_head(model: Any) -> Head | None:
    """The head that a model class brings along, which rows of no task keep."""
    name = type(model).__name__
    labels = tuple(str(model.config.id2label.get(i, i)) for i in range(model.config.num_labels))
    if name.endswith("ForSequenceClassification"):
        return Head("classification", labels) if len(labels) > 1 else Head("regression")
    if name.endswith("ForTokenClassification"):
        return Head("tokens", labels)
    if name.endswith("ForQuestionAnswering"):
        return Head("spans")
    return None


def base_prefix(model: Any) -> str:
    """The path of the headless model inside a model class, with its dot; empty where the model is headless."""
    prefix = model.base_model_prefix
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""
