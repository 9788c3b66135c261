"""Slots and storage: growth, reuse, what is trained and what rests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from taskgraft.nn.bank import AdapterBank, fresh_bottleneck
from taskgraft.nn.bottleneck import Form
from taskgraft.nn.rows import Slots

from reference import row_index

D, M = 6, 4
PLAIN = Form()


def values(seed: int, size: int = M, form: Form = PLAIN) -> dict[str, Tensor]:
    return fresh_bottleneck(D, size, form, 0.5, torch.Generator().manual_seed(seed))


def bank(form: Form = PLAIN) -> AdapterBank:
    return AdapterBank(form, D, M, torch.device("cpu"), torch.float32)


def test_what_is_written_is_read_back() -> None:
    b = bank()
    for slot in range(1, 6):
        b.write(slot, values(slot))
    for slot in range(1, 6):
        read = b.read(slot, M)
        assert all(torch.equal(read[name], value) for name, value in values(slot).items())
    assert all(not b.store(name)[0].any() for name in b.weights), "slot 0 is the bare backbone"


def test_the_store_doubles_so_that_adding_is_amortised_constant() -> None:
    b, copied = bank(), 0
    capacities = []
    for slot in range(1, 130):
        before = b.capacity
        b.write(slot, values(slot))
        if b.capacity != before:
            copied += before
            capacities.append(b.capacity)
    assert capacities == [2, 4, 8, 16, 32, 64, 128, 256]
    assert copied < 2 * 130, "slots copied by all growths together stay below twice the slots there are"


def test_trained_weights_are_parameters_and_the_rest_are_not() -> None:
    b = bank()
    for slot in (1, 2, 3):
        b.write(slot, values(slot))
    assert not list(b.parameters())
    b.train_slots([3, 1])
    assert {name: tuple(p.shape) for name, p in b.named_parameters()}["down"] == (2, D, M)
    assert torch.equal(b.down[0], values(3)["down"]) and torch.equal(b.down[1], values(1)["down"])
    assert set(b.state_dict()) == set(b.weights), "a checkpoint holds what is trained, not the store"
    with torch.no_grad():
        b.down[0] += 1
    assert torch.equal(b.read(3, M)["down"], values(3)["down"] + 1)
    b.train_slots([])
    assert not list(b.parameters())
    assert torch.equal(b.read(3, M)["down"], values(3)["down"] + 1), "what was trained is written back"
    assert torch.equal(b.read(2, M)["down"], values(2)["down"])


def test_widening_pads_with_zeros_and_keeps_what_is_trained() -> None:
    b = bank()
    b.write(1, values(1))
    b.write(2, values(2))
    b.train_slots([2])
    b.widen(8)
    assert b.down.shape == (1, D, 8) and not b.down[..., M:].any()
    assert all(torch.equal(value, values(2)[name]) for name, value in b.read(2, M).items())
    b.write(3, values(3, size=8))
    assert all(torch.equal(value, values(3, size=8)[name]) for name, value in b.read(3, 8).items())


def test_shared_weights_are_one_parameter_and_a_copy_for_each_at_rest() -> None:
    form = Form(norm_after="shared")
    b = bank(form)
    for slot in (1, 2):
        b.write(slot, values(slot, form=form))
    b.train_slots([1, 2])
    assert b.after_weight.shape == (1, D) and b.down.shape == (2, D, M)
    with torch.no_grad():
        b.after_weight += 1
    b.train_slots([])
    assert torch.equal(b.read(1, M)["after_weight"], torch.full((D,), 2.0))
    assert torch.equal(b.read(2, M)["after_weight"], torch.full((D,), 2.0))


def test_a_freed_slot_is_used_again() -> None:
    slots = Slots()
    assert [slots.take(name, 1) for name in "abc"] == [1, 2, 3]
    assert slots.release("b") == 2
    assert slots.take("d", 1) == 2
    assert slots.take("e", 1) == 4


@pytest.mark.parametrize("rows", [["a"], ["a", "a"]])
def test_rows_of_one_task_share_one_entry(rows: list[str]) -> None:
    slots = Slots()
    slots.take("a", M)
    index = row_index(slots, rows)
    assert index is not None and index.stored is not None and index.stored.tolist() == [1] and index.member is None
