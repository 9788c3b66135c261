"""What HyperFormer++ loses its first steps to: its norm and projector, its size at the start, embeddings that stay.

Ours, not the paper's: its runs have fifty times as many steps as the default here.
"""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study
from taskgraft.experiments.study import ALL, Arm, Option, study
from taskgraft.experiments.task_map import HEADER, learned_map, note
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
RATE, ENCODER_RATE = 1e-3, company.PAPER_RATE  # the better of two for HyperFormer++
OWN_RATE = 3e-2  # of task embeddings
Changes = tuple[dict[str, Any], dict[str, Any]]  # of the method, and of the settings
LINES: dict[str, Changes] = {
    "no task projector": ({"projector": False}, {}),
    "no conditional norm either": ({"conditional_norm": False, "projector": False}, {}),
    "a tenth of the weights at the start": ({"init_std": 1e-3}, {}),
}
MOVED = "embeddings at a higher rate"  # where embeddings are all that is a task's own: heads would not bear it


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    lines: dict[str, Changes] = {company.PLUS: ({}, {}), **LINES}
    rate = ENCODER_RATE
    if lab.backbone.model.config.is_encoder_decoder:
        rate = RATE
        lines[MOVED] = ({}, {"own_rate": OWN_RATE})
    methods = {name: company.hyperformer(lab, **changes) for name, (changes, _) in lines.items()}
    arms = [
        Arm(name, (Option(methods[name], rate, None, tuple(settings.items())),), together=True)
        for name, (_, settings) in lines.items()
    ]
    found = study(lab, tasks, arms, columns=True)
    against = found.against(company.PLUS)
    alone = {name: {ALL: gaps[ALL]} for name, gaps in against.items()}
    figure = differences_figure(alone, [], "points above HyperFormer++", f"Its first steps, {lab.backbone.name}")
    maps = {name: learned_map(lab, methods[name], found.cell(name, tasks[0]).runs[0], tasks) for name in lines}
    higher = f"; {MOVED}: {OWN_RATE:g}" if MOVED in lines else ""
    sections = [
        f"All at a rate of {rate:g}{higher}.\n",
        company.columns_table(lab, found, against, company.PLUS),
        "## Their task embeddings, first seed\n",
        markdown_table(HEADER, [[name, *each.cells] for name, each in maps.items()]),
        note(tasks),
    ]
    return of_study(
        found, "What HyperFormer++ loses its first steps to", sections, {"hyper-start": figure}, against,
        maps={name: each.to_json() for name, each in maps.items()},
    )  # fmt: skip
