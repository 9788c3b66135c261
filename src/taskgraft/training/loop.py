"""The training loop: one task or several together, any method, from rows to the weights that validation keeps.

A run is a function of its tasks, method, settings and backbone. Batches follow from the seed and the epoch, and the
state on disk holds everything else, so a run that is killed and started again ends with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.api import rows, trainable
from taskgraft.backbones.checkpoint import TASKS
from taskgraft.backbones.forward import GraftOutput, loss
from taskgraft.errors import GraftError, Stopped
from taskgraft.grafts.graft import STATE
from taskgraft.nn.heads import IGNORED, LOSSES
from taskgraft.training.batches import Rows, training_batches
from taskgraft.training.encode import filled, joined
from taskgraft.training.optim import AdamW, owned_parameters
from taskgraft.training.parts import Part
from taskgraft.training.predict import forward
from taskgraft.training.progress import Interrupts, Progress
from taskgraft.training.sampling import Batch, Sampler
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder, random_state, restore_random_state


class Loop:
    """Tasks being trained on a model: what changes from step to step, how it steps, and how it is saved.

    `settings` are resolved. `average` is the running mean of the trained weights; `kept` is its copy at the last epoch
    whose validation score was within a standard error of the best.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        parts: Sequence[Part],
        settings: Settings,
        device: torch.device,
        accelerator: Any,
        folder: RunFolder | None = None,
        run: str = "",
    ) -> None:
        assert settings.epochs is not None and settings.learning_rate is not None
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.parts = {part.name: part for part in parts}
        self.epochs, self.rate = settings.epochs, settings.learning_rate
        self.device, self.accelerator = device, accelerator
        self.folder, self.run_key = folder, run
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.bf16 = settings.precision == "bf16" or (settings.precision == "auto" and on_gpu)
        self.optimizer = AdamW(
            model, lr=self._rates(), weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
        )
        self.highest_rate: float = self.optimizer.defaults["lr"]
        self.weights = trained_weights(model)
        # The running statistics of a batch norm fit the weights of their own step, and no mean of weights.
        self.has_statistics = any(name.endswith(STATE) for name in self.weights)
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.kept = {name: weight.detach().clone() for name, weight in self.weights.items()}
        lengths = {part.name: part.encoded["train"].lengths for part in parts}
        batches = math.ceil(sum(map(len, lengths.values())) / settings.batch_size)
        self.sampler = sampler_for(lengths, batches, settings) if len(parts) > 1 else None
        self.loss_weights = {} if self.sampler is None else self.sampler.loss_weights
        self.steps_per_epoch = math.ceil(batches / settings.accumulation)
        self.total_steps = self.epochs * self.steps_per_epoch
        self.steps = 0  # optimiser steps taken
        self.epoch = 0  # epochs finished
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []  # an entry for each finished epoch
        self.kept_epoch = 0
        self.saved_steps: int | None = None  # where a new run would go on
        self._since = 0.0
        self._losses: list[float] = []

    @property
    def name(self) -> str:
        return ", ".join(self.parts)

    # -- the run

    def train(self, progress: Progress) -> None:
        """Run to the end of the last epoch, or until patience is lost, and leave the kept weights on the model."""
        self.resume()
        self._since = last_write = time.perf_counter()
        progress.begin(self.name, self.total_steps, self.steps)
        try:
            with Interrupts() as interrupts:
                while not self.finished:
                    self.model.train()
                    plan = self._plan()
                    for group in plan[self.steps - self.epoch * self.steps_per_epoch :]:
                        value = self._step(group)
                        progress.step(
                            self.steps, self.steps / self.steps_per_epoch, value, sum(len(batch) for batch in group)
                        )
                        if interrupts.asked or time.perf_counter() - last_write >= self.settings.checkpoint_seconds:
                            self.save()
                            last_write = time.perf_counter()
                        if interrupts.asked:
                            raise KeyboardInterrupt
                    self._finish_epoch(progress)
                    self.save()
                    last_write = time.perf_counter()
                    if interrupts.asked and not self.finished:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:  # also a second one, in the middle of something: what is on disk is whole
            kept = f"the same command goes on from step {self.saved_steps}"
            if self.saved_steps is None:
                kept = "nothing was kept" + ("" if self.folder else ": give it a run folder to be able to go on")
            where = f"step {self.steps} of {self.total_steps}"
            raise Stopped(f"training of {self.name!r} was stopped at {where}; {kept}.") from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise GraftError(
                f"out of memory with batches of {self.settings.batch_size} texts of up to {self.settings.max_length} "
                "tokens: halve the batch size and double the accumulation, which trains the same, or lower max_length."
            ) from error
        finally:
            progress.end()
        self._put(self.kept)
        for part in self.parts.values():
            part.targets.fold_into(self.model, part.name)
        self.seconds += time.perf_counter() - self._since

    @property
    def finished(self) -> bool:
        scores = [entry["score"] for entry in self.history if entry["score"] is not None]
        since_best = len(scores) - 1 - max(range(len(scores)), key=scores.__getitem__) if scores else 0
        return self.epoch >= self.epochs or since_best >= self.settings.patience

    def _plan(self) -> list[list[Batch]]:
        """This epoch's batches, in groups that make a step."""
        settings, step = self.settings, self.settings.accumulation
        if self.sampler is not None:
            batches = self.sampler.epoch(self.epoch)
        else:
            ((name, part),) = self.parts.items()
            lengths = part.encoded["train"].lengths
            found = training_batches(lengths, settings.batch_size, settings.seed, self.epoch)
            batches = [Batch({name: rows}) for rows in found]
        return [batches[at : at + step] for at in range(0, len(batches), step)]

    def _step(self, group: Sequence[Batch]) -> float:
        """One optimiser step over a group of batches: the mean over all of their rows."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.highest_rate * self._schedule()
        count = sum(len(batch) for batch in group)
        total = torch.zeros((), device=self.device)
        for batch in group:
            value = self._loss(batch) / count
            value.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        found = float(total)
        if not math.isfinite(found):
            raise GraftError(
                f"the loss of {self.name!r} became {found} at step {self.steps + 1}: lower the learning rate "
                f"(it is {self.rate:g}), or look for extreme numbers among the labels."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self._update_average()
        self._losses.append(found)
        return found

    def _loss(self, batch: Batch) -> Tensor:
        """The sum over a batch of each row's loss, weighted; the tasks' rows lie one after the other."""
        parts = [self.parts[name] for name in batch.parts]
        found = [
            part.encoded["train"].batch(rows.tolist(), self.device)
            for part, rows in zip(parts, batch.parts.values(), strict=True)
        ]
        inputs = found[0][0]
        if len(found) > 1:
            inputs = joined([some for some, _ in found], parts[0].encoded["train"].padding)
        labels = [answers for _, answers in found if answers is not None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            losses = self._row_losses(batch, inputs, labels)
        weights = [part.targets.weights(answers) for part, answers in zip(parts, labels, strict=True)]
        shares = [self.loss_weights.get(part.name, 1.0) for part in parts]
        sums = [(each * w).sum() * share for each, w, share in zip(losses, weights, shares, strict=True)]
        return torch.stack(sums).sum()

    def _row_losses(self, batch: Batch, inputs: dict[str, Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        """Each row's loss, by task."""
        sizes, smoothing = [len(rows) for rows in batch.parts.values()], self.settings.label_smoothing
        names = list(batch.parts)
        each = (
            names[0]
            if len(names) == 1
            else [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
        )
        if self.parts[names[0]].wording is not None:
            longest = max(answers.shape[1] for answers in labels)
            written = torch.cat([filled(answers, longest, IGNORED) for answers in labels])
            before = self.model.prepare_decoder_input_ids_from_labels(labels=written)
            with rows(self.model, each):
                logits = self.model(**inputs, decoder_input_ids=before, use_cache=False).logits
            return list(torch.split(LOSSES["tokens"](logits.float(), written, smoothing)[0], sizes))
        output = forward(self.model, each, inputs)
        losses, begin = [], 0
        for name, size, answers in zip(names, sizes, labels, strict=True):
            own = output if len(names) == 1 else rows_of(output, begin, begin + size)
            scaled = self.parts[name].targets.scaled(answers)
            losses.append(loss(self.model, own, scaled, rows=name, label_smoothing=smoothing, reduction="none"))
            begin += size
        return losses

    def _rates(self) -> float | dict[str, float]:
        """The learning rate; by task where what is its own has another than what tasks share."""
        own = self.settings.own_rate
        owners = {owner for _, owners, _ in owned_parameters(self.model) for owner in owners}
        if own is None or owners <= set(self.parts):
            return self.rate
        return {owner: own if owner in self.parts else self.rate for owner in owners}

    def _schedule(self) -> float:
        """Linear warm-up, then linear decay to zero."""
        warm = math.ceil(self.settings.warmup * self.total_steps)
        if self.steps < warm:
            return (self.steps + 1) / warm
        return (self.total_steps - self.steps) / (self.total_steps - warm)

    @torch.no_grad()
    def _update_average(self) -> None:
        reach = 1.0 if self.has_statistics else max(1.0, self.settings.average * self.total_steps)
        share = max(1 / reach, 1 / self.steps)
        torch._foreach_lerp_(list(self.average.values()), [w.detach() for w in self.weights.values()], share)

    def _finish_epoch(self, progress: Progress) -> None:
        """Validate the running mean, and keep it unless an earlier epoch was clearly better.

        With a few hundred validation rows one of them decides which epoch is highest. So the last epoch within a
        standard error of the best is kept, not the best itself.
        """
        metrics = self.evaluate("validation", self.average)
        score = self.score(metrics)
        trained = sum(self._losses) / max(1, len(self._losses))
        self._losses = []
        self.epoch += 1
        self.history.append({"epoch": self.epoch, "loss": trained, "score": score, "tasks": metrics})
        best = max((entry["score"] for entry in self.history if entry["score"] is not None), default=None)
        if score is None or best is None or score >= best - self._standard_error(best):
            self.kept_epoch = self.epoch
            for name, value in self.average.items():
                self.kept[name].copy_(value)
        only = next(iter(self.parts.values()))
        if score is not None:
            progress.epoch(self.epoch, only.task.metrics[0] if len(self.parts) == 1 else "mean score", score)
        scalars = {key: value for key, value in self.history[-1].items() if isinstance(value, (int, float))}
        for task, found in metrics.items():
            scalars |= {key if len(self.parts) == 1 else f"{task}/{key}": value for key, value in found.items()}
        self.accelerator.log(scalars, self.steps)

    def score(self, metrics: dict[str, dict[str, float]]) -> float | None:
        """The mean over all columns: a task has as many as it has metrics of its own. None where nothing was judged."""
        columns = [found[metric] for task, found in metrics.items() for metric in self.parts[task].task.metrics]
        return math.fsum(columns) / len(columns) if columns else None

    def _standard_error(self, score: float) -> float:
        """That of a mean of shares of validation rows; for other metrics it is a fair guess."""
        rows = [p.task.splits["validation"].num_rows for p in self.parts.values() if "validation" in p.encoded]
        return math.sqrt(max(0.0, score * (1 - score)) * sum(1 / n for n in rows)) / len(rows)

    def evaluate(
        self, split: str, weights: dict[str, Tensor] | None = None, *, bf16: bool = False
    ) -> dict[str, dict[str, float]]:
        """The metrics of a split of each task that has it, with these weights in the place of the model's own.

        What is reported is computed as it will be used: bf16 would round the mean of large numbers in a folded head.
        """
        if weights is not None:
            own = {name: value.detach().clone() for name, value in self.weights.items()}
            self._put(weights)
            try:
                return self.evaluate(split, bf16=self.bf16)
            finally:
                self._put(own)
        return {
            name: part.evaluate(self.model, self.tokenizer, split, self.settings, self.device, bf16)
            for name, part in self.parts.items()
            if split in part.encoded
        }

    def to_json(self) -> dict[str, Any]:
        """How it went, for a graft's record."""
        return {
            "settings": self.settings.to_json(),
            "epochs": self.epoch,
            "kept_epoch": self.kept_epoch,
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "history": self.history,
        }

    @property
    def validation(self) -> dict[str, dict[str, float]]:
        """The metrics by which the kept weights were chosen."""
        found: dict[str, dict[str, float]] = self.history[self.kept_epoch - 1]["tasks"]
        return found

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, value in self.weights.items():
            value.copy_(weights[name])

    # -- its state on disk

    def save(self) -> None:
        if self.folder is None:
            return
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
        tensors = random_state(self.device)
        for group, values in (("weights", self.weights), ("average", self.average), ("kept", self.kept)):
            tensors |= {f"{group}.{name}": value.detach() for name, value in values.items()}
        state = self.optimizer.state_dict()
        for number, moments in state["state"].items():
            tensors |= {f"moments.{number}.{name}": value for name, value in moments.items()}
        record = {
            "steps": self.steps,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "history": self.history,
            "losses": self._losses,
            "kept_epoch": self.kept_epoch,
            "slots": state["slots"],
        }
        self.folder.write(self.run_key, record, tensors)
        self.saved_steps = self.steps

    def resume(self) -> None:
        found = self.folder.read(self.run_key) if self.folder is not None else None
        if found is None:
            return
        record, tensors = found
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}, "kept": {}, "moments": {}, "random": {}}
        for name, value in tensors.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = value
        self._put(groups["weights"])
        for target, source in ((self.average, groups["average"]), (self.kept, groups["kept"])):
            for name, value in target.items():
                value.copy_(source[name])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in groups["moments"].items():
            number, _, moment = name.partition(".")
            moments.setdefault(int(number), {})[moment] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments, "slots": record["slots"]})
        restore_random_state(tensors, self.device)
        self.saved_steps = record["steps"]
        self.steps, self.epoch, self.seconds = record["steps"], record["epoch"], record["seconds"]
        self.history, self._losses, self.kept_epoch = record["history"], record["losses"], record["kept_epoch"]


def sampler_for(lengths: dict[str, Rows], batches: int, settings: Settings) -> Sampler:
    """How several tasks take turns."""
    mixed = settings.batches == "mixed"
    return Sampler(
        lengths, settings.batch_size, batches, settings.seed, settings.temperature, mixed, settings.weighting
    )


def rows_of(output: GraftOutput, begin: int, end: int) -> GraftOutput:
    """Some rows of an output."""
    parts = {key: getattr(output, key) for key in ("logits", "token_logits")}
    return GraftOutput(**{key: None if value is None else value[begin:end] for key, value in parts.items()})


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Everything of a model that training changes: parameters, and the running statistics of a batch norm."""
    own = model._keys_to_ignore_on_save
    state = model.state_dict(keep_vars=True)
    weights = {name: value for name, value in state.items() if name not in own and not name.startswith(f"{TASKS}.")}
    half = [name for name, value in trainable(model).items() if value.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise GraftError(
            f"{half[0]} would be trained in {str(model.dtype).removeprefix('torch.')}, where small steps are lost: "
            "load the backbone with dtype=torch.float32 (precision='bf16' still computes in bf16)."
        )
    return weights


def is_out_of_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
