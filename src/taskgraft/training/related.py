"""How a new task's examples look to trained tasks: which of them fits best, and what changes for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from taskgraft.backbones.api import grafts_of, rows
from taskgraft.backbones.forward import pooled
from taskgraft.errors import GraftError
from taskgraft.grafts.joint import Joint
from taskgraft.nn.heads import LOSSES
from taskgraft.tasks.wording import Wording
from taskgraft.training.batches import Rows, evaluation_batches
from taskgraft.training.memory import by_row
from taskgraft.training.parts import Part
from taskgraft.training.predict import Logits, evaluated_rows, logits_of
from taskgraft.training.settings import Settings
from taskgraft.training.written import greedy, label_scores

RIDGE = 1.0  # of the head that is fitted to judge features, in units of their variance
MOST_JUDGING = 256  # rows that tell which trained task fits best
POOLED = ("classification", "multilabel", "regression")


@torch.inference_mode()
def losses_of(model: Any, joint: Joint, part: Part, settings: Settings, device: torch.device) -> dict[str, float]:
    """Each trained task's loss on the new task's training rows; the tasks are on the model.

    A model that writes is asked how likely the answers are. Elsewhere heads do not carry over, so a task is judged by
    how well a ridge regression from its features predicts the answers it was not fitted on (leaving one out). Some
    hundreds of rows tell.
    """
    model.eval()
    some = judging_rows(part)
    if part.wording is not None:
        return {task: written_loss(model, task, part, some, settings, device) for task in joint.tasks}
    if part.task.kind not in POOLED:
        raise GraftError(
            f"which trained task is most related to {part.name!r} cannot be told for a task of kind {part.task.kind}: "
            "name one with like=... (--like)."
        )
    answers = targets_of(part)[some]
    return {
        task: left_out_error(features_of(model, task, part, some, settings, device), answers) for task in joint.tasks
    }


def judging_rows(part: Part) -> Rows:
    """The training rows that tasks are judged by: all, or so many of them evenly spaced."""
    count = len(part.encoded["train"])
    rows: Rows = np.arange(min(count, MOST_JUDGING)) * count // min(count, MOST_JUDGING)
    return rows


def written_loss(model: Any, task: str, part: Part, judging: Rows, settings: Settings, device: torch.device) -> float:
    encoded = part.encoded["train"]

    def losses_by_row(some: Rows) -> dict[int, float]:
        inputs, labels = encoded.batch(some.tolist(), device)
        assert labels is not None
        before = model.prepare_decoder_input_ids_from_labels(labels=labels)
        with rows(model, task):
            logits = model(**inputs, decoder_input_ids=before, use_cache=False).logits
        losses = LOSSES["tokens"](logits.float(), labels, 0.0)[0]
        return dict(zip(some.tolist(), losses.tolist(), strict=True))

    batches = evaluation_batches(encoded.lengths[judging], evaluated_rows(settings.batch_size, device))
    found = by_row(losses_by_row, (judging[some] for some in batches))
    return math.fsum(found.values()) / len(found)


def features_of(
    model: Any, task: str, part: Part, judging: Rows, settings: Settings, device: torch.device
) -> npt.NDArray[np.float64]:
    """What a head of this task would read of some of the new task's training rows: [rows, d]."""
    grafts, encoded = grafts_of(model), part.encoded["train"]
    pooling = grafts.require(task).method.pooling or "mean"

    def features_by_row(some: Rows) -> dict[int, npt.NDArray[np.float64]]:
        inputs, _ = encoded.batch(some.tolist(), device)
        with rows(model, task):
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        features = pooled(grafts, hidden, inputs.get("attention_mask"), pooling).double().cpu().numpy()
        return dict(zip(some.tolist(), features, strict=True))

    batches = evaluation_batches(encoded.lengths[judging], evaluated_rows(settings.batch_size, device))
    found = by_row(features_by_row, (judging[some] for some in batches))
    return np.stack([found[row] for row in judging.tolist()])


def targets_of(part: Part) -> npt.NDArray[np.float64]:
    """The answers as numbers: [rows, classes], or [rows, 1] at mean 0 and deviation 1."""
    answers = part.task.split("train")["label"]
    if part.task.kind == "regression":
        values = answers.to_numpy().astype(np.float64)
        scaled: npt.NDArray[np.float64] = ((values - values.mean()) / (values.std() or 1.0))[:, None]
        return scaled
    marks = np.zeros((len(answers), len(part.task.labels)))
    for row, answer in enumerate(answers.to_pylist()):
        marks[row, answer] = 1.0
    return marks


def left_out_error(features: npt.NDArray[np.float64], answers: npt.NDArray[np.float64]) -> float:
    """The mean squared error of a ridge regression on each row when it is fitted on the others, in closed form."""
    x = features - features.mean(0)
    x = np.concatenate([x / (np.sqrt((x**2).mean()) or 1.0), np.ones((len(x), 1))], 1)
    kernel = x @ x.T
    hat = kernel @ np.linalg.inv(kernel + RIDGE * x.shape[1] * np.eye(len(x)))
    errors = (answers - hat @ answers) / (1 - np.diag(hat))[:, None]
    return float((errors**2).mean())


Outputs = dict[str, "Logits | list[str]"]


def outputs_of(
    model: Any, tokenizer: Any, joint: Joint, part: Part, settings: Settings, device: torch.device
) -> Outputs:
    """What each trained task, on the model, says of the new task's training rows: probabilities, numbers or texts."""
    model.eval()
    encoded, size = part.encoded["train"], evaluated_rows(settings.batch_size, device)
    found: Outputs = {}
    for task, member in joint.tasks.items():
        if member.head is not None:
            logits = logits_of(model, task, encoded, size, device, False)
            if member.head.kind == "multilabel":  # each label is there or not: [labels, 2]
                logits = [np.stack([np.zeros_like(row), row], -1) for row in logits]
            if member.head.kind == "spans":  # which token begins, and which ends: [2, tokens]
                logits = [row.T for row in logits]
            found[task] = logits if member.head.kind == "regression" else [softmax(row) for row in logits]
            continue
        wording = Wording.from_json(member.task["wording"])
        if wording.candidates:
            scores = label_scores(model, task, tokenizer, encoded, wording.candidates, size, device)
            found[task] = [softmax(row) for row in scores]
        else:
            found[task] = greedy(model, task, tokenizer, encoded, size, device)
    return found


def softmax(row: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    finite = np.nan_to_num(row.astype(np.float64), neginf=-1e9)  # padding, where a span cannot be
    chances = np.exp(finite - finite.max(-1, keepdims=True))
    result: npt.NDArray[np.float64] = chances / chances.sum(-1, keepdims=True)
    return result


def drift_of(before: Outputs, after: Outputs) -> dict[str, dict[str, float]]:
    """By task: the share of rows whose answer changed (of numbers: none), and the largest change of an output."""
    found = {}
    for task, rows_before in before.items():
        pairs: list[tuple[Any, Any]] = list(zip(rows_before, after[task], strict=True))
        if isinstance(rows_before[0], str):
            found[task] = {"changed": float(np.mean([one != other for one, other in pairs]))}
            continue
        found[task] = {"largest": max(float(np.abs(one - other).max()) for one, other in pairs)}
        if pairs[0][0].shape != (1,):  # a number is not the same or another: it is near or far
            answers = [(one.argmax(-1) != other.argmax(-1)).any() for one, other in pairs]
            found[task]["changed"] = float(np.mean(answers))
    return found
