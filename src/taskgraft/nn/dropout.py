"""Dropout for the CPU, where drawing one random number per element is most of what dropout costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CHANCES = 1 << 16  # the keep probability is rounded to a multiple of 1 / 65,536


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        dropped = round(p * CHANCES)
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        words.random_(-(2**63), None)  # four 16-bit draws a word; without bounds the sign bit would never be set
        draws = words.view(torch.int16)[: x.numel()].view(x.shape)
        keep = draws >= dropped - CHANCES // 2
        ctx.save_for_backward(keep)
        ctx.scale = CHANCES / (CHANCES - dropped)
        return torch.ops.aten.native_dropout_backward(x, keep, ctx.scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grads[0], keep, ctx.scale), None


def dropout(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What `module(x)` gives; a plain dropout layer that is at work on a CPU is drawn four elements at a time."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    plain = type(module) is nn.Dropout and module.training and 0 < module.p < 1 and not any(hooks)
    if plain and x.device.type == "cpu" and not torch.compiler.is_compiling():
        dropped: Tensor = _Dropout.apply(x, module.p)  # type: ignore[no-untyped-call]
        return dropped
    result: Tensor = module(x, *args, **kwargs)
    return result
