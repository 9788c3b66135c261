"""Metrics: what is measured for each kind of task, computed with scikit-learn and scipy; SQuAD's and conlleval's here.

All are fractions, higher is better, and never NaN: a prediction that says nothing scores 0.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from taskgraft.errors import GraftError
from taskgraft.tasks.task import KINDS

Rows = Sequence[Any]
Compute = Callable[[Sequence[str], Rows, Rows, str], float]  # labels, answers, predictions, kind
PUNCTUATION = str.maketrans("", "", string.punctuation)
IMBALANCED = 3  # the largest class over the smallest, beyond which accuracy says little


def default_metrics(kind: str, labels: Sequence[str], counts: Sequence[int] | None = None) -> tuple[str, ...]:
    """The metrics of a task that names none; `counts` are rows per class."""
    if kind == "classification":
        return ("macro_f1",) if counts and max(counts) > IMBALANCED * min(counts) else ("accuracy",)
    if kind == "tokens":
        return ("entity_f1",) if has_entities(labels) else ("token_accuracy",)
    usual = {"multilabel": ("micro_f1",), "regression": ("pearson",), "text": ("exact_match",),
             "spans": ("squad_f1", "exact_match")}  # fmt: skip
    if kind not in usual:
        raise GraftError(f"a task of kind {kind!r} is unknown: use one of {', '.join(KINDS)}.")
    return usual[kind]


def check_metrics(kind: str, metrics: Sequence[str], labels: Sequence[str]) -> None:
    """Refuse metrics that are unknown or do not fit the task."""
    if not metrics:
        raise GraftError(f"a task needs at least one metric: use {', '.join(_metrics_of(kind, labels))}.")
    for name in metrics:
        if name not in METRICS:
            raise GraftError(f"metric {name!r} is unknown: use one of {', '.join(METRICS)}.")
        if name not in (fitting := _metrics_of(kind, labels)):
            whom = f"a {kind} task" + (f" with {len(labels)} classes" if labels else "")
            raise GraftError(f"metric {name!r} does not fit {whom}: use {', '.join(fitting)}.")


def evaluate(
    kind: str, metrics: Sequence[str], labels: Sequence[str], answers: Rows, predictions: Rows
) -> dict[str, float]:
    """The named metrics first, then the usual others of the kind.

    `answers` are a split's `label` column as Python values; `predictions` have the same form, but for spans and text
    each is the predicted string.
    """
    check_metrics(kind, metrics, labels)
    if not len(answers):
        raise GraftError("there is nothing to evaluate: the split has no rows.")
    if len(answers) != len(predictions):
        raise GraftError(f"{len(predictions)} predictions were given for {len(answers)} rows: give one for each.")
    usual = [name for name in USUAL[kind] if name in _metrics_of(kind, labels)]
    return {name: float(METRICS[name].compute(labels, answers, predictions, kind)) for name in [*metrics, *usual]}


def score_of(metrics: Sequence[str], scores: Mapping[str, float]) -> float:
    """A task's score: the mean of its own metrics."""
    missing = [name for name in metrics if name not in scores]
    if missing or not metrics:
        raise GraftError(f"the scores lack {', '.join(missing) or 'metrics'}: they hold {', '.join(scores) or 'none'}.")
    return math.fsum(scores[name] for name in metrics) / len(metrics)


def _accuracy(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    """Of rows; a multilabel row counts when its whole set is right."""
    right = (set(a) == set(p) if kind == "multilabel" else a == p for a, p in zip(answers, predictions, strict=True))
    return float(np.mean(list(right)))


def _f1(average: str) -> Compute:
    """scikit-learn's F1. The macro mean is over the classes that occur in the answers or the predictions: one that a
    small split does not have, and that nothing was taken for, is no failure."""

    def compute(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
        from sklearn.metrics import f1_score

        if kind == "classification":
            return float(f1_score(answers, predictions, average=average, zero_division=0))
        wanted, given = _indicators(labels, answers), _indicators(labels, predictions)
        occurs = (wanted | given).any(axis=0)
        if not occurs.any():
            return 1.0  # no row has a label, and none was given one
        wanted, given = wanted[:, occurs], given[:, occurs]
        columns = zip(wanted.T, given.T, strict=True) if average == "macro" else [(wanted.ravel(), given.ravel())]
        return float(np.mean([f1_score(a, p, zero_division=0) for a, p in columns]))

    return compute


def _matthews(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    from sklearn.metrics import matthews_corrcoef

    says_nothing = len(set(answers)) < 2 or len(set(predictions)) < 2
    return 0.0 if says_nothing else float(matthews_corrcoef(answers, predictions))


def _indicators(labels: Sequence[str], rows: Rows) -> Any:
    matrix = np.zeros((len(rows), len(labels)), dtype=bool)
    for row, present in zip(matrix, rows, strict=True):
        row[list(present)] = True
    return matrix


def _correlation(name: str) -> Compute:
    def compute(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
        import scipy.stats

        if len(answers) < 2:
            return 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant input: no correlation, 0
            value = float(getattr(scipy.stats, name)(answers, predictions).statistic)
        return value if math.isfinite(value) else 0.0

    return compute


def has_entities(labels: Sequence[str]) -> bool:
    """Whether the labels are of the form O, B-X, I-X (with E-X, S-X, too)."""
    return "O" in labels and len(labels) > 1 and all(name == "O" or name[:2] in ("B-", "I-", "E-", "S-")
                                                     for name in labels)  # fmt: skip


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of each entity, by conlleval's rules: a new type begins a new entity."""
    found, begin, before, before_type = set(), 0, "O", ""
    for position, tag in enumerate([*tags, "O"]):
        mark, _, type_ = tag.partition("-")
        if before != "O" and (before in "ES" or mark in "BSO" or type_ != before_type):
            found.add((before_type, begin, position - 1))
        if mark != "O" and (mark in "BS" or before in "ESO" or type_ != before_type):
            begin = position
        before, before_type = mark, type_
    return found


def _entity_f1(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    _check_lengths(answers, predictions)
    right = wanted = given = 0
    for answer, prediction in zip(answers, predictions, strict=True):
        a, p = entities([labels[i] for i in answer]), entities([labels[i] for i in prediction])
        right, wanted, given = right + len(a & p), wanted + len(a), given + len(p)
    return 2 * right / (wanted + given) if right else 0.0


def _token_accuracy(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    _check_lengths(answers, predictions)
    right = [a == p for rows in zip(answers, predictions, strict=True) for a, p in zip(*rows, strict=True)]
    return float(np.mean(right)) if right else 0.0


def _check_lengths(answers: Rows, predictions: Rows) -> None:
    for row, (answer, prediction) in enumerate(zip(answers, predictions, strict=True)):
        if len(answer) != len(prediction):
            raise GraftError(f"row {row} has {len(answer)} words and {len(prediction)} predictions: give as many.")


def normalise_answer(text: str) -> str:
    """SQuAD v1.1's own: lower case, without punctuation, then without articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def squad_exact_match(prediction: str, accepted: Sequence[str]) -> float:
    """1 if the prediction is one of the accepted answers, or is empty where there is none."""
    return float(normalise_answer(prediction) in {normalise_answer(text) for text in accepted or ("",)})


def squad_f1(prediction: str, accepted: Sequence[str]) -> float:
    """The overlap of words with the accepted answer that is nearest."""
    return max((_overlap(prediction, text) for text in accepted), default=squad_exact_match(prediction, ()))


def _overlap(prediction: str, answer: str) -> float:
    given, wanted = normalise_answer(prediction).split(), normalise_answer(answer).split()
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


def _exact_match(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    pairs = zip(answers, predictions, strict=True)
    if kind == "text":  # to the letter: "A", "3.2" and "-1" are answers, not articles and punctuation
        return float(np.mean([answer.split() == prediction.split() for answer, prediction in pairs]))
    return float(np.mean([squad_exact_match(prediction, _texts(answer)) for answer, prediction in pairs]))


def _squad_f1(labels: Sequence[str], answers: Rows, predictions: Rows, kind: str) -> float:
    pairs = zip(answers, predictions, strict=True)
    return float(np.mean([squad_f1(prediction, _texts(answer)) for answer, prediction in pairs]))


def _texts(answer: Any) -> list[str]:
    return [answer] if isinstance(answer, str) else [each["text"] for each in answer]


@dataclass(frozen=True)
class Metric:
    kinds: tuple[str, ...]
    compute: Compute
    fits: Callable[[Sequence[str]], bool] = lambda labels: True


CLASSES = ("classification", "multilabel")
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(CLASSES, _accuracy),
    "f1": Metric(("classification",), _f1("binary"), fits=lambda labels: len(labels) == 2),  # of the second class
    "macro_f1": Metric(CLASSES, _f1("macro")),
    "micro_f1": Metric(CLASSES, _f1("micro")),
    "matthews": Metric(("classification",), _matthews),
    "pearson": Metric(("regression",), _correlation("pearsonr")),
    "spearman": Metric(("regression",), _correlation("spearmanr")),
    "token_accuracy": Metric(("tokens",), _token_accuracy),
    "entity_f1": Metric(("tokens",), _entity_f1, fits=has_entities),
    "exact_match": Metric(("spans", "text"), _exact_match),
    "squad_f1": Metric(("spans", "text"), _squad_f1),
}
USUAL: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "macro_f1"),
    "multilabel": ("micro_f1", "macro_f1"),
    "regression": ("pearson", "spearman"),
    "tokens": ("entity_f1", "token_accuracy"),
    "spans": ("squad_f1", "exact_match"),
    "text": ("exact_match", "squad_f1"),
}


def _metrics_of(kind: str, labels: Sequence[str]) -> list[str]:
    if kind not in KINDS:
        raise GraftError(f"a task of kind {kind!r} is unknown: use one of {', '.join(KINDS)}.")
    return [name for name, metric in METRICS.items() if kind in metric.kinds and metric.fits(labels)]
