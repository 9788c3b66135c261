"""Adapters from wider and wider initial weights: which standard deviations train well (Figure 6, right)."""

from __future__ import annotations

from taskgraft.experiments import arms
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, about, points, signed
from taskgraft.experiments.study import Arm, options, study
from taskgraft.reports.experiments import curves_figure
from taskgraft.reports.tables import markdown_table

TASKS = ("mnli", "cola")
SIGMAS = tuple(10.0**n for n in range(-7, 1))
PAPER = 1e-2


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    rates = arms.PAPER_RATES if lab.setup.full else (1e-3,)
    epochs = arms.PAPER_EPOCHS if lab.setup.full else (arms.LONG,)
    names = {sigma: f"{sigma:.0e}" for sigma in SIGMAS}
    found = study(lab, tasks, [Arm(names[s], options([arms.adapter(lab, init_std=s)], rates, epochs)) for s in SIGMAS])
    gaps = {
        task: {name: found.difference(name, names[PAPER], [task]) for name in found.arms if name != names[PAPER]}
        for task in tasks
    }
    body = []
    for name in found.arms:
        cells = [found.cell(name, task) for task in tasks]
        against = [signed(gaps[task][name]) if name in gaps[task] else "-" for task in tasks]
        body.append([name, *(points(cell.score, cell.error) for cell in cells), *against])
    header = ["sigma", *tasks, *(f"{task} less that of {names[PAPER]}" for task in tasks)]
    curves = {task: [(s, 100 * found.cell(n, task).score, 100 * (found.cell(n, task).error or 0))
                     for s, n in names.items()] for task in tasks}  # fmt: skip
    return Report(
        f"Initial weights of adapters on {lab.backbone.name}",
        [about(lab), f"{markdown_table(header, body)}\nAdapters of size 64. ± is the standard error over seeds.\n"],
        {
            "cells": [cell.to_json() for cell in found.cells.values()],
            "differences": {task: {name: gap.to_json() for name, gap in row.items()} for task, row in gaps.items()},
        },
        found.records,
        [run for cell in found.cells.values() for run in cell.runs],
        {"init": curves_figure(curves, "standard deviation of the initial weights", "points",
                               f"Initial weights, {lab.backbone.name}")},
    )  # fmt: skip
