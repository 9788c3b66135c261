"""The designs that the authors of the adapter tried without gain, and three places of ours, against their own."""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import arms
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, about, points, signed
from taskgraft.experiments.study import Arm, options, study
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.tables import count_text, markdown_table

TASKS = ("cola", "mrpc", "rte", "mnli")
PAPER = "the paper's"
DESIGNS: dict[str, dict[str, Any]] = {
    "layer norm inside": {"norm_inside": "layer"},
    "batch norm inside": {"norm_inside": "batch"},
    "two layers": {"depth": 2},
    "three layers": {"depth": 3},
    "tanh": {"activation": "tanh"},
    "relu": {"activation": "relu"},
    "attention only": {"sites": ("attention",)},
    "feed-forward only": {"sites": ("feedforward",)},
    "parallel": {"parallel": True},
    "multiplicative": {"multiplicative": True},
    "parallel, multiplicative": {"parallel": True, "multiplicative": True},
    "backbone's norms frozen": {"norms": "none"},
}


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    rates = arms.PAPER_RATES if lab.setup.full else (1e-3, 3e-3)
    epochs = arms.PAPER_EPOCHS if lab.setup.full else (arms.LONG,)
    designs = {PAPER: {}, **DESIGNS}
    found = study(lab, tasks, [Arm(name, options([arms.adapter(lab, **changes)], rates, epochs))
                               for name, changes in designs.items()])  # fmt: skip
    against = {
        name: {"all": found.difference(name, PAPER), **{t: found.difference(name, PAPER, [t]) for t in tasks}}
        for name in DESIGNS
    }
    body = []
    for name in designs:
        gap = "-" if name == PAPER else signed(against[name]["all"])
        body.append([name, count_text(round(found.trained(name) or 0)), points(found.average(name)), gap,
                     *(points(cell.score, cell.error) for cell in found.row(name))])  # fmt: skip
    header = ["design", "trained", "average", "less the paper's", *tasks]
    gains = [name for name, row in against.items() if row["all"].sign > 0]
    losses = [name for name, row in against.items() if row["all"].sign < 0]
    sentence = (
        f"Above the paper's design, the interval included: {', '.join(gains) or 'none'}. "
        f"Below it: {', '.join(losses) or 'none'}. The others: not shown either way.\n"
    )
    return Report(
        f"Designs of the adapter on {lab.backbone.name}",
        [about(lab), sentence, f"{markdown_table(header, body)}\nSize 64. ± is the standard error over seeds.\n"],
        {
            "cells": [cell.to_json() for cell in found.cells.values()],
            "differences": {n: {task: gap.to_json() for task, gap in row.items()} for n, row in against.items()},
            "sentence": sentence,
        },
        found.records,
        [run for cell in found.cells.values() for run in cell.runs],
        {"variants": differences_figure({n: {"all": row["all"]} for n, row in against.items()}, [],
                                        "points above the paper's design", f"Designs, {lab.backbone.name}")},
    )  # fmt: skip
