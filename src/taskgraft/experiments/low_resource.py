"""Few rows of every task: who learns most from them in company (Karimi Mahabadi et al., Figure 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from taskgraft.errors import GraftError
from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Job, Lab, Record, RunsDone, do, say, share_out
from taskgraft.experiments.report import Report, about, mean_and_deviation, points
from taskgraft.experiments.study import TOGETHER
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table

TASKS = GLUE
SIZES = (100, 500, 1_000, 2_000, 4_000)
BATCH, STEPS = 32, 1_500  # fewer of more rows do not do: HyperFormer answers by chance until it has had 500 or more
JUDGED = 1_000  # test rows of a task, drawn at random


@dataclass(frozen=True)
class Few:
    """A run in company on so many rows of each task, drawn by a seed."""

    job: Job
    rows: int
    seed: int


def run(lab: Lab) -> Report:
    tasks = tuple(lab.chosen(TASKS))
    sizes = [size for size in SIZES if lab.setup.rows is None or size <= lab.setup.rows]
    if not sizes:
        raise GraftError(f"--rows {lab.setup.rows} is below the fewest rows of this experiment: {SIZES[0]}.")
    found, records = runs_of(lab, tasks, sizes)
    if lab.setup.runs_only:
        raise RunsDone
    curves: dict[str, list[tuple[int, float, float]]] = {name: [] for name in company.together(lab)}
    for (name, size), runs in found.items():
        curves[name].append((size, *mean_and_deviation([run["test"] for run in runs])))
    body = [[name, *(points(mean, spread) for _, mean, spread in curve)] for name, curve in curves.items()]
    highest = [max(curves, key=lambda name, at=at: curves[name][at][1]) for at in range(len(sizes))]  # type: ignore[misc]
    body.append(["highest", *highest])
    judged = "" if lab.setup.full else f", at most {JUDGED:,} test rows of each"
    steps = {run["steps"] for runs in found.values() for run in runs}
    said = " or ".join(f"{count:,}" for count in sorted(steps))
    note = (
        f"Runs of {said} steps of {BATCH} rows. Mean over all columns of {len(tasks)} tasks{judged}; "
        f"± is the deviation over {lab.setup.seeds} seeds, each with rows of its own, the same for every method. Rates "
        f"chosen by validation on {middle_of(sizes):,} rows.\n"
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


def runs_of(
    lab: Lab, tasks: tuple[str, ...], sizes: list[int]
) -> tuple[dict[tuple[str, int], list[Record]], list[Record]]:
    """By method and size its runs, one a seed, and all runs.

    Each method's rate is the best by validation at the middle size.
    """
    methods, middle, seeds = company.together(lab), middle_of(sizes), range(lab.setup.seeds)
    steps = None if lab.setup.full else STEPS

    def few(name: str, rate: float, size: int, seed: int) -> Few:
        settings = lab.settings_together(rate, steps, seed, batch_size=BATCH)
        return Few(Job(TOGETHER, methods[name], settings, tasks), size, seed)

    rates = {name: company.rates(lab, method) for name, method in methods.items()}
    first = learned(lab, (few(name, rate, middle, 0) for name in methods for rate in rates[name]))
    chosen: dict[str, float] = {}
    for name in methods:
        tried = [(first[few(name, rate, middle, 0)], rate) for rate in rates[name]]
        ended = [(record["validation"], rate) for record, rate in tried if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {name!r} with {middle} rows ended: {tried[0][0]['error']}")
        chosen[name] = max(ended, key=lambda pair: pair[0])[1]
    cells = [(name, size) for name in methods for size in sizes]
    rest = learned(lab, (few(name, chosen[name], size, seed) for name, size in cells for seed in seeds))
    if broken := [record for record in rest.values() if record["error"] is not None]:
        raise GraftError(f"run {broken[0]['name']} failed: {broken[0]['error']}")
    found = {(name, size): [rest[few(name, chosen[name], size, seed)] for seed in seeds] for name, size in cells}
    return found, [{**record, "rows": each.rows} for each, record in {**first, **rest}.items()]


def middle_of(sizes: list[int]) -> int:
    return sizes[len(sizes) // 2]


def learned(lab: Lab, wanted: Iterable[Few]) -> dict[Few, Record]:
    """What came of each; those that have not ended are run."""
    listed = list(wanted)
    left = [few for few in listed if record_of(lab, few) is None]
    say(f"{len(listed)} runs, {len(left)} of them to do")
    share_out(lab, left, learn, key=lambda few: (rows_of(lab, few).path(few.job),))
    found = {few: record_of(lab, few) for few in listed}
    return {few: record for few, record in found.items() if record is not None}


def learn(lab: Lab, few: Few) -> None:
    do(rows_of(lab, few), [few.job])


def record_of(lab: Lab, few: Few) -> Record | None:
    return rows_of(lab, few).known(few.job)


def rows_of(lab: Lab, few: Few) -> Lab:
    """A lab with these rows."""
    return lab.at(few.rows, few.seed, None if lab.setup.full else JUDGED)
