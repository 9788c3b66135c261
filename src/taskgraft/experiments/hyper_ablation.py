"""HyperFormer without each of its parts (Karimi Mahabadi et al., Table 4); ours is the line of AdamW's epsilon."""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study
from taskgraft.experiments.study import ALL, Arm, Option, study
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.sweeps import rate_text
from taskgraft.training.settings import EPSILON

TASKS = GLUE
STEPS = 2_000
PARTS: dict[str, dict[str, Any]] = {
    "no adapter blocks": {"blocks": False},
    "no conditional norm": {"conditional_norm": False},
    "no task projector": {"projector": False},
    "backbone's norms frozen": {"norms": "none"},
    "neither norm": {"conditional_norm": False, "norms": "none"},
}
LARGE = f"epsilon {rate_text(EPSILON)}"  # of AdamW, the default of other methods; HyperFormer's is its released code's


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    steps = None if lab.setup.full else STEPS

    def line(name: str, changes: dict[str, Any], **settings: Any) -> Arm:
        method = company.hyperformer(lab, shared=False, **changes)
        return Arm(name, (Option(method, company.PAPER_RATE, steps, tuple(settings.items())),), together=True)

    lines = [line(name, changes) for name, changes in {company.HYPER: {}, **PARTS}.items()]
    lines.append(line(LARGE, {}, epsilon=EPSILON))
    found = study(lab, tasks, lines, columns=True)
    against = found.against(company.HYPER)
    order = sorted(PARTS, key=lambda name: against[name][ALL].mean)
    said = ", ".join(f"{name} ({100 * against[name][ALL].mean:+.2f})" for name in order)
    sentence = f"By what is lost without it, the most first: {said}.\n"
    alone = {name: {ALL: against[name][ALL]} for name in (*PARTS, LARGE)}
    figure = differences_figure(alone, [], "points above HyperFormer", f"Without its parts, {lab.backbone.name}")
    table = company.columns_table(lab, found, against, company.HYPER)
    return of_study(
        found, "HyperFormer without its parts", [sentence, table], {"hyper-ablation": figure}, against, order=order
    )
