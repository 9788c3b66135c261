"""Few rows of every task: who learns most from them in company (Karimi Mahabadi et al., Figure 2)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from taskgraft.errors import GraftError
from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Job, Lab, Record, RunsDone
from taskgraft.experiments.report import Report, about, points
from taskgraft.experiments.study import TOGETHER
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
SIZES = (100, 500, 1_000, 2_000, 4_000)
STEPS = 1_000
VALIDATIONS = 4
JUDGED = 1_000  # test rows of a task, drawn at random


def run(lab: Lab) -> Report:
    tasks = tuple(lab.chosen(TASKS))
    sizes = [size for size in SIZES if lab.setup.rows is None or size <= lab.setup.rows]
    if not sizes:
        raise GraftError(f"--rows {lab.setup.rows} is below the fewest rows of this experiment: {SIZES[0]}.")
    curves: dict[str, list[tuple[int, float, float]]] = {name: [] for name in company.together(lab)}
    records: list[Record] = []
    for size in sizes:
        for name, found in at_size(lab, tasks, size).items():
            scores = [run["test"] for run in found]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            curves[name].append((size, statistics.fmean(scores), spread))
            records += found
    if lab.setup.runs_only:
        raise RunsDone
    body = [[name, *(points(mean, spread) for _, mean, spread in curve)] for name, curve in curves.items()]
    highest = [max(curves, key=lambda name, at=at: curves[name][at][1]) for at in range(len(sizes))]  # type: ignore[misc]
    body.append(["highest", *highest])
    judged = "" if lab.setup.full else f", at most {JUDGED:,} test rows of each"
    note = (
        f"Mean over all columns of {len(tasks)} tasks{judged}; ± is the deviation over {lab.setup.seeds} seeds, each "
        "with rows of its own, the same for every method. Rates chosen by validation on the first.\n"
    )
    table = f"{markdown_table(['rows of each task', *(f'{size:,}' for size in sizes)], body)}\n{note}"
    figure = sizes_figure(curves, "rows of each task", "points", f"Few rows, {lab.backbone.name}")
    shown: dict[str, Any] = {"curves": curves, "highest": dict(zip(map(str, sizes), highest, strict=True))}
    return Report(
        f"Few rows of every task on {lab.backbone.name}",
        [about(lab), table],
        shown,
        records,
        (),
        {"low-resource": figure},
    )


def at_size(lab: Lab, tasks: Sequence[str], size: int) -> dict[str, list[Record]]:
    """Each method's runs, one a seed; its rate is the best by validation on the first seed."""
    labs = [lab.at(size, seed, None if lab.setup.full else JUDGED) for seed in range(lab.setup.seeds)]
    steps = None if lab.setup.full else STEPS
    methods = company.together(lab)

    def job(name: str, rate: float, seed: int) -> Job:
        return Job(TOGETHER, methods[name], lab.settings_together(rate, steps, seed, VALIDATIONS), tuple(tasks))

    first = labs[0].run(job(name, rate, 0) for name in methods for rate in company.rates(lab, methods[name]))
    found: dict[str, list[Record]] = {}
    chosen: dict[str, float] = {}
    for name, method in methods.items():
        tried = [(first[job(name, rate, 0)], rate) for rate in company.rates(lab, method)]
        ended = [(record["validation"], rate, record) for record, rate in tried if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {name!r} with {size} rows ended: {tried[0][0]['error']}")
        _, chosen[name], record = max(ended, key=lambda each: each[0])
        found[name] = [record]
    for seed, other in enumerate(labs[1:], start=1):
        runs = other.run(job(name, chosen[name], seed) for name in methods)
        for name in methods:
            record = runs[job(name, chosen[name], seed)]
            if record["error"] is not None:
                raise GraftError(f"run {record['name']} failed on a further seed: {record['error']}")
            found[name].append(record)
    return found
