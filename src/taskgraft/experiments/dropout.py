"""The frozen backbone's dropout while adapters train: on, as in the paper, or off, as is our default."""

from __future__ import annotations

from taskgraft.experiments import arms
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, points, signed
from taskgraft.experiments.study import ALL, Arm, options, study
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
ON, OFF, BRANCH = "on", "off", "off, 0.1 in the adapter"


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    rates = arms.PAPER_RATES if lab.setup.full else (1e-3, 3e-3)
    epochs = arms.PAPER_EPOCHS if lab.setup.full else (arms.LONG,)
    methods = {
        ON: arms.adapter(lab),
        OFF: arms.adapter(lab, backbone_dropout=False, head_dropout=0.0),
        BRANCH: arms.adapter(lab, backbone_dropout=False, head_dropout=0.0, dropout=0.1),
    }
    found = study(lab, tasks, [Arm(name, options([method], rates, epochs)) for name, method in methods.items()])
    against = found.against(ON)
    body = [[name, *(points(cell.score, cell.error) for cell in found.row(name)), points(found.average(name)),
             "-" if name == ON else signed(against[name][ALL])] for name in found.arms]  # fmt: skip
    table = markdown_table(["dropout", *tasks, "average", "less on"], body)
    figure = differences_figure(against, tasks, "points above dropout on", f"Dropout, {lab.backbone.name}")
    return of_study(found, "Dropout in the frozen backbone", [table], {"dropout": figure}, against)
