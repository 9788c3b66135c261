"""Answers as the loss should see them: numbers brought to mean 0 and deviation 1, rare classes counting more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.api import grafts_of
from taskgraft.errors import GraftError
from taskgraft.tasks.task import Task
from taskgraft.training.encode import Encoded


@dataclass(frozen=True)
class Targets:
    """A regression learns `(y - mean) / deviation`, and its head is rescaled in the end: prices train like ratings."""

    mean: float = 0.0
    deviation: float = 1.0
    class_weights: Tensor | None = None

    @classmethod
    def of(cls, task: Task, encoded: Encoded, balance: bool, device: torch.device) -> Targets:
        labels = encoded.labels
        if balance and task.kind != "classification":
            raise GraftError(f"balance_classes is for classification, and task {task.name!r} is of kind {task.kind}.")
        if not isinstance(labels, Tensor) or not (balance or task.kind == "regression"):
            return cls()
        if task.kind == "regression":
            deviation = float(labels.double().std(correction=0))
            return cls(float(labels.double().mean()), deviation or 1.0)
        counts = torch.bincount(labels, minlength=len(task.labels)).clamp(min=1)
        return cls(class_weights=(len(labels) / (len(task.labels) * counts)).to(device))

    def scaled(self, labels: Tensor) -> Tensor:
        return (labels - self.mean) / self.deviation if labels.is_floating_point() and self.is_scaled else labels

    def weights(self, labels: Tensor) -> Tensor | None:
        """What each row counts for; None where all count alike."""
        return None if self.class_weights is None else self.class_weights[labels]

    @property
    def is_scaled(self) -> bool:
        return (self.mean, self.deviation) != (0.0, 1.0)

    @torch.no_grad()
    def fold_into(self, model: Any, name: str) -> None:
        """Give the head's last layer the scale of the labels, so that it predicts them as they are."""
        if not self.is_scaled:
            return
        grafts = grafts_of(model)
        for key in grafts.require(name).kinds:
            if key in grafts.head_kinds:
                kind = grafts.head_kinds[key]
                place = kind.slots.trained.index(name)
                kind.bank.trained("weight")[place].mul_(self.deviation)
                kind.bank.trained("bias")[place].mul_(self.deviation).add_(self.mean)
