"""A new task from a handful of examples, starting from tasks that were trained together.

The new task takes over the embedding or the adapter of the trained task that is most related to it, judged by that
task's loss on the examples, and is tuned from there (HyperFormer, section 3.4: few-shot transfer).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor

from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import now
from taskgraft.grafts.joint import BACKBONE, SHARED, Joint, Member, add_joint, load_joint
from taskgraft.names import check_task_name
from taskgraft.tasks.task import Task
from taskgraft.training.fit import Run, run_of
from taskgraft.training.parts import Part, part_of, settled
from taskgraft.training.progress import Progress
from taskgraft.training.related import drift_of, losses_of, outputs_of
from taskgraft.training.session import backbone_parameters, changed, device_of, trained
from taskgraft.training.settings import Settings

TUNE = ("all", "own")
STEPS = 300  # fewer rows make more epochs, so that every run has about as many steps


@dataclass(frozen=True, eq=False)
class FewShot:
    """What came of adding a task, once for each seed. `score` and `deviation` are over the seeds."""

    task: str
    rows: int
    tune: str  # "all" or "own"
    score: float | None
    deviation: float | None
    like: list[str | None]  # the trained task that each run started from
    losses: list[dict[str, float]]  # of the trained tasks on the examples, where they were compared
    drift: dict[str, dict[str, float]]  # what the first run's shared weights would do to the others, if it was asked
    runs: list[Run] = field(repr=False)
    joint: Joint = field(repr=False)  # all tasks and the new one, with the first run's shared weights

    @property
    def first(self) -> Run:
        """The run whose graft is kept: the first, whatever came of the others."""
        return self.runs[0]


def few_shot(
    backbone: Backbone,
    joint: Joint | str | PathLike[str],
    task: Task,
    rows: int = 16,
    *,
    like: str | None = None,
    tune: str = "all",
    seeds: int | Sequence[int] = (0,),
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    drift: bool = True,
    **changes: Any,
) -> FewShot:
    """Add a task to trained ones from `rows` examples of its training split, and measure it on its test split.

    `like` names the trained task to start from. `tune="all"` trains what tasks share too (hypernetwork, norms, or the
    fine-tuned backbone); "own" the new task's embedding or adapter, and head, alone. Each seed draws its own examples.
    No validation rows are used. The trained tasks are not touched: the new one comes back as a graft of its own.
    `drift` asks what the trained tasks would say with the new shared weights, which takes two passes over the examples.
    """
    joint = joint if isinstance(joint, Joint) else load_joint(joint)
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    check(joint, task, rows, like, tune, seeds, backbone)
    base = changed(settings, changes)
    found = [
        transfer(backbone, joint, task, rows, like, tune, replace(base, seed=seed), run, progress, drift and not number)
        for number, seed in enumerate(seeds)
    ]
    runs = [each.run for each in found]
    scores = [each.score for each in runs if each.score is not None]
    return FewShot(
        task=task.name,
        rows=runs[0].graft.task["rows"]["train"] if runs[0].graft else min(rows, task.split("train").num_rows),
        tune=tune,
        score=statistics.mean(scores) if scores else None,
        deviation=statistics.stdev(scores) if len(scores) > 1 else None,
        like=[each.like for each in found],
        losses=[each.losses for each in found],
        drift=found[0].drift,
        runs=runs,
        joint=found[0].joint,
    )


def check(
    joint: Joint, task: Task, rows: int, like: str | None, tune: str, seeds: Sequence[int], backbone: Backbone
) -> None:
    if not isinstance(task, Task):
        raise GraftError(f"{task!r} is not a task: read one with tg.load_task(...).")
    check_task_name(task.name)
    if task.name in joint.tasks:
        raise GraftError(f"a task named {task.name!r} is already among {', '.join(joint.tasks)}: choose another name.")
    if rows < 1:
        raise GraftError(f"{rows} examples are too few to learn from: give 1 or more.")
    if like is not None and like not in joint.tasks:
        raise GraftError(f"task {like!r} is not among those trained together: {', '.join(joint.tasks)} are.")
    if tune not in TUNE:
        raise GraftError(f"tune={tune!r} is unknown: use {' or '.join(TUNE)}.")
    if joint.method.trains_backbone and (like is not None or tune == "own"):
        raise GraftError(
            f"tasks trained by {joint.method.name!r} have nothing of their own to start from or to tune alone: "
            "leave like and tune out."
        )
    if not seeds:
        raise GraftError("no seeds were given: give one or more.")
    if getattr(backbone.model, "taskgraft", None) is not None:
        raise GraftError("the backbone already carries grafts: load it anew for a new task.")
    task.split("train")


@dataclass(frozen=True, eq=False)
class Transfer:
    """One seed's run, and what it started from."""

    run: Run
    like: str | None
    losses: dict[str, float]
    drift: dict[str, dict[str, float]]
    joint: Joint


def transfer(
    backbone: Backbone,
    joint: Joint,
    task: Task,
    rows: int,
    like: str | None,
    tune: str,
    settings: Settings,
    folder: str | PathLike[str] | None,
    progress: Progress | bool | None,
    watch: bool,
) -> Transfer:
    """One seed: draw the examples, find what to start from, train, measure."""
    model, method = backbone.model, joint.method
    splits = {"train": examples(task, rows, settings.seed)}
    judged_on = next((split for split in ("test", "validation") if split in task.splits), None)
    if judged_on is not None:
        splits["test"] = task.splits[judged_on]
    task = replace(task, splits=splits)
    count = task.split("train").num_rows
    steps = math.ceil(math.ceil(count / settings.batch_size) / settings.accumulation)
    epochs = settings.epochs or max(3, math.ceil(STEPS / steps))
    settings = settled(replace(settings, epochs=epochs), backbone, method, task.kind, count)
    device = device_of()
    part = part_of(backbone, task, settings, device, prefix=method.trains_backbone)
    model.to(device)
    total = backbone_parameters(model)
    losses: dict[str, float] = {}
    if like is None and not method.trains_backbone:
        with all_tasks(model, joint):
            losses = losses_of(model, joint, part, settings, device)
        like = min(losses, key=losses.__getitem__)
    mount = continued(model, joint, part, like, tune, settings.seed)
    start = f"{joint.company} {like} {'' if like is None else joint.hash_of(like)} {tune}"
    place = None if folder is None else f"{folder}/{settings.seed}"
    with trained(backbone, [part], method, settings, mount, run=place, progress=progress, track=None, start=start) as (
        loop,
        course,
    ):
        run = run_of(backbone, part, method, course, loop.predictions(course, "test"), total)
        if judged_on == "validation":
            run = judged_by_validation(run)
        if run.graft is not None:
            origin = {"method": method.to_json(), "together": list(joint.tasks), "like": like, "tune": tune}
            run = replace(run, graft=replace(run.graft, training={**run.graft.training, **origin}))
        after = with_newcomer(model, joint, part, run)
    drift: dict[str, dict[str, float]] = {}
    if watch:
        with all_tasks(model, joint):
            before = outputs_of(model, backbone.tokenizer, joint, part, settings, device)
        with all_tasks(model, after, list(joint.tasks)):
            drift = drift_of(before, outputs_of(model, backbone.tokenizer, joint, part, settings, device))
    return Transfer(run, like, losses, drift, after)


def judged_by_validation(run: Run) -> Run:
    """The run of a task without test rows, whose validation rows stood in for them."""
    graft = run.graft
    if graft is not None:
        metrics = {"score": run.score, "split": "validation", "validation": run.test, "test": {}}
        rows = {"validation" if split == "test" else split: count for split, count in graft.task["rows"].items()}
        graft = replace(graft, metrics=metrics, task={**graft.task, "rows": rows})
    return replace(run, split="validation", validation=run.test, test={}, graft=graft)


def examples(task: Task, rows: int, seed: int) -> Any:
    """Some training rows, drawn by the seed; of a classification, as evenly over the classes as they go."""
    table = task.split("train")
    order = np.random.default_rng(seed).permutation(table.num_rows)
    if task.kind == "classification":
        labels = table["label"].to_numpy()[order]
        turn = np.empty(len(order), np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange((labels == label).sum())
        order = order[np.argsort(turn, kind="stable")]
    return table.take(np.sort(order[:rows]))


@contextmanager
def all_tasks(model: Any, joint: Joint, tasks: Sequence[str] | None = None) -> Iterator[None]:
    """Trained tasks on a bare model, at rest, for a while."""
    was_training = model.training
    add_joint(model, joint, tasks)
    try:
        yield
    finally:
        api.ungraft(model)
        model.train(was_training)


@contextmanager
def continued(model: Any, joint: Joint, part: Part, like: str | None, tune: str, seed: int) -> Iterator[None]:
    """The new task on a bare model, with what it starts from, alone in being trained."""
    was_training = model.training
    add_joint(model, joint, None if like is None else [like])
    try:
        method = joint.method if like is None else joint.tasks[like].method
        api.add_task(model, part.name, method, part.head, seed=seed, train=False, like=like)
        if like is not None:  # the weights it shares are the new task's alone from here on
            api.remove_task(model, like)
            api.train_only(model, part.name, shared=tune == "all")
        else:
            api.train_only(model, [*joint.tasks, part.name])
        yield
    finally:
        api.ungraft(model)
        model.train(was_training)


def with_newcomer(model: Any, joint: Joint, part: Part, run: Run) -> Joint:
    """The trained tasks and the new one, with the shared weights as they are on the model now."""
    grafts = api.grafts_of(model)
    shared, weights = grafts.shared_names(part.name), grafts.read(part.name)
    tensors: dict[str, Tensor] = dict(joint.tensors)
    for name, value in weights.items():
        tensors[f"{SHARED if name in shared else part.name}/{name}"] = value.cpu().contiguous()
    for path, parameter in grafts.backbone.parameters_of(joint.method).items():
        tensors[f"{SHARED}/{BACKBONE}{path}"] = parameter.detach().cpu().clone()
    entry = grafts.require(part.name)
    scores = {"score": run.score, "split": run.split, "validation": run.validation, "test": run.test}
    others = {task: replace(member, metrics={}) for task, member in joint.tasks.items()}  # no longer as measured
    member = Member(entry.method, entry.head, part.record, scores)
    return replace(joint, tasks={**others, part.name: member}, tensors=tensors, metrics={}, created=now())
