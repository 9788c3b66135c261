"""How one run goes, whoever drives it: its batches, its schedule, its running mean, and what validation keeps of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from taskgraft.grafts.graft import STATE
from taskgraft.nn.bank import Place, corner
from taskgraft.training.batches import Rows, training_batches
from taskgraft.training.parts import Part
from taskgraft.training.sampling import Batch, Sampler
from taskgraft.training.settings import Settings


class Course:
    """One run: a task, or several that are trained together, and what changes from step to step.

    `parts` are by task; each part's own name is the one that its task has on the model. `settings` are resolved.
    `places` say where the weights lie, alone or in stacks with those of other runs; `rates` are by slot of the
    optimiser. `kept` is a copy of the running mean of the weights, at the last epoch whose validation score was within
    a standard error of the best. A batch is of `batch_size` rows for each of the processes that share it.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        settings: Settings,
        places: Mapping[str, Place],
        rates: Mapping[str, float],
        processes: int = 1,
    ) -> None:
        assert settings.epochs is not None and settings.learning_rate is not None
        self.parts, self.settings, self.places, self.rates = dict(parts), settings, dict(places), dict(rates)
        self.epochs, self.rate = settings.epochs, settings.learning_rate
        self.processes, self.batch_size = processes, settings.batch_size * processes
        self.weights = {name: place.of(place.stack) for name, place in places.items()}
        # The running statistics of a batch norm fit the weights of their own step, and no mean of weights.
        self.has_statistics = any(name.endswith(STATE) for name in self.weights)
        self._mean = {name: weight.clone() for name, weight in self.weights.items()}
        self.kept = {name: weight.clone() for name, weight in self.weights.items()}
        lengths = {name: part.encoded["train"].lengths for name, part in parts.items()}
        batches = math.ceil(sum(map(len, lengths.values())) / self.batch_size)
        if len(parts) > 1 and settings.epoch_steps is not None:
            batches = settings.epoch_steps * settings.accumulation
        self.sampler = sampler_for(lengths, self.batch_size, batches, settings) if len(parts) > 1 else None
        self.loss_weights = {} if self.sampler is None else self.sampler.loss_weights
        self.steps_per_epoch = math.ceil(batches / settings.accumulation)
        self.total_steps = self.epochs * self.steps_per_epoch
        self.steps = 0  # optimiser steps taken
        self.epoch = 0  # epochs finished
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []  # an entry for each finished epoch
        self.kept_epoch = 0
        self._losses: list[float] = []
        self._planned: tuple[int, list[list[Batch]]] = (-1, [])  # an epoch, and its steps

    @property
    def name(self) -> str:
        return ", ".join(self.parts)

    # -- steps

    def group(self) -> list[Batch]:
        """The batches that make the next step."""
        if self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._plan())
        return self._planned[1][self.steps - self.epoch * self.steps_per_epoch]

    def _plan(self) -> list[list[Batch]]:
        """This epoch's batches, in groups that make a step."""
        settings, step = self.settings, self.settings.accumulation
        if self.sampler is not None:
            batches = self.sampler.epoch(self.epoch)
        else:
            ((name, part),) = self.parts.items()
            lengths = part.encoded["train"].lengths
            found = training_batches(lengths, self.batch_size, settings.seed, self.epoch)
            batches = [Batch({name: rows}) for rows in found]
        return [batches[at : at + step] for at in range(0, len(batches), step)]

    def rates_now(self) -> dict[str, float]:
        """The learning rate of the next step, by slot of the optimiser."""
        highest = max(self.rates.values())
        now = highest * self._schedule()
        return {owner: now * (rate / highest) for owner, rate in self.rates.items()}

    def _schedule(self) -> float:
        """Linear warm-up, then linear decay to zero."""
        warm = math.ceil(self.settings.warmup * self.total_steps)
        if self.steps < warm:
            return (self.steps + 1) / warm
        return (self.total_steps - self.steps) / (self.total_steps - warm)

    @torch.no_grad()
    def stepped(self) -> None:
        """The weights have taken a step."""
        self.steps += 1
        if self.reach > 1:
            share = max(1 / self.reach, 1 / self.steps)
            torch._foreach_lerp_(list(self._mean.values()), list(self.weights.values()), share)

    def heard(self, loss: float) -> None:
        """The loss of a step, which may come after further steps."""
        self._losses.append(loss)

    @property
    def reach(self) -> float:
        """Over how many steps the running mean reaches back; over one, it is the weights themselves."""
        return 1.0 if self.has_statistics else max(1.0, self.settings.average * self.total_steps)

    @property
    def average(self) -> dict[str, Tensor]:
        """The running mean of the weights."""
        return self._mean if self.reach > 1 else self.weights

    # -- epochs

    @property
    def epoch_is_through(self) -> bool:
        """Whether all steps of an epoch are taken, and it waits to be validated."""
        return self.steps == (self.epoch + 1) * self.steps_per_epoch

    def validated(self, metrics: dict[str, dict[str, float]]) -> None:
        """End an epoch by the metrics of the running mean; keep that unless an earlier epoch was clearly better.

        With a few hundred validation rows one of them decides which epoch is highest. So the last epoch within a
        standard error of the best is kept, not the best itself.
        """
        score = self.score(metrics)
        trained = sum(self._losses) / max(1, len(self._losses))
        self._losses = []
        self.epoch += 1
        self.history.append({"epoch": self.epoch, "loss": trained, "score": score, "tasks": metrics})
        best = self.best
        if score is None or best is None or score >= best - self._standard_error(best):
            self.kept_epoch = self.epoch
            for name, value in self.average.items():
                self.kept[name].copy_(value)

    @property
    def best(self) -> float | None:
        """The highest validation score so far."""
        return max((entry["score"] for entry in self.history if entry["score"] is not None), default=None)

    @property
    def finished(self) -> bool:
        scores = [entry["score"] for entry in self.history if entry["score"] is not None]
        since_best = len(scores) - 1 - max(range(len(scores)), key=scores.__getitem__) if scores else 0
        # F1 and Matthews are 0 while every row is given the same label: there is nothing to lose patience with yet.
        begun = any(score != 0 for score in scores)
        return self.epoch >= self.epochs or (begun and since_best >= self.settings.patience)

    def score(self, metrics: dict[str, dict[str, float]]) -> float | None:
        """The mean over all columns: a task has as many as it has metrics of its own. None where nothing was judged."""
        columns = [found[metric] for task, found in metrics.items() for metric in self.parts[task].task.metrics]
        return math.fsum(columns) / len(columns) if columns else None

    def _standard_error(self, score: float) -> float:
        """That of a mean of shares of validation rows; for other metrics it is a fair guess."""
        rows = [p.task.splits["validation"].num_rows for p in self.parts.values() if "validation" in p.encoded]
        return math.sqrt(max(0.0, score * (1 - score)) * sum(1 / n for n in rows)) / len(rows)

    @property
    def validation(self) -> dict[str, dict[str, float]]:
        """The metrics by which the kept weights were chosen."""
        found: dict[str, dict[str, float]] = self.history[self.kept_epoch - 1]["tasks"]
        return found

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model these weights in the place of its own."""
        for name, value in self.weights.items():
            value.copy_(weights[name])

    def to_json(self) -> dict[str, Any]:
        """How it went, for a graft's record."""
        together = {"processes": self.processes} if self.processes > 1 else {}
        return {
            "settings": self.settings.to_json(),
            **together,
            "epochs": self.epoch,
            "kept_epoch": self.kept_epoch,
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "history": self.history,
        }

    # -- its state, in true sizes: it may be taken up in a wider stack

    def _groups(self) -> list[tuple[str, dict[str, Tensor]]]:
        mean = [("average", self._mean)] if self.reach > 1 else []
        return [("weights", self.weights), *mean, ("kept", self.kept)]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {
            f"{group}.{name}": corner(value, self.places[name].shape)
            for group, values in self._groups()
            for name, value in values.items()
        }
        record = {
            "steps": self.steps,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "history": self.history,
            "losses": self._losses,
            "kept_epoch": self.kept_epoch,
        }
        return record, tensors

    def restore(self, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken."""
        for group, values in self._groups():
            for name, value in values.items():
                corner(value, self.places[name].shape).copy_(tensors[f"{group}.{name}"])
        self.steps, self.epoch, self.seconds = record["steps"], record["epoch"], record["seconds"]
        self.history, self._losses, self.kept_epoch = record["history"], record["losses"], record["kept_epoch"]


def sampler_for(lengths: dict[str, Rows], batch_size: int, batches: int, settings: Settings) -> Sampler:
    """How several tasks take turns."""
    mixed = settings.batches == "mixed"
    return Sampler(lengths, batch_size, batches, settings.seed, settings.temperature, mixed, settings.weighting)
