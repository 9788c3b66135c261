"""Rows that were asked for, in batches, through the backbone: one pass for all tasks whose answers are read alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from taskgraft.backbones.graphs import call
from taskgraft.serving.asked import Row, inputs_of, longest_answer
from taskgraft.training.written import score, write

LOOK = 1024  # rows in line that are looked at for a batch
SHORTEST = 16  # tokens that rows are padded to on a GPU: shorter ones are not worth shapes of their own


def next_batch(line: deque[Row], tokens: int, padding: int) -> list[Row]:
    """Take a batch out of a line: whoever has waited longest, and those that go well with it.

    Those are read alike and most alike in length, where a place further back in the line counts as two tokens of
    difference; `tokens` hold them all, and no more than so much `padding` comes with them.
    """
    seen = [line.popleft() for _ in range(min(len(line), LOOK))]
    if not seen:
        return []
    lengths, mode = [row.length for row in seen], seen[0].mode
    longest = used = lengths[0]
    batch = {0}
    for place in sorted(range(1, len(seen)), key=lambda place: abs(lengths[place] - lengths[0]) + 2 * place):
        padded = max(longest, lengths[place]) * (len(batch) + 1)
        if seen[place].mode == mode and padded <= tokens and padded - used - lengths[place] <= padding:
            batch.add(place)
            longest, used = max(longest, lengths[place]), used + lengths[place]
    line.extendleft(seen[place] for place in reversed(range(len(seen))) if place not in batch)
    rows = [seen[place] for place in sorted(batch)]
    line.extend(row.asked.later.popleft() for row in rows if row.asked.later)
    return rows


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
