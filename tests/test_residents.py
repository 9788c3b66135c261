"""Grafts within a budget of bytes: one that is asked comes, the least recently used goes, and no answer changes."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import taskgraft as tg
from taskgraft.backbones import room
from taskgraft.backbones.kinds import Kind
from taskgraft.errors import Expired, Unreadable
from taskgraft.nn.bank import AdapterBank, fresh_bottleneck
from taskgraft.nn.bottleneck import Form
from taskgraft.nn.rows import Slots
from taskgraft.serving import engine as engine_module
from taskgraft.serving.answers import Answer

from serving import (
    SECONDS,
    Counted,
    Held,
    World,
    ask,
    asking_of,
    bytes_of,
    engine_on,
    reader,
    readers,
    results,
    same,
    small,
    taken,
    together,
    until,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "error::pytest.PytestUnhandledThreadExceptionWarning")

DIMENSIONS: dict[str, Any] = {"size": 4, "task_dim": 6, "hidden_dim": 10, "projected_dim": 5}
MANY = 24


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Many tasks of one kind, t0, t1, ..., and one of every other. Tests do not change the store."""
    world = World(tmp_path_factory.mktemp("many"), reader())
    for number in range(MANY):
        world.put(small(world.alone, number))
    for graft in readers(world.alone).values():
        world.put(graft)
    records = {"b": {"task": {"kind": "classification", "labels": ["x", "y"]}}}
    heads: dict[str, tg.Head | None] = {"b": tg.Head("classification", ("x", "y"))}
    world.put_joint(together(world.alone, tg.HyperFormer(shared=True, **DIMENSIONS), heads, records, 3), "hyper")
    return world


def graft_of(world: World, name: str) -> tg.Graft:
    graft = world.grafts[name]
    assert isinstance(graft, tg.Graft)
    return graft


def names(world: World, count: int = MANY) -> list[str]:
    return [name for name in world.grafts if name[1:].isdigit()][:count]


def room_for(world: World, count: int) -> int:
    return bytes_of(world.alone, *(graft_of(world, name) for name in names(world, count)))


# -- the budget


@pytest.mark.parametrize("count", [1, 2, 5])
def test_more_tasks_than_there_is_room_for_all_answer(many: World, count: int) -> None:
    budget, counted = room_for(many, count), Counted()
    draw = random.Random(count)
    with engine_on(many.folder, memory=budget, tokens=80, watch=counted) as engine:
        for _ in range(3):
            questions = [asking_of(many, name, draw, 9) for name in draw.sample(names(many), MANY)]
            many.check(ask(engine, questions), questions)
            assert taken(engine) == engine.residents.bytes <= budget
        assert len(engine.residents.order) == count, "all the room there is is used"
        assert engine.residents.arrived - engine.residents.departed == count
    assert counted.most_held <= budget and counted.most_bytes <= budget


def test_all_that_there_is_room_for_stays(many: World) -> None:
    questions = [(name, "the film was good") for name in names(many, 6)]
    with engine_on(many.folder, memory=room_for(many, 6)) as engine:
        for _ in range(4):
            many.check(ask(engine, questions), questions)
        assert (engine.residents.arrived, engine.residents.departed) == (6, 0)


def test_the_one_that_was_not_asked_for_longest_goes(many: World) -> None:
    with engine_on(many.folder, memory=room_for(many, 3)) as engine:
        for name in ("t0", "t1", "t2", "t0", "t3"):
            ask(engine, [(name, "good")])
        assert [version.name for version in engine.residents.order.values()] == ["t2", "t0", "t3"]


@settings(max_examples=12)
@given(data=st.data())
def test_tasks_of_all_kinds_and_sizes_alternate_within_a_budget(many: World, data: st.DataObject) -> None:
    """Widths, forms, poolings and heads that share no bank, in a room that a few of them fill."""
    kinds = [name for name in many.grafts if name not in names(many)] + names(many, 4)
    largest = max(bytes_of(many.alone, graft_of(many, name)) for name in kinds if "/" not in name)
    budget = data.draw(st.integers(largest, 3 * largest))
    order = data.draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=25))
    draw, counted = random.Random(0), Counted()
    questions = [asking_of(many, name, draw, 12) for name in order]
    with engine_on(many.folder, memory=budget, tokens=data.draw(st.sampled_from([40, 1000])), watch=counted) as engine:
        half = len(questions) // 2
        many.check(ask(engine, questions[:half]), questions[:half])
        many.check(ask(engine, questions), questions)
        assert taken(engine) == engine.residents.bytes <= budget
    assert counted.most_held <= budget and counted.most_bytes <= budget


def test_the_bytes_that_are_told_are_those_that_are_taken(many: World) -> None:
    """Also while a batch runs for which room was given back that did not suffice."""
    counted, questions = Counted(), [(name, "good") for name in ("mood", "t0", "topic", "stars", "t1", "price")]
    with engine_on(many.folder, memory=21_016, watch=counted) as engine:
        for _ in range(3):
            many.check(ask(engine, questions), questions)
    assert not counted.differed


def test_a_batch_whose_grafts_do_not_fit_together_is_run_in_parts(many: World) -> None:
    questions = [(name, "the film was good") for name in names(many, 9)]
    with engine_on(many.folder, memory=room_for(many, 2)) as engine:
        with Held(engine) as held:
            first = engine.submit([("t9", "good")])
            assert held.entered.wait(SECONDS)
            futures = engine.submit(questions)
            until(lambda: len(engine._ready) == len(questions))
        many.check(results([*first, *futures]), [("t9", "good"), *questions])
        assert sum(held.rows) == 10 and max(held.rows) == 2


def test_a_task_is_paged_once_for_all_that_wait_for_it(many: World) -> None:
    """Two tasks by turns, and room for one: its rows are run together, not brought and sent away for each."""
    questions = [(name, f"the film was good {number}") for number in range(10) for name in ("t0", "t1")]
    with engine_on(many.folder, memory=room_for(many, 1)) as engine:
        with Held(engine) as held:
            first = engine.submit([("t2", "good")])
            assert held.entered.wait(SECONDS)
            futures = engine.submit(questions[:2])
            until(lambda: len(engine._ready) == 2)  # both have been read, so that the others wait by turns
            futures += engine.submit(questions[2:])
            until(lambda: len(engine._ready) == len(questions))
        many.check(results([*first, *futures]), [("t2", "good"), *questions])
        assert engine.residents.arrived <= 5, f"{engine.residents.arrived} arrivals of three tasks"


def test_a_large_batch_of_tasks_that_do_not_fit_together(many: World) -> None:
    """As many parts as there are rows, more than Python calls may lie in one another."""
    questions = [(name, "good") for _ in range(700) for name in ("t0", "t1")]
    with engine_on(many.folder, memory=room_for(many, 1), tokens=1 << 20, waiting=2000) as engine:
        said = {name: ask(engine, [(name, "good")])[0] for name in ("t0", "t1")}
        with Held(engine) as held:
            first = engine.submit([("t2", "good")])
            assert held.entered.wait(SECONDS)
            futures = engine.submit(questions[:2])
            until(lambda: len(engine._ready) == 2)  # both have been read, so that the others wait by turns
            futures += engine.submit(questions[2:])
            until(lambda: len(engine._ready) == len(questions))
        found = results([*first, *futures])[1:]
        wrong = [answer for answer in found if not isinstance(answer, Answer)]
        assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[0]!r}"
        assert all(answer.label == said[answer.task].label for answer in found)


@pytest.fixture
def own(many: World, tmp_path: Path) -> World:
    """A store of three small tasks, one that is large, and one for another backbone."""
    world = World(tmp_path, many.alone)
    for number in range(3):
        world.put(small(world.alone, number))
    world.put(small(world.alone, 9, size=300, name="large"))
    torch.manual_seed(5)
    other = tg.Backbone(type(world.alone.model)(world.alone.model.config).eval(), world.alone.tokenizer, "other")
    world.put(small(other, 8, name="foreign"))
    return world


@pytest.mark.parametrize("wrong", ["large", "foreign"])
def test_a_graft_that_cannot_be_placed_fails_alone_and_pushes_nobody_out(own: World, wrong: str) -> None:
    budget = bytes_of(own.alone, *(graft_of(own, f"t{number}") for number in range(3)))
    good = [(f"t{number}", "the film was good") for number in range(3)]
    with engine_on(own.folder, memory=budget) as engine:
        own.check(ask(engine, good), good)
        before = engine.residents.departed
        for _ in range(2):
            found = ask(engine, [good[0], (wrong, "good"), *good[1:], (wrong, "bad")])
            own.check([found[0], *found[2:4]], good)
            for error in (found[1], found[4]):
                assert isinstance(error, Unreadable) and wrong in str(error), repr(error)
                assert wrong == "foreign" or ("memory" in str(error) and f"{budget:,}" in str(error))
        assert engine.residents.bytes == taken(engine) <= budget
        assert engine.residents.departed == before, "others were pushed out for one that cannot be placed"


def test_a_budget_that_is_too_small_for_anything(own: World) -> None:
    with engine_on(own.folder, memory=0) as engine:
        found = ask(engine, [("t0", "good"), ("t1", "good")])
        assert {type(error) for error in found} == {Unreadable} and engine.residents.bytes == taken(engine) == 0


def test_a_put_is_tried_on_within_the_budget(own: World) -> None:
    budget = bytes_of(own.alone, graft_of(own, "t0"), graft_of(own, "t1"))
    good = [("t0", "good"), ("t1", "good")]
    with engine_on(own.folder, memory=budget) as engine:
        own.check(ask(engine, good), good)
        with pytest.raises(Unreadable, match="more memory"):
            engine.put(graft_of(own, "large"), "fourth")
        assert "fourth" not in own.store
        assert engine.put(small(own.alone, 5), "fourth") == 1
        assert engine.residents.bytes == taken(engine) <= budget
        own.grafts["fourth"] = small(own.alone, 5)
        own.check(ask(engine, [*good, ("fourth", "good")]), [*good, ("fourth", "good")])


def test_a_put_that_fails_in_the_middle_leaves_no_trace(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the head once the adapters are there: what is on the model is what was."""
    good = [("t0", "good"), ("t1", "good")]
    with engine_on(own.folder) as engine:
        own.check(ask(engine, good), good)
        add = Kind.add

        def fails(kind: Kind, *args: Any) -> None:
            if kind.exact_width:
                raise torch.OutOfMemoryError("CUDA out of memory")
            add(kind, *args)

        monkeypatch.setattr(Kind, "add", fails)
        assert isinstance(ask(engine, [("t2", "good")])[0], Unreadable)
        monkeypatch.undo()
        kinds = engine.residents.grafts.kinds.values()
        assert {len(kind.slots.of) for kind in kinds} == {2}, "slots that nobody has are taken"
        assert engine.residents.bytes == taken(engine)
        own.check(ask(engine, [*good, ("t2", "good")]), [*good, ("t2", "good")])


def test_a_joint_whose_task_has_the_name_of_a_resident_on_the_model(own: World) -> None:
    """How an engine calls a graft on the model is its own affair."""
    with engine_on(own.folder) as engine:
        own.check(ask(engine, [("t0", "good")]), [("t0", "good")])
        [key] = engine.residents.order
        records = {key: {"task": {"kind": "classification", "labels": ["x", "y"]}}}
        heads: dict[str, tg.Head | None] = {key: tg.Head("classification", ("x", "y"))}
        own.put_joint(together(own.alone, tg.HyperFormer(**DIMENSIONS), heads, records, 3), "hyper")
        questions = [(f"hyper/{key}", "good"), ("t0", "good")]
        own.check(ask(engine, questions), questions)


def test_a_model_that_has_tasks_of_its_own_keeps_them(many: World) -> None:
    backbone = reader()
    model = tg.graft(backbone.model, tg.Adapter(size=4), {"v1": 2, "mine": 3})
    tg.train_only(model, [])
    inputs = dict(backbone.tokenizer(["the film was good"], return_tensors="pt"))

    def logits() -> Tensor:
        with torch.no_grad(), tg.rows(model, ["mine"]):
            return model(**inputs).logits  # type: ignore[no-any-return]

    before = logits()
    questions = [(name, "good") for name in names(many, 8)]
    with engine_on(many.folder, backbone, memory=room_for(many, 5)) as engine:
        many.check(ask(engine, questions), questions)
    assert tg.tasks_of(model) == ["v1", "mine"] and torch.equal(logits(), before)


# -- reading ahead


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_deadlock_when_little_is_read_ahead(many: World, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    monkeypatch.setattr(engine_module, "READ_AHEAD", ahead)
    draw = random.Random(ahead)
    with engine_on(many.folder, memory=room_for(many, 1)) as engine:
        for _ in range(3):
            questions = [asking_of(many, name, draw, 9) for name in draw.choices(names(many), k=40)]
            many.check(ask(engine, questions), questions)


def test_a_graft_that_cannot_be_read_does_not_stop_its_own_reader(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second question comes just after the read has failed and before the first has heard of it."""
    monkeypatch.setattr(engine_module, "READ_AHEAD", 1)
    path = own.folder / "t0" / "graft.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with engine_on(own.folder) as engine:
        find, routed = engine.library.find, threading.Event()

        def find_later(name: str, number: int | None = None) -> Any:
            if threading.current_thread().name.startswith("taskgraft-read"):
                second.extend(engine.submit([("t0", "bad")]))
                until(lambda: version.parked is not None or routed.is_set())
                routed.set()
            return find(name, number)

        version, second = engine.library.find("t0"), []  # type: ignore[var-annotated]
        engine.library.find = find_later  # type: ignore[method-assign]
        first = engine.submit([("t0", "good")])
        until(lambda: routed.is_set())
        engine.library.find = find  # type: ignore[method-assign]
        assert {type(error) for error in results([*first, *second])} == {Unreadable}
        own.check(ask(engine, [("t1", "good")]), [("t1", "good")])


def test_what_was_read_for_nobody_is_let_go(many: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(many.folder, memory=room_for(many, 2)) as engine:
        with Held(engine) as held:
            first = engine.submit([("t0", "good"), ("t1", "good")])
            assert held.entered.wait(SECONDS)
            late = engine.submit([(name, "good") for name in names(many)[2:10]], timeout=0.01)
            until(lambda: len(engine._ready) >= 8)
        assert {type(error) for error in results([*first, *late])[2:]} == {Expired}
        loaded = [engine.library.find(name).loaded for name in names(many)[2:10]]
        assert loaded == [None] * 8 and not engine._unplaced


# -- giving room back


def logits_of(model: Any, tasks: list[str], inputs: dict[str, Tensor]) -> list[Tensor]:
    """What each task says, alone and with the others."""
    found = []
    for rows in [*([task] * 3 for task in tasks), (tasks * 3)[:3]]:
        with torch.no_grad(), tg.rows(model, rows):
            output = model(**inputs)
        for value in (output.logits, output.token_logits):
            if value is not None:  # without the columns that wider heads have
                found.append(value[..., torch.isfinite(value).flatten(0, -2).any(0)])
    return found


@settings(max_examples=20)
@given(data=st.data())
def test_compacting_changes_no_bit_of_those_who_stay(many: World, data: st.DataObject) -> None:
    backbone = many.alone
    pool = [*names(many, 8), "mood", "topic", "entities", "where", "nli", "stars", "plain"]
    chosen = data.draw(st.lists(st.sampled_from(pool), min_size=2, max_size=9, unique=True))
    model = tg.graft(backbone.model, tg.HeadOnly(), tasks=())
    try:
        for name in chosen:
            tg.add_graft(model, graft_of(many, name))
        leaving = data.draw(st.lists(st.sampled_from(chosen), max_size=len(chosen) - 1, unique=True))
        for name in leaving:
            tg.remove_task(model, name)
        staying = [name for name in chosen if name not in leaving]
        inputs = dict(backbone.tokenizer(["good film", "bad", "it was"], return_tensors="pt", padding=True))
        before, weights = logits_of(model, staying, inputs), {name: model.taskgraft.read(name) for name in staying}
        widths = [bank.width for kind in model.taskgraft.kinds.values() for bank in kind.banks.values()]
        room.compact(model.taskgraft)
        held = room.held(model.taskgraft)
        for name in staying:
            assert all(torch.equal(value, weights[name][key]) for key, value in model.taskgraft.read(name).items())
        same_widths = widths == [bank.width for kind in model.taskgraft.kinds.values() for bank in kind.banks.values()]
        for now, then in zip(logits_of(model, staying, inputs), before, strict=True):
            torch.testing.assert_close(now, then, rtol=0 if same_widths else 1e-6, atol=0 if same_widths else 1e-6)
        assert held == room.used(model.taskgraft)
        assert all(kind.capacity == len(kind.slots.of) + 1 for kind in model.taskgraft.kinds.values())
        newcomer = next(name for name in names(many) if name not in chosen)  # and room is made again
        tg.add_graft(model, graft_of(many, newcomer))
        for key, value in model.taskgraft.read(newcomer).items():
            assert torch.equal(value, graft_of(many, newcomer).tensors[key])
        for name in staying:
            assert all(torch.equal(value, weights[name][key]) for key, value in model.taskgraft.read(name).items())
    finally:
        tg.ungraft(backbone.model)


def test_room_that_is_given_back_is_really_given_back(many: World) -> None:
    large = small(many.alone, 30, size=64)
    model = tg.graft(many.alone.model, tg.HeadOnly(), tasks=())
    grafts = model.taskgraft
    try:
        for name in names(many, 9):
            tg.add_graft(model, graft_of(many, name))
        tg.add_graft(model, large)
        full = room.held(grafts)
        for name in [large.name, *names(many, 8)]:
            tg.remove_task(model, name)
        assert room.held(grafts) == full, "room is kept until it is needed elsewhere"
        room.compact(grafts)
        tensors = [value for kind in grafts.kinds.values() for bank in kind.banks.values() for value in bank.buffers()]
        assert {value.shape[0] for value in tensors} == {2}, "the bare backbone's slot, and one"
        storage = sum(value.untyped_storage().nbytes() for value in tensors)
        assert storage == room.held(grafts) < full / 20
        with pytest.raises(tg.GraftError, match="not on this model"), tg.rows(model, ["t0"]):
            pass
    finally:
        tg.ungraft(many.alone.model)


def test_rows_that_were_named_before_must_be_named_again(many: World) -> None:
    model = tg.graft(many.alone.model, tg.HeadOnly(), tasks=())
    inputs = dict(many.alone.tokenizer(["good film", "bad"], return_tensors="pt", padding=True))
    try:
        for name in names(many, 3):
            tg.add_graft(model, graft_of(many, name))
        tg.remove_task(model, "t0")
        with tg.rows(model, ["t1", "t2"]):
            room.compact(model.taskgraft)
            with pytest.raises(tg.GraftError, match="name them again"):
                model(**inputs)
    finally:
        tg.ungraft(many.alone.model)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from([2, 3, 4, 5, 8, 16]), st.booleans()), min_size=1, max_size=14), st.integers(0, 9)
)
def test_what_was_foretold_of_room_is_what_it_takes(many: World, steps: list[tuple[int, bool]], extra: int) -> None:
    """`held_with` before a task comes is `held` after it, unless there is more to grow into: up to the budget."""
    model = tg.graft(many.alone.model, tg.HeadOnly(), tasks=())
    grafts = model.taskgraft
    try:
        there: list[str] = []
        for number, (size, leaves) in enumerate(steps):
            method, head = tg.Adapter(size=size), tg.Head("classification", tuple("abcdefghijklmnop"[:size]))
            foretold = room.held_with(grafts, method, head)
            before = {key: kind.bytes_with() for key, kind in grafts.kinds.items()}
            assert room.held(grafts) == sum(before.values()), "to ask changes nothing"
            budget = foretold + extra * 1000
            room.grow(grafts, method, head, budget)
            grafts.add(f"x{number}", method, head)
            there.append(f"x{number}")
            assert foretold <= room.held(grafts) <= budget
            assert extra or room.held(grafts) == foretold
            buffers = [
                value for kind in grafts.kinds.values() for bank in kind.banks.values() for value in bank.buffers()
            ]
            assert sum(value.numel() * value.element_size() for value in buffers) == room.held(grafts)
            assert room.used(grafts) <= room.held(grafts)
            if leaves:
                tg.remove_task(model, there.pop(0))
            if leaves and number % 3 == 0 and there:
                room.compact(grafts)
                assert room.used(grafts) == room.held(grafts)
    finally:
        tg.ungraft(many.alone.model)


# -- slots and banks on their own


@given(st.lists(st.integers(0, 9), max_size=40))
def test_compact_slots_are_numbered_without_gaps(steps: list[int]) -> None:
    """A number is a task that comes if it is away, and leaves if it is there."""
    slots, kept = Slots(), {}
    for number, step in enumerate(steps):
        name = f"t{step}"
        if name in slots.of:
            slots.release(name)
            del kept[name]
        else:
            slot = slots.take(name, step)
            assert 0 < slot <= 10 and slot not in kept.values(), "slot 0 is the bare backbone's"
            kept[name] = slot
        if number % 7 == 6:
            kept = compacted(slots, kept)
    kept = compacted(slots, kept)
    assert slots.take("newcomer", 1) == len(kept) + 1
    assert slots.sizes == {*(int(name[1:]) for name in kept), 1}


def compacted(slots: Slots, before: dict[str, int]) -> dict[str, int]:
    assert slots.of == before
    memory = {slot: name for name, slot in before.items()}
    for old, new in slots.compact():
        assert new not in memory, "nothing that is there is written over"
        memory[new] = memory.pop(old)
    assert memory == {slot: name for name, slot in slots.of.items()}
    assert sorted(slots.of.values()) == list(range(1, len(before) + 1))
    assert slots.compact() == []
    return dict(slots.of)


FORMS = [Form(), Form(norm_inside="batch"), Form(depth=2, norm_before=True), Form(depth=0, norm_after="own")]


@settings(max_examples=40)
@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=12, unique_by=lambda pair: pair[0]),
    st.permutations(range(1, 10)),
    st.data(),
)
def test_banks_resize_and_move_and_keep_what_they_hold(
    form: Form, slots: list[tuple[int, int]], elsewhere: list[int], data: st.DataObject
) -> None:
    """Slots of several sizes, written, moved to other places, given more room and less."""
    bank = AdapterBank(form, 5, 6, torch.device("cpu"), torch.float32)
    values = {slot: fresh(form, size, slot) for slot, size in slots}
    for slot, value in values.items():
        bank.write(slot, value)
    free = [slot for slot in elsewhere if slot not in values]
    moving = data.draw(st.lists(st.sampled_from(sorted(values)), max_size=len(free), unique=True))
    moves = dict(zip(moving, free, strict=False))
    bank.resize(max(bank.capacity, *moves.values(), 0) + 1)
    place = bank.place
    bank.move(list(moves.items()))
    now = {moves.get(slot, slot): (size, values[slot]) for slot, size in slots}
    bank.resize(max(now) + 1)
    assert bank.capacity == max(now) + 1 and bank.place is not place
    stores = [bank.store(name) for name in bank.weights]
    assert bank.bytes_of(bank.width, bank.capacity) == sum(s.numel() * s.element_size() for s in stores)
    assert all(s.untyped_storage().nbytes() == s.numel() * s.element_size() and not s.requires_grad for s in stores)
    for slot, (size, value) in now.items():
        read = bank.read(slot, size)
        assert set(read) == set(value) and all(torch.equal(read[name], value[name]) for name in value)
    assert not any(bank.store(name)[0].any() for name in bank.weights), "the bare backbone's slot is as it was"
    bank.write(max(now) + 1, fresh(form, 3, 99))
    assert bank.capacity > max(now) + 1
    assert all(torch.equal(bank.read(max(now) + 1, 3)[name], value) for name, value in fresh(form, 3, 99).items())


def fresh(form: Form, size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = fresh_bottleneck(5, size, form, 0.5, generator)
    return {name: torch.randn(value.shape, generator=generator) for name, value in made.items()}


def test_what_was_made_in_inference_mode_can_be_trained_later(many: World) -> None:
    """An engine's thread may resize banks in inference mode; they outlive it."""
    bank = AdapterBank(Form(), 5, 4, torch.device("cpu"), torch.float32)
    bank.write(1, fresh(Form(), 4, 1))
    with torch.inference_mode():
        bank.resize(4)
        bank.move([(1, 2)])
    bank.train_slots([2])
    bank.down.sum().backward()
    assert np.isfinite(bank.down.grad.numpy()).all()


def test_grafts_that_leave_while_others_ask(many: World) -> None:
    """Threads over a budget for two, so that nearly every question brings one and sends one away."""
    problems: list[str] = []
    questions = {name: (name, "the film was good") for name in names(many, 10)}
    said = {name: many.said(asking) for name, asking in questions.items()}
    counted = Counted()
    budget = room_for(many, 2)
    with engine_on(many.folder, memory=budget, tokens=60, watch=counted) as engine:

        def query(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(25):
                chosen = draw.choices([*questions], k=draw.randint(1, 4))
                try:
                    for name, answer in zip(chosen, ask(engine, [questions[name] for name in chosen]), strict=True):
                        same(answer, said[name])
                except BaseException as error:
                    problems.append(repr(error))

        threads = [threading.Thread(target=query, args=(seed,), daemon=True) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
        assert not any(thread.is_alive() for thread in threads) and not problems, problems[:2]
        assert engine.waiting == 0 and not engine._unplaced
        assert counted.most_held <= budget and counted.most_bytes <= budget
