"""The operation against a row-by-row reference written out from the equations, in float64."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from taskgraft.methods import Activation
from taskgraft.nn.bank import AdapterBank, bottleneck_layout, fresh_bottleneck
from taskgraft.nn.bottleneck import ACTIVATIONS, NONZERO_AT_ZERO, Form, bottleneck
from taskgraft.nn.rows import Route, Slots

from reference import one_row, row_index

D = 12


def random_weights(size: int, form: Form, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    fresh = fresh_bottleneck(D, size, form, 0.1, generator)
    return {
        name: (value + 0.1 * torch.randn(value.shape, generator=generator).abs()).double()
        for name, value in fresh.items()
    }


forms = st.builds(
    Form,
    activation=st.sampled_from(get_args(Activation)),
    depth=st.integers(1, 3),
    norm_before=st.booleans(),
    norm_inside=st.sampled_from([None, "layer", "batch"]),
    norm_after=st.sampled_from([None, "own", "shared"]),
    parallel=st.booleans(),
    scaling=st.sampled_from([1.0, 0.5, 4.0]),
    multiplicative=st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(form=forms, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_a_bank_equals_the_equations_row_by_row(form: Form, sizes: list[int], data: Any) -> None:
    names = [f"t{i}" for i in range(len(sizes))]
    rows = data.draw(st.lists(st.sampled_from([*names, None]), min_size=1, max_size=5))
    bank = AdapterBank(form, D, max(sizes), torch.device("cpu"), torch.float64).eval()
    slots, weights = Slots(), {}
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        weights[name] = random_weights(size, form, number)
        bank.write(slots.take(name, size), weights[name])
    x, x_in = torch.randn(len(rows), 3, D).double(), torch.randn(len(rows), 3, D).double()
    index = row_index(slots, rows)
    if index is None:
        assert set(rows) == {None}
        return
    y = bank(x, index, Route(tuple(rows), len(rows), {}), x_in if form.parallel else None)
    for i, name in enumerate(rows):
        expected = x[i] if name is None else one_row(x[i], weights[name], form, x_in[i])
        assert torch.allclose(y[i], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_which_activations_are_not_zero_at_zero(activation: str) -> None:
    zero = ACTIVATIONS[activation](torch.zeros(()))
    assert bool(zero != 0) == (activation in NONZERO_AT_ZERO)


def test_gelu_new_is_the_tanh_approximation() -> None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    expected = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert torch.allclose(ACTIVATIONS["gelu_new"](x), expected, atol=1e-15)


@pytest.mark.parametrize(("tasks", "length"), list(itertools.product([1, 2, 7], [1, 5])))
def test_the_plain_operation_on_stacked_weights(tasks: int, length: int) -> None:
    x = torch.randn(4, length, D, dtype=torch.float64, requires_grad=True)
    w = {
        "down": torch.randn(tasks, D, 3, dtype=torch.float64, requires_grad=True),
        "down_bias": torch.randn(tasks, 3, dtype=torch.float64, requires_grad=True),
        "up": torch.randn(tasks, 3, D, dtype=torch.float64, requires_grad=True),
        "up_bias": torch.randn(tasks, D, dtype=torch.float64, requires_grad=True),
    }
    rows = torch.randint(0, tasks, (4,))

    def operation(x: Tensor, *stacks: Tensor) -> Tensor:
        return bottleneck(x, rows, dict(zip(w, stacks, strict=True)))

    assert torch.autograd.gradcheck(operation, (x, *w.values()))
    y = operation(x, *w.values())
    for i, row in enumerate(rows):
        own = {name: stack[row] for name, stack in w.items()}
        assert torch.allclose(y[i], one_row(x[i], own, Form(), x[i]), atol=1e-12)


def test_batch_norm_inside_trains_by_its_own_tasks_rows() -> None:
    form = Form(norm_inside="batch")
    bank = AdapterBank(form, D, 4, torch.device("cpu"), torch.float64)
    slots = Slots()
    for number, name in enumerate(["a", "b"]):
        bank.write(slots.take(name, 4), random_weights(4, form, number))
    bank.train_slots([1, 2])
    slots.trained = ["a", "b"]
    x = torch.randn(5, 3, D, dtype=torch.float64)
    before = bank.inside_mean.clone()

    def forward(names: list[str | None], x: Tensor, again: bool = False) -> Tensor:
        index = row_index(slots, names)
        assert index is not None
        result: Tensor = bank(x, index, Route(tuple(names), len(names), {}, recomputing=again), None)
        return result

    mixed = forward(["a", "b", "a", None, "b"], x)
    moved = bank.inside_mean.clone()
    assert not torch.equal(before, moved)
    forward(["a", "b", "a", None, "b"], x, again=True)
    assert torch.equal(moved, bank.inside_mean), "a recomputed forward must not count twice"
    alone = forward(["a", "a"], x[[0, 2]])
    assert torch.allclose(mixed[[0, 2]], alone, atol=1e-12)
    assert torch.equal(mixed[3], x[3])
    hidden = x[[0, 2]] @ bank.down[0] + bank.down_bias[0]
    expected = before[0].lerp(hidden.flatten(0, 1).mean(0), 0.1)
    assert torch.allclose(moved[0], expected, atol=1e-12)


def test_layout_counts_2md_plus_d_plus_m() -> None:
    weights = bottleneck_layout(D, Form())(5)
    assert sum(torch.Size(w.shape).numel() for w in weights.values()) == 2 * 5 * D + D + 5


def test_initial_weights_are_a_normal_cut_at_two_sigma() -> None:
    values = fresh_bottleneck(400, 64, Form(), 1e-2, torch.Generator().manual_seed(0))
    assert values["down"].abs().max() <= 2e-2
    assert values["down"].std() == pytest.approx(0.88e-2, rel=0.02)  # a normal cut at 2 sigma has std 0.8796 sigma
    assert not values["down_bias"].any() and not values["up_bias"].any()
