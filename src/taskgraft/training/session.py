"""What every run needs around its loop: a device, a folder, trackers, and a model given back as it was found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from taskgraft.backbones import api
from taskgraft.backbones.checkpoint import TASKS
from taskgraft.backbones.insert import Grafts
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError, Stopped
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.methods import HeadOnly, Method
from taskgraft.nn.bank import Place
from taskgraft.nn.heads import Head
from taskgraft.training.course import Course
from taskgraft.training.loop import Lane, Loop
from taskgraft.training.optim import AdamW, owned_parameters
from taskgraft.training.parts import Part
from taskgraft.training.predict import cacheable, evaluated_rows
from taskgraft.training.progress import Progress, progress_for
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder
from taskgraft.training.team import Team, accelerate_state, team_of


def changed(settings: Settings | None, changes: Mapping[str, Any]) -> Settings:
    """The settings with these fields changed."""
    try:
        return dataclasses.replace(settings or Settings(), **changes)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(Settings))
        raise GraftError(f"{error}: the settings are {known}.") from error


@contextmanager
def trained(
    backbone: Backbone,
    parts: Sequence[Part],
    method: Method,
    settings: Settings,
    mount: AbstractContextManager[None],
    *,
    run: str | PathLike[str] | None,
    progress: Progress | bool | None,
    track: str | None,
    start: str = "",
) -> Iterator[tuple[Loop, Course]]:
    """Train tasks to the end; inside the block they are on the model, with the weights that were kept.

    `mount` puts them on the model, and takes them off again. `start` says what they start from, if not from scratch.
    """
    model, device, team = backbone.model, device_of(several=True), team_of()
    with ExitStack() as stack:
        folder = None if run is None else RunFolder(run)
        if folder is not None and team.leads:
            stack.enter_context(folder.held())
        accelerator = accelerator_for(parts[0].name, settings, track, folder)
        stack.callback(finish_trackers, accelerator)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        model.to(device)
        stack.enter_context(mount)
        if len(parts) == 1 and cacheable(model, parts[0].name):
            parts[0].make_features(model, parts[0].name, evaluated_rows(settings.batch_size, device), device)
        torch.manual_seed(settings.seed)
        key = run_key(model, parts, method, settings, start, team.size)
        team.check_same(key)
        rates = rates_of(model, [part.name for part in parts], settings)
        places = trained_places(model)
        team.start_alike(place.stack for place in places.values())
        course = Course({part.name: part for part in parts}, settings, places, rates, team.size)
        check_shareable(course, team)
        optimizer = AdamW(
            model, rates, eps=settings.epsilon, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm
        )
        lane = Lane(course, folder if team.leads else None, key)
        bf16 = computes_in_bf16(settings, device)
        loop = Loop(model, backbone.tokenizer, optimizer, device, bf16, [lane], team=team)
        loop.resume(lane)
        train_alone(loop, lane, Heard(progress_for(progress if team.leads else False), accelerator))
        yield loop, course


def train_alone(loop: Loop, lane: Lane, heard: Heard) -> None:
    """Train the one lane of a loop, and say how to go on where it is stopped."""
    course = lane.course
    heard.progress.begin(course.name, course.total_steps, course.steps)
    try:
        loop.train(heard)
    except KeyboardInterrupt:  # also a second one, in the middle of something: what is on disk is whole
        kept = f"the same command goes on from step {lane.saved_steps}"
        if lane.saved_steps is None:
            kept = "nothing was kept" + ("" if lane.folder else ": give it a run folder to be able to go on")
        where = f"step {course.steps} of {course.total_steps}"
        raise Stopped(f"training of {course.name!r} was stopped at {where}; {kept}.") from None
    finally:
        heard.progress.end()


@dataclass(frozen=True)
class Heard:
    """What a run of its own tells: people by their progress, trackers by Accelerate."""

    progress: Progress
    accelerator: Any

    def stepped(self, lane: Lane, loss: float, rows: int) -> None:
        course = lane.course
        self.progress.step(course.steps, course.steps / course.steps_per_epoch, loss, rows)

    def validated(self, lane: Lane) -> None:
        course, entry = lane.course, lane.course.history[-1]
        only = next(iter(course.parts.values())) if len(course.parts) == 1 else None
        if entry["score"] is not None:
            self.progress.epoch(course.epoch, "mean score" if only is None else only.task.metrics[0], entry["score"])
        scalars = {key: value for key, value in entry.items() if isinstance(value, (int, float))}
        for task, found in entry["tasks"].items():
            scalars |= {f"{task}/{key}" if only is None else key: value for key, value in found.items()}
        self.accelerator.log(scalars, course.steps)

    def ended(self, lane: Lane) -> None:
        if lane.error is not None:
            raise lane.error


def rates_of(model: Any, tasks: Sequence[str], settings: Settings) -> dict[str, float]:
    """The learning rate of each of the optimiser's slots: what is a task's own may have another than what is shared."""
    assert settings.learning_rate is not None
    owners = list(dict.fromkeys(owner for _, owners, _ in owned_parameters(model) for owner in owners))
    own = settings.own_rate
    if own is None or set(owners) <= set(tasks):
        own = settings.learning_rate
    return {owner: own if owner in tasks else settings.learning_rate for owner in owners}


def computes_in_bf16(settings: Settings, device: torch.device) -> bool:
    on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return settings.precision == "bf16" or (settings.precision == "auto" and on_gpu)


def trained_places(model: Any) -> dict[str, Place]:
    """Everything of a model that training changes: parameters, and the running statistics of a batch norm."""
    own = model._keys_to_ignore_on_save
    state = model.state_dict(keep_vars=True)
    weights = {name: value for name, value in state.items() if name not in own and not name.startswith(f"{TASKS}.")}
    half = [name for name, value in api.trainable(model).items() if value.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise GraftError(
            f"{half[0]} would be trained in {str(model.dtype).removeprefix('torch.')}, where small steps are lost: "
            "load the backbone with dtype=torch.float32 (precision='bf16' still computes in bf16)."
        )
    return {name: Place(value, None, tuple(value.shape)) for name, value in weights.items()}


@contextmanager
def lent(model: Any) -> Iterator[Grafts]:
    """A model that takes tasks, grafted if it was not; afterwards it is as it was found, to the bit."""
    was_training = model.training
    bare = getattr(model, "taskgraft", None) is None
    if bare:
        api.graft(model, HeadOnly(), tasks=())
    grafts = api.grafts_of(model)
    tasks, trained, shared = set(grafts.tasks), list(grafts.trained), grafts.trains_shared
    widths = [(bank, bank.width) for kind in grafts.kinds.values() for bank in kind.banks.values()]
    try:
        yield grafts
    finally:
        if bare:
            api.ungraft(model)
        else:
            api.train_only(model, [])
            for name in [name for name in grafts.tasks if name not in tasks]:
                api.remove_task(model, name)
            for bank, width in widths:
                if bank.width > width:
                    bank.narrow(width)
            api.train_only(model, trained, shared=shared)
        model.train(was_training)


@contextmanager
def mounted(model: Any, heads: Mapping[str, Head | None], method: Method, seed: int) -> Iterator[None]:
    """Tasks on the model, alone in being trained; afterwards the model is as it was found, to the bit."""
    with lent(model):
        for number, (name, head) in enumerate(heads.items()):
            api.add_task(model, name, method, head, seed=seed + number, train=False)
        api.train_only(model, list(heads))
        yield


def backbone_parameters(model: Any) -> int:
    """How many parameters a backbone has, without those of tasks that are being trained on it."""
    grafts = getattr(model, "taskgraft", None)
    kinds = [] if grafts is None else grafts.kinds.values()
    added = {id(p) for kind in kinds for bank in kind.all_banks for p in bank.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in added)


def device_of(several: bool = False) -> torch.device:
    """Where this process computes. Where `several` processes would do the same work again, they are refused."""
    state = accelerate_state()
    if state.num_processes > 1 and not several:
        raise GraftError(
            f"this runs in one process, and {state.num_processes} were started: `accelerate launch` and torchrun are "
            "for `taskgraft train`, tg.train and tg.fit."
        )
    device: torch.device = state.device
    return device


def check_shareable(course: Course, team: Team) -> None:
    """Refuse what depends on whole batches, where each process sees a part of one."""
    if team.size > 1 and course.has_statistics:
        raise GraftError(
            f"a batch norm takes its statistics from whole batches, and {team.size} processes have a part each: train "
            "in one process, or use norm_inside='layer'."
        )


def accelerator_for(name: str, settings: Settings, track: str | None, folder: RunFolder | None) -> Any:
    """Accelerate's part: the device, the backward pass, and the trackers."""
    from accelerate import Accelerator

    if track is not None and folder is None:
        raise GraftError(f"track={track!r} needs a run folder to write to: give run=FOLDER.")
    try:
        accelerator = Accelerator(log_with=track, project_dir=None if folder is None else str(folder.folder))
        if track is not None and not accelerator.log_with:
            raise GraftError(f"the tracker {track!r} is not installed: pip install {track}.")
        scalars = {key: value for key, value in settings.to_json().items() if value is not None}
        accelerator.init_trackers(name, config=scalars)
    except (ValueError, ImportError) as error:
        if isinstance(error, GraftError):
            raise
        raise GraftError(f"the tracker {track!r} cannot be used: {error}.") from error
    return accelerator


def finish_trackers(accelerator: Any) -> None:
    """Its own `end_training` would also part the processes, which may have more to train."""
    for tracker in accelerator.trackers:
        tracker.finish()


def run_key(
    model: Any, parts: Sequence[Part], method: Method, settings: Settings, start: str, processes: int = 1
) -> str:
    """What makes a run this one: a state is only taken up where all of it is the same."""
    unimportant = {"checkpoint_seconds"}
    about = {
        "tasks": [[part.name, part.task.kind, part.task.labels, part.task.metrics] for part in parts],
        "method": method.to_json(),
        "settings": {key: value for key, value in settings.to_json().items() if key not in unimportant},
        "data": [{split: rows.sha256() for split, rows in sorted(part.encoded.items())} for part in parts],
        "backbone": fingerprint(model).sha256,
        "start": start,
        **({"processes": processes} if processes > 1 else {}),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
