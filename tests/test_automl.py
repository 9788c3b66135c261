"""The no-BERT baseline: it learns, it chooses by validation alone, and it keeps to its budget."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPRegressor
from sklearn.svm import SVR, LinearSVC

import taskgraft as tg
from taskgraft.tasks.task import Task, schema_of
from taskgraft.training import automl as module
from taskgraft.training.automl import (
    CLASSIFIERS,
    REGRESSORS,
    AutoMLResult,
    automl,
    draw,
    spread,
    weights_of,
)
from taskgraft.training.ngrams import FEATURES, overlap

FILLER = ["the", "a", "it", "was", "then", "there", "some", "more", "of", "that", "which", "and", "so", "on", "with"]
TOPICS = {
    "sport": ["goal", "match", "team", "coach"],
    "money": ["bank", "rate", "bond", "profit"],
    "food": ["soup", "bread", "pepper", "oven"],
}
LABELS = tuple(TOPICS)


def sentence(rng: random.Random, topics: list[str]) -> str:
    words = rng.choices(FILLER, k=6) + [rng.choice(TOPICS[topic]) for topic in topics for _ in range(2)]
    rng.shuffle(words)
    return " ".join(words)


def task_of(
    kind: Any, rows: list[dict[str, Any]], metrics: tuple[str, ...], labels: tuple[str, ...] = (), **sizes: int
) -> Task:
    """The rows as a task: the first ones train, then `validation` and `test` many."""
    table = pa.Table.from_pylist(rows, schema=schema_of(kind, "pair" in rows[0]))
    validation, test = sizes.get("validation", 40), sizes.get("test", 40)
    train = len(rows) - validation - test
    splits = {"train": table.slice(0, train), "validation": table.slice(train, validation)}
    if test:
        splits["test"] = table.slice(train + validation)
    return Task("made up", kind, labels, metrics, splits)


def topics(rows: int = 200, **sizes: int) -> Task:
    rng = random.Random(1)
    made = [{"text": sentence(rng, [LABELS[i % 3]]), "label": i % 3} for i in range(rows)]
    return task_of("classification", made, ("accuracy",), LABELS, **sizes)


@pytest.fixture(scope="module")
def found() -> AutoMLResult:
    return automl(topics())


def test_it_learns_a_task_of_topics(found: AutoMLResult) -> None:
    assert found.test["accuracy"] > 0.9 and found.validation["accuracy"] > 0.9
    assert set(found.test) == {"accuracy", "macro_f1"}
    assert found.seconds > 0


def test_by_default_200_configurations_of_many_families_are_tried(found: AutoMLResult) -> None:
    assert found.configurations == 200 and len(found.families) >= 5
    assert sum(found.families.values()) == 200 and min(found.families.values()) >= 10
    distinct = {(t["model"], t["features"], str(t["settings"])) for t in found.trials}
    assert len(distinct) == 200
    assert {trial["features"] for trial in found.trials} == set(FEATURES), "every kind of features has a turn"


def test_every_family_learns(found: AutoMLResult) -> None:
    best = {family: max(t["score"] for t in found.trials if t["family"] == family) for family in found.families}
    assert min(best.values()) > 0.85, best


def test_no_configuration_fails_on_an_ordinary_task(found: AutoMLResult) -> None:
    assert [trial for trial in found.trials if trial["score"] is None] == []


def test_the_winner_is_the_best_by_validation(found: AutoMLResult) -> None:
    assert found.winner["score"] == max(trial["score"] for trial in found.trials) == found.validation["accuracy"]
    assert found.winner["family"] in found.description and found.winner["features"] in found.description


def test_the_test_rows_have_no_say() -> None:
    task = topics(120)
    upside_down = task.splits["test"].set_column(1, "label", pa.array([2 - i % 3 for i in range(40)]))
    other = Task(task.name, task.kind, task.labels, task.metrics, {**task.splits, "test": upside_down})
    a, b = automl(task, configurations=8), automl(other, configurations=8)
    assert a.winner["settings"] == b.winner["settings"] and a.validation == b.validation
    assert a.test != b.test


def test_the_seed_decides_everything() -> None:
    def essence(seed: int) -> list[tuple[Any, ...]]:
        trials = automl(topics(100), configurations=14, seed=seed).trials
        return [(t["model"], t["features"], str(t["settings"]), t["score"]) for t in trials]

    assert essence(3) == essence(3)
    assert essence(3) != essence(4)


def test_many_rows_are_halved_first() -> None:
    seen: list[tuple[int, int, float]] = []
    found = automl(topics(1_480), configurations=20, progress=lambda *news: seen.append(news))
    rows = [trial["rows"] for trial in found.trials]
    assert rows == [1_000] * 20 + [1_400] * 5, "all on some rows, then the best quarter on all"
    final = found.trials[20:]
    assert found.winner in final and found.winner["score"] == max(trial["score"] for trial in final)
    first = sorted((trial["score"] for trial in found.trials[:20]), reverse=True)
    again = {str(trial["settings"]) for trial in final}
    assert sorted((t["score"] for t in found.trials[:20] if str(t["settings"]) in again), reverse=True) == first[:5]
    assert [done for done, _, _ in seen] == list(range(1, 26)) and {total for _, total, _ in seen} == {25}
    assert seen[-1][2] == found.winner["score"]


def test_a_budget_in_seconds_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))  # a second each time it is asked
    found = automl(topics(100), seconds=30)
    assert 5 <= len(found.trials) <= 15
    assert found.winner["rows"] == 20 and found.test["accuracy"] > 0
    rushed = automl(topics(1_480), seconds=0.001)
    assert [trial["rows"] for trial in rushed.trials] == [1_000, 1_400], "one of each round, whatever the budget"


def test_regression() -> None:
    rng = random.Random(2)
    made = []
    for _ in range(240):
        good, bad = rng.randint(0, 4), rng.randint(0, 4)
        words = rng.choices(FILLER, k=5) + ["great"] * good + ["awful"] * bad
        rng.shuffle(words)
        made.append({"text": " ".join(words), "label": 100.0 + 5.0 * (good - bad)})
    found = automl(task_of("regression", made, ("pearson",)), configurations=40)
    assert found.test["pearson"] > 0.9
    assert len(found.families) == len(REGRESSORS) >= 5
    assert all(trial["score"] is not None for trial in found.trials)


def test_several_labels_a_row() -> None:
    rng = random.Random(3)
    made = []
    for _ in range(240):
        marks = [i for i in range(3) if rng.random() < 0.4]
        made.append({"text": sentence(rng, [LABELS[i] for i in marks]), "label": marks})
    found = automl(task_of("multilabel", made, ("micro_f1",), LABELS), configurations=40)
    assert found.test["micro_f1"] > 0.9
    assert len(found.families) == len(CLASSIFIERS) and all(trial["score"] is not None for trial in found.trials)


def test_pairs_are_told_apart_by_what_they_share() -> None:
    rng = random.Random(4)
    vocabulary = [f"word{i}" for i in range(60)]
    made = []
    for i in range(400):
        text, other = rng.sample(vocabulary, 5), rng.sample(vocabulary, 5)
        pair = rng.sample(text, 5) if i % 2 else other
        made.append({"text": " ".join(text), "pair": " ".join(pair), "label": i % 2})
    found = automl(task_of("classification", made, ("accuracy",), ("other", "same")), configurations=24)
    assert found.test["accuracy"] > 0.95, "no single word says anything: the overlap does"


def test_the_order_of_a_pair_matters() -> None:
    rng = random.Random(5)
    made = []
    for i in range(300):
        a, b = sentence(rng, ["sport"]), sentence(rng, ["money"])
        made.append({"text": (a, b)[i % 2], "pair": (b, a)[i % 2], "label": i % 2})
    found = automl(task_of("classification", made, ("accuracy",), ("ab", "ba")), configurations=10)
    assert found.test["accuracy"] > 0.95


def test_overlap_by_hand() -> None:
    assert overlap(["A b c", ""], ["b C d e", ""]).tolist() == [[2 / 5, 2 / 3, 2 / 4, 3 / 4], [0, 0, 0, 0]]


def test_a_task_without_test_rows_has_no_test_metrics() -> None:
    assert automl(topics(80, test=0), configurations=3).test == {}


def test_tiny_tasks_and_odd_texts() -> None:
    made = [{"text": text, "label": i % 2} for i, text in enumerate(["!", "?", "a", "", "b b", "é"] * 3)]
    found = automl(task_of("classification", made, ("accuracy",), ("x", "y"), validation=4, test=4), configurations=40)
    assert found.configurations == 40 and all(trial["score"] is not None for trial in found.trials)


def test_rare_classes_are_in_every_sample() -> None:
    labels = [0] * 90 + [1] * 9 + [2]
    order = spread("classification", labels, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(100))
    assert {labels[row] for row in order[:10]} == {0, 1, 2}
    assert sum(labels[row] == 1 for row in order[:50]) in (4, 5)


def test_weights_by_hand() -> None:
    rows, marks = np.random.default_rng(0).random((12, 4)), np.arange(12) % 3
    several = np.eye(3, dtype=int)[marks]
    assert weights_of(LinearSVC().fit(rows, marks)) == 3 * (4 + 1)
    assert weights_of(LinearSVC().fit(rows, marks > 0)) == 4 + 1
    assert weights_of(MultinomialNB().fit(rows, marks)) == 3 * (4 + 1)
    assert weights_of(OneVsRestClassifier(LinearSVC()).fit(rows, several)) == 3 * (4 + 1)
    assert weights_of(MLPRegressor(hidden_layer_sizes=(5,), tol=1.0).fit(rows, marks)) == (4 + 1) * 5 + (5 + 1)
    assert weights_of(KNeighborsClassifier().fit(rows, marks)) is None
    assert weights_of(SVR().fit(rows, marks)) is None


def test_the_first_few_configurations_have_one_of_each_family() -> None:
    first = draw(CLASSIFIERS, len(CLASSIFIERS), np.random.default_rng(0))
    assert {configuration.family.name for configuration in first} == {family.name for family in CLASSIFIERS}


def test_no_warning_gets_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        automl(topics(100), configurations=20)


def test_a_failed_configuration_is_part_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: Any) -> None:
        raise ValueError("weights overflowed\nat length")

    monkeypatch.setattr("sklearn.svm.LinearSVC.fit", overflow)
    found = automl(topics(100), configurations=14)
    failed = [trial for trial in found.trials if trial["score"] is None]
    assert failed and {(trial["model"], trial["error"]) for trial in failed} == {("LinearSVC", "weights overflowed")}
    monkeypatch.setattr(module, "CLASSIFIERS", [f for f in CLASSIFIERS if f.name == "linear SVM"])
    with pytest.raises(tg.GraftError, match="no model could be fitted to task 'made up'; the last one said: weights"):
        automl(topics(100), configurations=2)


ONE_LABEL = [{"text": "a", "label": 0}] * 90
BLANK = [{"text": " ", "label": i % 2} for i in range(90)]
BAD = [
    (lambda: automl(topics(), configurations=0), "configurations=0 leaves nothing to try"),
    (lambda: automl(topics(), seconds=0), "seconds=0 leaves no time"),
    (lambda: automl(topics(), seconds=float("nan")), "seconds=nan leaves no time"),
    (lambda: automl(task_of("classification", ONE_LABEL, ("accuracy",), ("x", "y"))), "all have one label"),
    (lambda: automl(task_of("classification", BLANK, ("accuracy",), ("x", "y"))), "are all empty"),
    (lambda: automl(topics(80, validation=0)), "has no validation rows"),
    (lambda: automl(Task("none", "classification", ("x", "y"), ("accuracy",), {})), "has no train rows"),
    (lambda: automl(task_of("text", [{"text": "a", "label": "b"}] * 90, ("exact_match",))),
     "no models for tasks of kind text .*: it takes classification, multilabel, regression"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "says"), BAD)
def test_bad_input_gets_one_sentence(call: Any, says: str) -> None:
    with pytest.raises(tg.GraftError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
