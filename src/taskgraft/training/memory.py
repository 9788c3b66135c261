"""What to do when a device's memory is too small for so many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from taskgraft.training.batches import Rows

Found = TypeVar("Found")


def is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text


def by_row(work: Callable[[Rows], dict[int, Found]], batches: Iterable[Rows]) -> dict[int, Found]:
    """What comes of each row of all batches, by its number."""
    found: dict[int, Found] = {}
    for rows in batches:
        found |= in_parts(work, rows)
    return found


def in_parts(work: Callable[[Rows], dict[int, Found]], rows: Rows) -> dict[int, Found]:
    """What comes of each of some rows; half of them at a time where all do not fit, and so on."""
    try:
        return work(rows)
    except RuntimeError as error:
        if len(rows) == 1 or not is_out_of_memory(error):
            raise
    if torch.cuda.is_available():  # outside of the handler, which holds what the work held
        torch.cuda.empty_cache()
    middle = len(rows) // 2
    return in_parts(work, rows[:middle]) | in_parts(work, rows[middle:])
