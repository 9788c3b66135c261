"""GLUE: full fine-tuning, adapters, norms only and head only, in scores and in parameters (Houlsby et al., Table 1)."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from taskgraft.experiments import arms
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab, say
from taskgraft.experiments.report import Report, copies, of_study, parameters, points, share, signed
from taskgraft.experiments.study import ALL, Differences, Study, study
from taskgraft.reports.bootstrap import Interval
from taskgraft.reports.experiments import differences_figure
from taskgraft.reports.tables import count_text, markdown_table, seconds_text
from taskgraft.training.fit import fit

TASKS = GLUE
NEAR = 0.004  # of full fine-tuning: the paper's distance on GLUE
MOST_TRAINED = 0.036  # of the backbone's weights
MANY_ROWS = 5_000  # of test: the standard error of an accuracy is then 0.7 points at most


def run(lab: Lab) -> Report:
    tasks = lab.chosen(TASKS)
    lines = [arms.full(lab), arms.adapters(lab), arms.adapters_of(lab, 64, arms.ADAPTER), arms.norms(lab),
             arms.head(lab)]  # fmt: skip
    seconds = alone(lab, tasks)
    found = study(lab, tasks, lines)
    against = found.against(arms.FULL)
    timing = one_at_a_time(found, seconds)
    claim = claim_a(lab, found, against[arms.ADAPTERS][ALL])
    sections = [table(lab, found), differences(against), f"## Claim A\n\n{claim['sentence']}\n",
                f"## In one pass\n\n{timing['sentence']}\n"]  # fmt: skip
    figure = differences_figure(against, tasks, "points above full fine-tuning", f"GLUE, {lab.backbone.name}")
    return of_study(found, "GLUE", sections, {"glue": figure}, against, claim_a=claim, timing=timing)


def table(lab: Lab, found: Study) -> str:
    """Table 1: parameters for all tasks together as multiples of one backbone, and trained for a task."""
    total = parameters(lab)
    header = ["method", "all tasks", "trained per task", *found.tasks, "average"]
    body = []
    for arm in found.arms:
        mean = found.trained(arm)
        scores = [points(cell.score, cell.error) for cell in found.row(arm)]
        weight = copies(mean, len(found.tasks), total, whole=arm == arms.FULL)
        body.append([arm, weight, share(mean, total), *scores, points(found.average(arm))])
    sizes = [getattr(cell.option.method, "size", "-") for cell in found.row(arms.ADAPTERS)]
    chosen = ", ".join(f"{task} {size}" for task, size in zip(found.tasks, sizes, strict=True))
    note = (
        f"± is the standard error over seeds. Shares are of the backbone's {count_text(total)} parameters. Sizes that "
        f"were chosen: {chosen}.\n"
    )
    return f"{markdown_table(header, body)}\n{note}"


def differences(against: Differences) -> str:
    """Every arm less full fine-tuning, with the interval by paired bootstrap over rows and seeds."""
    tasks = list(next(iter(against.values())))
    body = [[arm, *(signed(row[task]) for task in tasks)] for arm, row in against.items()]
    header = ["less full fine-tuning", *("average" if task == ALL else task for task in tasks)]
    return f"## Differences, 95 % intervals\n\n{markdown_table(header, body)}"


def claim_a(lab: Lab, found: Study, gap: Interval) -> dict[str, Any]:
    """Adapters within 0.4 points of full fine-tuning on the average, at no more than 3.6 % of the weights."""
    trained = (found.trained(arms.ADAPTERS) or 0) / parameters(lab)
    holds = gap.mean >= -NEAR and trained <= MOST_TRAINED
    sure = "and the whole interval lies above it" if gap.low >= -NEAR else "but the interval reaches below it"
    sentence = (
        f"Adapters at the best size per task: {signed(gap)} points against full fine-tuning on the average of "
        f"{len(found.tasks)} tasks, {100 * trained:.2f} % of the weights trained on average. "
    )
    sentence += f"Within 0.4 points, {sure}." if holds else "That is not within 0.4 points at 3.6 %: not shown here."
    record: dict[str, Any] = {"holds": holds, "sure": gap.low >= -NEAR, "trained": trained, **gap.to_json()}
    if large := [task for task in found.tasks if lab.task(task).split("test").num_rows >= MANY_ROWS]:
        there = found.difference(arms.ADAPTERS, arms.FULL, large)
        sentence += f" On {', '.join(large)} alone, which have at least {MANY_ROWS:,} test rows: {signed(there)}."
        record["large"] = {"tasks": large, **there.to_json()}
    picked = found.best_seeds().difference(arms.ADAPTERS, arms.FULL)
    sentence += f" With the best seed of each by validation, as the paper picks it: {signed(picked)}."
    record["best_seeds"] = picked.to_json()
    return {**record, "sentence": sentence}


def alone(lab: Lab, tasks: Sequence[str]) -> dict[str, float]:
    """Seconds of a step of a run that has the device to itself, by task, with its share of an epoch's evaluation."""
    method = arms.adapter(lab)

    def measure() -> dict[str, Any]:
        seconds = {}
        for name in tasks:
            task, settings = lab.task(name), lab.settings(name, 1e-3, 1, 0)
            fit(lab.backbone, small(task), method, settings=settings, progress=False)  # so that all is compiled
            start = time.perf_counter()
            steps = fit(lab.backbone, task, method, settings=settings, progress=False).steps
            seconds[name] = (time.perf_counter() - start) / steps
            say(f"  alone, a step of {name}: {1000 * seconds[name]:.1f} ms")
        return {"seconds": seconds}

    rows = {name: lab.task(name).split("train").num_rows for name in tasks}
    found: dict[str, float] = lab.once("glue.alone", rows, measure)["seconds"]
    return found


def one_at_a_time(found: Study, seconds: dict[str, float]) -> dict[str, Any]:
    """What the sweep of all settings on the first seed took in shared passes, and would have taken alone."""
    through = [run for run in found.records if run["error"] is None and run["method"]["method"] in ("adapter", "norms")]
    shared = [run for run in through if run["passes"]["runs"] > 1 and run["seed"] == 0]
    together = sum(longest_of(shared))
    each = sum(run["steps"] * seconds[run["task"]] for run in shared)
    sentence = (
        f"{len(shared)} runs of adapters and norms, all settings on the first seed, shared passes: "
        f"{seconds_text(together)}. One at a time they "
        f"would take {seconds_text(each)}, by the time of one epoch of each task with adapters of size 64 and its "
        f"evaluation, which was measured ({1000 * statistics.fmean(seconds.values()):.1f} ms a step on average): "
        f"{each / together:.1f} times as long."
    )
    return {"runs": len(shared), "together": together, "alone": each, "step_seconds": seconds, "sentence": sentence}


def longest_of(runs: Sequence[dict[str, Any]]) -> list[float]:
    """The seconds of each group of runs that shared passes: that of the last to end."""
    groups: dict[str, float] = {}
    for passes in (run["passes"] for run in runs):
        groups[passes["first"]] = max(groups.get(passes["first"], 0.0), passes["seconds"])
    return list(groups.values())


def small(task: Any) -> Any:
    return dataclasses.replace(task, splits={split: table.slice(0, 128) for split, table in task.splits.items()})
