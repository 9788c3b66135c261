"""The operation: `y = x + up(act(down(x)))` with each row's own weights, taken from a stack of all tasks'.

Houlsby et al., ICML 2019, section 2; the variants are those its section 3.6 tried (equations in docs/methods.md).
No loop over tasks: the rows' weights are gathered, or used in place by a kernel, and multiplied in one batch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.nn.rows import Kernel, Segments

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "identity": lambda x: x,
}
NONZERO_AT_ZERO = frozenset({"sigmoid", "softplus"})
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Form:
    """A bottleneck apart from its size and place. Grafts of one form share a bank, whatever their sizes."""

    activation: str = "gelu_new"
    depth: int = 1
    norm_before: bool = False
    norm_inside: Literal["layer", "batch"] | None = None
    norm_after: Literal["own", "shared"] | None = None
    parallel: bool = False
    scaling: float = 1.0
    multiplicative: bool = False
    dropout: float = 0.0
    reads: Literal["residual", "norm"] | None = None
    keeps: Literal["sum", "norm"] | None = None
    norm_sum: bool = False
    joined: bool = True

    @property
    def needs_residual(self) -> bool:
        """Whether it is wired around what its sub-layer's output is added to."""
        return self.reads is not None or self.keeps is not None or not self.joined

    @property
    def needs_mask(self) -> bool:
        """Whether hidden units that only pad the bank would leak into the result or its gradients."""
        return self.depth > 0 and (self.activation in NONZERO_AT_ZERO or self.norm_inside is not None)

    @property
    def is_plain(self) -> bool:
        """Whether this is the paper's adapter, whose two products can take in the bias and the residual."""
        return self == Form(activation=self.activation, dropout=self.dropout)


# From hidden units before the activation to the mean and variance that normalise them, each [rows, 1, m].
BatchStatistics = Callable[[Tensor], tuple[Tensor, Tensor]]


def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    form: Form,
    d: int,
    m: int,
    training: bool = False,
    choice: Kernel = "auto",
) -> Kernel:
    """Which implementation `bottleneck` uses: the fused kernels where they have the form, on a GPU; else the reference.

    "triton" insists on the kernels, also on the CPU, where Triton's interpreter runs them (TRITON_INTERPRET=1).
    """
    compiles = torch.compiler.is_compiling()  # a compiler fuses the operations of the reference itself
    if choice == "eager" or (choice == "auto" and (compiles or device.type != "cuda" or not has_triton())):
        return "eager"
    if not has_triton():
        raise GraftError("the kernel 'triton' needs Triton: pip install triton, or choose 'auto'.")
    from taskgraft.nn.kernels import supports

    if dtype in (torch.float16, torch.bfloat16, torch.float32) and supports(form, d, m, training):
        return "triton"
    if choice == "triton":
        raise GraftError(f"the kernel 'triton' has no {form} of size {m} in {dtype} on width {d}: choose 'auto'.")
    return "eager"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a bottleneck's input comes from: `x @ weight^T + bias` of a frozen layer.

    What that layer read is often kept for other gradients anyway, and then the bottleneck need not keep its input.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None


def bottleneck(
    x: Tensor,
    rows: Tensor | None,
    weights: Mapping[str, Tensor],
    form: Form = Form(),  # noqa: B008 - frozen
    *,
    source: Tensor | None = None,
    sizes: Tensor | None = None,
    statistics: BatchStatistics | None = None,
    training: bool = False,
    segments: Segments | None = None,
    kernel: Kernel = "auto",
    dtype: torch.dtype | None = None,
    origin: Origin | None = None,
) -> Tensor:
    """Send each row of `x` [rows, length, d] through its own bottleneck.

    `weights` are stacked by slot: down [slots, d, m], down_bias [slots, m], up [slots, m, d], up_bias [slots, d],
    and what the form asks for. `rows` [rows] gives each row's slot; one entry means all rows share it; None means
    that the weights already lie in row order. `source` is what the branch reads instead of x (parallel adapters);
    `sizes` [rows] are the true sizes, needed where the form masks padded hidden units; `segments` the rows of each
    slot, if known. `kernel` chooses the implementation. Products are computed in `dtype`: by default the finer of x's
    and the weights', or what autocast says. `origin`, if x is the output of a frozen layer, saves memory in training.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif dtype is None:
        dtype = torch.promote_types(x.dtype, next(iter(weights.values())).dtype)
    m = weights["down"].shape[2] if form.depth else 0
    if kernel_for(x.device, dtype, form, x.shape[-1], m, training, kernel) == "triton":
        from taskgraft.nn.kernels import fused

        return fused(x, rows, weights, form, dtype, sizes, segments, origin)
    return eager(x, rows, weights, form, dtype, x if source is None else source, sizes, statistics, training)


def eager(
    x: Tensor,
    rows: Tensor | None,
    weights: Mapping[str, Tensor],
    form: Form,
    dtype: torch.dtype,
    source: Tensor,
    sizes: Tensor | None,
    statistics: BatchStatistics | None,
    training: bool,
) -> Tensor:
    """The reference: gather each row's weights, then batched products."""
    w = {name: take(stack, rows) for name, stack in weights.items()}
    h = source
    if not torch.is_autocast_enabled(x.device.type):
        w, h = {name: value.to(dtype) for name, value in w.items()}, source.to(dtype)
    if form.norm_before:
        h = scale_and_shift(F.layer_norm(h, h.shape[-1:], eps=NORM_EPS), w["before_weight"], w["before_bias"])
    if form.depth:
        h = hidden_units(affine(h, w["down"], w["down_bias"]), w, form, sizes, statistics, training)
        if form.is_plain and x.dtype == h.dtype == w["up"].dtype:
            return residual_affine(x, h, w["up"], w["up_bias"])
        h = affine(h, w["up"], w["up_bias"])
    branch = h if form.norm_after is None or form.norm_sum else norm_after(h, w)
    if form.scaling != 1.0:
        branch = branch * form.scaling
    branch = branch.to(x.dtype)
    y = x + (x * branch if form.multiplicative else branch)
    return norm_after(y, w).to(x.dtype) if form.norm_sum else y


def norm_after(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    return scale_and_shift(F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), w["after_weight"], w["after_bias"])


def hidden_units(
    h: Tensor,
    w: Mapping[str, Tensor],
    form: Form,
    sizes: Tensor | None,
    statistics: BatchStatistics | None,
    training: bool,
) -> Tensor:
    """The m units between down and up: norm inside, activation, the further linears of a deep adapter, dropout."""
    mask = None
    if form.needs_mask:
        assert sizes is not None, "this form masks padded units, so it needs the rows' true sizes"
        mask = (torch.arange(h.shape[-1], device=h.device) < sizes[:, None]).to(h.dtype)[:, None]  # [rows, 1, m]
    if form.norm_inside == "layer":
        assert mask is not None and sizes is not None
        count = sizes.clamp(min=1).to(h.dtype)[:, None, None]
        centred = (h - (h * mask).sum(-1, keepdim=True) / count) * mask
        variance = centred.square().sum(-1, keepdim=True) / count
        h = scale_and_shift(centred * torch.rsqrt(variance + NORM_EPS), w["inside_weight"], w["inside_bias"])
    elif form.norm_inside == "batch":
        mean, variance = w["inside_mean"][:, None], w["inside_var"][:, None]
        if statistics is not None:
            mean, variance = statistics(h)
        h = scale_and_shift((h - mean) * torch.rsqrt(variance + NORM_EPS), w["inside_weight"], w["inside_bias"])
    act = ACTIVATIONS[form.activation]
    h = act(h) if mask is None else act(h) * mask
    for i in range(form.depth - 1):
        h = act(affine(h, w[f"middle{i}"], w[f"middle{i}_bias"]))
        h = h if mask is None else h * mask
    return F.dropout(h, form.dropout, training) if form.dropout else h


def take(stack: Tensor, rows: Tensor | None) -> Tensor:
    """Each row's slice of a stack; the stack itself where there is one slot for one entry of rows."""
    if rows is None or (stack.shape[0] == 1 and rows.shape[0] == 1):
        return stack
    return stack.index_select(0, rows)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x @ weight + bias` for x [rows, length, d], weight [rows or 1, d, m], bias [rows or 1, m]."""
    if weight.shape[0] == 1:
        return torch.addmm(bias[0], x.flatten(0, 1), weight[0]).view(*x.shape[:2], -1)
    return torch.baddbmm(bias[:, None], x, weight)


def residual_affine(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x + h @ weight + bias`, the product added in place to the one new tensor there is."""
    if weight.shape[0] == 1:
        return (x.flatten(0, 1) + bias[0]).addmm_(h.flatten(0, 1), weight[0]).view(x.shape)
    return (x + bias[:, None]).baddbmm_(h, weight)


def scale_and_shift(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x * weight + bias` with weight and bias [rows or 1, features]."""
    return torch.addcmul(bias[:, None], x, weight[:, None])
