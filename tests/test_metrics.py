"""Metrics against scikit-learn, scipy, conlleval's rules and SQuAD's own examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics as sk
from hypothesis import given
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.tasks.metrics import METRICS, default_metrics, entities, evaluate, score_of, squad_exact_match, squad_f1
from taskgraft.tasks.task import KINDS

TWO = ("no", "yes")
THREE = ("a", "b", "c")
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_classification_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    answers, predictions = rng.integers(0, 2, 200).tolist(), rng.integers(0, 2, 200).tolist()
    scores = evaluate("classification", ("matthews", "f1", "micro_f1"), TWO, answers, predictions)
    assert list(scores) == ["matthews", "f1", "micro_f1", "accuracy", "macro_f1"]
    assert scores["matthews"] == pytest.approx(sk.matthews_corrcoef(answers, predictions))
    assert scores["f1"] == pytest.approx(sk.f1_score(answers, predictions, pos_label=1))
    assert scores["accuracy"] == scores["micro_f1"] == pytest.approx(sk.accuracy_score(answers, predictions))
    assert scores["macro_f1"] == pytest.approx(sk.f1_score(answers, predictions, average="macro"))
    assert all(type(value) is float for value in scores.values())


def test_hand_computed_classification() -> None:
    scores = evaluate("classification", ("f1", "matthews"), TWO, [1, 1, 1, 0], [1, 1, 0, 1])
    assert scores["f1"] == pytest.approx(2 / 3)  # 2 right, 1 missed, 1 too many
    assert scores["matthews"] == pytest.approx(-1 / 3)  # (2*0 - 1*1) / sqrt(3*3*1*1)
    assert scores["accuracy"] == 0.5


def test_macro_f1_is_over_the_classes_that_occur() -> None:
    scores = evaluate("classification", ("macro_f1",), THREE, [0, 0, 1, 1], [0, 0, 1, 0])
    assert scores["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)  # "c" is neither there nor predicted
    scores = evaluate("classification", ("macro_f1",), THREE, [0, 0, 1, 1], [0, 0, 1, 2])
    assert scores["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_multilabel() -> None:
    answers, predictions = [[0], [0, 1], []], [[0], [1], []]
    scores = evaluate("multilabel", ("accuracy",), THREE, answers, predictions)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["micro_f1"] == pytest.approx(2 * 2 / (3 + 2))
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)
    assert evaluate("multilabel", ("micro_f1",), THREE, [[], []], [[], []])["micro_f1"] == 1
    assert evaluate("multilabel", ("micro_f1",), THREE, [[], []], [[0], []])["micro_f1"] == 0
    one_class = evaluate("multilabel", ("micro_f1",), THREE, [[1], [], []], [[1], [1], []])
    assert one_class["micro_f1"] == one_class["macro_f1"] == pytest.approx(2 / 3)


def test_regression_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    answers = rng.normal(size=100)
    predictions = np.exp(answers) + rng.normal(size=100)
    scores = evaluate("regression", ("spearman",), (), answers.tolist(), predictions.tolist())
    assert list(scores) == ["spearman", "pearson"]
    assert scores["pearson"] == pytest.approx(np.corrcoef(answers, predictions)[0, 1])
    ranks = [scipy.stats.rankdata(values) for values in (answers, predictions)]
    assert scores["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("predictions", [[3.0, 3.0, 3.0], [float("nan")] * 3, [float("inf"), 1.0, 2.0]])
def test_a_prediction_that_says_nothing_has_no_correlation(predictions: list[float]) -> None:
    scores = evaluate("regression", ("pearson",), (), [1.0, 2.0, 4.0], predictions)
    assert scores["pearson"] == 0
    assert math.isfinite(scores["spearman"])
    assert evaluate("regression", ("pearson",), (), [1.0], [2.0]) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.filterwarnings("error")
def test_one_class_only_is_zero_and_not_nan() -> None:
    scores = evaluate("classification", ("matthews", "f1"), TWO, [0, 0, 0], [0, 0, 0])
    assert scores["matthews"] == 0 and scores["f1"] == 0 and scores["accuracy"] == 1


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O B-LOC", {("PER", 1, 2), ("LOC", 4, 4)}),
        ("B-PER B-PER I-PER", {("PER", 0, 0), ("PER", 1, 2)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),  # no B needed
        ("B-PER I-LOC I-LOC", {("PER", 0, 0), ("LOC", 1, 2)}),  # a new type begins a new entity
        ("S-PER B-LOC I-LOC E-LOC E-LOC", {("PER", 0, 0), ("LOC", 1, 3), ("LOC", 4, 4)}),
        ("B-PER E-PER I-PER", {("PER", 0, 1), ("PER", 2, 2)}),
        ("B-a-b I-a-b", {("a-b", 0, 1)}),
        ("", set()),
    ],
)
def test_entities_as_conlleval_finds_them(tags: str, found: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_entity_f1_counts_exact_spans() -> None:
    # wanted: PER 0-1, LOC 3; PER 0. given: PER 0 (cut short), LOC 3; PER 0, LOC 1
    answers, predictions = [[1, 2, 0, 3], [1, 0]], [[1, 0, 0, 3], [1, 3]]
    scores = evaluate("tokens", ("entity_f1",), BIO, answers, predictions)
    assert scores["entity_f1"] == pytest.approx(2 * 2 / (3 + 4))
    assert scores["token_accuracy"] == pytest.approx(4 / 6)
    assert evaluate("tokens", ("entity_f1",), BIO, [[0, 0]], [[0, 0]]) == {"entity_f1": 0.0, "token_accuracy": 1.0}
    assert list(evaluate("tokens", ("token_accuracy",), ("noun", "verb"), [[0, 1]], [[0, 0]])) == ["token_accuracy"]


SQUAD = [  # prediction, accepted, exact match, f1
    ("the Eiffel tower", ["Eiffel Tower."], 1, 1),
    ("Eiffel Tower", ["the Eiffel tower in Paris"], 0, 2 * 2 / (2 + 4)),
    ("Denver Broncos", ["Denver Broncos", "The Denver Broncos!"], 1, 1),
    ("a  Santa Clara,  California", ["Santa Clara, California", "Levi's Stadium"], 1, 1),
    ("Levis Stadium", ["Levi's Stadium"], 1, 1),
    ("1,000", ["1000"], 1, 1),
    ("Paris", ["London", "Paris, France"], 0, 2 * 1 / (1 + 2)),  # the nearest counts
    ("the the cat", ["cat cat"], 0, 2 * 1 / (1 + 2)),  # words are counted, not collected
    ("Paris", ["London"], 0, 0),
    ("", ["Paris"], 0, 0),
    ("", [], 1, 1),  # a question without an answer
    ("Paris", [], 0, 0),
]


@pytest.mark.parametrize(("prediction", "accepted", "exact", "f1"), SQUAD)
def test_squad_metric(prediction: str, accepted: list[str], exact: float, f1: float) -> None:
    assert squad_exact_match(prediction, accepted) == exact
    assert squad_f1(prediction, accepted) == pytest.approx(f1)


def test_spans_and_text() -> None:
    answers = [[{"start": 0, "text": text} for text in accepted] for _, accepted, _, _ in SQUAD]
    scores = evaluate("spans", ("squad_f1",), (), answers, [prediction for prediction, *_ in SQUAD])
    assert list(scores) == ["squad_f1", "exact_match"]
    assert scores["exact_match"] == pytest.approx(np.mean([exact for _, _, exact, _ in SQUAD]))
    assert scores["squad_f1"] == pytest.approx(np.mean([f1 for *_, f1 in SQUAD]))
    scores = evaluate("text", ("exact_match",), (), ["A", "3.2", "-1", "not so"], ["the", "32", "-1", " not  so "])
    assert scores["exact_match"] == 0.5


def test_score_is_the_mean_of_the_tasks_own_metrics() -> None:
    assert score_of(("accuracy", "f1"), {"accuracy": 0.5, "f1": 1.0, "macro_f1": 0.0}) == 0.75
    with pytest.raises(GraftError, match="lack f1: they hold accuracy"):
        score_of(("f1",), {"accuracy": 1.0})


def test_default_metrics() -> None:
    assert default_metrics("classification", TWO) == ("accuracy",)
    assert default_metrics("classification", TWO, [30, 10]) == ("accuracy",)
    assert default_metrics("classification", TWO, [31, 10]) == ("macro_f1",)
    assert default_metrics("classification", TWO, [31, 0]) == ("macro_f1",)
    assert default_metrics("multilabel", THREE) == ("micro_f1",)
    assert default_metrics("regression", ()) == ("pearson",)
    assert default_metrics("tokens", BIO) == ("entity_f1",)
    assert default_metrics("tokens", ("O", "noun")) == ("token_accuracy",)
    assert default_metrics("spans", ()) == ("squad_f1", "exact_match")
    assert default_metrics("text", ()) == ("exact_match",)


EXAMPLES: dict[str, tuple[tuple[str, ...], list[Any], list[Any]]] = {
    "classification": (TWO, [0, 1], [0, 1]),
    "multilabel": (TWO, [[0], [0, 1]], [[0], [0, 1]]),
    "regression": ((), [0.0, 1.0], [0.0, 1.0]),
    "tokens": (BIO, [[1, 2], [0]], [[1, 2], [0]]),
    "spans": ((), [[{"start": 0, "text": "x"}]], ["x"]),
    "text": ((), ["x"], ["x"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_one_when_all_is_right_or_is_refused(kind: str, metric: str) -> None:
    labels, answers, predictions = EXAMPLES[kind]
    if kind in METRICS[metric].kinds:
        assert evaluate(kind, (metric,), labels, answers, predictions)[metric] == pytest.approx(1)
    else:
        with pytest.raises(GraftError, match=f"metric '{metric}' does not fit a {kind} task"):
            evaluate(kind, (metric,), labels, answers, predictions)


MISTAKES: list[tuple[tuple[Any, ...], str]] = [
    (("classification", ("acc",), TWO, [0], [0]), r"metric 'acc' is unknown: use one of accuracy, f1, .*squad_f1\."),
    (("classification", ("f1",), THREE, [0], [0]), "'f1' does not fit a classification task with 3 classes: use acc"),
    (("tokens", ("entity_f1",), ("noun", "verb"), [[0]], [[0]]), "'entity_f1' does not fit .* use token_accuracy"),
    (("classification", (), TWO, [0], [0]), "at least one metric"),
    (("classification", ("accuracy",), TWO, [0, 1], [0]), "1 predictions were given for 2 rows"),
    (("classification", ("accuracy",), TWO, [], []), "nothing to evaluate"),
    (("tokens", ("token_accuracy",), BIO, [[0], [0, 1]], [[0], [0]]), "row 1 has 2 words and 1 predictions"),
    (("images", ("accuracy",), TWO, [0], [0]), "kind 'images' is unknown"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_mistakes(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence) as caught:
        evaluate(*arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_kind_has_no_default() -> None:
    with pytest.raises(GraftError, match="kind 'images' is unknown"):
        default_metrics("images", ())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_scores_are_never_nan(rows: list[tuple[int, int]]) -> None:
    answers, predictions = [a for a, _ in rows], [p for _, p in rows]
    scores = evaluate("classification", ("matthews", "micro_f1"), THREE, answers, predictions)
    assert all(-1 <= value <= 1 for value in scores.values())
    numbers = evaluate("regression", ("pearson",), (), [float(a) for a in answers], [float(p) for p in predictions])
    assert all(-1 <= value <= 1 + 1e-9 for value in numbers.values())
