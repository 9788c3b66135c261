"""Rows of several tasks in one pass: how long they are made on a GPU, where each length is recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from taskgraft.training import passes
from taskgraft.training.parts import part_of
from taskgraft.training.passes import Piece, inputs_of, recorded_length
from taskgraft.training.settings import Settings

import tiny


@pytest.mark.parametrize(
    ("rows", "length", "padded"),
    [(8, 9, 32), (64, 32, 32), (64, 33, 48), (128, 100, 112), (256, 65, 72), (64, 99, 104), (4, 101, 104)],
)
def test_small_batches_have_few_lengths_and_none_beyond_the_limit(rows: int, length: int, padded: int) -> None:
    values = torch.zeros(rows, length, dtype=torch.long)
    limit = 100 if length in (99, 101) else 128
    assert recorded_length(values, torch.device("cuda"), limit) == padded
    assert recorded_length(values, torch.device("cpu"), limit) == length


def test_where_padding_would_count_a_batch_has_no_more_of_it_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "sent", lambda values, device: values)
    part = part_of(tiny.backbone(), tiny.task(count=40), Settings(max_length=40), torch.device("cpu"), prefix=False)
    rows = np.arange(20)

    def length(pieces: int, same_length: bool) -> int:
        inputs, _ = inputs_of([Piece(part, rows)] * pieces, torch.device("cuda"), same_length)
        return int(inputs["input_ids"].shape[1])

    assert length(1, False) == 32 and length(1, True) == length(50, True) == length(100, True) < 32
