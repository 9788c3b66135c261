"""What every run needs around its loop: a device, a folder, trackers, and a model given back as it was found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch

from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import fingerprint
from taskgraft.methods import Method
from taskgraft.nn.heads import Head
from taskgraft.training.loop import Loop
from taskgraft.training.parts import Part
from taskgraft.training.predict import cache_features, cacheable
from taskgraft.training.progress import Progress, progress_for
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder


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
) -> Iterator[Loop]:
    """Train tasks to the end; inside the block they are on the model, with the weights that were kept.

    `mount` puts them on the model, and takes them off again. `start` says what they start from, if not from scratch.
    """
    model, device = backbone.model, device_of()
    with ExitStack() as stack:
        folder = None if run is None else RunFolder(run)
        if folder is not None:
            stack.enter_context(folder.held())
        accelerator = accelerator_for(parts[0].name, settings, track, folder)
        stack.callback(accelerator.end_training)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        model.to(device)
        stack.enter_context(mount)
        if len(parts) == 1 and cacheable(model, parts[0].name):
            for encoded in parts[0].encoded.values():
                cache_features(model, parts[0].name, encoded, settings.batch_size, device)
        torch.manual_seed(settings.seed)
        key = run_key(model, parts, method, settings, start)
        loop = Loop(model, backbone.tokenizer, parts, settings, device, accelerator, folder, key)
        loop.train(progress_for(progress))
        yield loop


@contextmanager
def mounted(model: Any, heads: Mapping[str, Head | None], method: Method, seed: int) -> Iterator[None]:
    """Tasks on the model, alone in being trained; afterwards the model is as it was found, to the bit."""
    was_training = model.training
    if getattr(model, "taskgraft", None) is None:
        api.graft(model, method, heads, seed=seed)
        try:
            yield
        finally:
            api.ungraft(model)
            model.train(was_training)
        return
    grafts = api.grafts_of(model)
    before, shared = list(grafts.trained), grafts.trains_shared
    added: list[str] = []
    try:
        for number, (name, head) in enumerate(heads.items()):
            api.add_task(model, name, method, head, seed=seed + number, train=False)
            added.append(name)
        api.train_only(model, added)
        yield
    finally:
        for name in added:
            api.remove_task(model, name)
        api.train_only(model, before, shared=shared)
        model.train(was_training)


def device_of() -> torch.device:
    from accelerate import PartialState

    state = PartialState()
    if state.num_processes > 1:
        raise GraftError("tg.train runs on one process: start it without `accelerate launch` or torchrun.")
    device: torch.device = state.device
    return device


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


def run_key(model: Any, parts: Sequence[Part], method: Method, settings: Settings, start: str) -> str:
    """What makes a run this one: a state is only taken up where all of it is the same."""
    unimportant = {"checkpoint_seconds"}
    about = {
        "tasks": [[part.name, part.task.kind, part.task.labels, part.task.metrics] for part in parts],
        "method": method.to_json(),
        "settings": {key: value for key, value in settings.to_json().items() if key not in unimportant},
        "data": [{split: rows.sha256() for split, rows in sorted(part.encoded.items())} for part in parts],
        "backbone": fingerprint(model).sha256,
        "start": start,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
