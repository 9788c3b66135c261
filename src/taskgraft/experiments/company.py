"""The ways to learn several tasks that HyperFormer's experiments compare, alone and in company."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from taskgraft.experiments.lab import PAPER_EPSILON, Lab
from taskgraft.experiments.report import copies, parameters, points, share, signed
from taskgraft.experiments.study import ALL, Arm, Differences, Option, Study, options
from taskgraft.methods import Adapter, FullFineTuning, HyperFormer, Method
from taskgraft.reports.tables import count_text, markdown_table

SINGLE_FULL, SINGLE_ADAPTERS = "single-task, full", "single-task, adapters"
FULL, DAGGER, HYPER, PLUS = "multi-task, full", "Adapters (dagger)", "HyperFormer", "HyperFormer++"
REDUCTION = 32
PAPER_RATE = 3e-4


def hyperformer(lab: Lab, shared: bool = True, **changes: Any) -> HyperFormer:
    """The paper's, read out as the setup says where tasks have heads."""
    return HyperFormer.paper(shared, **{"pooling": lab.setup.pooling, **changes})


def adapter(lab: Lab, norm_after: Literal["own", "shared"] | None) -> Adapter:
    """The adapter that the paper compares with: a norm after it, a task's own or the tasks' common one; or without."""
    return Adapter(
        reduction=REDUCTION, norm_after=norm_after, activation="gelu_new", backbone_dropout=True,
        pooling=lab.setup.pooling,
    )  # fmt: skip


def together(lab: Lab) -> dict[str, Method]:
    """The four ways to learn tasks in company."""
    return {
        FULL: FullFineTuning(pooling=lab.setup.pooling),
        DAGGER: adapter(lab, "shared"),
        HYPER: hyperformer(lab, shared=False),
        PLUS: hyperformer(lab),
    }


def rates(lab: Lab, method: Method) -> tuple[float, ...]:
    """Two for everyone, or as many as the setup has trials, or the paper's one.

    An encoder bears less than a T5: full fine-tuning, and even less a norm after adapters, beside which its own
    residuals are small (at a rate of 3e-4 nothing was learned).
    """
    if lab.setup.full:
        return (PAPER_RATE,)
    encoder = not lab.backbone.model.config.is_encoder_decoder
    both = (PAPER_RATE, 1e-3)
    if encoder and method.trains_backbone:
        both = (1e-4, PAPER_RATE)
    elif encoder and isinstance(method, Adapter):
        both = (3e-5, 1e-4)
    return both[: lab.setup.trials]


def arm(lab: Lab, name: str, method: Method) -> Arm:
    """Tasks in company."""
    return Arm(name, options([method], rates(lab, method), (None,)), together=True)


def alone(lab: Lab, name: str, method: Method, tasks: Sequence[str]) -> Arm:
    """Each task by itself, for its share of the steps that all have together, in batches of the same size."""
    given: dict[str, Any] = {"batch_size": batch_size(lab), "steps": max(1, lab.setup.steps // len(tasks))}
    if lab.setup.full:
        given["epsilon"] = PAPER_EPSILON
    return Arm(name, tuple(Option(method, rate, None, tuple(given.items())) for rate in rates(lab, method)))


def batch_size(lab: Lab) -> int:
    """Rows of a step of several tasks together."""
    return lab.settings_together(None, None, 0).batch_size


def columns_of(lab: Lab, tasks: Sequence[str]) -> list[tuple[str, str]]:
    """The paper's columns: each metric of each task."""
    return [(task, metric) for task in tasks for metric in lab.task(task).metrics]


def columns_table(lab: Lab, found: Study, against: Differences, base: str) -> str:
    """All columns in points, their average, and what is trained."""
    total = parameters(lab)
    columns = columns_of(lab, found.tasks)
    body = []
    for name in found.arms:
        mean, method = found.trained(name), found.row(name)[0].option.method
        scores = [mean_of(found, name, task, metric) for task, metric in columns]
        gap = "-" if name == base else signed(against[name][ALL])
        weight = copies(mean, len(found.tasks), total, whole=method is not None and method.trains_backbone)
        body.append([name, weight, share(mean, total), *map(points, scores), points(found.average(name)), gap])
    header = ["method", "all tasks", "trained per task", *(f"{t} {m}" for t, m in columns), "average", f"less {base}"]
    together = {run["steps"] for name in found.arms for cell in found.row(name) for run in cell.runs if "tasks" in run}
    steps = " or ".join(f"{count:,}" for count in sorted(together))
    note = (
        f"Tasks that learn together have {steps} steps of {batch_size(lab)} rows. "
        f"The average is over the {len(columns)} columns. Parameters of all tasks as multiples of the backbone's "
        f"{count_text(total)}; what tasks share is split evenly among them. Differences with their 95 % interval.\n"
    )
    return f"{markdown_table(header, body)}\n{note}"


def mean_of(found: Study, arm: str, task: str, metric: str) -> float:
    """Over seeds."""
    return statistics.fmean(run["metrics"]["test"][metric] for run in found.cell(arm, task).runs)
