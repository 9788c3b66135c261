"""Fewer and larger kernels while a model trains on a GPU, where a step of a small model is thousands of small ones.

T5 writes its norm and its activation out in elementary operations: each becomes one kernel. It lays its position bias
out as no attention kernel takes it, and attention falls apart into elementary operations too: it is laid out anew.
Autocast casts every weight by itself in every call: frozen ones are cast once, trained ones together. A norm that only
linear layers read writes what they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskgraft.backbones.wrap import NormSite, Wrapper
from taskgraft.nn.bottleneck import has_triton

SUBLAYERS = ("LayerSelfAttention", "LayerCrossAttention", "LayerFF")  # of T5: their norm is read by linear layers alone
Replacement = tuple[nn.Module, str, Callable[..., Any]]  # a module, one of its methods, and what stands in its place
Place = tuple[dict[str, Any], str, Any]  # a table of a module, a name in it, and what is to stand there
NOTHING = object()


class Fused:
    """What stands in a model's tables for the length of a `with` block, and what stood there before afterwards."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(places)

    def __enter__(self) -> Fused:
        self._exchange()
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The model as it is without it, for a while; what was recorded with it stays good."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        before = [(table, name, self._put(table, name, value)) for table, name, value in self._places]
        self._places = before[::-1]

    @staticmethod
    def _put(table: dict[str, Any], name: str, value: Any) -> Any:
        before = table.get(name, NOTHING)
        if value is NOTHING:
            del table[name]
        else:
            table[name] = value
        return before


def fused(model: nn.Module, dtype: torch.dtype | None = None) -> Fused:
    """Let a model on a GPU use the fused forms for the length of a `with` block: the same functions but for rounding.

    `dtype` is what autocast computes in, and then the model must be called under it; None: without autocast. On other
    devices the model's own operations are kept, to the bit.
    """
    if not next(model.parameters()).is_cuda:
        return Fused(())
    places: list[Place] = [(vars(module), method, other) for module, method, other in replaceable(model, dtype)]
    if dtype is not None:
        places += [*cast_once(model, dtype), *cast_together(model, dtype), *read_in(model, dtype)]
    return Fused(places)


# -- other forms of a module's methods


def replaceable(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[Replacement]:
    """The methods that have a fused form, each with it."""
    narrow = {id(norm) for norm in norms_for_linears(model)}
    for module in map(unwrapped, model.modules()):
        name = type(module).__name__
        if "forward" in vars(module):  # someone else's
            continue
        if name.endswith("T5LayerNorm"):
            yield module, "forward", partial(rms_norm, module, dtype=dtype if id(module) in narrow else None)
        elif name == "NewGELUActivation":
            yield module, "forward", partial(F.gelu, approximate="tanh")
        elif name.endswith("T5Attention") and getattr(module, "has_relative_attention_bias", False):
            yield module, "compute_bias", partial(position_bias, module, dtype)


def rms_norm(norm: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A T5 norm in float32, written in a dtype; in anything less its own operations, whose casts come in between."""
    if x.dtype != torch.float32 or norm.weight.dtype != torch.float32:
        result: Tensor = type(norm).forward(norm, x)
        return result
    if dtype is not None and x.is_cuda and has_triton():
        from taskgraft.nn.norm_kernels import row_norm

        return row_norm(x, None, norm.weight[None], None, eps=norm.variance_epsilon, rms=True, dtype=dtype)
    y = F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return y if dtype is None else y.to(dtype)


def position_bias(attention: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Tensor:
    """T5's relative position bias [1, heads, queries, keys], keys side by side: attention kernels take it so alone."""
    values: Tensor = type(attention).compute_bias(attention, *args, **kwargs)
    return values.to(dtype or values.dtype).contiguous()


# -- what linear layers read


def cast_once(model: nn.Module, dtype: torch.dtype) -> list[Place]:
    """The weights of frozen linear layers in another dtype."""
    return [
        (table, name, nn.Parameter(weight.detach().to(dtype), requires_grad=False))
        for table, name, weight in linear_weights(model)
        if not weight.requires_grad
    ]


def cast_together(model: nn.Module, dtype: torch.dtype) -> list[Place]:
    """A forward that begins with casting the weights of linear layers that are trained, in one go."""
    learns = any(weight.requires_grad for _, _, weight in linear_weights(model))
    if not learns or getattr(model, "is_gradient_checkpointing", False):  # what is recomputed would not find them
        return []
    forward = model.forward

    def casting(*args: Any, **kwargs: Any) -> Any:
        places = [place for place in linear_weights(model) if place[2].requires_grad]
        for (table, name, _), value in zip(places, Cast.apply(dtype, *(w for _, _, w in places)), strict=True):  # type: ignore[no-untyped-call]
            table[name] = value
        try:
            return forward(*args, **kwargs)
        finally:
            for table, name, weight in places:
                table[name] = weight

    cast(Any, casting).__signature__ = inspect.signature(forward)  # `generate` reads it
    return [(vars(model), "forward", casting)]


class Cast(torch.autograd.Function):
    """Weights in another dtype, and their gradients back in their own, each way in a few kernels."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(copied(weights, [dtype] * len(weights)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True) if g is not None]
        found = iter(copied([g for g, _ in there], [dtype for _, dtype in there]))
        return None, *(None if g is None else next(found) for g in gradients)


def copied(values: Any, dtypes: list[torch.dtype]) -> list[Tensor]:
    made = [torch.empty_like(value, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)]
    if made:
        torch._foreach_copy_(made, list(values))
    return made


def linear_weights(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Where a model's linear layers have weights in float32: the table, the name in it, and the weight."""
    return [
        (layer._parameters, name, weight)
        for layer in map(unwrapped, model.modules())
        if isinstance(layer, nn.Linear)
        for name, weight in layer._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]


def read_in(model: nn.Module, dtype: torch.dtype) -> list[Place]:
    """Norms with tasks' own weights that write what linear layers read, where only these read it."""
    norms = norms_for_linears(model, wrapped=True)
    return [(vars(norm), "read_in", dtype) for norm in norms if isinstance(norm, NormSite)]


def norms_for_linears(model: nn.Module, wrapped: bool = False) -> list[nn.Module]:
    """T5's norms whose output nothing reads but linear layers, which cast it: those of its sub-layers, and of a model
    that writes also the last of each stack, which cross-attention and the language model's head read."""
    writes = hasattr(model, "lm_head")
    found = []
    for module in model.modules():
        name = type(module).__name__
        if "T5" in name and name.endswith(SUBLAYERS):
            found.append(module.get_submodule("layer_norm"))
        elif writes and name.endswith("T5Stack"):
            found.append(module.get_submodule("final_layer_norm"))
    return found if wrapped else [unwrapped(norm) for norm in found]


def unwrapped(module: nn.Module) -> nn.Module:
    return module.base if isinstance(module, Wrapper) else module
