"""Rows of several tasks in one pass: how long they are made on a GPU, where each length is recorded."""

from __future__ import annotations

import pytest
import torch

from taskgraft.training.passes import recorded_length


@pytest.mark.parametrize(
    ("rows", "length", "padded"),
    [(8, 9, 32), (64, 32, 32), (64, 33, 48), (128, 100, 112), (256, 65, 72), (64, 99, 104), (4, 101, 104)],
)
def test_small_batches_have_few_lengths_and_none_beyond_the_limit(rows: int, length: int, padded: int) -> None:
    values = torch.zeros(rows, length, dtype=torch.long)
    limit = 100 if length in (99, 101) else 128
    assert recorded_length(values, torch.device("cuda"), limit) == padded
    assert recorded_length(values, torch.device("cpu"), limit) == length
