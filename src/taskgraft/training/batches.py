"""Which rows stand together in a batch: shuffled by seed and epoch, and alike in length so that little is padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

POOL = 50  # batches whose rows are sorted by length together: large enough to pad little, small enough to mix

Rows = npt.NDArray[np.int64]


def training_batches(lengths: Rows, size: int, seed: int, epoch: int) -> list[Rows]:
    """One epoch's batches: a function of its arguments alone, so that a resumed run sees the same ones."""
    order = np.random.default_rng([seed, epoch])
    shuffled = order.permutation(len(lengths))
    batches: list[Rows] = []
    for start in range(0, len(shuffled), size * POOL):
        pool = shuffled[start : start + size * POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[at : at + size] for at in range(0, len(pool), size)]
    return [batches[i] for i in order.permutation(len(batches))]


def evaluation_batches(lengths: Rows, size: int) -> list[Rows]:
    """Every row once, the longest first, so that what does not fit into memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    return [order[at : at + size] for at in range(0, len(order), size)]
