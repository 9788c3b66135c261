"""Passes: rows of several tasks through the model at once, each row's loss by its own task, and how many rows at once.

A lane is one of the runs that share the model. Its rows meet those of the others in a batch and nowhere else, so the
gradient of a sum over lanes is each one's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.forward import GraftOutput, check_labels
from taskgraft.backbones.graphs import call
from taskgraft.backbones.insert import Grafts
from taskgraft.nn.heads import IGNORED, LOSSES, row_losses
from taskgraft.training.batches import Rows
from taskgraft.training.encode import filled, joined, sent
from taskgraft.training.parts import Part
from taskgraft.training.predict import FEATURES, forward

CPU = torch.device("cpu")
CPU_TOKENS, MOST_TOKENS = 4_096, 131_072  # of a pass; more at once gains nothing
MOST_LANES = {"cuda": 64, "cpu": 8}
PASS_SHARE, LANE_SHARE = 0.35, 0.25  # of free memory: what a pass keeps (its recording keeps as much), what lanes hold
LENGTHS = {32: 2_048, 16: 16_384, 8: math.inf}  # multiples that lengths are rounded to, by the tokens of a batch
COPIES = 7  # of a lane's weights: at rest, in training, gradient, two moments, running mean, kept


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of one task in a batch, and how their losses count."""

    part: Part
    rows: Rows
    smoothing: float = 0.0
    weight: float = 1.0

    @property
    def name(self) -> str:
        """That of the task on the model."""
        return self.part.name


@dataclass(frozen=True, eq=False)
class LaneBatch:
    """A batch of a lane: some rows of the step that it is taking."""

    lane: int
    pieces: list[Piece]
    step_rows: int  # its loss is a mean over all rows of the step

    @property
    def rows(self) -> int:
        return sum(len(piece.rows) for piece in self.pieces)

    @property
    def length(self) -> int:
        """Tokens of its longest row; what was made of a row beforehand is as long as one."""
        if self.pieces[0].part.encoded["train"].features:
            return 1
        return max(int(piece.part.encoded["train"].lengths[piece.rows].max()) for piece in self.pieces)


def packed(batches: Sequence[LaneBatch], most_tokens: int, same_length: bool) -> list[list[LaneBatch]]:
    """Lanes' batches in passes of at most so many tokens, padding counted, those alike in length together.

    A batch that is larger has a pass to itself. `same_length`: where padding would change a result, as in a batch norm.
    """
    passes: list[list[LaneBatch]] = []
    for length, batch in sorted(((batch.length, batch) for batch in batches), key=lambda pair: pair[0]):
        before = passes[-1] if passes else []
        tokens = (sum(other.rows for other in before) + batch.rows) * length
        if before and tokens <= most_tokens and not (same_length and before[-1].length != length):
            before.append(batch)
        else:
            passes.append([batch])

    def form(batch: LaneBatch) -> tuple[str, float]:
        return batch.pieces[0].part.task.kind, batch.pieces[0].smoothing

    return [sorted(some, key=form) for some in passes]  # losses that are computed alike lie side by side


def losses_of(
    model: Any, some: Sequence[LaneBatch], device: torch.device, bf16: bool, same_length: bool = False
) -> Tensor:
    """What a pass adds to the loss of each of its lanes: [lanes of the pass]."""
    pieces = [piece for batch in some for piece in batch.pieces]
    inputs, labels = inputs_of(pieces, device, same_length)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        losses = losses_by_row(model, pieces, inputs, labels, device)
    by_class = [piece.part.targets.weights(answers) for piece, answers in zip(pieces, labels, strict=True)]
    each = torch.cat([own if weights is None else own * weights for own, weights in zip(losses, by_class, strict=True)])
    shares = sent(shares_of(some).to(each.dtype), device)
    return torch.where(shares != 0, shares * each, 0.0).sum(1)  # zero times what another lane made of a row may be NaN


def shares_of(some: Sequence[LaneBatch]) -> Tensor:
    """What each row's loss counts for in each lane's mean: [lanes of the pass, rows]."""
    shares = torch.zeros(len(some), sum(batch.rows for batch in some), dtype=torch.float64)
    begin = 0
    for lane, batch in enumerate(some):
        for piece in batch.pieces:
            end = begin + len(piece.rows)
            shares[lane, begin:end] = piece.weight / batch.step_rows
            begin = end
    return shares


def inputs_of(
    pieces: Sequence[Piece], device: torch.device, same_length: bool = False
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The pieces' rows one after the other, on the device, and the labels of each piece, on the host.

    `same_length`: where padding would change a result, there is no more of it than the rows have alone.
    """
    splits = [piece.part.encoded["train"] for piece in pieces]
    found = [split.batch(piece.rows.tolist(), CPU) for split, piece in zip(splits, pieces, strict=True)]
    inputs, padding = found[0][0], splits[0].padding
    if FEATURES in inputs:
        inputs = {FEATURES: torch.cat([each[FEATURES] for each, _ in found])}
    else:
        inputs = joined([each for each, _ in found], padding)
        limit = max(split.limit for split in splits)
        lengths = {
            name: padded_length(each, device) if same_length else recorded_length(each, device, limit)
            for name, each in inputs.items()
        }
        inputs = {name: filled(each, lengths[name], padding[name]) for name, each in inputs.items()}
    labels = [answers for _, answers in found if answers is not None]
    return {name: sent(each, device) for name, each in inputs.items()}, labels


def padded_length(values: Tensor, device: torch.device) -> int:
    """The length of rows, rounded up where kernels want it."""
    return rounded(values.shape[1], 1 if device.type == "cpu" else 8)


def recorded_length(values: Tensor, device: torch.device, limit: int) -> int:
    """The same, up to the `limit` of texts, so that few different lengths are recorded.

    The smaller a batch, the less its padding costs beside a recording.
    """
    length = padded_length(values, device)
    if device.type == "cpu":
        return length
    multiple = next(size for size, tokens in LENGTHS.items() if values.numel() <= tokens)
    return max(length, min(rounded(length, multiple), rounded(limit, 8)))


def rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def losses_by_row(
    model: Any, pieces: Sequence[Piece], inputs: dict[str, Tensor], labels: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """The loss of each row of each piece."""
    names = [piece.name for piece in pieces for _ in piece.rows]
    each = names[0] if len(pieces) == 1 else names
    if pieces[0].part.wording is None:
        return head_losses(pieces, forward(model, each, inputs), labels, device)
    longest = max(padded_length(answers, device) for answers in labels)
    written = sent(torch.cat([filled(answers, longest, IGNORED) for answers in labels]), device)
    before = model.prepare_decoder_input_ids_from_labels(labels=written)
    logits = call(model, each, {**inputs, "decoder_input_ids": before}, use_cache=False).logits
    found: list[Tensor] = []
    begin = 0
    for smoothing, alike in groupby(pieces, key=lambda piece: piece.smoothing):
        sizes = [len(piece.rows) for piece in alike]
        end = begin + sum(sizes)
        losses = LOSSES["tokens"](logits[begin:end].float(), written[begin:end], smoothing)[0]
        found += torch.split(losses, sizes)
        begin = end
    return found


def head_losses(
    pieces: Sequence[Piece], output: GraftOutput, labels: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """The loss of each row under its own head; pieces side by side that differ in nothing but the head, at once."""
    found: list[Tensor] = []
    begin = 0

    def form(pair: tuple[Piece, Tensor]) -> tuple[Any, ...]:
        piece, answers = pair
        return piece.part.task.kind, piece.smoothing, answers.shape[1:]

    for (_, smoothing, _), pairs in groupby(zip(pieces, labels, strict=True), key=form):
        some = list(pairs)
        sizes = [len(piece.rows) for piece, _ in some]
        heads = [piece.part.head for piece, _ in some for _ in piece.rows]
        answers = sent(torch.cat([piece.part.targets.scaled(answers) for piece, answers in some]), device)
        check_labels(answers, heads, [piece.name for piece, _ in some for _ in piece.rows])
        own = rows_of(output, begin, begin + sum(sizes))
        found += torch.split(row_losses(own.logits, own.token_logits, answers, heads, smoothing)[0], sizes)
        begin += sum(sizes)
    return found


def rows_of(output: GraftOutput, begin: int, end: int) -> GraftOutput:
    """Some rows of an output."""
    parts = {key: getattr(output, key) for key in ("logits", "token_logits")}
    return GraftOutput(**{key: None if value is None else value[begin:end] for key, value in parts.items()})


# -- memory


def tokens_that_fit(model: Any, device: torch.device, bf16: bool) -> int:
    """How many tokens a pass may have: on a GPU by its free memory, and by what a layer keeps for its backward pass."""
    if device.type != "cuda":
        return CPU_TOKENS
    config = model.config
    layers = config.num_hidden_layers + (getattr(config, "num_decoder_layers", None) or 0)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "d_ff", None) or 4 * config.hidden_size
    # Of each token a layer keeps about a dozen vectors, the inner ones before and after the activation, and what the
    # norms and adapters keep in float32.
    kept_bytes = layers * (12 * config.hidden_size + 3 * inner) * (2 if bf16 else 4) + layers * 16 * config.hidden_size
    return max(1, min(MOST_TOKENS, int(PASS_SHARE * free_bytes(device) / kept_bytes)))


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, as far as this process may use it."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device.index) * total - torch.cuda.memory_reserved(device)
    return max(0, min(free, int(allowed)))


def lanes_that_fit(grafts: Grafts, kinds: Iterable[str], device: torch.device) -> int:
    """How many tasks may be trained at once in banks of these kinds, as wide as they are."""
    shapes = [
        shape
        for kind in (grafts.kinds[key] for key in kinds)
        for shape in kind.shapes(next(iter(kind.banks.values())).width).values()
    ]
    lane_bytes = 4 * COPIES * sum(map(math.prod, shapes))
    if device.type == "cuda":
        free = free_bytes(device)
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    most = MOST_LANES["cuda" if device.type == "cuda" else "cpu"]
    return max(1, min(most, int(LANE_SHARE * free / lane_bytes)))
