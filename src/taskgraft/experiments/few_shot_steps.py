"""New tasks from few examples after short and long runs in company: whether a method's start is worse, or only younger.

Ours, not the paper's: its runs have fifty times as many steps as the default here.
"""

from __future__ import annotations

from taskgraft.experiments import few_shot
from taskgraft.experiments.hyper_steps import lengths_of
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report
from taskgraft.experiments.shots import FEW, SIZES, Way

TASKS = few_shot.TASKS


def run(lab: Lab) -> Report:
    few = tuple(size for size in SIZES if size <= FEW)
    ways = [Way(str(steps), f"After {steps:,} steps in company", few, company_steps=steps) for steps in lengths_of(lab)]
    return few_shot.report(lab, ways, "New tasks after short and long runs in company", "few-shot-steps")
