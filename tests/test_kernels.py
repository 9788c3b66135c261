"""The bottleneck's kernels against the reference in float64: compiled on a GPU, else by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.nn import bottleneck as module
from taskgraft.nn.bottleneck import ACTIVATIONS, NONZERO_AT_ZERO, Form, Origin, bottleneck, kernel_for
from taskgraft.nn.rows import Segments

from families import build

pytest.importorskip("triton", reason="the kernels need Triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned", "rounding_bf16"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy, in the interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT_MOST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}  # of |found - wanted| / |wanted|


@dataclass(frozen=True)
class Shape:
    """A batch and a bank. `rows` are the slots of the batch's rows: one stands for all, None is the rows' order."""

    count: int = 3
    length: int = 5
    d: int = 32
    m: int = 6
    slots: int = 4
    rows: tuple[int, ...] | None = (2, 0, 2)


SHAPES = {
    "plain": Shape(),
    "one unit": Shape(m=1),
    "512 units": Shape(d=16, m=512, length=2),
    "257 units": Shape(d=48, m=257),
    "129 units": Shape(d=80, m=129),
    "65 units": Shape(d=144, m=65),
    "width 16": Shape(d=16),
    "wider than a slice": Shape(d=272, m=17),
    "length 1": Shape(length=1),
    "longer than a block": Shape(length=70, m=17),
    "one row": Shape(count=1, rows=(3,)),
    "one of several tasks": Shape(count=4, length=37, slots=3, rows=(1,)),
    "one task": Shape(count=2, slots=1, rows=(0,)),
    "one task whose rows are summed in parts": Shape(count=5, length=129, d=16, m=3, slots=1, rows=(0,)),
    "many rows of few tasks": Shape(count=13, length=3, slots=2, rows=(1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0)),
    "unsorted": Shape(count=6, rows=(3, 0, 2, 0, 3, 1)),
    "slots without rows": Shape(slots=7, rows=(2, 5, 2)),
    "row order": Shape(slots=3, rows=None),
    "row order of one": Shape(count=2, slots=1, rows=None),
}


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    weights: dict[str, Tensor]
    sizes: Tensor
    received: Tensor  # the gradient of the output

    def to(self, dtype: torch.dtype) -> Inputs:
        weights = {name: value.to(dtype) for name, value in self.weights.items()}
        return replace(self, x=self.x.to(dtype), weights=weights, received=self.received.to(dtype))


def drawn(shape: Shape, normed: bool, seed: int = 0, std: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    slots, d, m = shape.slots, shape.d, shape.m
    weights = {
        "down": std * normal(slots, d, m) / d**0.5,
        "down_bias": 0.3 * std * normal(slots, m),
        "up": std * normal(slots, m, d) / m**0.5,
        "up_bias": 0.3 * std * normal(slots, d),
    }
    if normed:
        weights |= {"after_weight": 1 + 0.3 * normal(slots, d), "after_bias": normal(slots, d)}
    named = shape.count if shape.rows is None else len(shape.rows)
    sizes = torch.randint((m + 1) // 2, m + 1, (named,), generator=generator)
    x, received = normal(shape.count, shape.length, d), normal(shape.count, shape.length, d)
    return Inputs(x, weights, sizes, received)


def computed(inputs: Inputs, shape: Shape, form: Form, kernel: str, **options: object) -> dict[str, Tensor]:
    """The output and all gradients."""
    x = inputs.x.to(DEVICE, copy=True).requires_grad_()
    weights = {name: value.to(DEVICE, copy=True).requires_grad_() for name, value in inputs.weights.items()}
    rows = None if shape.rows is None else torch.tensor(shape.rows, device=DEVICE)
    y = bottleneck(x, rows, weights, form, sizes=inputs.sizes.to(DEVICE), kernel=kernel, **options)
    y.backward(inputs.received.to(y))
    return {"y": y.detach(), "x": x.grad, **{name: value.grad for name, value in weights.items()}}


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and found.isfinite().all()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def check(shape: Shape, form: Form, dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 1.0) -> None:
    """The kernels against float64 on the same rounded numbers.

    Some sums of a gradient cancel: there half precision may be as far off as torch's own operations are in it.
    """
    inputs = drawn(shape, form.norm_after is not None, seed, std).to(dtype)
    wanted = computed(inputs.to(torch.float64), shape, form, "eager")
    found = computed(inputs, shape, form, "triton")
    eager = computed(inputs, shape, form, "eager") if dtype != torch.float32 else wanted
    without = sorted(set(range(shape.slots)) - set(range(shape.slots) if shape.rows is None else shape.rows))
    for name, value in wanted.items():
        assert found[name].dtype == dtype
        assert error(found[name], value) <= max(AT_MOST[dtype], error(eager[name], value)), name
        if name not in ("y", "x"):
            assert not found[name][without].any(), f"{name} of a slot without rows has a gradient"


def random_case(seed: int, widest: int = 144, most_units: int = 40, longest: int = 40) -> tuple[Shape, Form]:
    """Any shape and form that the kernels have."""
    draw = random.Random(seed)
    count, slots = draw.randint(1, 6), draw.randint(1, 5)
    how = draw.choice(["rows", "rows", "one", "order"])
    slots = count if how == "order" else slots
    rows = {"order": None, "one": (draw.randrange(slots),)}.get(how, tuple(draw.choices(range(slots), k=count)))
    shape = Shape(
        count, draw.randint(1, longest), 16 * draw.randint(1, widest // 16), draw.randint(1, most_units), slots, rows
    )
    form = Form(draw.choice(list(ACTIVATIONS)), norm_after=draw.choice([None, "own"]), scaling=draw.choice([1.0, 2.5]))
    return shape, form


# -- against float64


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str) -> None:
    check(SHAPES[name], Form(scaling=1.5))


NORMED = ["plain", "one unit", "wider than a slice", "longer than a block", "one of several tasks", "row order",
          "many rows of few tasks", "slots without rows", "one task whose rows are summed in parts"]  # fmt: skip


@pytest.mark.parametrize("name", NORMED)
def test_every_shape_with_a_norm_after(name: str) -> None:
    check(SHAPES[name], Form(norm_after="own", scaling=1.5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    check(SHAPES["plain"], Form(activation, norm_after="own", scaling=0.5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_as_small_as_fresh_ones(activation: str) -> None:
    check(Shape(m=16), Form(activation), std=0.03)


@pytest.mark.parametrize("dtype", AT_MOST, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed: int, dtype: torch.dtype) -> None:
    check(*random_case(seed), dtype, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [None, "own"])
def test_512_units_in_half_precision(norm: str | None, dtype: torch.dtype) -> None:
    check(SHAPES["512 units"], Form(norm_after=norm), dtype)


def test_width_8192() -> None:
    """In half precision, whose slices are wide: the interpreter is slow. A GPU goes on to float32 (test_gpu.py)."""
    check(Shape(count=2, length=1, d=8192, m=2, slots=1, rows=(0,)), Form(), torch.float16)


@pytest.mark.parametrize("activation", sorted(NONZERO_AT_ZERO))
@pytest.mark.parametrize("name", ["unsorted", "one task"])
def test_units_beyond_the_true_size_are_silent(name: str, activation: str) -> None:
    shape = SHAPES[name]
    inputs = drawn(shape, False)
    sizes, rows = inputs.sizes.tolist(), range(shape.count) if shape.rows is None else shape.rows
    by_slot = dict(zip(rows, sizes, strict=True))
    inputs = replace(inputs, sizes=torch.tensor([by_slot[slot] for slot in rows]))
    found = computed(inputs, shape, Form(activation), "triton")
    loud = {key: value.clone() for key, value in inputs.weights.items()}
    for slot, size in by_slot.items():
        assert not found["down"][slot, :, size:].any() and not found["up"][slot, size:].any()
        loud["down"][slot, :, size:], loud["up"][slot, size:] = 3.0, 3.0
    again = computed(replace(inputs, weights=loud), shape, Form(activation), "triton")
    assert torch.equal(found["y"], again["y"]) and torch.equal(found["x"], again["x"])


# -- what is asked for, and how it is given


@pytest.mark.parametrize("name", ["unsorted", "one task", "row order"])
def test_what_is_not_asked_for_changes_nothing(name: str) -> None:
    """Without gradients, with those of x alone, with those of the weights alone."""
    shape, form = SHAPES[name], Form(norm_after="own")
    inputs = drawn(shape, True)
    wanted = computed(inputs, shape, form, "triton")
    rows = None if shape.rows is None else torch.tensor(shape.rows, device=DEVICE)
    for of_x, of_weights in ((False, False), (True, False), (False, True)):
        x = inputs.x.to(DEVICE, copy=True).requires_grad_(of_x)
        weights = {k: v.to(DEVICE, copy=True).requires_grad_(of_weights) for k, v in inputs.weights.items()}
        y = bottleneck(x, rows, weights, form, kernel="triton")
        assert torch.equal(y.detach(), wanted["y"])
        if y.requires_grad:
            y.backward(inputs.received.to(DEVICE))
        assert torch.equal(x.grad, wanted["x"]) if of_x else x.grad is None
        for key, value in weights.items():
            assert torch.equal(value.grad, wanted[key]) if of_weights else value.grad is None


def test_segments_that_are_known_are_used_as_they_are() -> None:
    shape = SHAPES["unsorted"]
    inputs = drawn(shape, False)
    known = Segments.of(torch.tensor(shape.rows, device=DEVICE), shape.slots)
    found = computed(inputs, shape, Form(), "triton", segments=known)
    wanted = computed(inputs, shape, Form(), "triton")
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_tensors_that_do_not_lie_in_a_row() -> None:
    shape = Shape(count=4, slots=2, rows=(1, 0, 1, 1))
    inputs = drawn(shape, False)
    twisted = replace(
        inputs,
        x=inputs.x.transpose(0, 1).contiguous().transpose(0, 1),
        received=inputs.received[:, :1].expand(-1, shape.length, -1),
        weights={n: w.mT.contiguous().mT if w.dim() == 3 else w for n, w in inputs.weights.items()},
    )
    assert not twisted.x.is_contiguous() and not twisted.weights["down"].is_contiguous()
    straight = replace(inputs, received=twisted.received.contiguous()).to(torch.float64)
    wanted = computed(straight, shape, Form(), "eager")
    for name, value in computed(twisted, shape, Form(), "triton").items():
        assert error(value, wanted[name]) <= 1e-5, name


@pytest.mark.parametrize("norm", [None, "own"])
def test_float32_weights_are_trained_in_half_precision(norm: str | None) -> None:
    """As on a half-precision backbone: x is bfloat16, and the weights and their gradients are not."""
    shape, form = Shape(m=16), Form(norm_after=norm)
    inputs = drawn(shape, norm is not None)
    rounded = inputs.to(torch.bfloat16)
    mixed = replace(rounded, weights=rounded.to(torch.float32).weights)
    found = computed(mixed, shape, form, "triton", dtype=torch.bfloat16)
    wanted = computed(mixed.to(torch.float64), shape, form, "eager")
    for name, value in found.items():
        assert value.dtype == (torch.bfloat16 if name in ("x", "y") else torch.float32)
        assert error(value, wanted[name]) <= AT_MOST[torch.bfloat16], name


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", ["unsorted", "one of several tasks", "row order"])
def test_an_input_that_is_known_to_come_from_a_frozen_layer_is_not_kept(name: str, biased: bool) -> None:
    """Its gradients are found from what that layer read."""
    shape, form = SHAPES[name], Form(scaling=1.5)
    inputs, rows = drawn(shape, False), None if SHAPES[name].rows is None else torch.tensor(SHAPES[name].rows)
    frozen = torch.randn(shape.d, shape.d) / shape.d**0.5, torch.randn(shape.d) if biased else None

    def gradients(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        each = inputs.to(dtype)
        weight, bias = (None if value is None else value.to(DEVICE, dtype) for value in frozen)
        read = each.x.to(DEVICE, copy=True).requires_grad_()
        weights = {key: value.to(DEVICE, copy=True).requires_grad_() for key, value in each.weights.items()}
        x = torch.nn.functional.linear(read, weight, bias)
        place = None if rows is None else rows.to(DEVICE)
        y = bottleneck(x, place, weights, form, kernel=kernel, origin=Origin(read, weight, bias))
        return [y.detach(), *torch.autograd.grad(y, [read, *weights.values()], each.received.to(DEVICE))]

    for found, wanted in zip(gradients("triton", torch.float32), gradients("eager", torch.float64), strict=True):
        assert error(found, wanted) <= 1e-5


def test_autocast_computes_in_its_dtype_and_keeps_that_of_x() -> None:
    shape, inputs = Shape(m=16), drawn(Shape(m=16), False)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = computed(inputs, shape, Form(), "triton")
    wanted = computed(inputs.to(torch.float64), shape, Form(), "eager")
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert 1e-6 < error(value, wanted[name]) <= AT_MOST[torch.bfloat16] or name == "up_bias", name


# -- the choice of a kernel


UNSUPPORTED: Mapping[str, tuple[Form, int, int]] = {
    "a norm inside": (Form(norm_inside="layer"), 32, 6),
    "two layers": (Form(depth=2), 32, 6),
    "parallel": (Form(parallel=True), 32, 6),
    "513 units": (Form(), 32, 513),
    "a width that is no multiple of 16": (Form(), 40, 6),
    "a width above 8192": (Form(), 8208, 6),
}


@pytest.mark.parametrize(("form", "d", "m"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_the_kernels_have_not_is_refused_when_they_are_insisted_on(form: Form, d: int, m: int) -> None:
    cpu = torch.device(DEVICE)
    with pytest.raises(
        tg.GraftError, match=rf"the kernel 'triton' has no Form\(.* of size {m} in torch.float32 on wid"
    ):
        kernel_for(cpu, torch.float32, form, d, m, choice="triton")
    assert kernel_for(cpu, torch.float32, form, d, m) == "eager"


@pytest.mark.parametrize(("d", "m"), [(16, 1), (8192, 512)])
def test_the_smallest_and_the_largest_are_had(d: int, m: int) -> None:
    for dtype in AT_MOST:
        assert kernel_for(torch.device(DEVICE), dtype, Form(), d, m, choice="triton") == "triton"
        assert kernel_for(torch.device(DEVICE), dtype, Form(), d, m, choice="eager") == "eager"
    assert kernel_for(torch.device("cpu"), torch.float32, Form(), d, m) == "eager"
    with pytest.raises(tg.GraftError, match=r"in torch\.float64 on width"):
        kernel_for(torch.device(DEVICE), torch.float64, Form(), d, m, choice="triton")


def test_hidden_dropout_is_the_references_while_it_drops() -> None:
    device, form = torch.device(DEVICE), Form(dropout=0.1)
    assert kernel_for(device, torch.float32, form, 32, 6, choice="triton") == "triton"
    with pytest.raises(tg.GraftError, match=r"dropout=0.1.*choose 'auto'"):
        kernel_for(device, torch.float32, form, 32, 6, training=True, choice="triton")


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Callable[[], bool] = lambda: False  # noqa: E731
    monkeypatch.setattr(module, "has_triton", absent)
    assert kernel_for(torch.device("cuda"), torch.float32, Form(), 32, 6) == "eager"
    with pytest.raises(tg.GraftError, match="pip install triton, or choose 'auto'"):
        kernel_for(torch.device("cpu"), torch.float32, Form(), 32, 6, choice="triton")


def test_use_kernels_says_what_it_cannot_do() -> None:
    model = tg.graft(build("bert").to(DEVICE), tg.Adapter(size=8, depth=2), {"a": 2})
    with pytest.raises(tg.GraftError, match="kernel 'cuda' is unknown: use auto, eager, triton"):
        tg.use_kernels(model, "cuda")  # type: ignore[arg-type]
    ids = torch.ones(1, 3, dtype=torch.long, device=DEVICE)
    before = model(ids).logits
    tg.use_kernels(model, "triton")
    with pytest.raises(tg.GraftError, match=r"has no Form\(.*depth=2.* of size 8 in torch.float32 on width 32: choose"):
        model(ids)
    tg.use_kernels(model, "eager")
    assert torch.allclose(model(ids).logits, before, atol=1e-5)


def test_describe_shows_the_kernel_in_use() -> None:
    model = tg.graft(build("bert").to(DEVICE), tg.Adapter(size=8), {"a": 2})

    def kernels() -> set[str]:
        lines = [line.split() for line in tg.describe(model).splitlines() if line.startswith("encoder ")]
        return {word for line in lines for word in line if word in ("eager", "triton")}

    assert kernels() == {"eager" if DEVICE == "cpu" else "triton"}
    tg.use_kernels(model, "triton")
    assert kernels() == {"triton"}
    tg.use_kernels(model, "eager")
    assert kernels() == {"eager"}
