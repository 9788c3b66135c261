"""The designs that the authors of the adapter tried without gain, and three places of ours, against their own."""

from __future__ import annotations

from typing import Any

from taskgraft.experiments import arms
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, points, signed
from taskgraft.experiments.study import ALL, Arm, options, study
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
    epochs = arms.PAPER_EPOCHS if lab.setup.full else (8,)
    designs = {PAPER: {}, **DESIGNS}
    found = study(lab, tasks, [Arm(name, options([arms.adapter(lab, **changes)], rates, epochs))
                               for name, changes in designs.items()])  # fmt: skip
    against = found.against(PAPER)
    body = []
    for name in designs:
        gap = "-" if name == PAPER else signed(against[name][ALL])
        body.append([name, count_text(round(found.trained(name) or 0)), points(found.average(name)), gap,
                     *(points(cell.score, cell.error) for cell in found.row(name))])  # fmt: skip
    header = ["design", "trained", "average", "less the paper's", *tasks]
    gains = [name for name, row in against.items() if row[ALL].sign > 0]
    losses = [name for name, row in against.items() if row[ALL].sign < 0]
    sentence = (
        f"Above the paper's design, the interval included: {', '.join(gains) or 'none'}. "
        f"Below it: {', '.join(losses) or 'none'}. The others: not shown either way.\n"
    )
    alone = {name: {ALL: row[ALL]} for name, row in against.items()}
    figure = differences_figure(alone, [], "points above the paper's design", f"Designs, {lab.backbone.name}")
    note = f"{markdown_table(header, body)}\nSize 64. ± is the standard error over seeds.\n"
    return of_study(found, "Designs of the adapter", [sentence, note], {"variants": figure}, against, sentence=sentence)
