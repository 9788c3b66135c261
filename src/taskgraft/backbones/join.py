"""Where a post-norm layer joins its residual: `norm(dropout(dense(x)) + residual)`, the last two steps in one pass.

The sum is written in the backbone's own code, between an adapter's site and a norm's, so no wrapper of either sees it.
This stands before the forward of the one module that holds all three, and calls that forward wherever it cannot help.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from taskgraft.backbones.wrap import NormSite, Site
from taskgraft.nn.bank import AdapterBank
from taskgraft.nn.bottleneck import Origin, kernel_for, product_dtype
from taskgraft.nn.norms import fused, norm_dtype, norm_kernel_for
from taskgraft.nn.rows import Route

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts


def join_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    norm = self.LayerNorm
    plain = not is_hooked(norm) and not is_hooked(self.dropout)  # a hook on either must see its module run
    if isinstance(norm, NormSite) and plain and not torch.compiler.is_compiling():
        route = norm.grafts.route().for_batch(hidden_states)
        kinds = [kind for kind in norm.bank if kind in route.kinds]
        if len(kinds) == 1 and route.packing is None:
            index, bank = route.kinds[kinds[0]], norm.bank[kinds[0]]
            if norm_kernel_for(norm.base, input_tensor, bank.store("weight"), route.kernel) == "triton":
                stacks, rows = bank.stacked(index, cast=False)
                x: Tensor = self.dense(hidden_states)
                joined = in_one_pass(self.dropout, x, route, norm, rows, stacks, input_tensor)
                if joined is not None:
                    return joined
                x = adapted(self.dropout, self.dense, hidden_states, x)
                return fused(norm.base, x, rows, stacks, norm.offset, index.segments, input_tensor)
    result: Tensor = type(self).forward(self, hidden_states, input_tensor)
    return result


def in_one_pass(
    site: nn.Module,
    x: Tensor,
    route: Route,
    norm: NormSite,
    norm_rows: Tensor | None,
    norm_weights: Mapping[str, Tensor],
    residual: Tensor,
) -> Tensor | None:
    """The adapter too, where one kernel can do all three and nothing is to be learned; else None."""
    if torch.is_grad_enabled() or not isinstance(site, Site) or site.first or is_dropping(site):
        return None
    found = [(bank, route.kinds[kind]) for kind, bank in site.bank.items() if kind in route.kinds]
    if len(found) != 1 or not isinstance(found[0][0], AdapterBank) or not isinstance(norm.base, nn.LayerNorm):
        return None
    bank, index = found[0]
    weights, rows = bank.stacked(index, cast=False)
    alike = norm_rows is not None and rows is not None and rows.shape == norm_rows.shape
    if not alike or bank.form.norm_after is not None or "bias" not in norm_weights:
        return None
    dtype = product_dtype(x, bank.store(next(iter(weights))).dtype)
    if kernel_for(x.device, dtype, bank.form, x.shape[-1], bank.width, bank.training, route.kernel) == "eager":
        return None
    from taskgraft.nn.kernels import Join
    from taskgraft.nn.kernels import fused as fused_bottleneck

    assert norm_rows is not None
    weight, bias, eps = norm_weights["weight"], norm_weights["bias"], norm.base.eps
    join = Join(residual.contiguous(), norm_rows, weight, bias, eps, norm_dtype(norm.base, x))
    return fused_bottleneck(x, rows, weights, bank.form, dtype, index.sizes, None, join=join)


def adapted(dropout: nn.Module, dense: nn.Linear, read: Tensor, x: Tensor) -> Tensor:
    """`dropout(x)`, with the adapter that is on the dropout told what the dense layer has read to give x."""
    if isinstance(dropout, Site) and not is_dropping(dropout) and not dropout.first and is_frozen_linear(dense):
        return dropout.adapt(x, Origin(read, dense.weight, dense.bias))
    result: Tensor = dropout(x)
    return result


def is_dropping(dropout: nn.Module) -> bool:
    return dropout.training and getattr(dropout, "p", 1.0) > 0


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
