"""The norms' kernel against the equations in float64: LayerNorm and RMS norms, with each row's own weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from taskgraft.nn.norms import fused, norm_kernel_for, normalise, per_row
from taskgraft.nn.rows import Segments

pytest.importorskip("triton", reason="the kernels need Triton")
from taskgraft.nn import norm_kernels
from taskgraft.nn.norm_kernels import row_norm
from test_kernels import AT_MOST, DEVICE, error

pytestmark = pytest.mark.usefixtures("poisoned", "rounding_bf16")
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A batch and the weights of its tasks. `rows` are slots: one stands for all rows, None is the rows' order."""

    count: int = 3
    length: int = 5
    d: int = 48
    slots: int = 4
    rows: tuple[int, ...] | None = (2, 0, 2)


@dataclass(frozen=True)
class Kind:
    rms: bool = False
    biased: bool = True
    offset: float = 0.0


SHAPES = {
    "plain": Shape(),
    "length 1": Shape(length=1),
    "longer than a stretch": Shape(length=41),
    "width 16": Shape(d=16),
    "a width that is no power of two": Shape(d=80),
    "width 8192": Shape(count=1, length=3, d=8192, rows=(0,), slots=1),
    "one of several tasks": Shape(count=4, rows=(1,), slots=3),
    "one task": Shape(rows=(0,), slots=1),
    "one slot, unnamed": Shape(rows=None, slots=1),
    "row order": Shape(rows=None, slots=3),
    "unsorted": Shape(count=6, rows=(3, 0, 2, 0, 3, 1)),
    "slots without rows": Shape(slots=7, rows=(2, 5, 2)),
    "many rows of a task": Shape(count=70, length=1, slots=2, rows=(1, *[0] * 68, 1)),
}
KINDS = {
    "layer": Kind(),
    "layer without bias": Kind(biased=False),
    "rms": Kind(rms=True, biased=False),
    "gemma": Kind(rms=True, biased=False, offset=1.0),
}


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    received: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(**{name: None if value is None else value.to(dtype) for name, value in vars(self).items()})


def drawn(shape: Shape, kind: Kind, residual: bool, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    size = (shape.count, shape.length, shape.d)
    return Inputs(
        x=normal(*size) * 2 + 1.5,
        residual=normal(*size) - 0.5 if residual else None,
        weight=normal(shape.slots, shape.d) * 0.3 + 1 - kind.offset,
        bias=normal(shape.slots, shape.d) if kind.biased else None,
        received=normal(*size),
    )


def by_equations(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind) -> Tensor:
    if not kind.rms:
        x = x - x.mean(-1, keepdim=True)
    normalised = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    found = normalised * per_row(weight[rows] + kind.offset, x)
    return found if bias is None else found + per_row(bias[rows], x)


def computed(inputs: Inputs, shape: Shape, kind: Kind, by_kernel: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients."""
    leaves = {
        name: value.to(DEVICE, copy=True).requires_grad_()
        for name, value in vars(inputs).items()
        if name != "received" and value is not None
    }
    x, residual, weight, bias = (leaves.get(name) for name in ("x", "residual", "weight", "bias"))
    assert x is not None and weight is not None
    rows = None if shape.rows is None else torch.tensor(shape.rows, device=DEVICE)
    if by_kernel:
        y = row_norm(
            x, rows, weight, bias, eps=EPS, offset=kind.offset, rms=kind.rms, dtype=dtype, residual=residual
        )  # fmt: skip
    else:
        every = torch.arange(shape.slots, device=DEVICE) if rows is None else rows
        every = every.expand(shape.count) if len(every) == 1 else every
        y = by_equations(x if residual is None else x + residual, every, weight, bias, kind)
    y.backward(inputs.received.to(y))
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def check(shape: Shape, kind: Kind, residual: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """The kernel against float64 on the same rounded numbers."""
    inputs = drawn(shape, kind, residual, seed).to(dtype)
    wanted = computed(inputs.to(torch.float64), shape, kind, False, torch.float64)
    found = computed(inputs, shape, kind, True, dtype)
    without = sorted(set(range(shape.slots)) - set(range(shape.slots) if shape.rows is None else shape.rows))
    for name, value in wanted.items():
        assert found[name].dtype == dtype
        assert error(found[name], value) <= AT_MOST[dtype], name
        if name in ("weight", "bias"):
            assert not found[name][without].any(), f"{name} of a slot without rows has a gradient"


def random_case(seed: int, widest: int = 300, longest: int = 40) -> tuple[Shape, Kind, bool]:
    draw = random.Random(seed)
    count, slots = draw.randint(1, 6), draw.randint(1, 5)
    how = draw.choice(["rows", "rows", "one", "order"])
    slots = count if how == "order" else slots
    rows = {"order": None, "one": (draw.randrange(slots),)}.get(how, tuple(draw.choices(range(slots), k=count)))
    shape = Shape(count, draw.randint(1, longest), draw.randint(8, widest), slots, rows)
    return shape, draw.choice(list(KINDS.values())), draw.random() < 0.5


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_norm(kind: Kind, residual: bool) -> None:
    check(SHAPES["plain"], kind, residual)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "plain"])
def test_every_shape(name: str) -> None:
    check(SHAPES[name], KINDS["layer"], residual=True)


@pytest.mark.parametrize("dtype", AT_MOST, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed: int, dtype: torch.dtype) -> None:
    check(*random_case(seed), dtype, seed)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    inputs = drawn(Shape(), Kind(), False)
    far = replace(inputs, x=inputs.x + 300)
    wanted = computed(far.to(torch.float64), Shape(), Kind(), False, torch.float64)
    found = computed(far, Shape(), Kind(), True, torch.float32)
    assert all(error(found[name], value) <= 1e-4 for name, value in wanted.items())  # x itself has only 5 digits left


@pytest.mark.parametrize("name", ["unsorted", "one of several tasks"])
def test_what_is_not_asked_for_changes_nothing(name: str) -> None:
    """Without gradients; with those of x alone, of the residual alone, of the weights alone."""
    shape, kind = SHAPES[name], KINDS["layer"]
    inputs = drawn(shape, kind, True)
    wanted = computed(inputs, shape, kind, True, torch.float32)
    rows = None if shape.rows is None else torch.tensor(shape.rows, device=DEVICE)
    same = 0 if DEVICE == "cpu" else 1e-6  # a compiler may contract another program's sums in another way
    for asked in ((), ("x",), ("residual",), ("weight", "bias"), ("bias",)):
        given = {key: getattr(inputs, key).to(DEVICE, copy=True) for key in ("x", "residual", "weight", "bias")}
        for key in asked:
            given[key].requires_grad_()
        y = row_norm(
            given["x"], rows, given["weight"], given["bias"], eps=EPS, dtype=torch.float32, residual=given["residual"]
        )
        assert error(y.detach(), wanted["y"]) <= same
        if asked:
            y.backward(inputs.received.to(DEVICE))
        for key, value in given.items():
            assert error(value.grad, wanted[key]) <= same if key in asked else value.grad is None


def test_a_residual_and_a_branch_of_two_precisions() -> None:
    """As under autocast: each gradient has the precision of what it belongs to."""
    inputs = drawn(Shape(), Kind(), True)
    inputs = replace(inputs, x=inputs.x.bfloat16())
    found = computed(inputs, Shape(), Kind(), True, torch.float32)
    wanted = computed(inputs.to(torch.float64), Shape(), Kind(), False, torch.float64)
    assert {name: value.dtype for name, value in found.items() if value.dtype != torch.float32} == {"x": torch.bfloat16}
    for name, value in wanted.items():
        assert error(found[name], value) <= (AT_MOST[torch.bfloat16] if name == "x" else 1e-5), name


def test_heads_between_rows_and_features() -> None:
    """A norm of queries: [rows, heads, length, d], and not laid out in that order."""
    x = torch.randn(3, 5, 2, 16).transpose(1, 2).to(DEVICE)
    weight, rows = torch.randn(4, 16, device=DEVICE), torch.tensor([3, 0, 3], device=DEVICE)
    x.requires_grad_(), weight.requires_grad_()
    y = row_norm(x, rows, weight, None, eps=EPS, rms=True, dtype=torch.float32)
    received = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), received)
    exact, own = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    reference = by_equations(exact, rows, own, None, KINDS["rms"])
    wanted = torch.autograd.grad(reference, (exact, own), received.double())
    assert all(error(a, b) <= 1e-5 for a, b in zip((y.detach(), *found), (reference.detach(), *wanted), strict=True))


def test_segments_that_are_known_are_used_as_they_are() -> None:
    shape, inputs = SHAPES["unsorted"], drawn(SHAPES["unsorted"], Kind(), False)
    wanted = computed(inputs, shape, Kind(), True, torch.float32)
    rows, weight = torch.tensor(shape.rows, device=DEVICE), inputs.weight.to(DEVICE).requires_grad_()
    known = Segments.of(rows, shape.slots)
    bias = inputs.bias.to(DEVICE) if inputs.bias is not None else None
    y = row_norm(inputs.x.to(DEVICE), rows, weight, bias, eps=EPS, dtype=torch.float32, segments=known)
    y.backward(inputs.received.to(DEVICE))
    assert torch.equal(weight.grad, wanted["weight"])


def test_many_tokens_are_summed_in_longer_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "MANY_TOKENS", 10)
    check(SHAPES["longer than a stretch"], KINDS["layer"], residual=True)


NORMS: Mapping[str, Callable[..., nn.Module]] = {
    "layer": nn.LayerNorm,
    "t5": T5LayerNorm,
    "llama": LlamaRMSNorm,
    "gemma": GemmaRMSNorm,
}


@pytest.mark.parametrize("dtype", AT_MOST, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_backbones_own_norm(name: str, dtype: torch.dtype) -> None:
    """The kernel, torch's operations with weights by row, and the module itself with these weights."""
    base, x = NORMS[name](48, eps=EPS).to(DEVICE, dtype), (torch.randn(3, 5, 48) * 3 + 1).to(DEVICE, dtype)
    stacks = {key: torch.randn(2, 48).to(DEVICE, dtype) for key, _ in base.named_parameters()}
    rows, offset = torch.tensor([1, 0, 1], device=DEVICE), 1.0 if name == "gemma" else 0.0
    assert norm_kernel_for(base, x, stacks["weight"], "triton") == "triton"
    with torch.no_grad():
        found = fused(base, x, rows, stacks, offset, None)
        other = normalise(base, x, stacks["weight"][rows], stacks["bias"][rows] if "bias" in stacks else None, offset)
        for row, slot in enumerate(rows.tolist()):
            alone = torch.func.functional_call(base, {key: stack[slot] for key, stack in stacks.items()}, x[row][None])
            assert found.dtype == alone.dtype
            assert error(found[row], alone[0]) <= AT_MOST[dtype] and error(other[row], alone[0]) <= AT_MOST[dtype]


def test_when_the_kernel_is_used() -> None:
    x, weight, base = torch.randn(2, 3, 32), torch.ones(2, 32), nn.LayerNorm(32)
    assert norm_kernel_for(base, x, weight, "triton") == "triton"
    assert norm_kernel_for(base, x, weight, "eager") == norm_kernel_for(base, x, weight, "auto") == "eager"
    for given, own in (
        (x[:, 0], weight),
        (x.double(), weight.double()),
        (x.bfloat16(), weight),
        (torch.randn(1, 1, 8193), torch.ones(1, 8193)),
    ):
        assert norm_kernel_for(base, given, own, "triton") == "eager"
    with torch.autocast("cpu", torch.bfloat16):
        assert norm_kernel_for(base, x.bfloat16(), weight, "triton") == "triton"
        half = LlamaRMSNorm(32).bfloat16()
        assert norm_kernel_for(half, x.bfloat16(), weight.bfloat16(), "triton") == "eager", "it casts by itself"
        for base in (LlamaRMSNorm(32), T5LayerNorm(32)):  # in float32 there is nothing to cast
            assert norm_kernel_for(base, x, weight, "triton") == "triton"
            assert torch.equal(base(x), base.float()(x)) and base(x).dtype == torch.float32
