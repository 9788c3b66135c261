"""A question on its way through an engine: checked, put into tokens, and its answer read off the model's output."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from taskgraft.errors import GraftError
from taskgraft.serving.answers import Answer, Question
from taskgraft.serving.library import Version
from taskgraft.tasks.task import LABEL_TYPES, text_type
from taskgraft.training.encode import Encoded, encode, padded
from taskgraft.training.predict import NUMBER_TOKENS, Prediction, from_logits
from taskgraft.training.settings import TEXT_LENGTH

ALONE = ("tokens", "spans")  # kinds whose answer needs more of the tokenizer than the tokens


@dataclass(eq=False)
class Asked:
    """A question with all that is known of it so far."""

    question: Question
    deadline: float | None  # in the seconds of time.monotonic
    number: int | None = None  # the version that is wanted; None: the current one
    future: Future[Answer] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    version: Version | None = None
    table: Any = None
    encoded: Encoded | None = None
    rows: Sequence[int] = ()  # of what is encoded; spans have one for each window
    later: deque[Row] = field(default_factory=deque)  # rows that do not stand in line yet
    finished: bool = False  # it has its answer, or never will
    found: dict[int, Any] = field(default_factory=dict)  # what the model said of each of them

    @property
    def task(self) -> Version:
        assert self.version is not None
        return self.version

    @property
    def tokens(self) -> Encoded:
        assert self.encoded is not None
        return self.encoded


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a batch."""

    asked: Asked
    number: int

    @property
    def length(self) -> int:
        offsets = self.asked.tokens.inputs["input_ids"].offsets
        return int(offsets[self.number + 1] - offsets[self.number])

    @property
    def mode(self) -> str:
        return self.asked.task.mode


def check(question: Question, version: Version) -> Question:
    """Refuse what a task cannot read; words that stand in one string are taken apart."""
    name, text, pair = version.name, question.text, question.pair
    if pair is not None and not isinstance(pair, str):
        raise GraftError(f"task {name!r} was given a {type(pair).__name__} as `pair`: give a string.")
    if version.kind == "tokens":
        text = text.split() if isinstance(text, str) else text
        if not isinstance(text, list | tuple) or not all(isinstance(word, str) for word in text):
            raise GraftError(f"task {name!r} reads words: give a text, or a list of strings.")
    elif not isinstance(text, str):
        raise GraftError(f"task {name!r} reads a text, and a {type(text).__name__} was given: give a string.")
    if version.reads_pairs and pair is None:
        second = "the context, as" if version.kind == "spans" else "the second one, as"
        raise GraftError(f"task {name!r} reads pairs of texts: give {second} `pair`.")
    if pair is not None and version.graft.task and not version.reads_pairs:
        raise GraftError(f"task {name!r} reads one text, and a second one was given: leave `pair` out.")
    try:
        for part in (text, pair or "") if isinstance(text, str) else text:
            part.encode()
    except UnicodeEncodeError as error:
        raise GraftError(f"a text for task {name!r} holds half of a surrogate pair: it is not Unicode.") from error
    return Question(question.task, text, pair)


def encode_all(tokenizer: Any, positions: int, asked: Iterable[Asked]) -> None:
    """Tokenise questions: plain texts together, the others each for itself."""
    groups: dict[Hashable, list[Asked]] = {}
    for one in asked:
        limit = min(one.task.settings.get("max_length") or TEXT_LENGTH, positions)
        one.table = table_of(one)
        alone = one if one.task.kind in ALONE and one.task.wording is None else None
        groups.setdefault((alone, limit, one.table.column_names[1:] == ["pair"]), []).append(one)
    for (alone, limit, _), group in groups.items():  # type: ignore[misc]
        kind = "text" if alone is None else alone.task.kind
        table = pa.concat_tables([one.table for one in group])
        encoded = encode(tokenizer, kind, 0, table, limit, with_labels=False)
        for row, one in enumerate(group):
            one.encoded = encoded
            one.rows = [row] if alone is None else range(len(encoded))


def candidates(tokenizer: Any, version: Version) -> Sequence[Sequence[int]]:
    """The answers that a model may write for a task, as tokens."""
    assert version.wording is not None
    found: Sequence[Sequence[int]] = tokenizer(text_target=list(version.wording.candidates))["input_ids"]
    return found


def table_of(asked: Asked) -> pa.Table:
    """A question as a split of one row."""
    question, task = asked.question, asked.task
    columns: dict[str, Any] = {"text": pa.array([question.text], text_type(task.kind))}
    if question.pair is not None:
        columns["pair"] = pa.array([question.pair], pa.string())
    if task.kind == "spans":
        columns |= {"label": pa.array([[]], LABEL_TYPES["spans"]), "id": pa.array(["0"], pa.string())}
    table = pa.table(columns)
    return table if task.wording is None else task.wording.table(table)


def inputs_of(rows: Sequence[Row], device: torch.device, multiple: int) -> dict[str, Tensor]:
    """What the model takes for rows of a batch."""
    first = rows[0].asked.tokens
    return {
        name: padded([row.asked.tokens.inputs[name][row.number] for row in rows], first.padding[name], multiple).to(
            device, non_blocking=True
        )
        for name in first.inputs
    }


def longest_answer(asked: Asked) -> int:
    """How many tokens a model may write."""
    wording = asked.task.wording
    assert wording is not None
    written = max(NUMBER_TOKENS, *map(len, wording.candidates or ("",)))
    return asked.tokens.limit if asked.task.kind == "text" else written


def answer_of(asked: Asked) -> Answer:
    """The answer, once the model has said what it says of all rows of a question."""
    task, found = asked.task, [asked.found[row] for row in asked.rows]
    if isinstance(found[0], str):
        assert task.wording is not None
        prediction = Prediction(task.wording.answer(found[0]))
    else:
        if not all(np.isfinite(values).all() for values in found):
            raise GraftError(f"task {task.name!r} gives no numbers: its weights, or the backbone's, are not finite.")
        prediction = from_logits(task.kind, task.labels, asked.table, asked.tokens, found)[0]
    return Answer.of(task.name, task.number, task.kind, task.labels, prediction)
