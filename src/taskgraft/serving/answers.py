"""Questions and answers, as callers in Python, on a command line and over HTTP see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.training.predict import Prediction

Text = str | Sequence[str]  # a text, or for token tasks its words


@dataclass(frozen=True)
class Question:
    """A text for a task; tasks that read pairs want a second one, and spans a context, as `pair`."""

    task: str
    text: Text
    pair: str | None = None


Asking = Question | tuple[str, Any] | tuple[str, Any, str | None]


def question_of(asking: Asking) -> Question:
    if isinstance(asking, Question):
        return asking
    if not isinstance(asking, tuple) or not 2 <= len(asking) <= 3 or not isinstance(asking[0], str):
        raise GraftError(f"{str(asking)[:80]!r} is no question: give (task, text), or (task, text, second text).")
    return Question(*asking)


@dataclass(frozen=True)
class Answer:
    """What a task says of a text. Which fields are there depends on the kind of task; the others are None."""

    task: str
    version: int | None  # None: a folder that no store wrote
    kind: str
    label: str | None = None  # classification; None: what a model wrote is no class
    labels: list[str] | None = None  # multilabel
    probability: float | None = None
    probabilities: dict[str, float] | None = None  # classification and multilabel
    value: float | None = None  # regression
    tags: list[str] | None = None  # tokens: one for each word
    answer: str | None = None  # spans, and written texts
    start: int | None = None  # spans: characters of the context
    end: int | None = None

    @property
    def result(self) -> dict[str, Any]:
        """The fields that this kind of task has."""
        if self.kind == "classification" and self.probabilities is None:
            return {"label": self.label}
        return {name: value for name in RESULTS if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task, "version": self.version, "kind": self.kind, **self.result}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Answer:
        return cls(**{name: record[name] for name in ("task", "version", "kind", *RESULTS) if name in record})

    @classmethod
    def of(cls, task: str, version: int | None, kind: str, labels: Sequence[str], found: Prediction) -> Answer:
        """A prediction in words."""
        answer, chances = found.answer, found.probabilities
        known: dict[str, Any] = {}
        if kind == "classification":
            label = None if answer is None else labels[answer]
            known = {"label": label, "probabilities": chances}
            if chances is not None and label is not None:
                known["probability"] = chances[label]
        elif kind == "multilabel":
            known = {"labels": [labels[i] for i in answer], "probabilities": chances}
        elif kind == "regression":
            known = {"value": answer}
        elif kind == "tokens":
            known = {"tags": [labels[i] for i in answer]}
        elif kind == "spans" and found.span is not None:
            known = {"answer": answer, "start": found.span[0], "end": found.span[1]}
        else:
            known = {"answer": answer}
        return cls(task, version, kind, **known)


RESULTS = [field.name for field in fields(Answer) if field.name not in ("task", "version", "kind")]
