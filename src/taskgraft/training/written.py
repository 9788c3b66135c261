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

from taskgraft.backbones.api import grafts_of, rows
from taskgraft.backbones.forward import generated_once
from taskgraft.errors import GraftError
from taskgraft.training.batches import evaluation_batches
from taskgraft.training.encode import Encoded


@torch.inference_mode()
def greedy(
    model: Any,
    name: str,
    tokenizer: Any,
    encoded: Encoded,
    batch_size: int,
    device: torch.device,
    max_new_tokens: int | None = None,
) -> list[str]:
    """The text that the model gives for each row: greedy decoding, of at most as many tokens as a text may have."""
    found = [""] * len(encoded)
    limit = encoded.limit if max_new_tokens is None else max_new_tokens
    for some in evaluation_batches(encoded.lengths, batch_size):
        inputs, _ = encoded.batch(some.tolist(), device)
        with rows(model, name):
            ids = model.generate(**inputs, max_new_tokens=limit, do_sample=False, num_beams=1)
        for row, text in zip(some.tolist(), tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
            found[row] = text.strip()
    return found


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
) -> npt.NDArray[np.float64]:
    """The log probability that the model writes each candidate, and then ends: [rows, candidates].

    The encoder runs once for each batch; the candidates follow one by one, so that the batch's rows stay what they are.
    """
    if not candidates:
        raise GraftError("there are no candidates to score: give the answers that exist, or let the model write.")
    answers = [torch.tensor(ids, device=device) for ids in tokenizer(text_target=list(candidates))["input_ids"]]
    found = np.empty((len(encoded), len(candidates)))
    for some in evaluation_batches(encoded.lengths, batch_size):
        inputs, _ = encoded.batch(some.tolist(), device)
        precision = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        with rows(model, name), precision, generated_once(grafts_of(model)):
            read = model.get_encoder()(**inputs)
            scores = [written_after(model, read, inputs["attention_mask"], answer) for answer in answers]
        found[some] = torch.stack(scores, 1).cpu().numpy()
    return found


def written_after(model: Any, read: Any, mask: Tensor, answer: Tensor) -> Tensor:
    """The log probability of one answer's tokens after each row that was read: [rows]."""
    tokens = answer.expand(len(mask), -1)  # [rows, tokens]
    before = model.prepare_decoder_input_ids_from_labels(labels=tokens)
    logits: Tensor = model(encoder_outputs=read, attention_mask=mask, decoder_input_ids=before, use_cache=False).logits
    chances = logits.float().log_softmax(-1).gather(-1, tokens[:, :, None])[..., 0]
    return chances.double().sum(1)
