"""Several tasks trained together: HyperFormer and HyperFormer++, Adapters (dagger), multi-task full fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import Graft, identity
from taskgraft.grafts.joint import Joint, get_joint, grafts_in
from taskgraft.methods import DEFAULT_SIZE, HeadOnly, HyperFormer, Method
from taskgraft.names import check_task_name
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.course import Course
from taskgraft.training.parts import Part, part_of, settled
from taskgraft.training.predict import Prediction
from taskgraft.training.progress import Progress
from taskgraft.training.session import backbone_parameters, changed, device_of, mounted, trained
from taskgraft.training.settings import Settings


@dataclass(frozen=True, eq=False)
class JointRun:
    """What came of training tasks together once. `score` is the mean over all of their metrics, the papers' columns.

    `joint` is all of them with what they share; `grafts` each task written out, to be saved and served alone.
    """

    method: Method
    settings: Settings
    trained: int  # parameters, for all tasks together
    total: int  # parameters of the backbone
    score: float | None
    results: dict[str, dict[str, Any]]  # by task: score, split, validation, test
    epoch: int  # the one whose weights were kept
    epochs: int
    steps: int
    seconds: float
    cut: dict[str, dict[str, int]]  # by task and split: texts longer than the limit
    history: list[dict[str, Any]] = field(repr=False)
    joint: Joint = field(repr=False)
    grafts: dict[str, Graft] = field(repr=False)  # each task written out; none where the backbone itself was trained
    answers: dict[str, list[Any]] = field(default_factory=dict, repr=False)  # by task, to its test rows


def fit_joint(
    backbone: Backbone,
    tasks: Sequence[Task],
    method: Method | None = None,
    *,
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    track: str | None = None,
    **changes: Any,
) -> JointRun:
    """Train tasks together by a method (HyperFormer++), choose the epoch by the mean over their metrics.

    The options are those of `tg.fit`; `temperature`, `batches` and `weighting` say how the tasks take turns.
    """
    method = default_method(backbone) if method is None else method
    check_tasks(tasks, method)
    settings = changed(settings, changes)
    rows = sum(task.split("train").num_rows for task in tasks)
    kinds = {task.kind for task in tasks}
    model, device = backbone.model, device_of(several=True)
    kind = "spans" if "spans" in kinds else tasks[0].kind
    settings = settled(settings, backbone, method, kind, rows)
    total = backbone_parameters(model)
    parts = [part_of(backbone, task, settings, device, prefix=method.trains_backbone) for task in tasks]
    known_as = identity(model, backbone.name)
    mount = mounted(model, {part.name: part.head for part in parts}, method, settings.seed)
    with trained(backbone, parts, method, settings, mount, run=run, progress=progress, track=track) as (loop, course):
        return joint_run(backbone, parts, method, course, loop.predictions(course, "test"), total, known_as)


def default_method(backbone: Backbone) -> HyperFormer:
    """HyperFormer++: the paper's on models that write; on encoders, where a wider one learned more, of size 64."""
    if backbone.model.config.is_encoder_decoder:
        return HyperFormer(shared=True)
    return HyperFormer(shared=True, size=DEFAULT_SIZE)


def joint_run(
    backbone: Backbone,
    parts: Sequence[Part],
    method: Method,
    course: Course,
    tested: Mapping[str, Sequence[Prediction]],
    total: int,
    known_as: Mapping[str, Any],
) -> JointRun:
    """What came of a course over several tasks, which are still on the model. `tested` are answers to test rows."""
    model, validation = backbone.model, course.validation
    test = {name: course.parts[name].judged("test", found) for name, found in tested.items()}
    results = {part.name: result_of(part, validation.get(part.name, {}), test.get(part.name, {})) for part in parts}
    judged = {name: test.get(name) or validation[name] for name in course.parts if name in test or name in validation}
    score = course.score(judged)
    joint = get_joint(
        model,
        [part.name for part in parts],
        records={part.name: {"task": part.record, "metrics": results[part.name]} for part in parts},
        metrics={"score": score},
        training={**course.to_json(), "backbone_parameters": total},
        backbone=known_as,
    )
    return JointRun(
        method=method,
        settings=course.settings,
        trained=joint.parameters,
        total=total,
        score=score,
        results=results,
        epoch=course.kept_epoch,
        epochs=course.epoch,
        steps=course.steps,
        seconds=course.seconds,
        cut={part.name: part.cut for part in parts},
        history=course.history,
        joint=joint,
        grafts={} if method.trains_backbone else grafts_in(model, joint),
        answers={name: [prediction.answer for prediction in found] for name, found in tested.items()},
    )


def result_of(part: Part, validation: dict[str, float], test: dict[str, float]) -> dict[str, Any]:
    found = test or validation
    return {
        "score": score_of(part.task.metrics, found) if found else None,
        "split": "test" if test else "validation",
        "validation": validation,
        "test": test,
    }


def check_tasks(tasks: Sequence[Task], method: Method) -> None:
    """Refuse, before anything is read or trained, what cannot be trained together."""
    others = [task for task in tasks if not isinstance(task, Task)]
    if others:
        raise GraftError(f"{others[0]!r} is not a task: read one with tg.load_task(...).")
    names = [task.name for task in tasks]
    for name in names:
        check_task_name(name)
    if len(tasks) < 2:
        raise GraftError(f"{len(tasks)} tasks were given to be trained together: give two or more, or one alone.")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise GraftError(f"two tasks are called {twice[0]!r}: give each a name of its own.")
    for task in tasks:
        task.split("train")
    if isinstance(method, HeadOnly):
        raise GraftError(
            "tasks with a head alone share nothing: train them one by one, or use HyperFormer or adapters."
        )
