"""A backbone's norms with each task's own weights: LayerNorm, and the RMS norms of T5, Llama and Gemma.

The arithmetic follows the wrapped module to the bit where all rows share one task, casts included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskgraft.nn.bank import Bank, Layout, Weight
from taskgraft.nn.bottleneck import has_triton, take
from taskgraft.nn.rows import Kernel, Route, Segments

MOST_WIDTH = 8192  # that the kernel takes


def is_norm(module: nn.Module) -> bool:
    """By class name, because T5's and all RMS norms are not `nn.LayerNorm`."""
    return type(module).__name__.lower().endswith("norm")


def norm_layout(parameters: dict[str, Tensor], shared: bool) -> Layout:
    weights = {name: Weight(tuple(value.shape), "vector", shared) for name, value in parameters.items()}
    return lambda _: weights


class NormBank(Bank):
    """All tasks' weights of one norm of the backbone; slot 0 holds the backbone's own."""

    def __init__(self, base: nn.Module, shared: bool) -> None:
        parameters = {name: p for name, p in base.named_parameters(recurse=False) if p.dim() == 1}
        weight = parameters["weight"]
        super().__init__(norm_layout(dict(parameters), shared), 0, weight.device, weight.dtype, dict(parameters))


def task_norm(
    base: nn.Module,
    banks: dict[str, NormBank],
    x: Tensor,
    route: Route,
    offset: float,
    read_in: torch.dtype | None = None,
) -> Tensor:
    """Normalise each row of x with its task's weights; rows of no task with the backbone's.

    `read_in` is what all readers cast the result to, where they do: a kernel may write that.
    """
    values: dict[str, Tensor] | None = None
    found = {kind: route.kinds[kind] for kind in banks if kind in route.kinds}
    for kind, index in found.items():
        fuses = len(found) == 1 and norm_kernel_for(base, x, banks[kind].store("weight"), route.kernel) == "triton"
        stacks, rows = banks[kind].stacked(index, cast=not fuses)
        if fuses:
            return fused(base, x, rows, stacks, offset, index.segments, read_in=read_in)
        own = {name: take(stack, rows) for name, stack in stacks.items()}
        if values is None:
            values = own
        else:
            assert index.member is not None  # two kinds in one batch: neither has all of its rows
            member = index.member[:, None]
            values = {name: torch.where(member, own[name], values[name]) for name in own}
    if values is None:
        result: Tensor = base(x)
        return result
    return normalise(base, x, values["weight"], values.get("bias"), offset)


def norm_kernel_for(base: nn.Module, x: Tensor, weight: Tensor, choice: Kernel) -> Kernel:
    """The fused kernel on a GPU, where it follows the module's own casts; else torch's operations."""
    if choice == "eager" or x.dim() < 3 or torch.compiler.is_compiling() or not (x.is_cuda or choice == "triton"):
        return "eager"
    autocast = torch.is_autocast_enabled(x.device.type)
    casts = autocast and not isinstance(base, nn.LayerNorm) and x.dtype != torch.float32
    known = weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
    same = x.dtype == weight.dtype or (isinstance(base, nn.LayerNorm) and autocast)
    return "triton" if known and same and not casts and x.shape[-1] <= MOST_WIDTH and has_triton() else "eager"


def fused(
    base: nn.Module,
    x: Tensor,
    rows: Tensor | None,
    stacks: Mapping[str, Tensor],
    offset: float,
    segments: Segments | None,
    residual: Tensor | None = None,
    read_in: torch.dtype | None = None,
) -> Tensor:
    """`normalise(x + residual)` by the kernel, with weight and bias [slots, d] and the slot of each row."""
    from taskgraft.nn.norm_kernels import row_norm

    layer_norm = isinstance(base, nn.LayerNorm)
    dtype = read_in or (torch.float32 if layer_norm and torch.is_autocast_enabled(x.device.type) else x.dtype)
    eps = cast(float, base.variance_epsilon if hasattr(base, "variance_epsilon") else base.eps)
    weight, bias = stacks["weight"], stacks.get("bias")
    return row_norm(
        x, rows, weight, bias, eps=eps, offset=offset, rms=not layer_norm, dtype=dtype, segments=segments,
        residual=residual,
    )  # fmt: skip


def normalise(base: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    """`base` with other weights: weight and bias are [rows or 1, d]; x is [rows, ..., d]."""
    one = weight.shape[0] == 1
    if isinstance(base, nn.LayerNorm):
        if one:
            return F.layer_norm(x, base.normalized_shape, weight[0], None if bias is None else bias[0], base.eps)
        # With a weight and a bias, though trivial ones, the CPU's kernel takes half the time it takes without.
        x = F.layer_norm(x, base.normalized_shape, x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1]), base.eps)
        weight = per_row(weight, x)
        if bias is None:
            return x * weight
        into = x if x.dtype == weight.dtype and not torch.is_grad_enabled() else None
        return torch.addcmul(per_row(bias, x), x, weight, out=into)
    weight = weight[0] if one else per_row(weight, x)
    eps = cast(float, base.variance_epsilon if hasattr(base, "variance_epsilon") else base.eps)
    scale = torch.rsqrt(x.to(torch.float32).square().mean(-1, keepdim=True) + eps)
    if offset:  # Gemma: (1 + w), multiplied before the cast
        return (x.float() * scale * (offset + weight.float())).type_as(x)
    if type(base).__name__.endswith("LayerNorm"):  # T5: x keeps its dtype
        normalised = x * scale
        return weight * (normalised.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else normalised)
    return weight * (x.to(torch.float32) * scale).to(x.dtype)


def per_row(values: Tensor, x: Tensor) -> Tensor:
    """[rows, d] -> [rows, 1, ..., d], to meet x [rows, ..., d]."""
    return values.view(values.shape[0], *(1,) * (x.dim() - 2), values.shape[-1])
