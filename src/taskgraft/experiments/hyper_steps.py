"""Longer and longer runs of tasks in company: whether a method is worse than another, or only slower.

Ours, not the paper's: its runs have fifty times as many steps as the default here.
"""

from __future__ import annotations

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, points, signed
from taskgraft.experiments.study import Arm, Option, study
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
PARTS = (16, 4, 1)  # of the steps, which the longest runs have


def run(lab: Lab) -> Report:
    """Each method at the lower of its two rates, which on a T5 is the paper's."""
    tasks = lab.chosen(TASKS)
    methods = company.together(lab)
    lengths = sorted({max(1, lab.setup.steps // part) for part in PARTS})
    arms = [
        Arm(named(name, steps), (Option(method, company.rates(lab, method)[0], steps),), together=True)
        for name, method in methods.items()
        for steps in lengths
    ]
    found = study(lab, tasks, arms, columns=True)
    curves = {name: [(steps, found.average(named(name, steps)), 0.0) for steps in lengths] for name in methods}
    gaps = {
        other: {steps: found.difference(named(company.PLUS, steps), named(other, steps)) for steps in lengths}
        for other in methods
        if other != company.PLUS
    }
    header = ["steps", *(f"{steps:,}" for steps in lengths)]
    body = [[name, *(points(mean) for _, mean, _ in curve)] for name, curve in curves.items()]
    body += [[f"HyperFormer++ less {other}", *map(signed, each.values())] for other, each in gaps.items()]
    base = named(company.FULL, lengths[-1])
    against = found.against(base)
    rates = "; ".join(f"{name}: {company.rates(lab, method)[0]:g}" for name, method in methods.items())
    sections = [f"{markdown_table(header, body)}\nRates: {rates}.\n", company.columns_table(lab, found, against, base)]
    figure = sizes_figure(curves, "steps", "points", f"Longer runs, {lab.backbone.name}")
    return of_study(
        found, "Longer and longer runs", sections, {"hyper-steps": figure}, against, curves=curves,
        gaps={other: {str(steps): gap.to_json() for steps, gap in each.items()} for other, each in gaps.items()},
    )  # fmt: skip


def named(method: str, steps: int) -> str:
    return f"{method}, {steps:,} steps"
