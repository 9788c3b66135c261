"""Batches: every row once, alike in length, and a function of seed and epoch alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraft.training.batches import evaluation_batches, training_batches


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 128), min_size=1, max_size=300), st.integers(1, 40), st.integers(0, 5))
def test_every_row_is_in_one_batch(lengths: list[int], size: int, epoch: int) -> None:
    array = np.asarray(lengths)
    for batches in (training_batches(array, size, 3, epoch), evaluation_batches(array, size)):
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        assert all(1 <= len(batch) <= size for batch in batches)
        assert sum(len(batch) < size for batch in batches) <= 1
    again = training_batches(array, size, 3, epoch)
    assert all((a == b).all() for a, b in zip(again, training_batches(array, size, 3, epoch), strict=True))


def test_epochs_and_seeds_differ_and_little_is_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 129, 4000)
    one, other, seeded = (training_batches(lengths, 32, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    assert not np.array_equal(one[0], other[0]) and not np.array_equal(one[0], seeded[0])
    padded = sum(len(batch) * lengths[batch].max() for batch in one)
    shuffled = np.random.default_rng(1).permutation(4000).reshape(-1, 32)
    assert padded / lengths.sum() < 1.1 < sum(32 * lengths[batch].max() for batch in shuffled) / lengths.sum()


def test_batches_of_one_length_are_not_sorted_together_for_ever() -> None:
    """A row meets other rows in the next epoch."""
    lengths = np.random.default_rng(0).integers(5, 60, 640)
    company = [
        next(frozenset(batch.tolist()) for batch in training_batches(lengths, 16, 0, epoch) if 7 in batch)
        for epoch in range(4)
    ]
    assert len(set(company)) == 4
