"""The fused optimiser: each task's step equals torch's AdamW in float64, and our own plain step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import taskgraft as tg

from families import batch, build, perturb

pytest.importorskip("triton", reason="the kernels need Triton")
from taskgraft.nn.adamw_kernels import BLOCK, Stack, Table

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy, in the interpreter
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TASKS = 4
SHAPES = ((TASKS, 3, BLOCK // 3), (TASKS, 7), (TASKS, BLOCK + 5), (1, 11))  # below, far below and above a block
OWNERS = ((0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (4,))  # the last tensor is one that tasks share
DECAYS = (0.1, 0.0, 0.02, 0.0)
RATES, CLIPS = [1e-2, 3e-3, 1e-3, 2e-2, 5e-3], [1.0, float("inf"), 0.3, 1e9, 2.0]


class Float64:
    """torch's AdamW on copies in float64: an optimiser for each owner."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self.parts: list[list[tuple[Stack, int, Tensor]]] = [[] for _ in RATES]
        for stack in stacks:
            for slot, owner in enumerate(stack.owners):
                self.parts[owner].append((stack, slot, stack.parameter[slot].double().clone().requires_grad_()))
        self.optimizers = [
            torch.optim.AdamW(
                [{"params": [own], "weight_decay": stack.decay[slot]} for stack, slot, own in parts], lr=rate, eps=1e-6
            )
            for parts, rate in zip(self.parts, RATES, strict=True)
        ]

    def step(self, owner: int) -> None:
        for stack, slot, own in self.parts[owner]:
            own.grad = stack.gradient[slot].double().clone()
        torch.nn.utils.clip_grad_norm_([own for _, _, own in self.parts[owner]], CLIPS[owner])
        self.optimizers[owner].step()


def drawn() -> list[Stack]:
    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape).to(DEVICE)

    return [
        Stack(
            normal(shape),
            normal(shape),
            torch.zeros(shape, device=DEVICE),
            torch.zeros(shape, device=DEVICE),
            owners,
            [decay] * len(owners),
        )
        for shape, owners, decay in zip(SHAPES, OWNERS, DECAYS, strict=True)
    ]


def state_of(stacks: Sequence[Stack], owner: int) -> list[Tensor]:
    """All that a step of this owner may change."""
    return [
        tensor[slot].clone()
        for stack in stacks
        for slot, other in enumerate(stack.owners)
        for tensor in (stack.parameter, stack.mean, stack.square)
        if other == owner
    ]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_each_task_steps_as_torch_adamw_does_in_float64() -> None:
    """Rates, clipping and decay of their own; 1 has no rows in two steps, and 3 is held still in one."""
    stacks = drawn()
    reference, table = Float64(stacks), Table(stacks, len(RATES), DEVICE)
    steps, betas = torch.zeros(len(RATES), device=DEVICE), (0.9, 0.999)
    rates = torch.tensor(RATES, dtype=torch.float64, device=DEVICE)
    clips = torch.tensor(CLIPS, dtype=torch.float64, device=DEVICE)
    for step in range(5):
        without, still = (1 if step in (1, 2) else None), (3 if step == 3 else None)
        active = torch.ones(len(RATES), dtype=torch.float64, device=DEVICE)
        if still is not None:
            active[still] = 0
        for stack in stacks:
            stack.gradient.copy_(torch.randn(stack.gradient.shape))
            for slot, owner in enumerate(stack.owners):
                if owner == without:
                    stack.gradient[slot].zero_()
        before = {owner: state_of(stacks, owner) for owner in (without, still) if owner is not None}
        table.step(rates, clips, active, steps, betas, 1e-6)
        for owner, state in before.items():
            assert same(state, state_of(stacks, owner)), "it has no rows, or is held still: no bit changes"
        for owner in range(len(RATES)):
            if owner not in before:
                reference.step(owner)
    assert steps.tolist() == [5, 3, 5, 4, 5]
    for owner, parts in enumerate(reference.parts):
        squares = torch.stack([stack.gradient[slot].double().square().sum() for stack, slot, _ in parts]).sum()
        assert float(table.norms[owner]) == pytest.approx(float(squares.sqrt()), rel=1e-6)
        for stack, slot, own in parts:
            torch.testing.assert_close(stack.parameter[slot].double(), own.detach(), rtol=0, atol=2e-6)


def test_a_gradient_whose_square_is_zero_in_float32_is_still_a_gradient() -> None:
    stacks = drawn()
    table, steps = Table(stacks, len(RATES), DEVICE), torch.zeros(len(RATES), device=DEVICE)
    for stack in stacks:
        stack.gradient.zero_()
    stacks[0].gradient[2, 1, 7] = 1e-30
    before = [state_of(stacks, owner) for owner in range(len(RATES))]
    rates, clips = (torch.tensor(each, dtype=torch.float64, device=DEVICE) for each in (RATES, CLIPS))
    table.step(rates, clips, torch.ones_like(rates), steps, (0.9, 0.999), 1e-6)
    assert steps.tolist() == [0, 0, 1, 0, 0]
    assert [same(state, state_of(stacks, owner)) for owner, state in enumerate(before)] == [
        True, True, False, True, True
    ]  # fmt: skip


# -- `tg.AdamW`, fused and plain


class Pair:
    """Two equal models, one of which takes the plain step and one the fused one."""

    def __init__(self, method: tg.Method, tasks: Sequence[str], **options: Any) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            model = tg.graft(build("bert").to(DEVICE), method, dict.fromkeys(tasks, 2))
            perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft"))
            tg.use_kernels(model, "eager")
            self.models.append(model)
            self.optimizers.append(tg.AdamW(model, **options))
        self.optimizers[0]._can_fuse = lambda: False

    def step(self, rows: Sequence[str], seed: int) -> None:
        labels = torch.arange(len(rows), device=DEVICE) % 2
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            inputs = {key: value.to(DEVICE) for key, value in batch(model, len(rows), 3, seed).items()}
            with tg.rows(model, rows):
                (len(rows) * tg.loss(model, model(**inputs), labels)).backward()
        self.optimizers[0].step()
        with torch.no_grad():
            self.optimizers[1]._fused_step()

    def check(self, at_most: float = 1e-6) -> None:
        plain, fused = (tg.trainable(model) for model in self.models)
        for name, parameter in plain.items():
            assert (parameter - fused[name]).norm() <= at_most * parameter.norm(), name
            a, b = (each.state[p] for each, p in zip(self.optimizers, (parameter, fused[name]), strict=True))
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-7)
        assert self.optimizers[0].steps.tolist() == self.optimizers[1].steps.tolist()


ADAPTER = tg.Adapter(size=4)


def test_the_fused_step_equals_the_plain_one() -> None:
    """Every step brings gradients in new memory; rows come and go; a task is held still for a while."""
    options = {"lr": {"a": 1e-2, "b": 3e-3, "c": 1e-3}, "clip_norm": {"a": 0.5, "b": 1e9, "c": 5.0}}
    pair = Pair(ADAPTER, ["a", "b", "c"], weight_decay={"a": 0.1, "b": 0.0, "c": 0.3}, **options)
    kept = [parameter.data_ptr() for parameter in tg.trainable(pair.models[1]).values()]
    for step, rows in enumerate([["a", "b", "c"], ["a", "a"], ["b", "c"], ["c", "c", "a"], ["a", "b", "c"]]):
        for optimizer in pair.optimizers:
            optimizer.set_active("c", step != 3)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - step / 10)
        before = pair.models[1].taskgraft.read("b")
        pair.step(rows, step)
        after = pair.models[1].taskgraft.read("b")
        assert all(torch.equal(value, after[key]) for key, value in before.items()) == ("b" not in rows)
    pair.check()
    assert pair.optimizers[1].steps.tolist() == [4, 3, 3]
    assert kept == [parameter.data_ptr() for parameter in tg.trainable(pair.models[1]).values()]


def test_what_tasks_share_steps_as_a_slot_of_its_own() -> None:
    method = tg.HyperFormer(size=4, task_dim=4, hidden_dim=4, projected_dim=4)
    pair = Pair(method, ["a", "b"], lr=1e-2, weight_decay=0.1, clip_norm=0.5)
    for step, rows in enumerate([["a", "b"], ["a"], ["b", "b"]]):
        pair.step(rows, step)
    pair.check()
    assert pair.optimizers[1].steps.tolist() == pytest.approx([2, 2, 3])


def test_a_task_that_takes_a_slot_begins_anew() -> None:
    pair = Pair(ADAPTER, ["a", "b"], lr=1e-2, weight_decay=0.1, clip_norm=0.5)
    for step in range(2):
        pair.step(["a", "b"], step)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        model.taskgraft.swap("a", "c", ADAPTER, tg.Head.of(2), seed=5)
        optimizer.restart("a", "c", weight_decay=0.3, clip_norm=1e9)
    for step in range(2, 5):
        pair.step(["c", "b"] if step != 3 else ["c"], step)
    pair.check()
    assert pair.optimizers[1].steps_of("c") == 3 and pair.optimizers[1].steps_of("b") == 4


def test_a_bank_that_grows_under_the_optimiser() -> None:
    pair = Pair(ADAPTER, ["a"], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            for model in pair.models:
                tg.add_task(model, "wide", tg.Adapter(size=9), 5, train=False)
        pair.step(["a", "a"], step)
    pair.check()


def test_a_state_is_saved_and_loaded_into_another_optimiser() -> None:
    pair = Pair(ADAPTER, ["a", "b"], lr=1e-2)
    for step, rows in enumerate([["a", "b"], ["a"], ["a", "b"]]):
        pair.step(rows, step)
    for number, model in enumerate(pair.models):
        state = copy.deepcopy(pair.optimizers[number].state_dict())
        pair.optimizers[number] = tg.AdamW(model, lr=1e-2)
        pair.optimizers[number].load_state_dict(state)
    pair.optimizers[0]._can_fuse = lambda: False
    for step, rows in enumerate([["b", "b"], ["a", "b"]]):
        pair.step(rows, step + 5)
    pair.check()


def test_a_state_is_loaded_into_the_optimiser_it_came_from() -> None:
    pair = Pair(ADAPTER, ["a", "b"], lr=1e-2)
    pair.step(["a", "b"], 0)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.step(["a", "a"], 1)
    for optimizer, state in zip(pair.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    pair.step(["a", "b"], 2)
    pair.check()


def test_a_rate_of_zero_moves_the_moments() -> None:
    """The first step of a schedule that warms up from zero."""
    pair = Pair(ADAPTER, ["a", "b"], lr=1e-2)
    for step, rate in enumerate((0.0, 5e-3, 1e-2)):
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        pair.step(["a", "b"], step)
    pair.check()


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    """A pooler that no head reads, under full fine-tuning."""
    pair = Pair(tg.FullFineTuning(head_dropout=0.0), ["a"], lr=1e-2, weight_decay=0.5)
    for model in pair.models:
        model.eval()
    before = pair.models[1].pooler.dense.weight.detach().clone()
    for step in range(2):
        pair.step(["a", "a"], step)
    assert torch.equal(before, pair.models[1].pooler.dense.weight)
    plain, fused = (tg.trainable(model) for model in pair.models)
    for name, parameter in plain.items():  # a key's bias has no effect, so its gradient is rounding alone
        if not name.endswith("key.bias"):
            assert (parameter - fused[name]).norm() <= 1e-5 * parameter.norm(), name


def test_when_the_fused_step_is_taken() -> None:
    model = tg.graft(build("bert").to(DEVICE), ADAPTER, {"a": 2})
    optimizer = tg.AdamW(model, lr=1e-2)
    on_gpu = DEVICE.type == "cuda"
    assert optimizer._can_fuse() == on_gpu
    optimizer.param_groups[0]["lr"] = 1e-3
    assert not optimizer._can_fuse(), "the groups have two rates"
    assert not tg.AdamW(tg.graft(build("bert", torch.float64).to(DEVICE), ADAPTER, {"a": 2}))._can_fuse()
