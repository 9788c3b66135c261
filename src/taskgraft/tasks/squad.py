"""Answers that are spans of a context, as in SQuAD: overlapping windows over long contexts, and back to the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from taskgraft.errors import GraftError

Logits = Sequence[Any] | NDArray[np.floating[Any]]  # for each window: a number per token, padding after it or none
BATCH = 1_000  # rows tokenised at a time: a tokenizer's own record of them is large


@dataclass(frozen=True)
class Windows:
    """Questions with a window of their context each; a row has as many windows as its context needs."""

    columns: dict[str, list[list[int]]]  # what the model takes: input_ids, attention_mask, ...
    row: list[int]  # the row of the table that each window is of
    start: list[int]  # the first accepted answer's first and last token;
    end: list[int]  # both the first token's where the answer is not whole in the window
    offsets: list[NDArray[np.int32]]  # [tokens, 2]: each token's characters of the context; -1 where it is none of them

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class Answer:
    text: str  # context[start:end]
    start: int
    end: int
    score: float


def windows(
    tokenizer: Any, table: pa.Table, max_length: int = 384, stride: int = 128, with_answers: bool = True
) -> Windows:
    """Tokenise questions with their contexts; windows of a long context share `stride` tokens with the one before.

    A question longer than half of what the overlap leaves is cut, so that every window has room for its context.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise GraftError(
            f"{type(tokenizer).__name__} is not a fast tokenizer: spans need the characters of each token."
        )
    room = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    longest = (room - stride) // 2
    if stride < 0 or longest < 1:
        raise GraftError(
            f"windows of {max_length} tokens that share {stride} leave no room for a question: "
            f"use a stride from 0 to {room - 2}, or longer windows."
        )
    made = Windows({}, [], [], [], [])
    for begin in range(0, table.num_rows, BATCH):
        rows = table.slice(begin, BATCH)
        encoded = tokenizer(
            _cut(tokenizer, rows["text"].to_pylist(), longest),
            rows["pair"].to_pylist(),
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            padding=False,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        answers = rows["label"].to_pylist() if with_answers else [[]] * rows.num_rows
        for window, row in enumerate(encoded["overflow_to_sample_mapping"]):
            in_context = np.array([part == 1 for part in encoded.sequence_ids(window)], dtype=bool)
            offsets = np.array(encoded["offset_mapping"][window], dtype=np.int32).reshape(-1, 2)
            offsets[~in_context] = -1
            ids = encoded["input_ids"][window]
            nowhere = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else 0
            start, end = _tokens_of(answers[row][0], offsets) if answers[row] else (None, None)
            made.start.append(nowhere if start is None or end is None else start)
            made.end.append(nowhere if start is None or end is None else end)
            made.row.append(begin + row)
            made.offsets.append(offsets)
        for name in encoded:
            if name not in ("overflow_to_sample_mapping", "offset_mapping"):
                made.columns.setdefault(name, []).extend(encoded[name])
    return made


def _cut(tokenizer: Any, questions: list[str], longest: int) -> list[str]:
    """Questions of at most `longest` tokens: what is cut is their end."""
    encoded = tokenizer(questions, add_special_tokens=False, truncation=False, padding=False, verbose=False,
                        return_offsets_mapping=True)["offset_mapping"]  # fmt: skip
    return [
        question if len(offsets) <= longest else question[: offsets[longest - 1][1]]
        for question, offsets in zip(questions, encoded, strict=True)
    ]


def _tokens_of(answer: dict[str, Any], offsets: NDArray[np.int32]) -> tuple[int | None, int | None]:
    """The first and last token of an answer, or None if it is not whole in the window."""
    text = answer["text"]
    begin = answer["start"] + len(text) - len(text.lstrip())
    stop = answer["start"] + len(text.rstrip())
    inside = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(inside) or stop <= begin or begin < offsets[inside[0], 0] or stop > offsets[inside[-1], 1]:
        return None, None
    first = np.searchsorted(offsets[inside, 1], begin, side="right")  # the first token that ends after the beginning
    last = np.searchsorted(offsets[inside, 0], stop, side="left") - 1  # the last that begins before the end
    return int(inside[first]), int(inside[last])


def best_answers(
    made: Windows, table: pa.Table, start_logits: Logits, end_logits: Logits, max_answer_tokens: int = 30
) -> list[Answer]:
    """For each row of the table, the span with the largest sum of its two logits, over all spans of all its windows."""
    for name, logits in (("start", start_logits), ("end", end_logits)):
        if len(logits) != len(made):
            raise GraftError(
                f"{len(logits)} rows of {name} logits were given for {len(made)} windows: give one for each."
            )
    if max_answer_tokens < 1:
        raise GraftError(f"answers of at most {max_answer_tokens} tokens do not exist: use 1 or more.")
    contexts = table["pair"].to_pylist()
    best = [Answer("", 0, 0, -np.inf)] * table.num_rows
    for window, row in enumerate(made.row):
        offsets = made.offsets[window]
        starts = _in_context(start_logits[window], offsets, window)
        ends = _in_context(end_logits[window], offsets, window)
        answer = _best_span(contexts[row], offsets, starts, ends, max_answer_tokens)
        if answer is not None and answer.score > best[row].score:
            best[row] = answer
    return best


def _in_context(logits: Any, offsets: NDArray[np.int32], window: int) -> NDArray[np.float64]:
    """The logits of a window's own tokens; -inf outside of the context, at tokens without characters, and for NaN."""
    values = np.asarray(logits, dtype=np.float64)
    if values.ndim != 1 or len(values) < len(offsets):
        raise GraftError(f"window {window} has {len(offsets)} tokens, and its logits the shape {values.shape}.")
    values = values[: len(offsets)]
    return np.where((offsets[:, 0] >= 0) & (offsets[:, 0] < offsets[:, 1]) & ~np.isnan(values), values, -np.inf)


def _best_span(
    context: str, offsets: NDArray[np.int32], starts: NDArray[np.float64], ends: NDArray[np.float64], longest: int
) -> Answer | None:
    # sums[i, k]: a span from token i to token i + k
    later = np.concatenate([ends, np.full(longest - 1, -np.inf)])
    sums = starts[:, None] + np.lib.stride_tricks.sliding_window_view(later, longest)
    while np.isfinite(score := sums.max(initial=-np.inf)):
        first, length = np.unravel_index(sums.argmax(), sums.shape)
        begin, stop = int(offsets[first, 0]), int(offsets[first + length, 1])
        text = context[begin:stop]
        if stripped := text.strip():  # some tokenizers count the space before a word as part of it
            begin += len(text) - len(text.lstrip())
            return Answer(stripped, begin, begin + len(stripped), float(score))
        sums[first, length] = -np.inf
    return None
