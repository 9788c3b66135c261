"""Rows that were asked for, in batches, through the backbone: one pass for all tasks whose answers are read alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from taskgraft.backbones.graphs import call
from taskgraft.serving.asked import Row, inputs_of, longest_answer
from taskgraft.training.written import score, write

SHORTEST = 16  # tokens: rows that are shorter are not worth a batch of their own, nor on a GPU a shape


def batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows that are read alike and alike in length: none is padded to more than twice its own."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.mode, -row.length)):
        if batch:
            longest = batch[0].length
            alike = row.mode == batch[0].mode and (2 * row.length >= longest or longest <= SHORTEST)
            if not alike or longest * (len(batch) + 1) > tokens:
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def through(model: Any, tokenizer: Any, device: torch.device, rows: Sequence[Row], longest: int) -> int:
    """Let the model say what it says of each row; how many tokens went through it, padding included.

    `longest` is the number of positions that the backbone has.
    """
    filled, multiple = list(rows), 1
    if device.type != "cpu":  # one of few shapes, which are recorded
        filled += [rows[-1]] * (bucket(len(rows)) - len(rows))
        multiple = min(longest, bucket(max(SHORTEST, *(row.length for row in rows))))
    inputs = inputs_of(filled, device, multiple)
    names = [row.asked.task.key for row in filled]
    found: Sequence[Any]
    if rows[0].mode == "head":
        found = logits_of(call(model, names, inputs), rows)
    elif rows[0].mode == "scores":
        answers = [row.asked.task.candidates or [] for row in filled]
        found = [s[: len(own)] for s, own in zip(score(model, names, inputs, answers), answers, strict=True)]
    else:
        found = write(model, names, tokenizer, inputs, [longest_answer(row.asked) for row in filled])
    for row, said in zip(rows, found, strict=False):
        row.asked.found[row.number] = said
    return inputs["input_ids"].numel()


def logits_of(output: Any, rows: Sequence[Row]) -> list[Any]:
    """Each row's own logits, without what pads them."""
    of_rows, of_tokens = (
        None if logits is None else logits.float().cpu().numpy() for logits in (output.logits, output.token_logits)
    )
    found = []
    for place, row in enumerate(rows):
        head = row.asked.task.graft.head
        assert head is not None
        found.append(
            of_tokens[place, : row.length, : head.width] if head.per_token else of_rows[place, : head.width]  # type: ignore[index]
        )
    return found


def bucket(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most half as much again, and few of them."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
