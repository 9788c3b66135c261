"""How sure a difference between two methods is: tasks' rows and seeds drawn anew, many times, the same for both.

Most metrics are a function of sums over rows (how often which class was taken for which), so all draws are one matrix
product. Rank correlation is not, and is computed draw by draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from taskgraft.errors import GraftError
from taskgraft.tasks.metrics import METRICS

Array = npt.NDArray[np.float64]
DRAWS, AT_ONCE = 2000, 250


@dataclass(frozen=True)
class Answers:
    """What the runs of one method, one a seed, said of a task's rows."""

    kind: str
    labels: tuple[str, ...]
    metrics: tuple[str, ...]  # whose mean is the score
    right: Sequence[Any]  # the rows' own answers
    given: Sequence[Sequence[Any]]  # by seed

    def __post_init__(self) -> None:
        if not self.given or any(len(one) != len(self.right) for one in self.given):
            raise GraftError(f"each seed needs an answer for each of the {len(self.right)} rows.")


@dataclass(frozen=True)
class Interval:
    """A mean, and the middle 95 % of what it is when rows and seeds are drawn anew."""

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies on one side of zero, else 0: not shown."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class Drawn:
    """A method's score on a task, and what it is in each draw of rows and seeds."""

    answers: Answers
    score: float
    scores: Array

    def less(self, other: Drawn) -> Drawn:
        """The lead over another method, which answered the same rows."""
        one, two = self.answers, other.answers
        if list(one.right) != list(two.right) or (one.kind, one.metrics) != (two.kind, two.metrics):
            raise GraftError("the two methods were not judged on the same rows by the same metrics.")
        return Drawn(one, self.score - other.score, self.scores - other.scores)


def drawn(answers: Answers, number: int = 0, draws: int = DRAWS, seed: int = 0) -> Drawn:
    """Draw rows and seeds; `number` is the task's, whose draws are its own and the same for every method."""
    return Drawn(answers, score(answers), samples(answers, draws, np.random.default_rng((seed, number))))


def difference(first: Sequence[Answers], second: Sequence[Answers], draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean over tasks of the first method's score less the second's, which answered the same rows."""
    one, other = ([drawn(each, n, draws, seed) for n, each in enumerate(answers)] for answers in (first, second))
    return between(one, other)


def between(first: Sequence[Drawn], second: Sequence[Drawn], weights: Sequence[float] | None = None) -> Interval:
    """The difference of two methods whose draws are at hand; `weights` are what each task counts for, if not alike."""
    if len(first) != len(second) or not first:
        raise GraftError(f"{len(first)} and {len(second)} tasks cannot be paired: give as many of both.")
    leads = [one.less(other) for one, other in zip(first, second, strict=True)]
    mean = float(np.average([lead.score for lead in leads], weights=weights))
    spread = np.average([lead.scores for lead in leads], axis=0, weights=weights)
    return Interval(mean, float(np.quantile(spread, 0.025)), float(np.quantile(spread, 0.975)))


def score(answers: Answers) -> float:
    """The mean over seeds and metrics, as it was measured."""
    once = np.ones((1, len(answers.right)))
    return float(np.mean([values(answers, given, once)[0] for given in answers.given]))


def samples(answers: Answers, draws: int, rng: np.random.Generator) -> Array:
    """The score of each draw of as many rows, and as many seeds."""
    rows, seeds = len(answers.right), len(answers.given)
    found = []
    for counts in counts_of(rows, draws, rng):
        by_seed = np.stack([values(answers, given, counts) for given in answers.given], axis=1)
        chosen = rng.integers(seeds, size=by_seed.shape)
        found.append(np.take_along_axis(by_seed, chosen, axis=1).mean(axis=1))
    return np.concatenate(found)


def counts_of(rows: int, draws: int, rng: np.random.Generator) -> Iterator[Array]:
    """How often each row is in each draw, some draws at a time."""
    for begin in range(0, draws, AT_ONCE):
        some = min(AT_ONCE, draws - begin)
        places = rng.integers(rows, size=(some, rows)) + rows * np.arange(some)[:, None]
        yield np.bincount(places.ravel(), minlength=some * rows).reshape(some, rows).astype(np.float64)


def values(answers: Answers, given: Sequence[Any], counts: Array) -> Array:
    """The mean of the task's metrics for each draw of rows."""
    found: Array = np.mean([metric(name, answers, given, counts) for name in answers.metrics], axis=0)
    return found


def metric(name: str, answers: Answers, given: Sequence[Any], counts: Array) -> Array:
    right, compute = answers.right, METRICS[name].compute
    if answers.kind == "classification":
        classes = len(answers.labels)
        # [draws, right class, given class]
        pairs = np.asarray(right, dtype=np.int64) * classes + np.asarray(given, dtype=np.int64)
        table = (counts @ np.eye(classes * classes)[pairs]).reshape(-1, classes, classes)
        if name in OF_TABLES:
            return OF_TABLES[name](table)
    if answers.kind == "spans":
        each = [compute(answers.labels, [a], [p], answers.kind) for a, p in zip(right, given, strict=True)]
        mean: Array = counts @ np.asarray(each) / counts.sum(1)
        return mean
    rows = np.arange(len(right))
    drawn = [np.repeat(rows, some.astype(np.int64)).tolist() for some in counts]
    kept = ((answers.labels, [right[i] for i in draw], [given[i] for i in draw], answers.kind) for draw in drawn)
    return np.array([compute(*each) for each in kept])


def accuracy(table: Array) -> Array:
    found: Array = np.trace(table, axis1=1, axis2=2) / table.sum((1, 2))
    return found


def f1_by_class(table: Array) -> Array:
    """[draws, classes]; 0 where a class is neither right nor given."""
    hits = np.diagonal(table, axis1=1, axis2=2)
    total = table.sum(1) + table.sum(2)
    found: Array = np.divide(2 * hits, total, out=np.zeros_like(total), where=total > 0)
    return found


def macro_f1(table: Array) -> Array:
    """Over the classes that occur."""
    occurs = (table.sum(1) + table.sum(2)) > 0
    found: Array = f1_by_class(table).sum(1) / occurs.sum(1)
    return found


def matthews(table: Array) -> Array:
    wanted, given, all_rows = table.sum(2), table.sum(1), table.sum((1, 2))
    hits = np.trace(table, axis1=1, axis2=2)
    above = hits * all_rows - (wanted * given).sum(1)
    below = (all_rows**2 - (wanted**2).sum(1)) * (all_rows**2 - (given**2).sum(1))
    found: Array = np.divide(above, np.sqrt(below), out=np.zeros_like(above), where=below > 0)
    return found


OF_TABLES: dict[str, Callable[[Array], Array]] = {
    "accuracy": accuracy,
    "f1": lambda table: f1_by_class(table)[:, 1],
    "macro_f1": macro_f1,
    "micro_f1": accuracy,
    "matthews": matthews,
}
