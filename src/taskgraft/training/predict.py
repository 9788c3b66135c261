"""What a task on a model says of texts: logits, and predictions in the form that its metrics take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from taskgraft.backbones.api import grafts_of, rows
from taskgraft.backbones.forward import GraftOutput, pooled
from taskgraft.backbones.graphs import call
from taskgraft.errors import GraftError
from taskgraft.methods import HeadOnly
from taskgraft.tasks.metrics import evaluate
from taskgraft.tasks.squad import best_answers
from taskgraft.tasks.wording import Wording
from taskgraft.training.batches import Rows, evaluation_batches
from taskgraft.training.encode import Encoded
from taskgraft.training.memory import by_row
from taskgraft.training.team import ALONE, Team
from taskgraft.training.written import greedy, label_scores

FEATURES = "features"
MOST_ROWS = 512  # of a batch on a GPU, however few training's have
NUMBER_TOKENS = 12  # that a number, or a class's, has at most when it is written
Logits = list[npt.NDArray[Any]]  # one array a row: [classes], or [tokens, classes]


@dataclass(frozen=True)
class Prediction:
    """A row's answer as its metrics want it, and how sure the head is: {label: probability}, None without classes."""

    answer: Any  # None: a model wrote something that is no class
    probabilities: dict[str, float] | None = None
    span: tuple[int, int] | None = None  # characters of the context, for spans


def forward(model: Any, name: str | Sequence[str], inputs: dict[str, Tensor]) -> GraftOutput:
    """The model's output for rows of one task, or of each row's own; from cached features, that of the head alone."""
    if FEATURES not in inputs:
        output: GraftOutput = call(model, name, inputs)
        return output
    grafts = grafts_of(model)
    first = name if isinstance(name, str) else name[0]  # rows that share a pass have heads of one kind
    key = next(key for key in grafts.require(first).kinds if key in grafts.head_kinds)
    index = grafts.route_of(name).kinds[key]
    return GraftOutput(logits=grafts.head_kinds[key].bank(inputs[FEATURES], index))


def cacheable(model: Any, name: str) -> bool:
    """Whether the task is a head on pooled features that never change."""
    task = grafts_of(model).require(name)
    return isinstance(task.method, HeadOnly) and task.head is not None and not task.head.per_token


def evaluated_rows(batch_size: int, device: torch.device) -> int:
    """How many rows at once, where training has so many: a pass without gradients takes more."""
    return max(2 * batch_size, MOST_ROWS if device.type == "cuda" else 1)


@torch.no_grad()
def cache_features(model: Any, name: str, encoded: Encoded, batch_size: int, device: torch.device) -> None:
    """Run the bare backbone over a split once, and keep what the task's head reads."""
    grafts = grafts_of(model)
    pooling = str(grafts.require(name).method.pooling)

    def features_of(some: Rows) -> dict[int, Tensor]:
        inputs, _ = encoded.batch(some.tolist(), device)
        with rows(model, None):
            output = model(**inputs, output_hidden_states=True)
        features = pooled(grafts, output.hidden_states[-1], inputs.get("attention_mask"), pooling).float().cpu()
        return dict(zip(some.tolist(), features, strict=True))

    training = model.training
    model.eval()
    try:
        found = by_row(features_of, evaluation_batches(encoded.lengths, batch_size))
    finally:
        model.train(training)
    encoded.features[FEATURES] = torch.stack([found[row] for row in range(len(encoded))])


@torch.inference_mode()
def logits_of(
    model: Any, name: str, encoded: Encoded, batch_size: int, device: torch.device, bf16: bool, team: Team = ALONE
) -> Logits:
    """Every row's logits, in order, without padding: of tokens, or of classes that other tasks' heads have."""
    head = grafts_of(model).require(name).head
    assert head is not None
    width, lengths = head.width, encoded.lengths

    def own_logits(some: Rows) -> dict[int, npt.NDArray[Any]]:
        inputs, _ = encoded.batch(some.tolist(), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            output = forward(model, name, inputs)
        logits = output.logits if output.logits is not None else output.token_logits
        assert logits is not None
        return {
            row: values[:width] if values.ndim == 1 else values[: lengths[row], :width]
            for row, values in zip(some.tolist(), logits.float().cpu().numpy(), strict=True)
        }

    found = team.pooled(by_row(own_logits, team.turns(evaluation_batches(lengths, batch_size))))
    return [found[row] for row in range(len(encoded))]


def predictions(
    model: Any,
    name: str,
    tokenizer: Any,
    kind: str,
    labels: Sequence[str],
    table: pa.Table,
    encoded: Encoded,
    *,
    batch_size: int,
    device: torch.device,
    bf16: bool = False,
    wording: Wording | None = None,
    decoding: str = "auto",
    team: Team = ALONE,
) -> list[Prediction]:
    """A task's answer to each row of a table; `wording` is how rows are put into words for a model that writes.

    Each process of a team computes a part of them, and all get all.
    """
    training = model.training
    model.eval()
    try:
        if wording is None:
            logits = logits_of(model, name, encoded, batch_size, device, bf16, team)
            return from_logits(kind, labels, table, encoded, logits)
        if wording.candidates and decoding != "greedy":
            scores = label_scores(model, name, tokenizer, encoded, wording.candidates, batch_size, device, bf16, team)
            return from_logits(kind, labels, table, encoded, list(scores))
        longest = encoded.limit if kind == "text" else max(NUMBER_TOKENS, *map(len, wording.candidates or ("",)))
        texts = greedy(model, name, tokenizer, encoded, batch_size, device, longest, bf16, team)
        return [Prediction(wording.answer(text)) for text in texts]
    finally:
        model.train(training)


def from_logits(
    kind: str, labels: Sequence[str], table: pa.Table, encoded: Encoded, logits: Logits
) -> list[Prediction]:
    """Answers from logits, one for each row of the table."""
    if kind == "spans":
        assert encoded.windows is not None
        starts, ends = [row[:, 0] for row in logits], [row[:, 1] for row in logits]
        best = best_answers(encoded.windows, table, starts, ends)
        return [Prediction(answer.text, span=(answer.start, answer.end)) for answer in best]
    if kind == "regression":
        return [Prediction(float(row[0])) for row in logits]
    if kind == "tokens":
        assert encoded.words is not None
        unseen = labels.index("O") if "O" in labels else 0  # a word that was cut off has no logits
        best_of = [row.argmax(-1) for row in logits]
        return [
            Prediction([int(best_of[row][place]) if place >= 0 else unseen for place in encoded.words[row]])
            for row in range(len(logits))
        ]
    found = []
    for row in logits:
        if kind == "multilabel":
            chances = 1 / (1 + np.exp(-row.astype(np.float64)))
            answer: Any = [int(i) for i in np.flatnonzero(chances > 0.5)]
        else:
            chances = np.exp(row.astype(np.float64) - row.max())
            chances /= chances.sum()
            answer = int(row.argmax())
        found.append(Prediction(answer, dict(zip(labels, chances.tolist(), strict=True))))
    return found


def judged(
    kind: str, labels: Sequence[str], metrics: Sequence[str], table: pa.Table, found: Sequence[Prediction]
) -> dict[str, float]:
    """The metrics of predictions against a split's own answers."""
    if not len(found):
        raise GraftError("there are no rows to evaluate.")
    answers, given = table["label"].to_pylist(), [row.answer for row in found]
    if kind == "classification":  # what was written is no class: a wrong one
        given = [(wanted + 1) % len(labels) if got is None else got for wanted, got in zip(answers, given, strict=True)]
    return evaluate(kind, metrics, labels, answers, given)
