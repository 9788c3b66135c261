"""Train a task, or several together: `tg.train` gives what they became, `tg.fit` also what happened on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, overload

from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import STATE, Graft, materialise
from taskgraft.grafts.joint import Joint
from taskgraft.methods import Adapter, Method, method_from_json
from taskgraft.names import check_task_name
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.course import Course
from taskgraft.training.joint import JointRun, fit_joint
from taskgraft.training.parts import Part, part_of, settled
from taskgraft.training.predict import Prediction
from taskgraft.training.progress import Progress
from taskgraft.training.session import backbone_parameters, changed, device_of, mounted, trained
from taskgraft.training.settings import Settings

APART = ("graft", "answers")  # of a run: what its record leaves out


@dataclass(frozen=True, eq=False)
class Run:
    """What came of training a task once. `score` is the mean of the task's metrics on `split`.

    `graft` is what was trained; `cut` counts the texts that were longer than the limit, `history` has a line an epoch.
    """

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
    answers: list[Any] = field(default_factory=list, repr=False)  # to the test rows, as its metrics take them

    def to_json(self) -> dict[str, Any]:
        """Everything but the graft and the answers."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in APART}
        return {**values, "method": self.method.to_json(), "settings": self.settings.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], graft: Graft | None, answers: list[Any]) -> Run:
        """From what `to_json` wrote, and what it left out."""
        values = {f.name: record[f.name] for f in fields(cls) if f.name not in APART}
        made = {"method": method_from_json(record["method"]), "settings": Settings(**record["settings"])}
        return cls(**{**values, **made}, graft=graft, answers=answers)


@overload
def train(backbone: Backbone, task: Task, method: Method | None = None, **options: Any) -> Graft: ...


@overload
def train(backbone: Backbone, task: Sequence[Task], method: Method | None = None, **options: Any) -> Joint: ...


def train(
    backbone: Backbone, task: Task | Sequence[Task], method: Method | None = None, **options: Any
) -> Graft | Joint:
    """Train a task and return its graft; the backbone's model is left as it was found. `options` are those of `fit`.

    Several tasks are trained together, by HyperFormer++ if no method is given, and come back as one `tg.Joint`.
    """
    if not isinstance(task, Task):
        return fit(backbone, task, method, **options).joint
    if method is not None and method.trains_backbone:
        raise GraftError(
            f"method {method.name!r} changes the backbone itself, so there is no graft of it: "
            "use tg.fit to measure it, or tg.Adapter() for a graft."
        )
    graft = fit(backbone, task, method, **options).graft
    assert graft is not None
    return graft


@overload
def fit(backbone: Backbone, task: Task, method: Method | None = None, **options: Any) -> Run: ...


@overload
def fit(backbone: Backbone, task: Sequence[Task], method: Method | None = None, **options: Any) -> JointRun: ...


def fit(
    backbone: Backbone,
    task: Task | Sequence[Task],
    method: Method | None = None,
    *,
    settings: Settings | None = None,
    run: str | PathLike[str] | None = None,
    progress: Progress | bool | None = None,
    track: str | None = None,
    **changes: Any,
) -> Run | JointRun:
    """Train a task by a method (`tg.Adapter()`), choose the epoch by validation, and measure it on the test split.

    `changes` are fields of `Settings` (`epochs=3`). `run` is a folder in which the state is kept: a run that was killed
    goes on from there, to the same bits. `progress`: a bar on a terminal by default. `track`: "tensorboard" or another
    tracker of Accelerate, written to the run folder. A list of tasks is trained together, by
    HyperFormer++ if no method is given.
    """
    settings = changed(settings, changes)
    if isinstance(task, str) or not isinstance(task, (Task, Sequence)):
        raise GraftError(f"{task!r} is not a task: read one with tg.load_task(...), or give a list of them.")
    if not isinstance(task, Task):
        return fit_joint(backbone, task, method, settings=settings, run=run, progress=progress, track=track)
    method = Adapter() if method is None else method
    check_task_name(task.name)
    settings = settled(settings, backbone, method, task.kind, task.split("train").num_rows)
    total = backbone_parameters(backbone.model)
    part = part_of(backbone, task, settings, device_of(several=True), prefix=method.trains_backbone)
    mount = mounted(backbone.model, {task.name: part.head}, method, settings.seed)
    with trained(backbone, [part], method, settings, mount, run=run, progress=progress, track=track) as (loop, course):
        return run_of(backbone, part, method, course, loop.predictions(course, "test"), total)


def run_of(
    backbone: Backbone,
    part: Part,
    method: Method,
    course: Course,
    tested: Mapping[str, Sequence[Prediction]],
    total: int,
    name: str | None = None,
) -> Run:
    """What came of a course over one task, which is still on the model, under its own name or another.

    `tested` are the answers to its test rows.
    """
    task, model = part.task, backbone.model
    name = task.name if name is None else name
    found = tested.get(task.name, ())
    validation, test = course.validation.get(task.name, {}), part.judged("test", found) if found else {}
    graft, split = None, "test" if test else "validation"
    score = score_of(task.metrics, test or validation) if test or validation else None
    if not method.trains_backbone:
        graft = materialise(
            model,
            name,
            metrics={"score": score, "split": split, "validation": validation, "test": test},
            task_record=part.record,
            backbone=backbone.name,
            training={**course.to_json(), "method": method.to_json(), "cut": part.cut, "backbone_parameters": total},
        )
        graft = replace(graft, name=task.name)
    return Run(
        task=task.name,
        method=api.grafts_of(model).require(name).method,
        settings=course.settings,
        trained=count_of_trained(model, name),
        total=total,
        score=score,
        split=split,
        validation=validation,
        test=test,
        epoch=course.kept_epoch,
        epochs=course.epoch,
        steps=course.steps,
        seconds=course.seconds,
        cut=part.cut,
        history=course.history,
        graft=graft,
        answers=[prediction.answer for prediction in found],
    )


def count_of_trained(model: Any, name: str) -> int:
    """How many parameters are trained for a task: its own, and what it shares unless that is held still."""
    grafts = api.grafts_of(model)
    still = set() if grafts.trains_shared else grafts.shared_names(name)
    weights = {key: value for key, value in grafts.read(name).items() if key not in still and not key.endswith(STATE)}
    backbone = grafts.backbone.parameters_of(grafts.require(name).method)
    return sum(value.numel() for value in (*weights.values(), *backbone.values()))
