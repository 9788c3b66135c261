"""Heads: from the backbone's hidden states to each task's logits, stacked like everything else, and their loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskgraft.errors import GraftError
from taskgraft.nn.bank import Bank, Layout, Weight
from taskgraft.nn.bottleneck import affine, take
from taskgraft.nn.rows import RowIndex

HeadKind = Literal["classification", "multilabel", "regression", "tokens", "spans"]
PER_TOKEN = ("tokens", "spans")
IGNORED = -100  # the label that counts for nothing, as everywhere in Transformers


@dataclass(frozen=True)
class Head:
    """What a task predicts. `labels` names its classes; a regression and a span need none."""

    kind: HeadKind = "classification"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(str(label) for label in self.labels))
        if self.kind not in ("classification", "multilabel", "regression", "tokens", "spans"):
            raise GraftError(
                f"a head of kind {self.kind!r} is unknown: use classification, multilabel, regression, tokens or spans."
            )
        if self.kind in ("regression", "spans"):
            object.__setattr__(self, "labels", ())
        elif len(self.labels) < (1 if self.kind == "multilabel" else 2):
            raise GraftError(
                f"a {self.kind} head needs at least 2 labels and got {len(self.labels)}; "
                'for a number use tg.Head("regression").'
            )
        if len(set(self.labels)) != len(self.labels):
            raise GraftError(f"the labels {list(self.labels)} name a class twice.")

    @property
    def width(self) -> int:
        return {"regression": 1, "spans": 2}.get(self.kind, len(self.labels))

    @property
    def per_token(self) -> bool:
        return self.kind in PER_TOKEN

    @classmethod
    def of(cls, wish: Head | int | Sequence[str] | None) -> Head | None:
        """A head from what a caller wrote: a Head, a number of classes, their names, or None for no head."""
        if wish is None or isinstance(wish, Head):
            return wish
        if isinstance(wish, int):
            return cls("classification", tuple(str(i) for i in range(wish)))
        if isinstance(wish, str):
            raise GraftError(f"labels={wish!r} is one string: give a list of label names or their number.")
        return cls("classification", tuple(wish))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "labels": list(self.labels)}


def head_layout(d: int, hidden: int | None) -> Layout:
    """A linear head, C(d + 1) weights, or one with a hidden layer of tanh units."""

    def layout(classes: int) -> dict[str, Weight]:
        if hidden is None:
            return {"weight": Weight((d, classes), "matrix"), "bias": Weight((classes,), "vector")}
        return {
            "hidden": Weight((d, hidden), "matrix"),
            "hidden_bias": Weight((hidden,), "vector"),
            "weight": Weight((hidden, classes), "matrix"),
            "bias": Weight((classes,), "vector"),
        }

    return layout


def fresh_head(layout: Layout, classes: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Initial weights as BERT's heads have them: a normal of std 0.02 cut at two sigma, biases zero."""
    values = {}
    for name, weight in layout(classes).items():
        values[name] = torch.zeros(weight.shape)
        if weight.role == "matrix":
            nn.init.trunc_normal_(values[name], std=0.02, a=-0.04, b=0.04, generator=generator)
    return values


class HeadBank(Bank):
    """The heads of all tasks that read the backbone in one way (pooling, hidden layer, dropout)."""

    def __init__(
        self, d: int, hidden: int | None, dropout: float, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(head_layout(d, hidden), width, device, dtype, blank=None)
        self.has_hidden = hidden is not None
        self.dropout = dropout

    def forward(self, features: Tensor, index: RowIndex) -> Tensor:
        """features [rows, d] or [rows, length, d] -> logits padded with -inf beyond each row's own classes."""
        stacks, rows = self.stacked(index)
        w = {name: take(stack, rows) for name, stack in stacks.items()}
        x = features if features.dim() == 3 else features[:, None]
        x = F.dropout(x.to(w["weight"].dtype), self.dropout, self.training)
        if self.has_hidden:
            x = F.dropout(torch.tanh(affine(x, w["hidden"], w["hidden_bias"])), self.dropout, self.training)
        logits = affine(x, w["weight"], w["bias"])
        known = torch.arange(logits.shape[-1], device=logits.device) < index.sizes[:, None]  # [rows or 1, classes]
        logits = logits.masked_fill(~known[:, None], float("-inf"))
        return logits if features.dim() == 3 else logits[:, 0]


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """One vector per row: [rows, length, d] -> [rows, d]. (The frozen pooler is the backbone's own business.)"""
    if pooling == "cls":
        return hidden[:, 0]
    if mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, -1]
    if pooling == "mean":
        weight = mask.to(hidden.dtype)[:, None]
        return torch.bmm(weight / weight.sum(-1, keepdim=True).clamp(min=1), hidden)[:, 0]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]


def row_losses(
    logits: Tensor | None,
    token_logits: Tensor | None,
    labels: Tensor,
    heads: Sequence[Head | None],
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Each row's loss under its own head, and which rows count: ([rows], [rows] bool).

    `labels` is [rows] or [rows, n]: a class or a number in column 0; a column per class (multilabel); the first and
    last token (spans); a class per token (tokens). Rows without a head or a label don't count.
    """
    rows = len(heads)
    if labels.shape[0] != rows:
        raise GraftError(f"{labels.shape[0]} labels were given for {rows} rows.")
    labels = labels[:, None] if labels.dim() == 1 else labels
    some = logits if logits is not None else token_logits
    if some is None:
        raise GraftError("no row of this batch has a head, so there are no logits to compute a loss from.")
    kinds = sorted({head.kind for head in heads if head is not None})
    if len(kinds) == 1 and None not in heads:
        source = token_logits if kinds[0] in PER_TOKEN else logits
        assert source is not None
        loss, counted = LOSSES[kinds[0]](fine(source), labels, label_smoothing)
        return torch.where(counted, loss, loss.new_zeros(())), counted
    zero = some.new_zeros((), dtype=torch.promote_types(some.dtype, torch.float32))
    total, counts = zero.expand(rows), torch.zeros(rows, dtype=torch.bool, device=some.device)
    for kind in kinds:
        mine = torch.tensor([head is not None and head.kind == kind for head in heads], device=some.device)
        source = token_logits if kind in PER_TOKEN else logits
        assert source is not None
        # Rows of other kinds are computed on zeros, so that their padding cannot reach a gradient.
        picked = torch.where(mine.view(rows, *(1,) * (source.dim() - 1)), source, zero)
        answers = torch.where(mine[:, None], labels, 0)
        loss, counted = LOSSES[kind](fine(picked), answers, label_smoothing)
        counted = counted & mine
        total = total + torch.where(counted, loss, zero)
        counts = counts | counted
    return total, counts


def fine(logits: Tensor) -> Tensor:
    """Logits in the precision that losses are taken in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def smooth_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross entropy whose smoothing spreads over the classes that exist (not -inf); 0 at ignored labels."""
    if not smoothing:
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape)
    known = torch.isfinite(logits)
    log_p = logits.log_softmax(-1)
    ignored = labels == IGNORED
    loss = -log_p.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]
    spread = -torch.where(known, log_p, log_p.new_zeros(())).sum(-1) / known.sum(-1)
    loss = (1 - smoothing) * loss + smoothing * spread
    return torch.where(ignored, loss.new_zeros(()), loss)


def _classification(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    answer = labels[:, 0].long()
    return smooth_cross_entropy(logits, answer, smoothing), answer != IGNORED


def _multilabel(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    width = min(logits.shape[1], labels.shape[1])
    logits, labels = logits[:, :width], labels[:, :width]
    known = torch.isfinite(logits) & (labels != IGNORED)
    safe = torch.where(known, logits, logits.new_zeros(()))
    target = labels.to(logits.dtype).clamp(0, 1) * (1 - smoothing) + smoothing / 2
    loss = F.binary_cross_entropy_with_logits(safe, target, reduction="none") * known
    return loss.sum(1) / known.sum(1).clamp(min=1), known.any(1)


def _regression(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    # Any number is an answer, so a missing one is NaN; among whole numbers, which have no NaN, it is -100.
    missing = labels[:, 0].isnan() if labels.is_floating_point() else labels[:, 0] == IGNORED
    answer = labels[:, 0].to(logits.dtype).masked_fill(missing, 0.0)
    return (logits[:, 0] - answer).square(), ~missing


def _tokens(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    answers = labels[:, : logits.shape[1]].long()
    known = (answers != IGNORED).sum(1)
    losses = smooth_cross_entropy(logits[:, : answers.shape[1]], answers, smoothing)
    return losses.sum(1) / known.clamp(min=1), known > 0


def _spans(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    answers = labels[:, :2].long()
    places = logits[:, :, :2].transpose(1, 2)  # [rows, 2, length]
    answers = answers.masked_fill((answers < 0) | (answers >= places.shape[-1]), IGNORED)
    there = places.gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    answers = answers.masked_fill(~torch.isfinite(there), IGNORED)  # an answer that was cut off, or in the padding
    losses = smooth_cross_entropy(places, answers, smoothing)
    known = (answers != IGNORED).sum(1)
    return losses.sum(1) / known.clamp(min=1), known > 0


LOSSES = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "tokens": _tokens,
    "spans": _spans,
}
