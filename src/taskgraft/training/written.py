"""What a model that reads and writes says of texts: the words it chooses, or how likely given answers are.

The caller puts the model in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from taskgraft.backbones.api import grafts_of, rows
from taskgraft.backbones.forward import generated_once
from taskgraft.errors import GraftError
from taskgraft.nn.heads import IGNORED
from taskgraft.training.batches import Rows, evaluation_batches
from taskgraft.training.encode import Encoded, padded
from taskgraft.training.memory import by_row
from taskgraft.training.team import ALONE, Team

MOST_ANSWERS = 1_024  # of all rows of a batch, side by side


@torch.inference_mode()
def greedy(
    model: Any,
    name: str,
    tokenizer: Any,
    encoded: Encoded,
    batch_size: int,
    device: torch.device,
    max_new_tokens: int | None = None,
    bf16: bool = False,
    team: Team = ALONE,
) -> list[str]:
    """The text that the model gives for each row: greedy decoding, of at most as many tokens as a text may have."""
    if not writes(model):
        raise GraftError(answers_nothing(model, name))
    limit = encoded.limit if max_new_tokens is None else max_new_tokens

    def texts_of(some: Rows) -> dict[int, str]:
        inputs, _ = encoded.batch(some.tolist(), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            texts = write(model, name, tokenizer, inputs, [limit] * len(some))
        return dict(zip(some.tolist(), texts, strict=True))

    found = team.pooled(by_row(texts_of, team.turns(evaluation_batches(encoded.lengths, batch_size))))
    return [found[row] for row in range(len(encoded))]


def writes(model: Any) -> bool:
    return hasattr(model, "generate")


def answers_nothing(model: Any, name: str) -> str:
    return (
        f"task {name!r} has no head and {type(model).__name__} does not write, so it has no answers of its own: import "
        "or train it with a head, or read the model's output yourself (tg.add_graft)."
    )


def write(
    model: Any, names: str | Sequence[str], tokenizer: Any, inputs: dict[str, Tensor], limits: Sequence[int]
) -> list[str]:
    """What the model writes after each row of a batch, of at most so many tokens."""
    with rows(model, names):
        ids = model.generate(**inputs, max_new_tokens=max(limits), do_sample=False, num_beams=1)
    forced = model.generation_config.forced_eos_token_id is not None  # the last token of a row's own is its end
    ends = [limit + 1 - (forced and limit < max(limits)) for limit in limits]  # and the one it starts from
    kept = [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]


@torch.inference_mode()
def label_scores(
    model: Any,
    name: str,
    tokenizer: Any,
    encoded: Encoded,
    candidates: Sequence[str],
    batch_size: int,
    device: torch.device,
    bf16: bool = False,
    team: Team = ALONE,
) -> npt.NDArray[np.float64]:
    """The log probability that the model writes each candidate, and then ends: [rows, candidates].

    The encoder runs once for each batch, whatever the number of candidates.
    """
    if not candidates:
        raise GraftError("there are no candidates to score: give the answers that exist, or let the model write.")
    answers = tokenizer(text_target=list(candidates))["input_ids"]
    several = answers_at_once(min(batch_size, len(encoded)), device)  # and no more where rows have to be parted

    def scores_of(some: Rows) -> dict[int, npt.NDArray[np.float64]]:
        inputs, _ = encoded.batch(some.tolist(), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            scores = score(model, name, inputs, [answers] * len(some), several)
        return dict(zip(some.tolist(), scores, strict=True))

    found = team.pooled(by_row(scores_of, team.turns(evaluation_batches(encoded.lengths, batch_size))))
    return np.array([found[row] for row in range(len(encoded))]).reshape(len(encoded), len(candidates))


def score(
    model: Any,
    names: str | Sequence[str],
    inputs: dict[str, Tensor],
    answers: Sequence[Sequence[Sequence[int]]],
    several: int | None = None,
) -> npt.NDArray[np.float64]:
    """The log probability of each of a row's own answers, given as tokens: [rows, most]; -inf beyond the last.

    `several` of them go through the decoder side by side.
    """
    mask, most = inputs["attention_mask"], max(map(len, answers))
    several = min(most, several or answers_at_once(len(answers), mask.device))
    with rows(model, names), generated_once(grafts_of(model)):
        read = model.get_encoder()(**inputs).last_hidden_state
    if several > 1:
        read, mask = read.repeat_interleave(several, 0), mask.repeat_interleave(several, 0)
        names = names if isinstance(names, str) else [name for name in names for _ in range(several)]
    scores = []
    with rows(model, names), generated_once(grafts_of(model)):
        for first in range(0, most, several):
            some = [
                own[place] if place < len(own) else [] for own in answers for place in range(first, first + several)
            ]
            chances = written_after(model, BaseModelOutput(read), mask, padded(some, IGNORED).to(mask.device))
            scores.append(chances.view(-1, several))
    found = torch.cat(scores, 1)[:, :most].cpu().numpy()
    for row, own in enumerate(answers):
        found[row, len(own) :] = -np.inf
    return found


def answers_at_once(rows: int, device: torch.device) -> int:
    """How many answers of each row go through the decoder side by side: where launching is what takes time, several."""
    return max(1, MOST_ANSWERS // rows) if device.type == "cuda" else 1


def written_after(model: Any, read: Any, mask: Tensor, tokens: Tensor) -> Tensor:
    """The log probability of an answer's tokens, [rows, tokens], after each row that was read: [rows]."""
    before = model.prepare_decoder_input_ids_from_labels(labels=tokens)
    logits: Tensor = model(encoder_outputs=read, attention_mask=mask, decoder_input_ids=before, use_cache=False).logits
    there = tokens != IGNORED
    chances = logits.float().log_softmax(-1).gather(-1, tokens.where(there, 0)[:, :, None])[..., 0]
    return chances.double().where(there, 0).sum(1)
