"""SQuAD v1.1: F1 of adapters by size and of full fine-tuning (Figure 5)."""

from __future__ import annotations

from taskgraft.experiments import arms
from taskgraft.experiments.data import SQUAD
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, parameters, points, share, signed
from taskgraft.experiments.study import Arm, options, study
from taskgraft.methods import FullFineTuning
from taskgraft.reports.experiments import Family, percentiles_figure
from taskgraft.reports.tables import count_text, markdown_table

TASKS = (SQUAD,)
SIZES, PAPER_SIZES = (2, 8, 64), tuple(2**n for n in range(1, 9))
RATES, EPOCHS = (3e-5, 1e-4, 3e-4, 1e-3), (3, 10, 20)  # the paper's
FULL_RATES, FULL_EPOCHS = (3e-5, 5e-5, 1e-4), (2, 3, 5)


def run(lab: Lab) -> Report:
    (task,) = lab.chosen(TASKS)
    sizes = PAPER_SIZES if lab.setup.full else SIZES
    names = [f"adapters {size}" for size in sizes]
    found = study(lab, [task], lines(lab, sizes))
    total = parameters(lab)
    body = []
    for arm in found.arms:
        cell = found.cell(arm, task)
        exact = sum(run["metrics"]["test"]["exact_match"] for run in cell.runs) / len(cell.runs)
        gap = "-" if arm == arms.FULL else signed(found.difference(arm, arms.FULL))
        body.append([arm, count_text(cell.trained), share(cell.trained, total), points(cell.score, cell.error),
                     points(exact), gap])  # fmt: skip
    header = ["method", "trained", f"of {count_text(total)}", "F1", "exact match", "F1 less full fine-tuning"]

    def curve(arms_: list[str]) -> list[tuple[float, float, float, float]]:
        cells = [found.cell(arm, task) for arm in arms_]
        return [(float(c.trained or 0), 100 * (c.score - (c.error or 0)), 100 * c.score,
                 100 * (c.score + (c.error or 0))) for c in cells]  # fmt: skip

    families = [Family("adapters, by size", curve(names), [str(size) for size in sizes]),
                Family(arms.FULL, curve([arms.FULL]), [])]  # fmt: skip
    table = f"{markdown_table(header, body)}\n± is the standard error over seeds.\n"
    title = f"SQuAD v1.1, {lab.backbone.name}"
    figure = percentiles_figure(families, "F1, with the standard error over seeds", title)
    return of_study(found, "SQuAD v1.1", [table], {"squad": figure})


def lines(lab: Lab, sizes: tuple[int, ...]) -> list[Arm]:
    method = FullFineTuning(pooling=lab.setup.pooling)
    if lab.setup.full:
        sized = [Arm(f"adapters {size}", options([arms.adapter(lab, size)], RATES, EPOCHS)) for size in sizes]
        return [*sized, Arm(arms.FULL, options([method], FULL_RATES, FULL_EPOCHS))]
    sized = [Arm(f"adapters {size}", options([arms.adapter(lab, size)], (1e-3, 3e-3), (5,))) for size in sizes]
    return [*sized, Arm(arms.FULL, options([method], (1e-4, 3e-4), (4,)))]
