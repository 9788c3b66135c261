"""The training loop: one run, or many side by side on one frozen backbone, any method, from rows to kept weights.

A run is a function of its tasks, method, settings and backbone. Batches follow from the seed and the epoch, and the
state on disk holds everything else, so a run that is killed and started again ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from taskgraft.backbones.fused import Fused, fused
from taskgraft.backbones.graphs import forget_recordings, recorded
from taskgraft.errors import Diverged, GraftError
from taskgraft.nn.bank import corner
from taskgraft.training.course import Course
from taskgraft.training.memory import is_out_of_memory
from taskgraft.training.optim import AdamW
from taskgraft.training.passes import LaneBatch, Piece, losses_of, packed
from taskgraft.training.predict import Prediction
from taskgraft.training.progress import Interrupts
from taskgraft.training.sampling import Batch
from taskgraft.training.state import RunFolder, random_state, restore_random_state
from taskgraft.training.team import ALONE, Team


@dataclass(eq=False)
class Lane:
    """A run on its way: its course, where its state is kept, and why it had to end if it went wrong."""

    course: Course
    folder: RunFolder | None = None
    run_key: str = ""
    saved_steps: int | None = None  # where a new run would go on
    saved_at: float = dataclasses.field(default_factory=time.perf_counter)
    error: GraftError | None = None


class Watch(Protocol):
    """What the loop tells of its lanes as they go."""

    def stepped(self, lane: Lane, loss: float, rows: int) -> None: ...
    def validated(self, lane: Lane) -> None: ...
    def ended(self, lane: Lane) -> Lane | None:
        """It has run to its end, with the kept weights on the model, or to its error; another may take its place.

        The successor is resumed, if there was something to resume.
        """


class Loop:
    """Lanes driven over a model, a step of each at a time. A run of its own is a loop of one lane.

    `alone` runs keep the random state that dropout draws from. Lanes' batches share passes of up to `pass_tokens`.
    The processes of a `team` share the rows of one lane: they take the same steps, and the main one alone saves.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        optimizer: AdamW,
        device: torch.device,
        bf16: bool,
        lanes: list[Lane],
        *,
        alone: bool = True,
        pass_tokens: int = 0,
        team: Team = ALONE,
    ) -> None:
        self.model, self.tokenizer, self.optimizer = model, tokenizer, optimizer
        self.device, self.bf16 = device, bf16
        self.lanes, self.alone, self.pass_tokens, self.team = list(lanes), alone, pass_tokens, team
        self.evaluated_at_once = len(lanes) if device.type == "cuda" else 1  # batches of a task
        self._underway: deque[Losses] = deque()  # of steps that were taken and are not heard of yet
        # While a GPU computes a step the next one is made ready, so what came of it is asked for a step later.
        self._steps_ahead = 1 if device.type == "cuda" else 0
        self._since = time.perf_counter()
        self._interrupts = Interrupts(team.size > 1)
        self._stop = self._due = False  # what one process of a team asked for, as all of them have heard

    def train(self, watch: Watch) -> None:
        """Run every lane to its end: its last epoch, or the one at which patience is lost.

        Ctrl-C comes out of it as KeyboardInterrupt, once every lane is saved.
        """
        self._since = time.perf_counter()
        self.model.train()
        try:
            computed_in = torch.bfloat16 if self.bf16 else None
            with self._interrupts as interrupts, recorded(self.model), fused(self.model, computed_in) as forms:
                while self._settle(watch, forms):
                    if self.team.size > 1 or not interrupts.asked:
                        self._step(watch)
                    stop = interrupts.asked if self.team.size == 1 else self._stop
                    for lane in self.lanes:
                        if stop or (self._is_due(lane) if self.team.size == 1 else self._due):
                            self._hear(watch)
                            self.save(lane)
                    self._due = False
                    if stop:
                        raise KeyboardInterrupt
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            settings = max((lane.course.settings for lane in self.lanes), key=lambda each: each.batch_size)
            raise GraftError(
                f"out of memory with batches of {settings.batch_size} texts of up to {settings.max_length} "
                "tokens: halve the batch size and double the accumulation, which trains the same, or lower max_length."
            ) from error

    def _settle(self, watch: Watch, forms: Fused) -> bool:
        """Validate epochs that are through, and let lanes go that have ended, for their successors to come in.

        Whether any lane has a step to take.
        """
        if any(lane.course.epoch_is_through for lane in self.lanes):
            self._hear(watch)
        place = 0
        while place < len(self.lanes):
            lane = self.lanes[place]
            if lane.error is None and lane.course.epoch_is_through:
                found = self.evaluate(lane.course, "validation", lane.course.average)
                lane.course.validated(self.team.from_main(found))
                watch.validated(lane)
                self._count_seconds({lane: 1})
                self.save(lane)
            if lane.error is None and not lane.course.finished:
                place += 1
                continue
            if lane.error is None:
                lane.course.put(lane.course.kept)
                for part in lane.course.parts.values():
                    part.targets.fold_into(self.model, part.name)
            with forms.set_aside():  # whoever reads the model then finds it as it is, and uses it so
                successor = watch.ended(lane)
            self._since = time.perf_counter()
            if successor is None:
                del self.lanes[place]
            else:
                self.lanes[place] = successor
        return bool(self.lanes)

    # -- a step

    def _step(self, watch: Watch) -> None:
        """One optimiser step of every lane, each over its own batches: the mean over all of their rows."""
        groups = {lane: lane.course.group() for lane in self.lanes}
        rows = {lane: sum(map(len, group)) for lane, group in groups.items()}
        for lane in self.lanes:
            self.optimizer.set_rates(lane.course.rates_now())
        self.team.seed_step(self.lanes[0].course.settings.seed, self.lanes[0].course.steps)
        numbers, losses = self._backward(groups)
        if self.team.size > 1:
            numbers, losses = [0], self._told_to_all(losses)
        self._underway.append(Losses(rows, numbers, losses))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for lane in groups:
            lane.course.stepped()
        self._count_seconds(rows)
        self._hear(watch, self._steps_ahead)

    def _told_to_all(self, losses: Tensor) -> Tensor:
        """Sum the gradients of all processes, and their losses; with them goes whether one would stop, or save."""
        asked = self._interrupts.asked, self._is_due(self.lanes[0])
        wishes = torch.tensor(asked, dtype=torch.float64).to(self.device)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.team.summed(parameters, torch.cat([losses.double().sum()[None], wishes]))

    def _is_due(self, lane: Lane) -> bool:
        seconds = time.perf_counter() - lane.saved_at
        return lane.folder is not None and seconds >= lane.course.settings.checkpoint_seconds

    def _hear(self, watch: Watch, but: int = 0) -> None:
        """What the losses were of all steps, but for the last few."""
        while len(self._underway) > but:
            losses = self._underway.popleft()
            found, wishes = losses.read()
            if wishes:
                self._stop, self._due = self._stop or wishes[0], self._due or wishes[1]
            for lane, value in found.items():
                if lane.error is not None:
                    continue
                if math.isfinite(value):
                    lane.course.heard(value)
                    watch.stepped(lane, value, losses.rows[lane])
                    continue
                lane.error = Diverged(
                    f"the loss of {lane.course.name!r} became {value} at step {losses.steps[lane]}: lower the "
                    f"learning rate (it is {lane.course.rate:g}), or look for extreme numbers among the labels."
                )
                for owner in lane.course.rates:
                    self.optimizer.set_active(owner, False)

    def _backward(self, groups: dict[Lane, list[Batch]]) -> tuple[list[int], Tensor]:
        """Put the gradients of a step on the model; the losses of its passes, in more of them where memory is short."""
        while True:
            try:
                return self._passes(groups)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if not forget_recordings(self.model):  # what they hold may be all that is missing
                    if self.pass_tokens <= 1:
                        raise
                    self.pass_tokens //= 2
            self.optimizer.zero_grad()  # nothing else has changed yet
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _passes(self, groups: dict[Lane, list[Batch]]) -> tuple[list[int], Tensor]:
        """A lane's batches follow one another; those of different lanes that come at the same time share passes.

        Parts of the losses, and the number of the lane that each belongs to.
        """
        same_length = any(lane.course.has_statistics for lane in groups)
        found = [torch.zeros(0, device=self.device)]
        order: list[int] = []
        rows = {lane: sum(map(len, group)) for lane, group in groups.items()}
        for turn in zip_longest(*groups.values()):
            batches = [
                LaneBatch(number, pieces_of(lane.course, batch.share(self.team.rank, self.team.size)), rows[lane])
                for number, (lane, batch) in enumerate(zip(groups, turn, strict=True))
                if batch is not None and len(batch) > self.team.rank
            ]
            for some in packed(batches, self.pass_tokens, same_length):
                losses = losses_of(self.model, some, self.device, self.bf16, same_length)
                losses.sum().backward()  # type: ignore[no-untyped-call]
                found.append(losses.detach())
                del losses  # and its graph, before the next pass
                order += [batch.lane for batch in some]
        return order, torch.cat(found)

    def _count_seconds(self, rows: dict[Lane, int]) -> None:
        """Share the time since the last count out, by rows."""
        now = time.perf_counter()
        for lane, count in rows.items():
            lane.course.seconds += (now - self._since) * count / sum(rows.values())
        self._since = now

    # -- validation

    def evaluate(
        self, course: Course, split: str, weights: dict[str, Tensor] | None = None, *, bf16: bool = False
    ) -> dict[str, dict[str, float]]:
        """The metrics of a split of each task that has it, with these weights in the place of the model's own.

        What is reported is computed as it will be used: bf16 would round the mean of large numbers in a folded head.
        """
        if weights is not None:
            own = {name: value.clone() for name, value in course.weights.items()}
            course.put(weights)
            try:
                return self.evaluate(course, split, bf16=self.bf16)
            finally:
                course.put(own)
        found = self.predictions(course, split, bf16=bf16)
        return {name: course.parts[name].judged(split, answers) for name, answers in found.items()}

    def predictions(self, course: Course, split: str, *, bf16: bool = False) -> dict[str, list[Prediction]]:
        """The answers to a split's rows, of each task that has it."""
        settings = course.settings
        if self.evaluated_at_once > 1:  # one task after the other: as many rows as a pass of all of them has
            most = min(settings.batch_size * self.evaluated_at_once, self.pass_tokens // (settings.max_length or 1))
            settings = dataclasses.replace(settings, batch_size=max(settings.batch_size, most))
        return {
            name: part.predictions(self.model, self.tokenizer, split, settings, self.device, bf16, self.team)
            for name, part in course.parts.items()
            if split in part.encoded
        }

    # -- a lane's state on disk

    def save(self, lane: Lane) -> None:
        lane.saved_at = time.perf_counter()
        if lane.folder is None:
            return
        record, tensors = lane.course.state()
        if self.alone:
            tensors |= random_state(self.device)
        for name, place in lane.course.places.items():
            for key, moment in self.optimizer.state.get(place.stack, {}).items():
                tensors[f"{key}.{name}"] = corner(place.of(moment), place.shape)
        record["slots"] = [self.optimizer.steps_of(owner) for owner in lane.course.rates]
        lane.folder.write(lane.run_key, record, tensors)
        lane.saved_steps = lane.course.steps

    def resume(self, lane: Lane) -> None:
        """Go on from the state on disk, where there is one of this run."""
        found = self.team.from_main(lane.folder.read(lane.run_key) if lane.folder is not None else None)
        if found is None:
            return
        record, tensors = found
        lane.course.restore(record, tensors)
        for name, place in lane.course.places.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in tensors:
                    moment = place.of(self.optimizer.moments(place.stack)[key])
                    corner(moment, place.shape).copy_(tensors[f"{key}.{name}"])
        for owner, steps in zip(lane.course.rates, record["slots"], strict=True):
            self.optimizer.set_steps(owner, steps)
        if self.alone:
            restore_random_state(tensors, self.device)
        lane.saved_steps = record["steps"]


class Losses:
    """The losses of a step of some lanes, on their way from the device."""

    def __init__(self, rows: dict[Lane, int], numbers: list[int], parts: Tensor) -> None:
        self.rows, self._numbers = rows, numbers
        self.steps = {lane: lane.course.steps + 1 for lane in rows}
        self._arrived = None
        if parts.is_cuda:
            self._parts = torch.empty(parts.shape, dtype=parts.dtype, pin_memory=True)
            self._parts.copy_(parts, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a core is free meanwhile
            self._arrived.record()
        else:
            self._parts = parts

    def read(self) -> tuple[dict[Lane, float], list[bool]]:
        """Each lane's loss, once the device has computed it, and what the processes of a team have asked for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        totals = [np.float32(0)] * len(self.rows)
        with np.errstate(all="ignore"):  # a loss may overflow
            for number, value in zip(self._numbers, self._parts.numpy(), strict=False):
                totals[number] = np.float32(totals[number] + value)
        asked = [bool(value) for value in self._parts[len(self._numbers) :]]
        return dict(zip(self.rows, map(float, totals), strict=True)), asked


def pieces_of(course: Course, batch: Batch) -> list[Piece]:
    """The rows of a batch, by task, with what their losses count."""
    return [
        Piece(course.parts[task], rows, course.settings.label_smoothing, course.loss_weights.get(task, 1.0))
        for task, rows in batch.parts.items()
    ]
