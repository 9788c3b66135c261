"""Where a post-norm layer joins its residual: `norm(dropout(dense(x)) + residual)`, the last two steps in one pass.

The sum is written in the backbone's own code, between an adapter's site and a norm's, so no wrapper of either sees it.
This stands before the forward of the one module that holds all three, and calls that forward wherever it cannot help.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.wrap import NormSite, Site
from taskgraft.nn.bottleneck import Origin
from taskgraft.nn.norms import NormBank, fused, norm_kernel_for

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts


def join_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    norm = self.LayerNorm
    plain = not is_hooked(norm) and not is_hooked(self.dropout)  # a hook on either must see its module run
    if isinstance(norm, NormSite) and plain and not torch.compiler.is_compiling():
        route = norm.grafts.route().for_batch(hidden_states)
        kinds = [kind for kind in norm.bank if kind in route.kinds]
        if len(kinds) == 1 and route.packing is None and isinstance(norm.bank[kinds[0]], NormBank):
            index, bank = route.kinds[kinds[0]], norm.bank[kinds[0]]
            if norm_kernel_for(norm.base, input_tensor, bank.store("weight"), route.kernel) == "triton":
                stacks, rows = bank.stacked(index, cast=False)
                x = adapted(self.dropout, self.dense, hidden_states)
                return fused(norm.base, x, rows, stacks, norm.offset, index.segments, input_tensor)
    result: Tensor = type(self).forward(self, hidden_states, input_tensor)
    return result


def adapted(dropout: nn.Module, dense: nn.Linear, hidden_states: Tensor) -> Tensor:
    """`dropout(dense(x))`, with the adapter that is on the dropout told what the dense layer has read."""
    x: Tensor = dense(hidden_states)
    drops = dropout.training and getattr(dropout, "p", 1.0) > 0
    if isinstance(dropout, Site) and not drops and not dropout.first and is_frozen_linear(dense):
        return dropout.adapt(x, Origin(hidden_states, dense.weight, dense.bias))
    result: Tensor = dropout(x)
    return result


def is_frozen_linear(dense: nn.Module) -> bool:
    """Whether a layer computes `x @ weight^T + bias` and nothing else: not quantised, not offloaded, not hooked."""
    own_forward = "forward" in dense.__dict__
    return type(dense) is nn.Linear and not is_hooked(dense) and not own_forward and not dense.weight.requires_grad


def is_hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def joins_of(grafts: Grafts) -> list[nn.Module]:
    """The modules of a model that join a residual, by its family's table."""
    layers = dict.fromkeys(site.layer_path for site in grafts.backbone.sites)
    return [grafts.model.get_submodule(f"{layer}.{join}") for layer in layers for join in grafts.family.joins]


def install_joins(grafts: Grafts) -> None:
    for module in joins_of(grafts):
        if "forward" not in module.__dict__:  # else another library stands there already
            module.__dict__["forward"] = types.MethodType(join_forward, module)


def remove_joins(grafts: Grafts) -> None:
    for module in joins_of(grafts):
        if getattr(module.__dict__.get("forward"), "__func__", None) is join_forward:
            del module.__dict__["forward"]
