"""Scores against trained parameters: adapters by size, the top layers, norms and heads (Figures 1, 3 and 4)."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from taskgraft.experiments import arms
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, of_study, parameters, points, share, signed
from taskgraft.experiments.study import Arm, Study, options, study
from taskgraft.methods import FullFineTuning, HeadOnly, NormsOnly
from taskgraft.reports.experiments import Family, percentiles_figure
from taskgraft.reports.tables import count_text, markdown_table

TASKS = GLUE
SIZES = tuple(2**n for n in range(9))
PERCENTILES = (20, 50, 80)
SHOWN = ("mnli", "cola")  # Figure 4's


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    tops = [f"top {k}" for k in range(1, arms.layers(lab) + 1)]
    adapters = [f"adapters {size}" for size in SIZES]
    found = study(lab, tasks, lines(lab))
    pairs = equal_parameters(found, adapters, tops)
    claim = claim_b(found, pairs)
    families = [
        Family("adapters, by size", curve(found, adapters), [str(size) for size in SIZES]),
        Family("top layers, by number", curve(found, tops), [name.split()[1] for name in tops]),
        Family(arms.NORMS, curve(found, [arms.NORMS]), []),
        Family(arms.HEAD, curve(found, [arms.HEAD]), []),
    ]
    figures = {
        "tradeoff": percentiles_figure(
            families, "points above full fine-tuning", f"GLUE by trained parameters, {lab.backbone.name}"
        )
    }
    for task in (task for task in SHOWN if task in tasks):
        single = [Family(f.name, curve(found, names, task), f.labels) for f, names in
                  zip(families, (adapters, tops, [arms.NORMS], [arms.HEAD]), strict=True)]  # fmt: skip
        figures[task] = percentiles_figure(
            single, "points, with the standard error over seeds", f"{task}, {lab.backbone.name}"
        )
    sections = [table(lab, found), claim.pop("section")]
    return of_study(found, "Scores against trained parameters", sections, figures, claim_b=claim)


def lines(lab: Lab) -> list[Arm]:
    """Two trials for each point, full fine-tuning's too; the paper's grid for `full`."""
    pooling = lab.setup.pooling
    full = lab.setup.full
    rates = arms.PAPER_RATES if full else (1e-3, 3e-3)
    own = arms.PAPER_RATES if full else (1e-4, 3e-4)
    epochs = arms.PAPER_EPOCHS if full else (6,)
    sized = [Arm(f"adapters {size}", options([arms.adapter(lab, size)], rates, epochs)) for size in SIZES]
    tops = [Arm(f"top {k}", arms.top(lab, k, own, epochs)) for k in range(1, arms.layers(lab) + 1)]
    others = [
        Arm(arms.NORMS, options([NormsOnly(pooling=pooling)], (3e-3, 1e-2), epochs)),
        Arm(arms.HEAD, options([HeadOnly(pooling=pooling)], (3e-3, 1e-2), (60,))),
        Arm(arms.FULL, options([FullFineTuning(pooling=pooling)], own, epochs)),
    ]
    return [*sized, *tops, *others]


def curve(found: Study, names: list[str], task: str | None = None) -> list[tuple[float, float, float, float]]:
    """(trained parameters, low, middle, high): percentiles over tasks of what lies above full fine-tuning; of one task
    the score itself, a standard error to each side."""
    points = []
    for arm in names:
        trained = found.trained(arm) or 0.0
        if task is None:
            above = [found.cell(arm, t).score - found.cell(arms.FULL, t).score for t in found.tasks]
            low, middle, high = np.percentile(above, PERCENTILES)
        else:
            cell = found.cell(arm, task)
            trained, middle, error = float(cell.trained or 0), cell.score, cell.error or 0.0
            low, high = middle - error, middle + error
        points.append((trained, 100 * float(low), 100 * float(middle), 100 * float(high)))
    return points


def table(lab: Lab, found: Study) -> str:
    total = parameters(lab)
    body = []
    for arm in found.arms:
        mean = found.trained(arm)
        above = [found.cell(arm, t).score - found.cell(arms.FULL, t).score for t in found.tasks]
        body.append([
            arm, count_text(round(mean or 0)), share(mean, total), points(found.average(arm)),
            *(f"{100 * value:+.1f}" for value in np.percentile(above, PERCENTILES)),
            *(points(found.cell(arm, task).score) for task in found.tasks),
        ])  # fmt: skip
    header = ["method", "trained per task", f"of {count_text(total)}", "average",
              *(f"{p}th percentile" for p in PERCENTILES), *found.tasks]  # fmt: skip
    return f"{markdown_table(header, body)}\nPercentiles over tasks are of the score less full fine-tuning's.\n"


def equal_parameters(found: Study, adapters: list[str], tops: list[str]) -> list[tuple[str, str]]:
    """For each number of top layers, the largest adapters with no more parameters."""
    pairs = []
    for top in tops:
        limit = found.trained(top) or 0
        fitting = [name for name in adapters if (found.trained(name) or 0) <= limit]
        if fitting:
            pairs.append((fitting[-1], top))
    return pairs


def claim_b(found: Study, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """At equal parameters adapters beat the top layers; norms alone fall behind."""
    compared = [*pairs, (arms.NORMS, arms.FULL), (arms.NORMS, "adapters 64"), (arms.HEAD, arms.NORMS)]
    results: list[dict[str, Any]] = []
    body = []
    best = found.best_seeds()
    for one, other in compared:
        gap, picked = found.difference(one, other), best.difference(one, other)
        verdict = {1: "higher", -1: "lower", 0: "not shown"}[gap.sign]
        results.append({"one": one, "other": other, **gap.to_json(), "verdict": verdict,
                        "best_seeds": picked.to_json()})  # fmt: skip
        trained = [count_text(round(found.trained(arm) or 0)) for arm in (one, other)]
        body.append([one, other, *trained, signed(gap), verdict, signed(picked)])
    wins = sum(row["verdict"] == "higher" for row in results[: len(pairs)])
    behind = [row["verdict"] for row in results[len(pairs) : len(pairs) + 2]]
    sentence = (
        f"Adapters with no more trained parameters are above the top layers in {wins} of {len(pairs)} pairs, the "
        f"interval included; norms only against full fine-tuning: {behind[0]}, against adapters 64: {behind[1]}."
    )
    header = ["one", "other", "trained by the one", "by the other", "difference (95 % interval)", "the one is",
              "with best seeds"]  # fmt: skip
    note = "Best seeds: of each method and task the one that is best by validation, as the paper picks it."
    section = f"## Claim B\n\n{sentence}\n\n{markdown_table(header, body)}\n{note}\n"
    mean_gap = statistics.fmean(row["mean"] for row in results[: len(pairs)]) if pairs else None
    return {"compared": results, "wins": wins, "mean_gap": mean_gap, "sentence": sentence, "section": section}
