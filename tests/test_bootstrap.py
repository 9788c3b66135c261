"""Intervals of differences between methods: a draw's metrics as they are defined, intervals as wide as is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import taskgraft as tg
from taskgraft.reports import bootstrap
from taskgraft.reports.bootstrap import Answers, Interval, between, counts_of, difference, samples, score, values
from taskgraft.tasks.metrics import METRICS

CASES: dict[str, tuple[str, int]] = {
    "accuracy": ("classification", 3),
    "f1": ("classification", 2),
    "macro_f1": ("classification", 4),
    "micro_f1": ("classification", 3),
    "matthews": ("classification", 3),
    "pearson": ("regression", 0),
    "spearman": ("regression", 0),
    "squad_f1": ("spans", 0),
    "exact_match": ("spans", 0),
}


def drawn(metric: str, rows: int = 40, seeds: int = 3, seed: int = 0, noise: float = 0.4) -> Answers:
    kind, classes = CASES[metric]
    rng = np.random.default_rng(seed)
    right: list[Any]
    if kind == "classification":
        truth = rng.integers(classes, size=rows)
        wrong = rng.random((seeds, rows)) < noise
        right = truth.tolist()
        given: list[list[Any]] = np.where(wrong, rng.integers(classes, size=(seeds, rows)), truth).tolist()
    elif kind == "regression":
        numbers = rng.normal(size=rows)
        right, given = numbers.tolist(), (numbers + noise * rng.normal(size=(seeds, rows))).tolist()
    else:
        words = np.array(["red", "green", "blue", "white"])
        right = [[{"text": " ".join(words[rng.integers(4, size=2)]), "start": 0}] for _ in range(rows)]
        given = [[" ".join(words[rng.integers(4, size=2)]) for _ in range(rows)] for _ in range(seeds)]
    return Answers(kind, tuple(f"c{i}" for i in range(classes)), (metric,), right, given)


@pytest.mark.parametrize("metric", CASES)
def test_the_metric_of_a_draw_is_the_metric_of_its_rows(metric: str) -> None:
    answers = drawn(metric)
    rng = np.random.default_rng(1)
    (counts,) = counts_of(40, 5, rng)
    assert (counts.sum(1) == 40).all()
    found = values(answers, answers.given[0], counts)
    for some, value in zip(counts, found, strict=True):
        rows = np.repeat(np.arange(40), some.astype(int))
        right, given = [answers.right[i] for i in rows], [answers.given[0][i] for i in rows]
        assert value == pytest.approx(METRICS[metric].compute(answers.labels, right, given, answers.kind), abs=1e-12)


@pytest.mark.parametrize("metric", ["matthews", "f1", "macro_f1"])
def test_a_draw_that_says_nothing_scores_zero(metric: str) -> None:
    _, classes = CASES[metric]
    labels = tuple(map(str, range(classes)))
    answers = Answers("classification", labels, (metric,), [0] * 5, [[0] * 5])
    assert score(answers) == (1.0 if metric == "macro_f1" else 0.0)


def test_a_method_does_not_differ_from_itself() -> None:
    answers = [drawn(metric) for metric in ("accuracy", "matthews", "spearman")]
    assert difference(answers, answers, draws=50) == Interval(0.0, 0.0, 0.0)
    assert difference(answers, answers, draws=50).sign == 0


def test_the_interval_is_as_wide_as_that_of_a_mean_of_paired_rows() -> None:
    rows, rng = 3000, np.random.default_rng(3)
    truth = np.zeros(rows, int)
    one, other = (rng.random(rows) < 0.2).astype(int), (rng.random(rows) < 0.3).astype(int)
    make = [Answers("classification", ("a", "b"), ("accuracy",), truth.tolist(), [x.tolist()]) for x in (one, other)]
    found = difference(make[:1], make[1:])
    each = other - one
    error = each.std() / math.sqrt(rows)
    assert found.mean == pytest.approx(each.mean()) and found.sign == 1
    assert found.low == pytest.approx(each.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(each.mean() + 1.96 * error, abs=0.15 * error)
    assert difference(make[1:], make[:1]).sign == -1


def test_rows_that_both_get_wrong_alike_make_no_difference_less_sure() -> None:
    one = drawn("accuracy", rows=500, seeds=1)
    better = list(one.given[0])
    for row in [row for row, given in enumerate(better) if given != one.right[row]][:20]:
        better[row] = one.right[row]
    other = Answers(one.kind, one.labels, one.metrics, one.right, [better])
    assert difference([other], [one]).low > 0, "twenty rows better and none worse"


def test_a_lead_that_two_methods_have_in_common_makes_its_growth_no_less_sure() -> None:
    now, before, base = (bootstrap.drawn(drawn("accuracy", noise=noise)) for noise in (0.1, 0.4, 0.8))
    growth = between([now.less(base)], [before.less(base)])
    gain = between([now], [before])
    assert (growth.mean, growth.low, growth.high) == pytest.approx((gain.mean, gain.low, gain.high))
    assert growth.low > 0 > between([before.less(base)], [now.less(base)]).high


def test_seeds_that_disagree_widen_an_interval() -> None:
    rows = 400
    right = [0] * rows
    steady = Answers("classification", ("a", "b"), ("accuracy",), right, [[0] * 300 + [1] * 100] * 3)
    given = [[0] * n + [1] * (rows - n) for n in (200, 300, 400)]
    unsteady = Answers("classification", ("a", "b"), ("accuracy",), right, given)
    rng = np.random.default_rng
    assert score(steady) == score(unsteady)
    assert samples(unsteady, 500, rng(0)).std() > 2 * samples(steady, 500, rng(0)).std()


def test_the_same_draws_each_time() -> None:
    one, other = [drawn("f1", seed=1)], [drawn("f1", seed=1, noise=0.5)]
    assert difference(one, other, draws=40) == difference(one, other, draws=40)
    assert difference(one, other, draws=40) != difference(one, other, draws=40, seed=1)


def test_what_cannot_be_compared_is_refused() -> None:
    one = drawn("accuracy")
    with pytest.raises(tg.GraftError, match="same rows"):
        difference([one], [drawn("accuracy", seed=5)])
    with pytest.raises(tg.GraftError, match="cannot be paired"):
        difference([one], [])
    with pytest.raises(tg.GraftError, match="for each of the 40 rows"):
        Answers(one.kind, one.labels, one.metrics, one.right, [[0]])
