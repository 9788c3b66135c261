"""Calls by recordings: what they rest on, as far as a machine without a GPU can show it (the rest: test_gpu.py)."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.backbones.graphs import call, recorded, stand_ins
from taskgraft.nn.rows import Draft, Route, bind

from families import SAMPLES, batch, build, perturb


def grafted(name: str = "bert", method: tg.Method | None = None, tasks: str = "abcd") -> Any:
    model = build(name)
    heads = dict.fromkeys(tasks) if SAMPLES[name].writes else {task: 2 + i for i, task in enumerate(tasks)}
    tg.graft(model, method or tg.Adapter(size=4), heads)
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_"))


def hyper() -> tg.Method:
    return tg.HyperFormer(size=4, task_dim=4, hidden_dim=4, projected_dim=4)


def by_rows(model: Any, rows: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    with tg.rows(model, rows):
        return model(**inputs, **options)


# -- without a GPU


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_on_a_cpu_a_graphed_call_is_the_model_itself(name: str) -> None:
    model = grafted(name)
    graphed, inputs = tg.Graphed(model), batch(model, 4)
    parameters = tg.trainable(model)
    for rows in (["a", "b", None, "a"], ["a", "b", None, "a"], "c", None, ["d", "c", "b", "a"]):
        found, wanted = graphed(rows, inputs, return_dict=True), by_rows(model, rows, inputs, return_dict=True)
        assert type(found) is type(wanted) and found.keys() == wanted.keys()
        values = [next(iter(output.values())) for output in (found, wanted)]
        assert torch.equal(*values)
        if rows is None:
            continue
        grads = [
            torch.autograd.grad(
                torch.where(value.isfinite(), value, 0.0).sum(), list(parameters.values()), allow_unused=True
            )
            for value in values
        ]
        for own, other in zip(*grads, strict=True):
            assert (own is None and other is None) or torch.equal(own, other)
    assert not graphed.recordings


def test_labels_are_refused() -> None:
    model = grafted()
    with pytest.raises(tg.GraftError, match=r"takes no labels: take its output's loss with tg\.loss"):
        tg.Graphed(model)("a", {**batch(model), "labels": torch.zeros(6)})


def test_a_model_without_tasks_is_refused() -> None:
    with pytest.raises(tg.GraftError, match="not grafted"):
        tg.Graphed(build("bert"))
    with pytest.raises(tg.GraftError, match="'z' is not on this model"):
        tg.Graphed(grafted())("z", {})


class Held:
    """Stands for a recording."""

    graphed: tg.Graphed


def test_calls_go_by_recordings_inside_a_block_and_only_there() -> None:
    model = grafted()
    inputs = batch(model, 2)
    wanted = by_rows(model, ["a", "b"], inputs).logits
    assert torch.equal(call(model, ["a", "b"], inputs).logits, wanted)
    with recorded(model):
        outer = model.taskgraft.graphed
        assert isinstance(outer, tg.Graphed)
        assert torch.equal(call(model, ["a", "b"], inputs).logits, wanted)
        with recorded(model):
            assert model.taskgraft.graphed is outer
        assert model.taskgraft.graphed is outer
        outer.recordings["a shape"] = recording = Held()
        recording.graphed = outer  # as a recording does
        gone = weakref.ref(recording)
        del recording
    assert model.taskgraft.graphed is None and gone() is None  # with its memory, before garbage is collected
    with pytest.raises(RuntimeError), recorded(model):
        raise RuntimeError
    assert model.taskgraft.graphed is None


# -- drafts: what a recording is made for, and what it is played with


def draft(model: Any, rows: Any) -> Draft:
    found: Draft = model.taskgraft.draft_of(rows)
    return found


SAME: list[tuple[Any, Any]] = [
    (["a", "b", "a"], ["c", "d", "c"]),
    (["a", "b", "a"], ["b", "b", "a"]),
    (["a", "b", "c"], ["d", "d", "a"]),
    (["a", "b", None], [None, "c", "d"]),
    (["a", "a", "a"], ["d", "d", "d"]),
    ("a", "b"),
]
OTHER: list[tuple[Any, Any]] = [
    (["a", "b", "a"], ["a", "b"]),
    (["a", "b", "a"], ["a", "a", "a"]),
    (["a", "b", "a"], ["a", "b", None]),
    (["a", "b", None], ["a", None, None]),
    (["a", "a"], "a"),
    ("a", None),
]


@pytest.mark.parametrize("trained", ["abcd", ""], ids=["trained", "at rest"])
@pytest.mark.parametrize("rows", SAME, ids=str)
def test_one_recording_serves_all_tasks_of_one_composition(rows: tuple[Any, Any], trained: str) -> None:
    model = grafted()
    tg.train_only(model, list(trained))
    one, other = (draft(model, each) for each in rows)
    assert one.outline == other.outline and one.flat().shape == other.flat().shape
    assert not torch.equal(one.flat(), other.flat())


@pytest.mark.parametrize("rows", OTHER, ids=str)
def test_another_composition_is_another_recording(rows: tuple[Any, Any]) -> None:
    model = grafted()
    one, other = (draft(model, each) for each in rows)
    assert one.outline != other.outline


def test_trained_rows_stored_rows_and_kinds_are_told_apart() -> None:
    model = grafted()
    rows = ["a", "b", "a"]
    trained = draft(model, rows).outline
    tg.train_only(model, ["a"])
    assert len({trained, draft(model, rows).outline, draft(model, ["b", "c", "b"]).outline}) == 3
    for task in "ef":
        tg.add_task(model, task, tg.Adapter(size=4, activation="relu"), 2, train=False)
    assert draft(model, ["b", "e", "b"]).outline != draft(model, ["b", "c", "b"]).outline
    assert draft(model, ["f", "e", "f"]).outline != draft(model, ["b", "c", "b"]).outline
    made = grafted(method=hyper())
    assert draft(made, ["a", "b", "a"]).outline == draft(made, ["d", "c", "d"]).outline
    assert draft(made, ["a", "b", "a"]).outline != draft(made, ["a", "b", "c"]).outline, "three tasks are generated"
    assert draft(made, ["a", "b", None]).outline != draft(made, ["a", "b", "c"]).outline


def test_recordings_of_generated_tasks_are_few() -> None:
    """Trained tasks that are not in a batch are generated with those that are, and change nothing."""
    model = grafted(method=hyper())
    perturb(model)
    grafts = model.taskgraft
    mixed = [["a", "b", "a"], ["d", "c", "b"], ["c", "c", "d"]]
    assert len({grafts.draft_of(rows, recorded=True).outline for rows in mixed}) == 1
    assert len({grafts.draft_of(rows).outline for rows in mixed}) == 2, "else nothing more than needed is generated"
    one = grafts.draft_of(["a", "a", "a"], recorded=True)
    assert one.outline == grafts.draft_of(["a", "a", "a"]).outline, "a batch of one task generates it alone"
    tg.train_only(model, [])
    assert len({grafts.draft_of(rows, recorded=True).outline for rows in mixed}) == 2
    tg.train_only(model, list("abcd"))
    inputs = {"input_ids": torch.randint(1, 90, (3, 5))}
    for rows in (*mixed, ["a", None, "b"]):
        found = grafts.draft_of(rows, recorded=True)
        assert len(next(iter(found.generated.values())).tasks.sizes or ()) == 4
        gradients = []
        for route in (grafts.route_of(rows), found.route(found.flat())):
            model.zero_grad()
            with bind(grafts.bound, route):
                model(**inputs).logits[:, :2].nan_to_num(posinf=0, neginf=0).square().sum().backward()
            gradients.append({name: p.grad for name, p in tg.trainable(model).items()})
        for name, plain in gradients[0].items():
            other = gradients[1][name]
            assert other is not None and torch.allclose(plain, other, atol=1e-6), name
        (embeddings,) = (value for name, value in gradients[1].items() if name.endswith("embedding"))
        absent = [place for place, task in enumerate("abcd") if task not in rows]
        assert embeddings is not None and not embeddings[absent].any(), "exactly zero: they are held still"


def numbers(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else tensor.tolist()


def tensors_of(route: Route) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for index in [*route.kinds.values(), *(made.tasks for made in route.generated_rows.values())]:
        found += [index.stored, index.trained, index.positions, index.sizes, index.group, index.member]
        found += [None, None] if index.segments is None else [index.segments.order, index.segments.starts]
    return found + [made.rows for made in route.generated_rows.values()]


@pytest.mark.parametrize("method", [None, hyper()], ids=["adapter", "hyperformer"])
@pytest.mark.parametrize("rows", [["b", "a", None, "d", "b"], ["c", "a", "c", "d", "b"], ["b"] * 5, "c"], ids=str)
def test_a_draft_and_its_numbers_make_the_route(rows: Any, method: tg.Method | None) -> None:
    """Also when the numbers travel alone, to a draft of other tasks and the same outline."""
    model = grafted(method=method)
    made = draft(model, rows)
    route, wanted = made.route(made.flat()), model.taskgraft.route_of(rows)
    assert route.names == wanted.names and route.length == wanted.length and route.kernel == wanted.kernel
    for key, lookup in made.kinds.items():
        index = route.kinds[key]
        for field in ("stored", "trained", "positions", "sizes", "group", "member"):
            assert numbers(getattr(index, field)) == getattr(lookup, field), field
        order, starts = (None, None) if index.segments is None else (index.segments.order, index.segments.starts)
        assert (numbers(order), numbers(starts)) == (lookup.order, lookup.starts)
    names = {"a": "d", "b": "a", "c": "b", "d": "c", None: None}
    others = names[rows] if isinstance(rows, str) else [names[name] for name in rows]
    swapped = draft(model, others).route(made.flat())
    for each in (route, swapped):
        for found, value in zip(tensors_of(each), tensors_of(wanted), strict=True):
            assert (found is None and value is None) or torch.equal(found, value)
    with torch.no_grad():
        inputs = batch(model, 5)
        expected = by_rows(model, rows, inputs).logits
        with tg.rows(model, others) as bound:
            model.taskgraft.bound.route = swapped
            assert torch.equal(model(**inputs).logits, expected)
            model.taskgraft.bound.route = bound


def test_numbers_that_are_overwritten_change_the_route() -> None:
    """That is how a recording is played for other rows: its tensors are parts of one that stays where it is."""
    model = grafted()
    flat = draft(model, ["a", "b", "a"]).flat()
    route = draft(model, ["a", "b", "a"]).route(flat)
    flat.copy_(draft(model, ["d", "c", "b"]).flat())
    inputs = batch(model, 3)
    with torch.no_grad():
        expected = by_rows(model, ["d", "c", "b"], inputs).logits
        with tg.rows(model, "a"):
            model.taskgraft.bound.route = route
            found = model(**inputs).logits
    assert torch.equal(found, expected)


def test_the_layout_changes_when_weights_move_and_only_then() -> None:
    """Recordings are dropped by it, so it must not change with tasks that fit into the room there is."""
    model = grafted(tasks="ab")
    tg.train_only(model, [])
    layouts = [model.taskgraft.layout]

    def moved() -> bool:
        layouts.append(model.taskgraft.layout)
        return layouts[-1] != layouts[-2]

    tg.add_task(model, "c", tg.Adapter(size=4), 2, train=False)
    assert not moved(), "there is room for four"
    tg.remove_task(model, "c")
    tg.add_task(model, "d", tg.Adapter(size=4), 2, train=False)
    assert not moved()
    tg.add_task(model, "e", tg.Adapter(size=4), 2, train=False)
    assert moved(), "the store has grown"
    tg.add_task(model, "wide", tg.Adapter(size=9), 2, train=False)
    assert moved()
    tg.train_only(model, "a")
    assert moved()
    model.taskgraft.swap("a", "f", tg.Adapter(size=4), tg.Head.of(2), seed=3)
    assert not moved(), "it took the place of another"
    model.to(torch.float64)
    assert moved()


def test_a_batch_norm_is_never_recorded() -> None:
    model = grafted(method=tg.Adapter(size=4, norm_inside="batch"))
    plain = grafted()
    assert model.taskgraft.has_batch_norm(draft(model, "a").kinds)
    assert not plain.taskgraft.has_batch_norm(draft(plain, "a").kinds)
    assert not model.taskgraft.has_batch_norm(draft(model, None).kinds)


def test_stand_ins_are_of_the_same_memory_and_leave_no_trace() -> None:
    model = grafted()
    own = tg.trainable(model)
    before = {name: id(value) for name, value in own.items()}
    inputs = batch(model, 2)
    held = by_rows(model, ["a", "b"], inputs).logits[:, :2].sum()  # a graph that ties the parameters down
    with stand_ins(model, own) as made:
        others = tg.trainable(model)
        assert all(others[name] is made[name] and made[name] is not value for name, value in own.items())
        assert all(made[name].data_ptr() == value.data_ptr() for name, value in own.items())
        loss = by_rows(model, ["a", "b"], inputs).logits[:, :2].sum()
        found = torch.autograd.grad(loss, list(made.values()), allow_unused=True)
    assert {name: id(value) for name, value in tg.trainable(model).items()} == before
    wanted = torch.autograd.grad(held, list(own.values()), allow_unused=True)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_stand_ins_are_taken_out_again_after_an_error() -> None:
    model = grafted()
    own = tg.trainable(model)
    with pytest.raises(RuntimeError), stand_ins(model, own):
        raise RuntimeError
    assert all(value is own[name] for name, value in tg.trainable(model).items())
