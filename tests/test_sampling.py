"""Sampling over tasks: shares by temperature, fair streams, one expected gradient, and plans that can be replayed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.training.batches import Rows
from taskgraft.training.sampling import Batch, Sampler, Weighting, task_shares

WEIGHTINGS: tuple[Weighting, ...] = ("sampling", "loss")
WAYS = list(itertools.product((True, False), WEIGHTINGS))
SIZES = {"large": 900, "middle": 120, "small": 30, "tiny": 5}


def token_counts(sizes: dict[str, int], seed: int = 0) -> dict[str, Rows]:
    random = np.random.default_rng(seed)
    return {name: random.integers(5, 129, size) for name, size in sizes.items()}


def sampler(sizes: dict[str, int] = SIZES, **fields: Any) -> Sampler:
    return Sampler(token_counts(sizes), **{"batch_size": 8, "batches": 25, "seed": 3} | fields)


def as_lists(batches: list[Batch]) -> list[dict[str, list[int]]]:
    return [{name: rows.tolist() for name, rows in batch.parts.items()} for batch in batches]


def occurrences(plan: Sampler, batches: list[Batch]) -> dict[str, Rows]:
    """How often each row of each task is in the batches."""
    return {
        name: sum(
            (np.bincount(b.parts[name], minlength=len(n)) for b in batches if name in b.parts), np.zeros(len(n), int)
        )
        for name, n in plan.lengths.items()
    }


def padded(plan: Sampler, batches: list[Batch]) -> float:
    """Tokens after padding, by tokens."""
    lengths = [np.concatenate([plan.lengths[name][rows] for name, rows in batch.parts.items()]) for batch in batches]
    return float(sum(len(each) * each.max() for each in lengths) / sum(each.sum() for each in lengths))


def test_shares_follow_the_formula_and_its_limits() -> None:
    sizes = [900, 120, 30, 5]
    roots = [(n / sum(sizes)) ** (1 / 10) for n in sizes]
    assert np.allclose(task_shares(sizes, 10.0), np.array(roots) / sum(roots), rtol=1e-12)
    assert np.allclose(task_shares(sizes, 1.0), np.array(sizes) / sum(sizes), rtol=1e-12)
    assert task_shares(sizes, math.inf).tolist() == [0.25] * 4
    assert task_shares(sizes, 1e-300).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert task_shares([7, 7], 1e-300).tolist() == [0.5, 0.5]
    assert task_shares([3], 2.0).tolist() == [1.0]


@pytest.mark.parametrize(("mixed", "weighting"), WAYS)
def test_tasks_are_drawn_as_often_as_said(mixed: bool, weighting: Weighting) -> None:
    plan = sampler(mixed=mixed, weighting=weighting, temperature=2.0, batches=2000)
    batches = plan.epoch(0) + plan.epoch(1)
    drawn = np.array([sum(len(batch.parts.get(name, ())) for batch in batches) for name in plan.lengths])
    draws = len(batches) * (8 if mixed else 1)
    q = plan.drawn_by
    assert np.abs(drawn / drawn.sum() - q).max() < 4 * math.sqrt(0.25 / draws)
    assert np.allclose(q, plan.shares) == (weighting == "sampling")
    halves = [sum(len(batch.parts.get("large", ())) for batch in half) for half in (batches[:1000], batches[1000:2000])]
    assert np.abs(np.array(halves) / 8000 - q[0]).max() < 4 * math.sqrt(0.25 / draws * 4)


@pytest.mark.parametrize(("mixed", "weighting"), WAYS)
def test_every_row_comes_once_before_any_comes_twice(mixed: bool, weighting: Weighting) -> None:
    plan = sampler(mixed=mixed, weighting=weighting)
    batches: list[Batch] = []
    for epoch in range(12):
        batches += plan.epoch(epoch)
        for counts in occurrences(plan, batches).values():
            assert counts.max() - counts.min() <= 1
    assert occurrences(plan, batches)["small"].min() >= 1  # so the bound has been at work


@pytest.mark.parametrize(("mixed", "weighting"), WAYS)
def test_an_epoch_is_a_function_of_the_fields_and_its_number(mixed: bool, weighting: Weighting) -> None:
    old = sampler(mixed=mixed, weighting=weighting)
    epochs = [as_lists(old.epoch(number)) for number in range(6)]
    assert as_lists(sampler(mixed=mixed, weighting=weighting).epoch(5)) == epochs[5] == as_lists(old.epoch(5))
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    assert as_lists(sampler(mixed=mixed, weighting=weighting, seed=4).epoch(0)) != epochs[0]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.floats(0.5, 50), st.integers(0, 2**32))
def test_both_weightings_have_one_expected_gradient(sizes: list[int], temperature: float, seed: int) -> None:
    means = np.random.default_rng(seed).normal(size=len(sizes))
    expected = float(task_shares(sizes, temperature) @ means)
    for weighting in WEIGHTINGS:
        lengths = {str(task): np.broadcast_to(np.int64(9), size) for task, size in enumerate(sizes)}
        plan = Sampler(lengths, 4, 1, 0, temperature=temperature, weighting=weighting)
        weights = np.array(list(plan.loss_weights.values()))
        assert float((plan.drawn_by * weights) @ means) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert weighting == "loss" or set(plan.loss_weights.values()) == {1.0}


@pytest.mark.parametrize(("mixed", "weighting"), WAYS)
def test_the_mean_over_drawn_rows_goes_to_the_same_number(mixed: bool, weighting: Weighting) -> None:
    plan = sampler(mixed=mixed, weighting=weighting, temperature=2.0, batches=300)
    random = np.random.default_rng(1)
    values = {name: random.normal(2 * task, 1.0, size) for task, (name, size) in enumerate(SIZES.items())}
    means = np.array([each.mean() for each in values.values()])
    weights = np.array(list(plan.loss_weights.values()))
    losses = [  # of each batch
        sum(plan.loss_weights[name] * values[name][rows].sum() for name, rows in batch.parts.items()) / len(batch)
        for epoch in range(20)
        for batch in plan.epoch(epoch)
    ]
    expected = float(plan.shares @ means)
    deviation = math.sqrt(float(plan.drawn_by @ (weights * means - expected) ** 2))
    assert np.mean(losses) == pytest.approx(expected, abs=4 * deviation / math.sqrt(len(losses) * (8 if mixed else 1)))
    assert abs(expected - means[0]) > 0.5  # going by size alone would be seen


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(WEIGHTINGS),
    st.sampled_from([1e-3, 1.0, 10.0, math.inf]),
)
def test_every_batch_is_full(
    sizes: list[int], size: int, batches: int, mixed: bool, weighting: Weighting, temperature: float
) -> None:
    named = {f"task {task}": rows for task, rows in enumerate(sizes)}
    plan = sampler(named, batch_size=size, batches=batches, mixed=mixed, weighting=weighting, temperature=temperature)
    epochs = [plan.epoch(number) for number in range(3)]
    for batch in itertools.chain(*epochs):
        assert len(batch) == size == sum(len(rows) for rows in batch.parts.values())
        assert list(batch.parts) == [name for name in named if name in batch.parts]
        assert all(len(rows) and rows.min() >= 0 and rows.max() < named[name] for name, rows in batch.parts.items())
        if not mixed:
            [(name, rows)] = batch.parts.items()  # and a row as often as the passes that the batch can touch
            assert np.bincount(rows).max() <= math.ceil((size - 1) / named[name]) + 1
    assert [len(epoch) for epoch in epochs] == [batches] * 3
    for counts in occurrences(plan, list(itertools.chain(*epochs))).values():
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("mixed", [True, False])
def test_little_is_padding(mixed: bool) -> None:
    plan = sampler({"one": 9000, "other": 3000}, batch_size=32, batches=200, mixed=mixed)
    batches = plan.epoch(0)
    rows = [(name, row) for batch in batches for name, part in batch.parts.items() for row in part.tolist()]
    shuffled = np.random.default_rng(0).permutation(len(rows)).reshape(-1, 32)
    unsorted = [
        Batch({name: np.array([rows[i][1] for i in at if rows[i][0] == name]) for name in {rows[i][0] for i in at}})
        for at in shuffled
    ]
    assert padded(plan, batches) < 1.1 < 1.5 < padded(plan, unsorted)
    longest = [max(plan.lengths[name][part].max() for name, part in batch.parts.items()) for batch in batches]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.3  # and not the short batches first


@pytest.mark.parametrize("mixed", [True, False])
def test_a_batch_of_a_small_task_is_not_a_few_rows_many_times(mixed: bool) -> None:
    """Sorting many passes by length together would set each row beside its own repetitions."""
    plan = sampler({"alone": 100}, batch_size=32, batches=100, mixed=mixed)
    distinct = [len(set(batch.parts["alone"].tolist())) for batch in plan.epoch(0)]
    assert min(distinct) >= 16 and np.mean(distinct) > 26
    plan = sampler({"large": 5000, "small": 40}, batch_size=32, batches=100, mixed=mixed, temperature=math.inf)
    parts = [batch.parts["small"] for batch in plan.epoch(0) if "small" in batch.parts]
    assert sum(len(set(part.tolist())) for part in parts) > 0.75 * sum(map(len, parts))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0\.0 must be above 0: 1 goes by size"),
        ({"temperature": -2}, "temperature=-2 must be above 0: "),
        ({"temperature": math.nan}, "temperature=nan must be above 0: "),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"batches": 2.5}, r"batches=2\.5 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"weighting": "both"}, "weighting='both' is unknown: use sampling or loss"),
        ({"sizes": {"tone": 4, "spam": 0}}, "task 'spam' has no training rows: leave it out or give it some"),
        ({"sizes": {}}, r"the tasks have \[\] training rows: give one task or more"),
    ],
)
def test_what_cannot_be_sampled_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GraftError, match=message):
        sampler(**fields)


def test_sizes_and_epochs_that_do_not_exist_are_said() -> None:
    with pytest.raises(GraftError, match=r"the tasks have \[3, 0\] training rows"):
        task_shares([3, 0], 1.0)
    with pytest.raises(GraftError, match="epoch -1 does not exist: epochs are counted from 0"):
        sampler().epoch(-1)
