"""Further classification tasks: a search without a backbone, full and variable fine-tuning, adapters (Table 2)."""

from __future__ import annotations

import statistics

from taskgraft.experiments import arms
from taskgraft.experiments.data import CLASSIFICATION
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, copies, of_study, parameters, points, share, signed
from taskgraft.experiments.study import ALL, Arm, Differences, Option, Study, options, study
from taskgraft.methods import FullFineTuning, TopLayers
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.tables import count_text, markdown_table

TASKS = CLASSIFICATION
AUTOML, VARIABLE = "no BERT, AutoML", "variable fine-tuning"
RATES, EPOCHS, SIZES = (1e-5, 3e-5, 1e-4, 3e-3), (20, 50, 100), (2, 4, 8, 16, 32, 64)  # the paper's
TOP = (1, 2, 3, 5, 7, 9, 11, 12)


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    found = study(lab, tasks, [Arm(AUTOML, (Option(None),)), *lines(lab)])
    against = found.against(arms.FULL, [VARIABLE, arms.ADAPTERS])
    title = "Classification tasks"
    figure = differences_figure(against, tasks, "points above full fine-tuning", f"{title}, {lab.backbone.name}")
    return of_study(found, title, [table(lab, found, against)], {"classification": figure}, against)


def lines(lab: Lab) -> list[Arm]:
    """The arms that read the backbone: six trials each, or the paper's grids."""
    pooling, depth = lab.setup.pooling, arms.layers(lab)
    if lab.setup.full:
        tops = [TopLayers(k=k, pooling=pooling) for k in TOP if k <= depth]
        return [
            Arm(arms.FULL, options([FullFineTuning(pooling=pooling)], RATES, EPOCHS)),
            Arm(VARIABLE, options(tops, RATES, EPOCHS)),
            Arm(arms.ADAPTERS, options([arms.adapter(lab, size) for size in SIZES], RATES, EPOCHS)),
        ]
    some = sorted({1, (depth + 1) // 2, depth})  # one, half and all of the layers
    tops = [TopLayers(k=k, pooling=pooling) for k in some]
    return [arms.full(lab), Arm(VARIABLE, options(tops, (1e-4, 3e-4), (10,))), arms.adapters(lab)]


def table(lab: Lab, found: Study, against: Differences) -> str:
    total = parameters(lab)
    body = []
    for task in found.tasks:
        cells = [found.cell(arm, task) for arm in found.arms]
        body.append([task, *(points(cell.score, cell.error) for cell in cells)])
    means = [found.row(arm) for arm in found.arms]
    spread = [statistics.fmean(cell.error or 0.0 for cell in row) for row in means]
    body.append(["average", *(points(found.average(arm), e) for arm, e in zip(found.arms, spread, strict=True))])
    body.append(
        ["less full fine-tuning", *(signed(against[arm][ALL]) if arm in against else "-" for arm in found.arms)]
    )
    trained = [found.trained(arm) for arm in found.arms]
    body.append(["trained per task", *(share(mean, total) for mean in trained)])
    weights = [copies(mean, len(found.tasks), total, arm == arms.FULL)
               for arm, mean in zip(found.arms, trained, strict=True)]  # fmt: skip
    body.append(["all tasks", *weights])
    note = (
        "± is the standard error over seeds (the average's: the mean of the tasks'). The last row counts parameters of "
        f"all tasks together as multiples of the backbone's {count_text(total)}; what is frozen counts once.\n"
    )
    return f"{markdown_table(['accuracy', *found.arms], body)}\n{note}"
