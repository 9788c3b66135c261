"""Many grafts in one pass: runs of many tasks, or of many settings of one, side by side on one frozen backbone.

The loss of a step is the sum over runs of each one's own mean. The backbone is frozen and every run has a slot of its
own in each bank, so gradients do not mix: a run ends as it would have ended alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from taskgraft.backbones import api
from taskgraft.backbones.insert import Grafts
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError, Stopped
from taskgraft.methods import Adapter, HeadOnly, Method, NormsOnly
from taskgraft.names import check_task_name
from taskgraft.nn.heads import Head
from taskgraft.tasks.task import Task
from taskgraft.training.course import Course
from taskgraft.training.ended import read_run, write_run
from taskgraft.training.fit import Run, run_of
from taskgraft.training.loop import Lane, Loop
from taskgraft.training.optim import AdamW
from taskgraft.training.parts import Part, part_of, settled
from taskgraft.training.passes import lanes_that_fit, tokens_that_fit
from taskgraft.training.predict import evaluated_rows
from taskgraft.training.progress import ManyProgress, many_progress_for
from taskgraft.training.session import backbone_parameters, computes_in_bf16, device_of, lent, run_key
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder

HELD = ".held"  # in the run folder, beside those of the trials


@dataclass(frozen=True, eq=False)
class Trial:
    """One run among many: a task, a method and settings, under a name of its own."""

    name: str
    task: Task
    method: Method = Adapter()  # noqa: RUF009 - frozen
    settings: Settings = Settings()  # noqa: RUF009


def fit_many(
    backbone: Backbone,
    trials: Sequence[Trial],
    *,
    run: str | PathLike[str] | None = None,
    lanes: int | None = None,
    progress: ManyProgress | bool | None = None,
    on_run: Callable[[Trial, Run], None] | None = None,
    on_failure: Callable[[Trial, GraftError], None] | None = None,
) -> dict[str, Run]:
    """Train all trials, `lanes` of them at a time (None: as memory allows), and give what `tg.fit` gives of each alone.

    A trial that ends leaves its place to one that waits; `on_run` hears of it at once. One whose loss is no longer a
    number goes to `on_failure`, while the others go on; without that, an error in the end names such trials.
    `run` is a folder in which each trial's state, and in the end its graft, is kept under its name: the same call goes
    on where an earlier one was stopped or killed, and repeats nothing that ended. `seconds` of a run are its share, by
    rows, of its passes. What dropout draws, where it is on, depends on the company; all else does not, to rounding.
    """
    trials = list(trials)
    check(trials, lanes)
    device, total = device_of(), backbone_parameters(backbone.model)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        backbone.model.to(device)
        grafts = stack.enter_context(lent(backbone.model))
        ready = made_ready(backbone, grafts, trials, None if run is None else Path(run), device)
        if run is not None:
            stack.enter_context(RunFolder(Path(run) / HELD).held())
        torch.manual_seed(trials[0].settings.seed)
        crew = Crew(backbone, grafts, device, total, lanes, many_progress_for(progress), on_run, on_failure)
        crew.train(ready)
    if crew.failures and on_failure is None:
        said = "; ".join(f"{name!r}: {str(error).rstrip('.')}" for name, error in crew.failures.items())
        raise GraftError(f"{len(crew.failures)} of {len(trials)} runs failed, the others ended: {said}.")
    return {trial.name: crew.runs[trial.name] for trial in trials if trial.name in crew.runs}


def check(trials: Sequence[Trial], lanes: int | None) -> None:
    """Refuse, before anything is read or trained, what cannot be trained side by side."""
    if not trials:
        raise GraftError("no trials were given: give one or more.")
    if lanes is not None and (not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1):
        raise GraftError(f"lanes={lanes!r} must be a whole number of at least 1.")
    first = trials[0]
    for number, trial in enumerate(trials):
        if not isinstance(trial, Trial) or not isinstance(trial.task, Task):
            raise GraftError(f"{trial!r} is not a trial of a task: give tg.Trial(NAME, tg.load_task(...)).")
        check_task_name(trial.name)
        if trial.name in [other.name for other in trials[:number]]:
            raise GraftError(f"two trials are called {trial.name!r}: give each a name of its own.")
        method, norms = trial.method, trial.method.trained_norms
        shares = norms == "shared" or (isinstance(method, Adapter) and method.norm_after == "shared")
        if shares or not isinstance(method, (Adapter, NormsOnly, HeadOnly)):
            raise GraftError(
                f"trial {trial.name!r} trains weights that it would share with others ({method.name}): use adapters, "
                "norms or heads of its own, or tg.fit."
            )
        for what, own, others in (
            ("precision", trial.settings.precision, first.settings.precision),
            ("backbone_dropout", method.backbone_dropout, first.method.backbone_dropout),
        ):
            if own != others:
                raise GraftError(
                    f"trials {first.name!r} and {trial.name!r} have {what}={others!r} and {own!r}, and share passes: "
                    "make them agree, or train them in two calls."
                )


@dataclass(frozen=True, eq=False)
class Ready:
    """A trial with its rows encoded and its settings resolved; `needs` are its kinds of banks, and its sizes there."""

    trial: Trial
    settings: Settings
    part: Part
    name: str  # of its task on the model
    needs: dict[str, int]
    folder: RunFolder | None
    key: str  # which run its state is of

    @property
    def group(self) -> tuple[Any, ...]:
        """Trials of one group fit into one another's places, and share an optimiser."""
        return reads_features(self.trial.method, self.part.head), self.settings.epsilon, *self.needs


def reads_features(method: Method, head: Head | None) -> bool:
    """Whether all that learns is a head on what the frozen backbone makes of a text, which never changes."""
    return isinstance(method, HeadOnly) and head is not None and not head.per_token


def made_ready(
    backbone: Backbone, grafts: Grafts, trials: Sequence[Trial], folder: Path | None, device: torch.device
) -> list[Ready]:
    """Encode the rows of all trials, once for those that read the same."""
    model, found, parts = backbone.model, list[Ready](), dict[tuple[Any, ...], Part]()
    for number, trial in enumerate(trials):
        task, method = trial.task, trial.method
        settings = settled(trial.settings, backbone, method, task.kind, task.split("train").num_rows)
        same: tuple[Any, ...] = (id(task), settings.max_length, settings.balance_classes)
        if same not in parts:
            parts[same] = part_of(backbone, task, settings, device, prefix=False)
        if reads_features(method, parts[same].head):
            tokens, same = parts[same], (*same, method.pooling)
            parts[same] = parts.get(same) or tokens.with_features()
        needs = grafts.needs(method, parts[same].head)
        if not needs:
            raise GraftError(f"trial {trial.name!r} would train nothing: tasks have no heads on {backbone.name}.")
        name = f"trial {number}"
        while name in grafts.tasks:
            name += "_"
        place = None if folder is None else RunFolder(folder / trial.name)
        key = "" if place is None else run_key(model, [parts[same]], method, settings, start="one of many")
        found.append(Ready(trial, settings, parts[same], name, needs, place, key))
    return found


@dataclass(eq=False)
class Crew:
    """The runs of a call on their way: who waits, who is on the model, and what came of the others."""

    backbone: Backbone
    grafts: Grafts
    device: torch.device
    total: int  # parameters of the backbone
    lanes: int | None
    progress: ManyProgress
    on_run: Callable[[Trial, Run], None] | None
    on_failure: Callable[[Trial, GraftError], None] | None
    runs: dict[str, Run] = field(default_factory=dict)
    failures: dict[str, GraftError] = field(default_factory=dict)
    waiting: deque[Ready] = field(default_factory=deque)
    running: dict[Lane, Ready] = field(default_factory=dict)
    loop: Loop = field(init=False)

    def train(self, ready: Sequence[Ready]) -> None:
        """Read back what has ended before, and train the rest, one group after the other."""
        groups: dict[tuple[Any, ...], list[Ready]] = {}
        for each in ready:
            ended = None if each.folder is None else read_run(each.folder, each.key)
            if ended is None:
                groups.setdefault(each.group, []).append(each)
            else:
                self.runs[each.trial.name] = ended
        self.progress.begin([each.trial.name for each in ready], list(self.runs))
        try:
            for group in groups.values():
                self._train_group(group)
        except (KeyboardInterrupt, Stopped):
            how = "the same call goes on from there"
            if ready[0].folder is None:
                how = "the rest was not kept: give it a run folder to be able to go on"
            ends = len(self.runs) + len(self.failures)
            raise Stopped(f"training of {len(ready)} runs was stopped when {ends} had ended; {how}.") from None
        finally:
            self.progress.end()

    def _train_group(self, group: Sequence[Ready]) -> None:
        """Train trials that fit into one another's places: as many at a time as there are lanes."""
        model, first = self.backbone.model, group[0]
        with lent(model):
            self._mount(first)
            for key in first.needs:
                self.grafts.kinds[key].reserve(each.needs[key] for each in group)
            count = self.lanes or lanes_that_fit(self.grafts, first.needs, self.device)
            running, self.waiting = group[:count], deque(group[count:])
            for each in running[1:]:
                self._mount(each)
            api.train_only(model, [each.name for each in running])
            optimizer = AdamW(
                model,
                {each.name: rate_of(each) for each in running},
                eps=first.settings.epsilon,
                weight_decay={each.name: each.settings.weight_decay for each in running},
                clip_norm={each.name: each.settings.clip_norm for each in running},
            )
            lanes, bf16 = [self._lane(each) for each in running], computes_in_bf16(first.settings, self.device)
            tokens = tokens_that_fit(model, self.device, bf16)
            self.loop = Loop(
                model, self.backbone.tokenizer, optimizer, self.device, bf16, lanes, alone=False, pass_tokens=tokens
            )
            for lane in lanes:
                self.loop.resume(lane)
            self.loop.train(self)

    def _mount(self, ready: Ready) -> None:
        trial, model = ready.trial, self.backbone.model
        api.add_task(model, ready.name, trial.method, ready.part.head, seed=ready.settings.seed, train=False)

    def _lane(self, ready: Ready) -> Lane:
        """The lane of a trial whose task is on the model."""
        if ready.folder is not None:
            with ready.folder.held():  # makes it, or says why it cannot be used
                pass
        task, rows = ready.part.task, evaluated_rows(ready.settings.batch_size, self.device)
        if reads_features(ready.trial.method, ready.part.head):
            ready.part.make_features(self.backbone.model, ready.name, rows, self.device)
        parts = {task.name: replace(ready.part, task=replace(task, name=ready.name))}
        course = Course(parts, ready.settings, self.grafts.places(ready.name), {ready.name: rate_of(ready)})
        lane = Lane(course, ready.folder, ready.key)
        self.running[lane] = ready
        return lane

    # -- what the loop tells

    def stepped(self, lane: Lane, loss: float, rows: int) -> None:
        name, course = self.running[lane].trial.name, lane.course
        epoch = course.steps / course.steps_per_epoch
        self.progress.lane(name, course.steps, course.total_steps, epoch, loss, course.best, rows)

    def validated(self, lane: Lane) -> None:
        pass

    def ended(self, lane: Lane) -> Lane | None:
        ready, optimizer = self.running.pop(lane), self.loop.optimizer
        trial = ready.trial
        if lane.error is None:
            tested = self.loop.predictions(lane.course, "test")
            self._keep(
                ready, run_of(self.backbone, ready.part, trial.method, lane.course, tested, self.total, ready.name)
            )
        else:
            self._give_up(ready, lane.error)
        if not self.waiting:
            optimizer.set_active(ready.name, False)
            return None
        following = self.waiting.popleft()
        settings = following.settings
        self.grafts.swap(ready.name, following.name, following.trial.method, following.part.head, settings.seed)
        optimizer.restart(ready.name, following.name, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm)
        successor = self._lane(following)
        self.loop.resume(successor)
        return successor

    # -- what came of them

    def _keep(self, ready: Ready, run: Run) -> None:
        if ready.folder is not None:
            write_run(ready.folder, ready.key, run)
        self.runs[ready.trial.name] = run
        self.progress.run(ready.trial.name, run.score)
        if self.on_run is not None:
            self.on_run(ready.trial, run)

    def _give_up(self, ready: Ready, error: GraftError) -> None:
        self.failures[ready.trial.name] = error
        self.progress.run(ready.trial.name, None)
        if self.on_failure is not None:
            self.on_failure(ready.trial, error)


def rate_of(ready: Ready) -> float:
    rate = ready.settings.learning_rate
    assert rate is not None
    return rate
