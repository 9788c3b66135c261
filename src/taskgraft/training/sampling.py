"""Which rows of which tasks stand together in a batch, when several tasks are trained at once.

HyperFormer (Karimi Mahabadi et al., ACL 2021) draws a task with probability p_i ~ (n_i / N)^(1/T), where n_i are its
training rows: small tasks are not drowned by large ones. Its batches hold one task each; ours may also be mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from taskgraft.errors import GraftError
from taskgraft.training.batches import POOL, Rows
from taskgraft.training.settings import Weighting

Shares = npt.NDArray[np.float64]


def task_shares(sizes: Sequence[int], temperature: float) -> Shares:
    """What each task counts for, summing to 1: by its size at temperature 1, all the same at infinity."""
    if not temperature > 0:
        raise GraftError(f"temperature={temperature!r} must be above 0: 1 goes by size, inf treats all tasks alike.")
    if len(sizes) == 0 or min(sizes) < 1:
        raise GraftError(f"the tasks have {list(sizes)} training rows: give one task or more, each with a row or more.")
    unscaled = (np.asarray(sizes, np.float64) / max(sizes)) ** (1 / temperature)  # the largest is 1: no underflow
    shares: Shares = unscaled / unscaled.sum()
    return shares


@dataclass(frozen=True, eq=False)
class Batch:
    """Row numbers by task, of the tasks that are in the batch, in the sampler's order."""

    parts: dict[str, Rows]

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def share(self, rank: int, size: int) -> Batch:
        """Every so many-th row, across tasks: what one of several processes reads of it, which may be nothing."""
        found, before = {}, 0
        for task, rows in self.parts.items():
            own = rows[(rank - before) % size :: size]
            before += len(rows)
            if len(own):
                found[task] = own
        return Batch(found)


@dataclass(frozen=True, eq=False)
class Sampler:
    """The batches of every epoch: a function of these fields alone, so a resumed run and all processes see the same.

    `lengths` are the token counts of each task's training rows. `weighting` says how tasks come to count by `shares`:
    drawn that often, or drawn by size with their rows' losses weighted. The expected gradient is the same, if the loss
    is the mean of `loss_weights[task] * loss` over a batch's rows (not divided by the sum of the weights).
    """

    lengths: Mapping[str, Rows]
    batch_size: int
    batches: int  # per epoch
    seed: int
    temperature: float = 10.0
    mixed: bool = True  # rows of several tasks in a batch; False: one task in each, as in the paper
    weighting: Weighting = "sampling"

    def __post_init__(self) -> None:
        for field, least in (("batch_size", 1), ("batches", 1), ("seed", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GraftError(f"{field}={value!r} must be a whole number of at least {least}.")
        if self.weighting not in get_args(Weighting):
            raise GraftError(f"weighting={self.weighting!r} is unknown: use {' or '.join(get_args(Weighting))}.")
        for name, lengths in self.lengths.items():
            if len(lengths) == 0:
                raise GraftError(f"task {name!r} has no training rows: leave it out or give it some.")
        task_shares(self.sizes, self.temperature)

    @property
    def sizes(self) -> list[int]:
        """n_i: training rows of each task."""
        return [len(lengths) for lengths in self.lengths.values()]

    @property
    def shares(self) -> Shares:
        """p_i: what each task counts for in the loss."""
        return task_shares(self.sizes, self.temperature)

    @property
    def drawn_by(self) -> Shares:
        """q_i: the probability that a row (a batch, if not mixed) is of the task."""
        return self.shares if self.weighting == "sampling" else task_shares(self.sizes, 1.0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """p_i / q_i: what the loss of a task's rows is multiplied by, so that its expectation is sum_i p_i mean_i."""
        if self.weighting == "sampling":  # also where a share is too small for a float
            return dict.fromkeys(self.lengths, 1.0)
        return dict(zip(self.lengths, (self.shares / self.drawn_by).tolist(), strict=True))

    def epoch(self, number: int) -> list[Batch]:
        """The batches of an epoch, counted from 0. It goes on in each task's rows where the epochs before it ended."""
        if number < 0:
            raise GraftError(f"epoch {number} does not exist: epochs are counted from 0.")
        order, counts = self._draws(number)
        earlier = sum((self._draws(past)[1] for past in range(number)), np.zeros_like(counts))
        tasks = order.permutation(np.repeat(np.arange(len(counts)), counts))  # the task of each draw
        at_once = 1 if self.mixed else self.batch_size  # rows of a draw
        streams = [
            self._stream(task, start * at_once, (start + count) * at_once)
            for task, (start, count) in enumerate(zip(earlier.tolist(), counts.tolist(), strict=True))
        ]
        return self._mixed(tasks, streams, order) if self.mixed else self._unmixed(tasks, streams, order)

    def _draws(self, epoch: int) -> tuple[np.random.Generator, Rows]:
        """How often each task is drawn in an epoch, and the generator that then says when.

        Counts first and their order afterwards is the same as drawing one by one, and replaying an epoch costs no rows.
        """
        order = np.random.default_rng([self.seed, epoch])
        return order, order.multinomial(self.batches * (self.batch_size if self.mixed else 1), self.drawn_by)

    def _stream(self, task: int, start: int, end: int) -> Rows:
        """A stretch of the task's endless stream: shuffled passes, every row once before any comes twice.

        Passes are numbered from 1: numpy seeds [seed, i] and [seed, i, 0] alike, and the former shuffles an epoch.
        """
        size = self.sizes[task]
        passes = range(start // size, end // size + 1)
        rows = [np.random.default_rng([self.seed, task, number + 1]).permutation(size) for number in passes]
        return np.concatenate(rows)[start - passes[0] * size : end - passes[0] * size]

    def _mixed(self, tasks: Rows, streams: list[Rows], order: np.random.Generator) -> list[Batch]:
        rows, lengths = np.empty_like(tasks), np.empty_like(tasks)
        for task, (stream, counted) in enumerate(zip(streams, self.lengths.values(), strict=True)):
            rows[tasks == task] = stream
            lengths[tasks == task] = counted[stream]
        with np.errstate(divide="ignore"):  # a task that is never drawn
            one_pass = float((self.sizes / self.drawn_by).min())  # rows of all tasks until one of them starts again
        names = list(self.lengths)
        return [
            Batch({names[task]: rows[at[tasks[at] == task]] for task in np.unique(tasks[at])})
            for at in alike(lengths, self.batch_size, one_pass, order)
        ]

    def _unmixed(self, tasks: Rows, streams: list[Rows], order: np.random.Generator) -> list[Batch]:
        plans = {
            name: stream[alike(counted[stream], self.batch_size, len(counted), order)]
            for stream, (name, counted) in zip(streams, self.lengths.items(), strict=True)
        }
        names, following = list(plans), [iter(plan) for plan in plans.values()]
        return [Batch({names[task]: next(following[task])}) for task in tasks]


def alike(lengths: Rows, size: int, one_pass: float, order: np.random.Generator) -> Rows:
    """Positions [batches, size] of rows alike in length, sorted in pools of up to POOL batches, each pool's shuffled.

    A pool is no longer than `one_pass` (or one batch): the same row, coming again, would be sorted beside itself, and a
    batch of a small task would be a few rows many times. Pools stay in order, so that streams are read evenly.
    """
    pools = np.arange(len(lengths)) // (size * int(np.clip(one_pass // size, 1, POOL)))
    batches = np.lexsort((lengths, pools)).reshape(-1, size)
    shuffled: Rows = batches[np.lexsort((order.random(len(batches)), pools[::size]))]
    return shuffled
