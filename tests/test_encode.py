"""Texts to token ids: the tokenizer's own, held flat; labels where the loss looks for them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraft.tasks.task import schema_of
from taskgraft.training.encode import CHUNK, Ragged, encode

import tiny

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 999), max_size=9), min_size=1, max_size=20))
def test_ragged_rows_come_back(rows: list[list[int]]) -> None:
    ragged = Ragged.joined([Ragged.of(rows[: len(rows) // 2]), Ragged.of(rows[len(rows) // 2 :])])
    assert [ragged[i].tolist() for i in range(len(ragged))] == rows
    padded = ragged.padded(range(len(rows)), fill=-1, multiple=4)
    assert padded.shape[1] % 4 == 0 and padded.shape[1] >= max(map(len, rows))
    for row, values in zip(padded.tolist(), rows, strict=True):
        assert row == values + [-1] * (len(row) - len(values))


def test_batches_are_what_the_tokenizer_gives() -> None:
    tokenizer = tiny.tokenizer()
    found, _ = tiny.rows("classification", CHUNK + 7)
    table = pa.Table.from_pylist(found, schema_of("classification", False))
    encoded = encode(tokenizer, "classification", 2, table, 32)
    assert len(encoded) == CHUNK + 7
    rows = [3, CHUNK - 1, CHUNK, CHUNK + 6]
    inputs, labels = encoded.batch(rows, CPU)
    expected = tokenizer([found[row]["text"] for row in rows], padding=True, return_tensors="pt")
    assert inputs.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(inputs[name], values), name
    assert labels is not None and labels.tolist() == [found[row]["label"] for row in rows]


def test_pairs_are_encoded_together_and_cut_texts_counted() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    table = pa.table(
        {"text": ["the film was good", "it"], "pair": ["we saw it again today", "is"], "label": [1, 0]},
        schema_of("classification", True),
    )
    inputs, _ = encode(tokenizer, "classification", 2, table, 32).batch([0, 1], CPU)
    expected = tokenizer(table["text"].to_pylist(), table["pair"].to_pylist(), padding=True, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    assert torch.equal(inputs["token_type_ids"], expected["token_type_ids"])
    for limit, cut in ((32, 0), (12, 0), (11, 1), (5, 1), (4, 2)):
        short = encode(tokenizer, "classification", 2, table, limit)
        assert short.cut == cut and int(short.lengths.max()) <= limit


def test_words_are_labelled_at_their_first_token() -> None:
    table = pa.table({"text": [["the", "film", "good"]], "label": [[2, 2, 0]]}, schema_of("tokens", False))
    encoded = encode(tiny.tokenizer(), "tokens", 3, table, 32)
    _, labels = encoded.batch([0], CPU)
    assert labels is not None and labels.tolist() == [[-100, 2, 2, 0, -100]]
    assert encoded.words is not None and encoded.words[0].tolist() == [1, 2, 3]
    cut = encode(tiny.tokenizer(), "tokens", 3, table, 4)
    assert cut.words is not None and cut.words[0].tolist() == [1, 2, -1] and cut.cut == 1


def test_what_was_encoded_has_a_hash() -> None:
    tables = [tiny.task(seed=seed).splits["train"] for seed in (0, 0, 1)]
    one, same, other = (encode(tiny.tokenizer(), "classification", 2, table, 32).sha256() for table in tables)
    assert one == same != other
    relabelled = tables[0].set_column(1, "label", pa.array(1 - tables[0]["label"].to_numpy(), pa.int64()))
    assert encode(tiny.tokenizer(), "classification", 2, relabelled, 32).sha256() != one
    assert np.array_equal(tables[0]["label"].to_numpy(), tables[1]["label"].to_numpy())
