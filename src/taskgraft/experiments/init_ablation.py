"""Adapters from wider and wider initial weights: which standard deviations train well (Figure 6, right)."""

from __future__ import annotations

from taskgraft.experiments import arms
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, points, signed
from taskgraft.experiments.study import Arm, options, study
from taskgraft.reports.experiments import curves_figure
from taskgraft.reports.tables import markdown_table

TASKS = ("mnli", "cola")
SIGMAS = tuple(10.0**n for n in range(-7, 1))
PAPER = 1e-2


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    rates = arms.PAPER_RATES if lab.setup.full else (1e-3, 3e-3)
    epochs = arms.PAPER_EPOCHS if lab.setup.full else (arms.LONG,)
    names = {sigma: f"{sigma:.0e}" for sigma in SIGMAS}
    found = study(lab, tasks, [Arm(names[s], options([arms.adapter(lab, init_std=s)], rates, epochs)) for s in SIGMAS])
    against = found.against(names[PAPER])
    body, best = [], found.best_seeds()
    for name in found.arms:
        cells = [found.cell(name, task) for task in tasks]
        gaps = [signed(against[name][task]) if name in against else "-" for task in tasks]
        picked = [points(best.cell(name, task).score) for task in tasks]
        body.append([name, *(points(cell.score, cell.error) for cell in cells), *gaps, *picked])
    header = ["sigma", *tasks, *(f"{task} less that of {names[PAPER]}" for task in tasks),
              *(f"{task}, best seed" for task in tasks)]  # fmt: skip
    curves = {task: [(s, 100 * found.cell(n, task).score, 100 * (found.cell(n, task).error or 0))
                     for s, n in names.items()] for task in tasks}  # fmt: skip
    note = "Adapters of size 64. ± is the standard error over seeds; the best seed is the one that validation picks."
    table = f"{markdown_table(header, body)}\n{note}\n"
    across = "standard deviation of the initial weights"
    figure = curves_figure(curves, across, "points", f"Initial weights, {lab.backbone.name}")
    return of_study(found, "Initial weights of adapters", [table], {"init": figure}, against)
