"""The no-BERT baseline: a budgeted search over classical and shallow neural text models, as in Houlsby et al.

Fitted on the training rows, chosen on the validation rows by successive halving, judged once on the test rows.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn import ensemble, linear_model, naive_bayes, neighbors, neural_network, svm
from sklearn.multiclass import OneVsRestClassifier
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from taskgraft.errors import GraftError
from taskgraft.tasks.metrics import evaluate, score_of
from taskgraft.tasks.task import Task
from taskgraft.training.ngrams import LSA, SPARSE, TFIDF, Matrices

KINDS = ("classification", "multilabel", "regression")
FEWEST, MOST = 1_000, 10_000  # rows of the first round: a quarter of all, but within these
KEPT = 4  # one configuration in so many goes on to all the rows
FIRST_ROUND = 0.6  # of a budget in seconds


# -- models


@dataclass(frozen=True)
class Log:
    """A setting drawn evenly in its logarithm."""

    low: float
    high: float


Settings = Mapping[str, Log | tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Family:
    """Models that are searched together, in `share` of every 40 configurations; settings are Logs or choices."""

    name: str
    share: int
    models: tuple[Any, ...]
    features: tuple[str, ...]
    settings: Settings
    fixed: Mapping[str, Any] = field(default_factory=dict)
    one_vs_rest: bool = False  # where rows have several labels: it learns them one by one


BALANCE = (None, "balanced")
NEIGHBOURS: Settings = {"n_neighbors": (1, 3, 5, 8, 12, 20, 35), "weights": ("uniform", "distance")}
TREES: Settings = {"max_features": Log(0.02, 0.3), "min_samples_leaf": (1, 2, 4)}
LAYERS: Settings = {
    "hidden_layer_sizes": ((32,), (64,), (128,), (64, 32)),
    "alpha": Log(1e-5, 1e-1),
    "learning_rate_init": Log(1e-3, 1e-2),
    "max_iter": (10, 20, 30),
}
SGD: Settings = {"alpha": Log(1e-6, 1e-3), "average": (False, True)}

CLASSIFIERS = (
    Family("logistic regression", 7, (linear_model.LogisticRegression,), TFIDF + LSA,
           {"C": Log(0.1, 100), "class_weight": BALANCE}, {"max_iter": 50}, one_vs_rest=True),
    Family("linear SVM", 7, (svm.LinearSVC,), SPARSE,
           {"C": Log(0.01, 10), "class_weight": BALANCE, "loss": ("hinge", "squared_hinge")},
           {"tol": 1e-3, "max_iter": 300}, one_vs_rest=True),
    Family("naive Bayes", 8, (naive_bayes.MultinomialNB, naive_bayes.ComplementNB), SPARSE,
           {"alpha": Log(0.01, 3)}, one_vs_rest=True),
    Family("stochastic gradient descent", 8, (linear_model.SGDClassifier,), TFIDF + LSA,
           {**SGD, "loss": ("hinge", "log_loss", "modified_huber", "perceptron"), "class_weight": BALANCE},
           {"max_iter": 30}, one_vs_rest=True),
    Family("nearest neighbours", 4, (neighbors.KNeighborsClassifier,), TFIDF + LSA, NEIGHBOURS, {"metric": "cosine"}),
    Family("forest", 2, (ensemble.RandomForestClassifier, ensemble.ExtraTreesClassifier), LSA,
           {**TREES, "class_weight": BALANCE}, {"n_estimators": 100}),
    Family("shallow neural net", 4, (neural_network.MLPClassifier,), ("frequent words", *LSA), LAYERS,
           {"batch_size": 64}),
)  # fmt: skip
REGRESSORS = (
    Family("ridge regression", 9, (linear_model.Ridge,), TFIDF + LSA, {"alpha": Log(0.01, 100)}),
    Family("linear SVM", 7, (svm.LinearSVR,), SPARSE,
           {"C": Log(0.01, 10), "epsilon": (0.0, 0.1, 0.3),
            "loss": ("epsilon_insensitive", "squared_epsilon_insensitive")},
           {"tol": 1e-3, "max_iter": 300}),
    Family("kernel SVM", 5, (svm.SVR,), LSA, {"C": Log(0.1, 30), "gamma": Log(0.1, 10), "epsilon": (0.1, 0.3)}),
    Family("stochastic gradient descent", 8, (linear_model.SGDRegressor,), TFIDF + LSA,
           {**SGD, "loss": ("squared_error", "huber", "epsilon_insensitive"), "eta0": Log(0.01, 0.3)},
           {"max_iter": 30, "learning_rate": "adaptive"}),
    Family("nearest neighbours", 5, (neighbors.KNeighborsRegressor,), TFIDF + LSA, NEIGHBOURS, {"metric": "cosine"}),
    Family("forest", 2, (ensemble.RandomForestRegressor, ensemble.ExtraTreesRegressor), LSA, TREES,
           {"n_estimators": 60}),
    Family("shallow neural net", 4, (neural_network.MLPRegressor,), ("frequent words", *LSA), LAYERS,
           {"batch_size": 64}),
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    family: Family
    model: Any
    features: str
    settings: tuple[tuple[str, Any], ...]

    def build(self, kind: str, rows: int, seed: int) -> Any:
        """The estimator, not yet fitted; it asks for no more neighbours, nor a larger batch, than there are rows."""
        settings = {**dict(self.settings), **self.family.fixed}
        for name in {"n_neighbors", "batch_size"} & settings.keys():
            settings[name] = min(settings[name], rows)
        estimator = self.model(**settings)
        if "random_state" in estimator.get_params():
            estimator.set_params(random_state=seed)
        return OneVsRestClassifier(estimator) if kind == "multilabel" and self.family.one_vs_rest else estimator

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family.name,
            "model": self.model.__name__,
            "features": self.features,
            "settings": dict(self.settings),
        }


def draw(families: Sequence[Family], count: int, rng: np.random.Generator) -> list[Configuration]:
    """Distinct configurations, the families taking turns by their shares; each has had one after the first few."""

    def value(setting: Log | tuple[Any, ...]) -> Any:
        if isinstance(setting, Log):
            return float(f"{math.exp(rng.uniform(math.log(setting.low), math.log(setting.high))):.3g}")
        return setting[rng.integers(len(setting))]

    turns = sorted((i / family.share, place) for place, family in enumerate(families) for i in range(family.share))
    drawn: dict[Configuration, None] = {}
    for _, place in itertools.cycle(turns):
        if len(drawn) == count:
            break
        family = families[place]
        settings = tuple((name, value(setting)) for name, setting in family.settings.items())
        drawn.setdefault(Configuration(family, value(family.models), value(family.features), settings))
    return list(drawn)


def weights_of(model: Any) -> int | None:
    """How many numbers a model has learned; None for neighbours, forests and kernels, which keep rows or grow."""
    if isinstance(model, OneVsRestClassifier):
        return sum(weights_of(part) or 0 for part in model.estimators_)
    for names in (("coefs_", "intercepts_"), ("coef_", "intercept_"), ("feature_log_prob_", "class_log_prior_")):
        if hasattr(model, names[0]):
            values = [getattr(model, name) for name in names]
            return sum(np.size(part) for value in values for part in (value if isinstance(value, list) else [value]))
    return None


# -- the search


def spread(kind: str, values: Sequence[Any], rng: np.random.Generator) -> Any:
    """The rows in an order of which every beginning is a fair sample: no class is missing from one that has room."""
    order = rng.permutation(len(values))
    if kind != "classification":
        return order
    seen: Counter[int] = Counter()
    sizes = Counter(values)
    place = []
    for row in order.tolist():
        place.append(seen[values[row]] / sizes[values[row]])
        seen[values[row]] += 1
    return order[np.argsort(place, kind="stable")]


@dataclass(frozen=True)
class AutoMLResult:
    """The best configuration by the validation rows, what it scores, and everything that was tried.

    A trial has family, model, features, settings, rows (of training), score (on validation; None where it failed, with
    the `error`) and seconds. `winner` is the best of the trials on all rows.
    """

    validation: dict[str, float]
    test: dict[str, float]  # empty where the task has no test rows
    winner: dict[str, Any]
    families: dict[str, int]  # how many configurations of each were tried
    seconds: float
    trials: list[dict[str, Any]] = field(repr=False)
    parameters: int | None  # the winner's weights over its features; None for neighbours, forests and kernels

    @property
    def configurations(self) -> int:
        return sum(self.families.values())

    @property
    def description(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.winner["settings"].items())
        return f"{self.winner['family']} ({self.winner['model']}) over {self.winner['features']}: {settings}"


@dataclass(frozen=True, eq=False)
class Fitted:
    """A configuration that has learned: its trial, its metrics on the validation rows, and the model."""

    trial: dict[str, Any]
    metrics: dict[str, float]
    model: Any


class Trials:
    """A task's rows as matrices and targets, to try configurations on."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.answers = {split: table.column("label").to_pylist() for split, table in task.splits.items()}
        self.matrices = Matrices(task, seed)
        self.targets: Any
        self.centre, self.scale = 0.0, 1.0
        if task.kind == "multilabel":
            self.targets = np.zeros((len(self.answers["train"]), len(task.labels)), dtype=np.int64)
            for marks, positions in zip(self.targets, self.answers["train"], strict=True):
                marks[positions] = 1
        else:
            self.targets = np.asarray(self.answers["train"])
        if task.kind == "regression":
            self.centre, self.scale = float(self.targets.mean()), float(self.targets.std()) or 1.0
            self.targets = (self.targets - self.centre) / self.scale

    def predict(self, model: Any, features: str, split: str) -> list[Any]:
        """In the form of the split's answers."""
        predicted = model.predict(self.matrices.matrix(features, split))
        if self.task.kind == "multilabel":
            return [np.flatnonzero(marks).tolist() for marks in predicted]
        if self.task.kind == "regression":
            predicted = predicted * self.scale + self.centre
            if not np.isfinite(predicted).all():
                raise ValueError("its predictions are not finite")
        return list(predicted.tolist())

    def judge(self, predictions: list[Any], split: str) -> dict[str, float]:
        return evaluate(self.task.kind, self.task.metrics, self.task.labels, self.answers[split], predictions)

    def attempt(self, configuration: Configuration, rows: Any) -> Fitted:
        """Fit on these training rows and judge on the validation rows; a failure has no metrics, but an error."""
        start = time.perf_counter()
        trial: dict[str, Any] = {**configuration.to_json(), "rows": len(rows), "score": None}
        model, metrics = configuration.build(self.task.kind, len(rows), self.seed), {}
        try:  # one thread: these models are too small to gain from more, and lose much when cores are busy
            with warnings.catch_warnings(), np.errstate(all="ignore"), threadpool_limits(1):
                warnings.simplefilter("ignore")  # a search also tries what does not converge
                model.fit(self.matrices.matrix(configuration.features, "train")[rows], self.targets[rows])
                predictions = self.predict(model, configuration.features, "validation")
        except ValueError as error:  # weights that overflow, and the like
            trial["error"] = str(error).strip().partition("\n")[0]
        else:
            metrics = self.judge(predictions, "validation")
            trial["score"] = score_of(self.task.metrics, metrics)
        trial["seconds"] = time.perf_counter() - start
        return Fitted(trial, metrics, model)


def automl(
    task: Task,
    *,
    configurations: int = 200,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> AutoMLResult:
    """Search for the best classical model of a task: every configuration on some rows, the best quarter on all.

    `seconds` ends the search early, once a model has been fitted on all rows; `progress` is called after each trial
    with how many are done, how many there are, and the best validation score of this round.
    """
    check(task, configurations, seconds)
    start = time.perf_counter()
    rng = np.random.default_rng(seed)
    trials = Trials(task, seed)
    order = spread(task.kind, trials.answers["train"], rng)
    candidates = draw(REGRESSORS if task.kind == "regression" else CLASSIFIERS, configurations, rng)

    every = len(order)
    some = min(every, max(FEWEST, min(every // 4, MOST)))
    total = configurations + (math.ceil(configurations / KEPT) if some < every else 0)
    tried: list[dict[str, Any]] = []
    best: Fitted | None = None
    for size in sorted({some, every}):
        limit = math.inf if seconds is None else seconds * (FIRST_ROUND if size < every else 1)
        rows = np.sort(order[:size])
        best, scores = None, {}
        for candidate in candidates:
            if best is not None and time.perf_counter() - start >= limit:
                break
            fitted = trials.attempt(candidate, rows)
            tried.append(fitted.trial)
            if fitted.metrics:
                scores[candidate] = fitted.trial["score"]
                best = fitted if best is None or fitted.trial["score"] > best.trial["score"] else best
            if progress is not None:
                progress(len(tried), total, best.trial["score"] if best else 0.0)
        ranked = sorted(scores, key=lambda candidate: -scores[candidate])  # of equals, the earlier
        candidates = ranked[: math.ceil(len(ranked) / KEPT)]
    if best is None:
        raise GraftError(f"no model could be fitted to task {task.name!r}; the last one said: {tried[-1]['error']}.")

    winner, test = best.trial, {}
    if "test" in task.splits and task.splits["test"].num_rows:
        test = trials.judge(trials.predict(best.model, winner["features"], "test"), "test")
    return AutoMLResult(
        validation=best.metrics,
        test=test,
        winner=winner,
        families=dict(Counter(trial["family"] for trial in tried if trial["rows"] == some)),
        seconds=time.perf_counter() - start,
        trials=tried,
        parameters=weights_of(best.model),
    )


def check(task: Task, configurations: int = 1, seconds: float | None = None) -> None:
    """Refuse what no search could begin with."""
    if task.kind not in KINDS:
        raise GraftError(
            f"the AutoML baseline has no models for tasks of kind {task.kind} (task {task.name!r}): "
            f"it takes {', '.join(KINDS)}."
        )
    if configurations < 1:
        raise GraftError(f"configurations={configurations} leaves nothing to try: use at least 1.")
    if seconds is not None and not seconds > 0:
        raise GraftError(f"seconds={seconds} leaves no time: give more than 0, or None for no limit.")
    train = task.split("train")
    task.split("validation")
    if not any(text.strip() for text in train.column("text").to_pylist()):
        raise GraftError(f"the training texts of task {task.name!r} are all empty: check its text column.")
    if task.kind == "classification" and len(train.column("label").unique()) < 2:
        raise GraftError(f"the training rows of task {task.name!r} all have one label: give rows of at least 2.")
