"""The per-slot optimiser: equal to torch's AdamW for a task alone, and blind to tasks without rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import taskgraft as tg

from families import batch, build, perturb


def grafted(tasks: list[str], **changes: Any) -> Any:
    model = build("bert", torch.float64)
    method = tg.Adapter(size=4, head_dropout=0.0, **changes)
    tg.graft(model, method, dict.fromkeys(tasks, 2))
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads"))


def backward(model: Any, rows: list[str], seed: int, scale: float = 1.0) -> None:
    inputs = batch(model, rows=len(rows), seed=seed)
    labels = torch.randint(0, 2, (len(rows),), generator=torch.Generator().manual_seed(seed))
    with tg.rows(model, rows):
        (scale * len(rows) * tg.loss(model, model(**inputs), labels)).backward()


def snapshot(model: Any, task: str) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.taskgraft.read(task).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def moments(optimizer: tg.AdamW, task: str) -> list[torch.Tensor]:
    number = optimizer.owners.index(task)
    found = []
    for group in optimizer.param_groups:
        for parameter, slots in zip(group["params"], group["slots"], strict=True):
            state = optimizer.state[parameter]
            if state and number in slots:
                place = slots.index(number)
                found += [state[key][place].clone() for key in ("exp_avg", "exp_avg_sq")]
    return [optimizer.steps[number].clone(), *found]


@pytest.mark.parametrize(("shared", "eps"), [(True, 1e-6), (False, 1e-8)], ids=["plus", "hyperformer"])
def test_generators_of_their_own_have_a_smaller_epsilon(shared: bool, eps: float) -> None:
    model = build("bert", torch.float64)
    tg.graft(model, tg.HyperFormer(shared=shared, size=4), {"a": 2, "b": 2})
    assert {group["eps"] for group in tg.AdamW(model).param_groups} == {eps}
    assert {group["eps"] for group in tg.AdamW(model, eps=1e-3).param_groups} == {1e-3}


def test_one_task_alone_steps_as_torch_adamw_does() -> None:
    ours, theirs = grafted(["a"]), grafted(["a"])
    named = tg.trainable(theirs)
    decayed = [
        p
        for path, p in named.items()
        if path.rpartition(".")[2] in ("down", "up") or (path.startswith("taskgraft") and path.endswith("weight"))
    ]
    others = [p for p in named.values() if not any(p is q for q in decayed)]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-6
    )
    optimizer = tg.AdamW(ours, lr=1e-2, weight_decay=0.1)
    for step in range(10):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            backward(model, ["a"] * 4, step)
            opt.step()
    for path, parameter in tg.trainable(ours).items():
        assert torch.allclose(parameter, named[path], rtol=1e-9, atol=1e-12), path


def test_a_task_without_rows_changes_in_no_bit() -> None:
    """B has trained before, so it has moments; then 50 steps on rows of A only, with decay."""
    model = grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, ["a", "b", "b"], step)
        optimizer.step()
    weights, state = snapshot(model, "b"), moments(optimizer, "b")
    assert any(value.abs().sum() > 0 for value in state)
    started = snapshot(model, "a")
    for step in range(50):
        optimizer.zero_grad(set_to_none=bool(step % 2))
        backward(model, ["a", "a"], step)
        optimizer.step()
    assert equal(weights, snapshot(model, "b"))
    assert all(torch.equal(x, y) for x, y in zip(state, moments(optimizer, "b"), strict=True))
    assert not equal(started, snapshot(model, "a"))


def test_tasks_trained_together_equal_each_trained_alone() -> None:
    """Own learning rates, own clipping, unequal numbers of steps."""
    rates, clips = {"a": 1e-2, "b": 3e-3}, {"a": 0.05, "b": 1e9}
    schedule = [["a", "b"], ["a", "a"], ["b"], ["a", "b", "b"], ["a"]]
    together = grafted(["a", "b"])
    optimizer = tg.AdamW(together, lr=rates, clip_norm=clips, weight_decay=0.1)
    for step, rows in enumerate(schedule):
        optimizer.zero_grad()
        backward(together, rows, step)
        optimizer.step()
    for task in ("a", "b"):
        alone = grafted(["a", "b"])
        tg.train_only(alone, task)
        single = tg.AdamW(alone, lr=rates[task], clip_norm=clips[task], weight_decay=0.1)
        for step, rows in enumerate(schedule):
            if task in rows:
                single.zero_grad()
                backward(alone, rows, step)
                single.step()
        for key, value in together.taskgraft.read(task).items():
            assert torch.allclose(value, alone.taskgraft.read(task)[key], rtol=1e-10, atol=1e-12), key


def test_a_tiny_gradient_is_still_a_gradient() -> None:
    model = grafted(["a"])
    optimizer = tg.AdamW(model, lr=1e-2)
    before = snapshot(model, "a")
    backward(model, ["a"], 0, scale=1e-30)
    optimizer.step()
    assert not equal(before, snapshot(model, "a"))


def test_a_task_that_is_held_still_does_not_change() -> None:
    model = grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2)
    optimizer.set_active("a", False)
    before, other = snapshot(model, "a"), snapshot(model, "b")
    backward(model, ["a", "b"], 0)
    assert min(optimizer.gradient_norms().values()) > 0
    optimizer.step()
    assert equal(before, snapshot(model, "a")) and not equal(other, snapshot(model, "b"))


def test_state_saves_and_loads_to_the_bit() -> None:
    model = grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2)

    def steps(model: Any, optimizer: tg.AdamW, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            backward(model, ["a", "b"] if step % 2 else ["a"], step)
            optimizer.step()

    steps(model, optimizer, 0, 3)
    optimizer.set_active("b", False)
    twin = copy.deepcopy(model)
    resumed = tg.AdamW(twin, lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 3, 7)
    steps(twin, resumed, 3, 7)
    for task in ("a", "b"):
        assert equal(snapshot(model, task), snapshot(twin, task))


def test_shared_weights_step_as_a_slot_of_their_own() -> None:
    model = grafted(["a", "b"], norm_after="shared")
    optimizer = tg.AdamW(model, lr=1e-2)
    assert optimizer.owners[:2] == ["a", "b"] and all(owner.startswith("(shared ") for owner in optimizer.owners[2:])
    before = snapshot(model, "b")
    backward(model, ["a"], 0)
    optimizer.step()
    after = snapshot(model, "b")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and all(".after_" in key or key.startswith("norm.") for key in changed)


@pytest.mark.parametrize("method", [tg.FullFineTuning(), tg.TopLayers(k=1)])
def test_the_baselines_train_the_backbone_and_give_it_back(method: Any) -> None:
    model = build("bert")
    original = {key: value.clone() for key, value in model.state_dict().items()}
    tg.graft(model, method, {"a": 2})
    trained = {path for path in tg.trainable(model) if not path.startswith("taskgraft_heads")}
    everything = {path for path, _ in model.named_parameters() if not path.startswith("taskgraft_heads")}
    top = {path for path in everything if path.startswith("encoder.layer.1.")}
    assert trained == (everything if isinstance(method, tg.FullFineTuning) else top)
    assert sum(p.numel() for p in tg.trainable(model).values()) == tg.count(method, model.config, labels=2)
    optimizer = tg.AdamW(model, lr=1e-2)
    backward(model, ["a", "a"], 0)
    optimizer.step()
    now = model.state_dict()
    assert any(not torch.equal(original[key], now[key]) for key in original)
    tg.ungraft(model)
    assert all(torch.equal(original[key], value) for key, value in model.state_dict().items())


def test_wrong_names_are_refused() -> None:
    model = grafted(["a"])
    with pytest.raises(tg.GraftError, match="not being trained"):
        tg.AdamW(model, lr={"a": 1e-3, "z": 1e-3})
    with pytest.raises(tg.GraftError, match="no value for"):
        tg.AdamW(grafted(["a", "b"]), lr={"a": 1e-3})
    tg.train_only(model, [])
    with pytest.raises(tg.GraftError, match="train_only"):
        tg.AdamW(model)


def test_a_larger_task_at_rest_does_not_take_the_weights_from_an_optimiser() -> None:
    """Its bank is widened under the one being trained, whose Parameters must stay the same objects."""
    alone, joined = grafted(["a"]), grafted(["a"])
    for model in (alone, joined):
        optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1)
        for step in range(4):
            if step == 2 and model is joined:
                tg.add_task(model, "wide", tg.Adapter(size=9, head_dropout=0.0), 5, train=False)
            optimizer.zero_grad()
            backward(model, ["a", "a"], step)
            optimizer.step()
    for key, value in alone.taskgraft.read("a").items():
        assert torch.allclose(value, joined.taskgraft.read("a")[key], rtol=1e-10, atol=1e-12), key


def test_an_optimiser_of_other_tasks_is_refused() -> None:
    model = grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2)
    tg.train_only(model, "b")
    backward(model, ["b"], 0)
    with pytest.raises(tg.GraftError, match="make a new one"):
        optimizer.step()


def test_tasks_that_share_weights_cannot_join_after_training_apart() -> None:
    model = grafted(["a", "b"], norm_after="shared")
    for task in ("a", "b"):
        tg.train_only(model, task)
        optimizer = tg.AdamW(model, lr=1e-2)
        backward(model, [task], 0)
        optimizer.step()
    before = snapshot(model, "b")
    with pytest.raises(tg.GraftError, match="were trained apart"):
        tg.train_only(model, ["a", "b"])
    assert equal(before, snapshot(model, "b"))


def test_small_steps_are_not_lost_on_a_half_precision_backbone() -> None:
    model = build("bert", torch.bfloat16)
    tg.graft(model, tg.Adapter(size=4), {"a": 2})
    before = snapshot(model, "a")
    optimizer = tg.AdamW(model, lr=1e-5)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, ["a", "a"], step)
        optimizer.step()
    after = snapshot(model, "a")
    assert all(not torch.equal(before[key].float(), after[key]) for key in before)
    inputs = batch(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        tg.train_only(model, [])
        assert torch.equal(model(**inputs).logits, expected), "putting a task to rest changes no output"


def test_a_checkpoint_of_tasks_in_another_order_is_refused() -> None:
    model, other = grafted(["a", "b"]), grafted(["b", "a"])
    with pytest.raises(tg.GraftError, match=r"holds the tasks \['a', 'b'\]"):
        other.load_state_dict(model.state_dict())
    twin = grafted(["a", "b"])
    twin.load_state_dict(model.state_dict(), strict=True)
    tg.train_only(twin, [])
    twin.load_state_dict(build("bert", torch.float64).state_dict(), strict=True)


def test_weight_decay_may_be_a_tasks_own() -> None:
    decays = {"a": 0.5, "b": 0.0}
    together = grafted(["a", "b"])
    optimizer = tg.AdamW(together, lr=1e-2, weight_decay=decays)
    for step in range(3):
        optimizer.zero_grad()
        backward(together, ["a", "b"], step)
        optimizer.step()
    for task, decay in decays.items():
        alone = grafted(["a", "b"])
        single = tg.AdamW(alone, lr=1e-2, weight_decay=decay)
        for step in range(3):
            single.zero_grad()
            backward(alone, ["a", "b"], step)
            single.step()
        for key, value in together.taskgraft.read(task).items():
            assert torch.allclose(value, alone.taskgraft.read(task)[key], rtol=1e-10, atol=1e-12), key
    with pytest.raises(tg.GraftError, match=r"weight_decay names no value for \['b'\]"):
        tg.AdamW(together, weight_decay={"a": 0.1})


def test_rates_that_are_set_are_the_rates_and_a_scheduler_scales_them() -> None:
    def moved(change: bool) -> dict[str, dict[str, torch.Tensor]]:
        model = grafted(["a", "b"])
        optimizer = tg.AdamW(model, lr={"a": 1e-2, "b": 2e-2}, weight_decay=0.0)
        if change:
            optimizer.set_rates({"a": 4e-2})
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        before = {task: snapshot(model, task) for task in ("a", "b")}
        backward(model, ["a", "b"], 0)
        optimizer.step()
        return {task: {key: snapshot(model, task)[key] - was[key] for key in was} for task, was in before.items()}

    plain, changed = moved(False), moved(True)
    for task, ratio in (("a", 2.0), ("b", 0.5)):
        for key, value in plain[task].items():
            torch.testing.assert_close(changed[task][key], ratio * value, rtol=1e-9, atol=1e-12)


def test_a_task_that_takes_a_slot_begins_anew() -> None:
    """As if the task before it had never been there, and without a change to the one beside it."""
    model, beside = grafted(["a", "b"]), grafted(["a", "b"])
    optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1, clip_norm=0.01)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, ["a", "b"], step)
        optimizer.step()
    kept = snapshot(model, "b")
    steps = optimizer.steps_of("b")
    optimizer.set_active("a", False)
    model.taskgraft.swap("a", "c", tg.Adapter(size=4), tg.Head.of(2), seed=5)
    optimizer.restart("a", "c", weight_decay=0.3, clip_norm=1e9)
    assert equal(kept, snapshot(model, "b")) and optimizer.steps_of("b") == steps and optimizer.steps_of("c") == 0
    tg.ungraft(beside)
    tg.graft(beside, tg.Adapter(size=4), {"c": 2}, seed=5)
    alone = tg.AdamW(beside, lr=1e-2, weight_decay=0.3)
    for step in range(3):
        for each, other in ((model, optimizer), (beside, alone)):
            other.zero_grad()
            backward(each, ["c", "c"], step)
            other.step()
    for key, value in model.taskgraft.read("c").items():
        torch.testing.assert_close(value, beside.taskgraft.read("c")[key], rtol=1e-9, atol=1e-12)
    assert equal(kept, snapshot(model, "b"))


def test_rates_that_were_set_are_part_of_the_state() -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=4), {"a": 2, "b": 2})
    first, second = tg.AdamW(model, lr=1e-3), tg.AdamW(model, lr=5e-2)
    first.set_rates({"a": 1e-4, "b": 3e-4})
    second.load_state_dict(first.state_dict())
    rates = [group["lr"] * second.rate for group in second.param_groups]
    assert all(torch.allclose(rate, torch.tensor([1e-4, 3e-4], dtype=torch.float64)) for rate in rates)
    second.set_rates({"b": 1e-2})
    assert torch.allclose(second.rate, torch.tensor([1e-4, 1e-2], dtype=torch.float64))
