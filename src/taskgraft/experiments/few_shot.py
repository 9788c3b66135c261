"""A new task from few examples, starting from tasks that were trained together (Karimi Mahabadi et al., section 3.4).

Two controls on models that write. The classes' numbers are re-mapped: a pretrained model may have met the task, but not
with those numbers. And runs have more steps: whether a method is worse, or only slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from scipy.special import stdtrit

from taskgraft.experiments import company, shots
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, about, points
from taskgraft.experiments.shots import BATCH, FEW, JUDGED, METHODS, OTHERS, SIZES, STEPS, Scores, Shots, Way
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table

TASKS = shots.TASKS
WAYS = (
    Way("published", "As published"),
    Way("remapped", "Classes' numbers re-mapped", (16, 100), remapped=True, control=True),
    Way("longer", "Five times the steps", (100,), times=5, control=True),
)


def run(lab: Lab) -> Report:
    writes = lab.backbone.model.config.is_encoder_decoder
    return report(lab, [way for way in WAYS if writes or not way.control], "New tasks from few examples", "few-shot")


def report(lab: Lab, ways: Sequence[Way], title: str, figure: str) -> Report:
    """A section for each way; the figure has the first one, or all that differ in their runs in company."""
    found = shots.run_shots(lab, ways)
    sections: list[str] = []
    record: dict[str, dict[str, Any]] = {}
    for way in ways:
        judged = [task for task in found.tasks if found.sizes(way, task)]
        if judged:
            section, record[way.name] = section_of(found, way, judged)
            sections += section
    drawn = "One seed"
    if len(found.seeds) > 1:
        drawn = (
            f"Mean ± deviation over {len(found.seeds)} seeds, each with examples of its own; differences with their "
            "95 % interval over seeds"
        )
    sections.append(
        f"{drawn}; at most {JUDGED:,} test rows; "
        f"batches of {BATCH}, {STEPS} steps or three passes over the examples, whichever is more.\n"
    )
    several = len(found.starts) > 1
    if several:
        sections = [by_length({f"{way.company_steps:,} steps": record[way.name]["means"] for way in ways}), *sections]
    curves, shorter = {}, []
    for arm, way in product(METHODS, ways if several else ways[:1]):
        common = [size for size in SIZES if all(size in found.sizes(way, task) for task in found.tasks)]
        name = f"{arm}, {way.company_steps:,} steps" if several else arm
        curves[name] = [
            (size, statistics.fmean(statistics.fmean(found.scores(arm, way, task, size)) for task in found.tasks), 0.0)
            for size in common
        ]
        shorter += [name] if several and way is not ways[-1] else []
    drawing = sizes_figure(curves, "examples", "points, mean over tasks", f"New tasks, {lab.backbone.name}", shorter)
    runs = [{**each, "name": shots.place_of(lab, shot).stem} for shot, each in found.found.items()]
    return Report(
        f"{title} on {lab.backbone.name}", [about(lab, seeds=False), *sections], record, runs, (), {figure: drawing}
    )


def section_of(found: Shots, way: Way, tasks: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """A way's tables, and the same for programs."""
    means = {arm: found.few(arm, way, tasks) for arm in METHODS}
    own = {task: {arm: found.few(arm, way, [task]) for arm in METHODS} for task in tasks}
    rows, wins = lines(found, way, tasks)
    few = sorted({size for task in tasks for size in found.sizes(way, task) if size <= FEW})
    counted = f"{few[0]} to {few[-1]}" if len(few) > 2 else " and ".join(map(str, few))
    gaps = [f"{with_interval(less(means[company.PLUS], means[other]))} against {other}" for other in OTHERS]
    sentence = (
        f"HyperFormer++ above both others on the mean of {counted} examples: {len(wins)} of {len(tasks)} tasks "
        f"({', '.join(wins) or 'none'}). On the mean over tasks as well, in points: {'; '.join(gaps)}.\n"
    )
    tables = [by_task(own), markdown_table(["task", "examples", *METHODS], rows)]
    return [f"## {way.title}\n", sentence, *tables], {"wins": wins, "sentence": sentence, "means": means}


def lines(found: Shots, way: Way, tasks: Sequence[str]) -> tuple[list[Any], list[str]]:
    """A line for each task and size; and the tasks on which HyperFormer++ is above both others."""
    body, wins = [], []
    for task in tasks:
        few: dict[str, list[float]] = {arm: [] for arm in METHODS}
        for size in found.sizes(way, task):
            cells = []
            for arm in METHODS:
                scores = found.scores(arm, way, task, size)
                mean = statistics.fmean(scores)
                cells.append(points(mean, statistics.stdev(scores) if len(scores) > 1 else None))
                if size <= FEW:
                    few[arm].append(mean)
            body.append([task, str(size), *cells])
        means = {arm: statistics.fmean(values) for arm, values in few.items()}
        if means[company.PLUS] > max(means[other] for other in OTHERS):
            wins.append(task)
    return body, wins


def by_task(scores: Mapping[str, Mapping[str, Scores]]) -> str:
    """HyperFormer++ less the others on each task's few examples, and with how many of the seeds it is above both."""
    body = []
    for task, each in scores.items():
        gaps = [less(each[company.PLUS], each[other]) for other in OTHERS]
        known = [seed for seed in zip(*gaps, strict=True) if None not in seed]
        above = sum(min(seed) > 0 for seed in known)
        body.append([task, *map(with_interval, gaps), f"{above} of {len(known)}"])
    return markdown_table(["task", *(f"{company.PLUS} less {other}" for other in OTHERS), "seeds above both"], body)


def by_length(means: Mapping[str, Mapping[str, Scores]]) -> str:
    """A section: each method's mean after shorter and longer runs in company, and what the longest changed."""
    rows = {arm: [each[arm] for each in means.values()] for arm in METHODS}
    gaps = {
        f"{company.PLUS} less {arm}": [less(each[company.PLUS], each[arm]) for each in means.values()] for arm in OTHERS
    }
    body = [
        [name, *map(say_scores, row), with_interval(less(row[-1], row[0]))]
        for lines, say_scores in ((rows, with_error), (gaps, with_interval))
        for name, row in lines.items()
    ]
    return (
        f"## By steps in company\n\n{markdown_table(['', *means, 'change'], body)}\n"
        f"Mean over tasks and up to {FEW} examples ± standard error over seeds; differences with their 95 % interval. "
        "Seeds draw the examples; the run in company that all start from is the first seed's.\n"
    )


def less(ones: Scores, others: Scores) -> list[float | None]:
    """The difference of each seed; None where one of both failed."""
    pairs = zip(ones, others, strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]


def with_error(scores: Scores) -> str:
    """The mean in points over the seeds that there are, with its standard error."""
    mean, error, _ = over_seeds(scores)
    return "-" if mean is None else f"{mean:.1f}" + ("" if error is None else f" ± {error:.1f}")


def with_interval(differences: Scores) -> str:
    """The mean difference in points, with its 95 % interval: Student's, of as many seeds as there are."""
    mean, error, count = over_seeds(differences)
    if mean is None or error is None:
        return "-" if mean is None else f"{mean:+.1f}"
    off = float(stdtrit(count - 1, 0.975)) * error
    return f"{mean:+.1f} ({mean - off:+.1f} to {mean + off:+.1f})"


def over_seeds(scores: Scores) -> tuple[float | None, float | None, int]:
    """Mean and standard error in points, as far as there are some, and of how many seeds."""
    known = [100 * score for score in scores if score is not None]
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return statistics.fmean(known) if known else None, error, len(known)
