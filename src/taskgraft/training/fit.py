"""Train a task: `tg.train` gives its graft, `tg.fit` also what happened on the way, for every method."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch

from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import POSITIONS_FROM_PAD, fingerprint
from taskgraft.grafts.graft import Graft, get_graft
from taskgraft.methods import Adapter, Method
from taskgraft.names import check_task_name
from taskgraft.nn.heads import Head
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.encode import Encoded, encode
from taskgraft.training.loop import Loop
from taskgraft.training.predict import cache_features, cacheable
from taskgraft.training.progress import Progress, progress_for
from taskgraft.training.settings import Settings
from taskgraft.training.state import RunFolder


@dataclass(frozen=True, eq=False)
class Run:
    """What came of training a task once. `score` is the mean of the task's metrics on `split`."""

    task: str
    method: Method
    settings: Settings
    trained: int  # parameters that were trained
    total: int  # parameters of the backbone
    score: float | None  # None where no rows were held out
    split: str  # "test", or "validation" where there is no test split
    validation: dict[str, float]  # of the weights that were kept, which it chose
    test: dict[str, float]
    epoch: int  # the one whose weights were kept
    epochs: int  # how many were run
    steps: int
    seconds: float
    cut: dict[str, int]  # texts longer than the limit, by split
    history: list[dict[str, Any]] = field(repr=False)
    graft: Graft | None = field(repr=False)  # None for methods that change the backbone itself


def train(backbone: Backbone, task: Task, method: Method | None = None, **options: Any) -> Graft:
    """Train a task and return its graft; the backbone's model is left as it was found. `options` are those of `fit`."""
    if method is not None and method.trains_backbone:
        raise GraftError(
            f"method {method.name!r} changes the backbone itself, so there is no graft of it: "
            "use tg.fit to measure it, or tg.Adapter() for a graft."
        )
    graft = fit(backbone, task, method, **options).graft
    assert graft is not None
    return graft


def fit(
    backbone: Backbone,
    task: Task,
    method: Method | None = None,
    *,
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    track: str | None = None,
    **changes: Any,
) -> Run:
    """Train a task by a method (`tg.Adapter()`), choose the epoch by validation, and measure it on the test split.

    `changes` are fields of `Settings` (`epochs=3`). `run` is a folder in which the state is kept: a run that was killed
    goes on from there, to the same bits. `progress`: a bar on a terminal by default. `track`: "tensorboard" or another
    tracker of Accelerate, written to the run folder.
    """
    method = Adapter() if method is None else method
    try:
        settings = dataclasses.replace(settings or Settings(), **changes)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(Settings))
        raise GraftError(f"{error}: the settings are {known}.") from error
    check_task_name(task.name)
    head = head_of(task, backbone)
    settings = settings.resolved(method, task.kind, task.split("train").num_rows)
    model, device = backbone.model, device_of()
    total = sum(p.numel() for p in model.parameters())
    encoded = encode_splits(backbone, task, settings)
    with ExitStack() as stack:
        folder = None if run is None else RunFolder(run)
        if folder is not None:
            stack.enter_context(folder.held())
        accelerator = accelerator_for(task.name, settings, track, folder)
        stack.callback(accelerator.end_training)
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        model.to(device)
        stack.enter_context(mounted(model, task.name, method, head, settings.seed))
        if cacheable(model, task.name):
            for part in encoded.values():
                cache_features(model, task.name, part, settings.batch_size, device)
        torch.manual_seed(settings.seed)
        key = run_key(model, task, method, settings, encoded)
        loop = Loop(model, backbone.tokenizer, task, encoded, settings, device, accelerator, folder, key)
        loop.train(progress_for(progress))
        validation = metrics_of(loop.history[loop.kept_epoch - 1])
        test = loop.evaluate("test") if "test" in encoded else {}
        trained = sum(p.numel() for p in api.trainable(model).values())
        graft, split = None, "test" if test else "validation"
        score = score_of(task.metrics, test or validation) if test or validation else None
        cut = {name: part.cut for name, part in encoded.items()}
        if not method.trains_backbone:
            graft = get_graft(
                model,
                task.name,
                metrics={"score": score, "split": split, "validation": validation, "test": test},
                task_record=task.to_json(),
                backbone=backbone.name,
                training={
                    "settings": settings.to_json(),
                    "epochs": loop.epoch,
                    "kept_epoch": loop.kept_epoch,
                    "steps": loop.steps,
                    "seconds": round(loop.seconds, 2),
                    "cut": cut,
                    "backbone_parameters": total,
                    "history": loop.history,
                },
            )
            trained = graft.parameters
        return Run(
            task=task.name,
            method=api.grafts_of(model).require(task.name).method,
            settings=settings,
            trained=trained,
            total=total,
            score=score,
            split=split,
            validation=validation,
            test=test,
            epoch=loop.kept_epoch,
            epochs=loop.epoch,
            steps=loop.steps,
            seconds=loop.seconds,
            cut=cut,
            history=loop.history,
            graft=graft,
        )


def head_of(task: Task, backbone: Backbone) -> Head | None:
    """What a task needs on top of the backbone; a text task needs nothing but a backbone that writes."""
    writes = bool(backbone.model.config.is_encoder_decoder)
    if task.kind != "text":
        return Head(task.kind, task.labels)
    if not writes:
        raise GraftError(
            f"task {task.name!r} is text to text and {backbone.name} does not read and write: "
            "use an encoder-decoder such as t5-small, or give the task classes."
        )
    return None


@contextmanager
def mounted(model: Any, name: str, method: Method, head: Head | None, seed: int) -> Iterator[None]:
    """The task on the model, alone in being trained; afterwards the model is as it was found, to the bit."""
    was_training = model.training
    if getattr(model, "taskgraft", None) is None:
        api.graft(model, method, {name: head}, seed=seed)
        try:
            yield
        finally:
            api.ungraft(model)
            model.train(was_training)
        return
    before = list(api.grafts_of(model).trained)
    api.add_task(model, name, method, head, seed=seed, train=False)
    try:
        api.train_only(model, name)
        yield
    finally:
        api.remove_task(model, name)
        api.train_only(model, before)
        model.train(was_training)


def encode_splits(backbone: Backbone, task: Task, settings: Settings) -> dict[str, Encoded]:
    assert settings.max_length is not None
    limit = min(settings.max_length, positions(backbone.model.config))
    return {
        split: encode(backbone.tokenizer, task.kind, len(task.labels), table, limit)
        for split, table in task.splits.items()
        if table.num_rows
    }


def positions(config: Any) -> int:
    """How many tokens the backbone has positions for."""
    most = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    return most - config.pad_token_id - 1 if config.model_type in POSITIONS_FROM_PAD else most


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


def run_key(model: Any, task: Task, method: Method, settings: Settings, encoded: dict[str, Encoded]) -> str:
    """What makes a run this one: a state is only taken up where all of it is the same."""
    unimportant = {"checkpoint_seconds"}
    parts = {
        "task": [task.name, task.kind, task.labels, task.metrics],
        "method": method.to_json(),
        "settings": {key: value for key, value in settings.to_json().items() if key not in unimportant},
        "data": {split: part.sha256() for split, part in sorted(encoded.items())},
        "backbone": fingerprint(model).sha256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def metrics_of(entry: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if key not in ("epoch", "loss", "score")}
