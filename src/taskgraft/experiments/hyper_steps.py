"""Short and long runs of tasks in company: whether a method is worse than another, or only slower.

Ours, not the paper's: its runs have fifty times as many steps as the default here.
"""

from __future__ import annotations

from itertools import product

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, mean_and_deviation, of_study, points, signed
from taskgraft.experiments.study import Arm, Option, study
from taskgraft.experiments.task_map import first_maps, maps_section
from taskgraft.reports.bootstrap import Interval
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
DIVISORS = (4, 1)  # a quarter of the steps, and all of them
CHANGE = "change"  # from the fewest steps to the most
LAST = "cola"  # the task that all methods learn last


def run(lab: Lab) -> Report:
    """Each method at the paper's rate, or on an encoder at the lower of its two."""
    tasks = lab.chosen(TASKS)
    methods = company.together(lab)
    lengths = lengths_of(lab)
    arms = [
        Arm(named(name, steps), (Option(method, company.rates(lab, method)[0], steps),), together=True)
        for name, method in methods.items()
        for steps in lengths
    ]
    found = study(lab, tasks, arms, columns=True)
    curves = {
        name: [(steps, *mean_and_deviation(found.averages(named(name, steps)))) for steps in lengths]
        for name in methods
    }
    judged = {"": tasks}
    if LAST in tasks and len(tasks) > 1:
        judged[f", without {LAST}"] = [task for task in tasks if task != LAST]
    short, long = lengths[0], lengths[-1]
    gaps: dict[str, dict[str, Interval]] = {}
    for (ending, some), other in product(judged.items(), methods):
        if other != company.PLUS:
            pairs = {steps: (named(company.PLUS, steps), named(other, steps)) for steps in lengths}
            gaps[f"HyperFormer++ less {other}{ending}"] = {
                **{str(steps): found.difference(*pair, some) for steps, pair in pairs.items()},
                CHANGE: found.growth(pairs[long], pairs[short], some),
            }
    gains = {name: found.difference(named(name, long), named(name, short)) for name in methods}
    header = ["steps", *(f"{steps:,}" for steps in lengths), CHANGE]
    several = lab.setup.seeds > 1
    body = [
        [name, *(points(mean, off if several else None) for _, mean, off in curve), signed(gains[name])]
        for name, curve in curves.items()
    ]
    body += [[name, *map(signed, each.values())] for name, each in gaps.items()]
    base = named(company.FULL, long)
    against = found.against(base)
    rates = "; ".join(f"{name}: {company.rates(lab, method)[0]:g}" for name, method in methods.items())
    maps = first_maps(found)
    sections = [
        f"{markdown_table(header, body)}\nRates: {rates}.\n",
        company.columns_table(lab, found, against, base),
        maps_section(maps, tasks),
    ]
    figure = sizes_figure(curves, "steps", "points", f"Short and long runs, {lab.backbone.name}")
    return of_study(
        found, "Short and long runs", sections, {"hyper-steps": figure}, against, curves=curves,
        maps={name: each.to_json() for name, each in maps.items()},
        gaps={name: {what: gap.to_json() for what, gap in each.items()} for name, each in gaps.items()},
        gains={name: gain.to_json() for name, gain in gains.items()},
    )  # fmt: skip


def named(method: str, steps: int) -> str:
    return f"{method}, {steps:,} steps"


def lengths_of(lab: Lab) -> list[int]:
    """Steps of runs in company, the fewest first: as many as can be parted by validations."""
    settings = [lab.settings_together(None, max(1, lab.setup.steps // divisor), 0) for divisor in DIVISORS]
    return sorted({(each.epochs or 1) * (each.epoch_steps or 1) for each in settings})
