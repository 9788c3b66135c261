"""A new task from few examples, starting from tasks that were trained together (Karimi Mahabadi et al., section 3.4).

Two controls on models that write. The classes' numbers are re-mapped: a pretrained model may have met the task, but not
with those numbers. And runs have more steps: whether a method is worse, or only slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.special import stdtrit

from taskgraft.errors import Diverged, GraftError
from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE, TRANSFER, judged_on
from taskgraft.experiments.lab import Job, Lab, Record, RunsDone, say, share_out
from taskgraft.experiments.report import Report, about, points
from taskgraft.experiments.study import TOGETHER
from taskgraft.reports.experiments import sizes_figure
from taskgraft.reports.tables import markdown_table
from taskgraft.tasks.task import Task
from taskgraft.training.few_shot import few_shot

TASKS = (*GLUE, *TRANSFER)
SIZES = (4, 16, 32, 100, 500, 1_000, 2_000)
FEW = 100  # up to here a size counts for the claim
JUDGED = 1_000  # test rows, drawn at random
BATCH, STEPS = 32, 100  # of a run, at least; no fewer than three passes over the examples
OTHERS = (company.FULL, company.DAGGER)
METHODS = (*OTHERS, company.PLUS)


@dataclass(frozen=True)
class Way:
    """A table: how new tasks are learned, from how many examples, and after how long a run in company."""

    name: str
    title: str
    sizes: tuple[int, ...] = SIZES
    remapped: bool = False
    times: int = 1  # as many steps
    control: bool = False  # asked only of models that write
    company_steps: int | None = None  # None: as many as the setup has


WAYS = (
    Way("published", "As published"),
    Way("remapped", "Classes' numbers re-mapped", (16, 100), remapped=True, control=True),
    Way("longer", "Five times the steps", (100,), times=5, control=True),
)


@dataclass(frozen=True)
class Shot:
    """A new task, after a run in company, from so many examples drawn by a seed."""

    start: Job
    task: str
    rows: int
    seed: int
    remapped: bool
    times: int

    @property
    def name(self) -> str:
        ending = ".remapped" * self.remapped + ".longer" * (self.times > 1)
        return f"few-shot.{self.start.label}.{self.task}.{self.rows}.seed{self.seed}{ending}"


def run(lab: Lab) -> Report:
    writes = lab.backbone.model.config.is_encoder_decoder
    return report(lab, [way for way in WAYS if writes or not way.control], "New tasks from few examples", "few-shot")


def report(lab: Lab, ways: Sequence[Way], title: str, figure: str) -> Report:
    """A section for each way; the figure has the first one, or all that differ in their runs in company."""
    names = lab.chosen(TASKS)
    known, new = [name for name in names if name in GLUE], [name for name in names if name in TRANSFER]
    if len(known) < 2 or not new:
        raise GraftError("few-shot needs two or more tasks of GLUE to start from, and one of the others.")
    starts = starts_of(lab, known, [way.company_steps or lab.setup.steps for way in ways])
    seeds = range(lab.setup.seeds)
    sizes = {way: {task: [size for size in sizes_of(lab, task) if size in way.sizes] for task in new} for way in ways}

    def shot_of(arm: str, way: Way, task: str, size: int, seed: int) -> Shot:
        start = starts[way.company_steps or lab.setup.steps][arm]
        return Shot(start, task, size, seed, way.remapped, way.times)

    shots = [
        shot_of(arm, way, task, size, seed)
        for seed in seeds for arm in METHODS for way in ways for task in new for size in sizes[way][task]
    ]  # fmt: skip
    left = [shot for shot in shots if not place_of(lab, shot).exists()]
    needed = list(dict.fromkeys(shot.start for shot in left))
    run_company(lab, needed)
    # Where another experiment kept no more than the record of a start:
    share_out(lab, needed, trained, key=lambda job: (lab.path(job), "weights"))
    share_out(lab, left, result_of)
    if lab.setup.runs_only:
        raise RunsDone
    found = {shot: result_of(lab, shot) for shot in shots}

    def scores(arm: str, way: Way, task: str, size: int) -> list[float]:
        each = [found[shot_of(arm, way, task, size, seed)] for seed in seeds]
        ended = [record["score"] for record in each if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {arm!r} on {task!r} with {size} examples ended: {each[0]['error']}")
        return ended

    def few_of(arm: str, way: Way, tasks: Iterable[str]) -> Scores:
        """Of each seed the mean over these tasks and few examples."""
        pairs = [(task, size) for task in tasks for size in sizes[way][task] if size <= FEW]
        return [mean_score([found[shot_of(arm, way, *pair, seed)] for pair in pairs]) for seed in seeds]

    sections: list[str] = []
    record: dict[str, dict[str, Any]] = {}
    for way in ways:
        judged = {task: each for task, each in sizes[way].items() if each}
        if not judged:
            continue
        rows, wins = lines(judged, partial(scores, way=way))
        few = sorted({size for each in judged.values() for size in each if size <= FEW})
        counted = f"{few[0]} to {few[-1]}" if len(few) > 2 else " and ".join(map(str, few))
        means = {arm: few_of(arm, way, judged) for arm in METHODS}
        gaps = [f"{with_interval(less(means[company.PLUS], means[other]))} against {other}" for other in OTHERS]
        own = {task: {arm: few_of(arm, way, [task]) for arm in METHODS} for task in judged}
        sentence = (
            f"HyperFormer++ above both others on the mean of {counted} examples: {len(wins)} of {len(judged)} tasks "
            f"({', '.join(wins) or 'none'}). On the mean over tasks as well, in points: {'; '.join(gaps)}.\n"
        )
        sections += [f"## {way.title}\n", sentence, by_task(own), markdown_table(["task", "examples", *METHODS], rows)]
        record[way.name] = {"wins": wins, "sentence": sentence, "means": means}
    drawn = "One seed"
    if len(seeds) > 1:
        drawn = (
            f"Mean ± deviation over {len(seeds)} seeds, each with examples of its own; differences with their 95 % "
            "interval over seeds"
        )
    sections.append(
        f"{drawn}; at most {JUDGED:,} test rows; "
        f"batches of {BATCH}, {STEPS} steps or three passes over the examples, whichever is more.\n"
    )
    several = len(starts) > 1
    if several:
        sections = [by_length({f"{way.company_steps:,} steps": record[way.name]["means"] for way in ways}), *sections]
    curves, shorter = {}, []
    for arm, way in product(METHODS, ways if several else ways[:1]):
        common = [size for size in SIZES if all(size in sizes[way][task] for task in new)]
        name = f"{arm}, {way.company_steps:,} steps" if several else arm
        curves[name] = [
            (size, statistics.fmean(statistics.fmean(scores(arm, way, task, size)) for task in new), 0.0)
            for size in common
        ]
        shorter += [name] if several and way is not ways[-1] else []
    drawing = sizes_figure(curves, "examples", "points, mean over tasks", f"New tasks, {lab.backbone.name}", shorter)
    runs = [{**each, "name": place_of(lab, shot).stem} for shot, each in found.items()]
    return Report(
        f"{title} on {lab.backbone.name}", [about(lab, seeds=False), *sections], record, runs, (), {figure: drawing}
    )


def lines(sizes: dict[str, list[int]], scores: Callable[..., list[float]]) -> tuple[list[Any], list[str]]:
    """A line for each task and size; and the tasks on which HyperFormer++ is above both others."""
    body, wins = [], []
    for task, some in sizes.items():
        few: dict[str, list[float]] = {arm: [] for arm in METHODS}
        for size in some:
            cells = []
            for arm in METHODS:
                found = scores(arm, task=task, size=size)
                mean = statistics.fmean(found)
                cells.append(points(mean, statistics.stdev(found) if len(found) > 1 else None))
                if size <= FEW:
                    few[arm].append(mean)
            body.append([task, str(size), *cells])
        means = {arm: statistics.fmean(values) for arm, values in few.items()}
        if means[company.PLUS] > max(means[company.FULL], means[company.DAGGER]):
            wins.append(task)
    return body, wins


def mean_score(records: Sequence[Record]) -> float | None:
    """Of the runs of one seed; None where one of them failed."""
    scores = [record["score"] for record in records]
    return None if None in scores else statistics.fmean(scores)


Scores = Sequence[float | None]  # of each seed


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


def starts_of(lab: Lab, tasks: Sequence[str], lengths: Sequence[int]) -> dict[int, dict[str, Job]]:
    """By its steps each method's run in company on the first seed: all at the rate that the shortest does best at."""
    best = chosen(lab, tasks, min(lengths))
    return {
        steps: {
            name: replace(job, settings=lab.settings_together(job.settings.learning_rate, steps, 0))
            for name, job in best.items()
        }
        for steps in lengths
    }


def chosen(lab: Lab, tasks: Sequence[str], steps: int) -> dict[str, Job]:
    """Each method's run in company on the first seed, at its best rate by validation."""
    methods = company.together(lab)
    jobs = {
        name: [Job(TOGETHER, methods[name], lab.settings_together(rate, steps, 0), tuple(tasks))
               for rate in company.rates(lab, methods[name])]
        for name in METHODS
    }  # fmt: skip
    run_company(lab, [job for each in jobs.values() for job in each])
    best = {}
    for name, each in jobs.items():
        known = [(job, lab.known(job) or {}) for job in each]
        ended = [(record["validation"], job) for job, record in known if record["error"] is None]
        if not ended:
            raise GraftError(f"no run of {name!r} ended: {known[0][1]['error']}")
        best[name] = max(ended, key=lambda pair: float(pair[0]))[1]
    return best


def run_company(lab: Lab, jobs: Sequence[Job]) -> None:
    """Do those that have not been; what another experiment waits for as well is done once."""
    share_out(lab, [job for job in jobs if lab.known(job) is None], trained, key=lambda job: (lab.path(job),))


def trained(lab: Lab, job: Job) -> None:
    """A run in company, of which the weights are kept."""
    try:
        lab.joint(job)
    except Diverged as error:
        lab.keep_failed(job, error)


def sizes_of(lab: Lab, name: str) -> list[int]:
    """As far as the rows go, and the setup's limit."""
    rows = min(lab.task(name).split("train").num_rows, lab.setup.rows or SIZES[-1])
    return [size for size in SIZES if size <= rows]


def place_of(lab: Lab, shot: Shot) -> Path:
    """Where what came of it is kept."""
    return lab.place(shot.name, what(lab, shot))


def result_of(lab: Lab, shot: Shot) -> Record:
    """What came of it, once."""
    return lab.once(shot.name, what(lab, shot), lambda: transferred(lab, shot))


def what(lab: Lab, shot: Shot) -> dict[str, Any]:
    """All that decides what comes of it."""
    return {**asdict(shot), "start": lab.path(shot.start).stem, "rows_of": lab.hash(shot.task)}


def transferred(lab: Lab, shot: Shot) -> Record:
    task = judged_on(lab.task(shot.task), JUDGED)
    passes = lab.setup.epochs or max(3, math.ceil(STEPS / math.ceil(shot.rows / BATCH)))
    settings = replace(shot.start.settings, epochs=shot.times * passes, epoch_steps=None, batch_size=BATCH, warmup=0.1)
    try:
        found = few_shot(
            lab.backbone, lab.joint(shot.start), remapped(task) if shot.remapped else task, shot.rows,
            seeds=[shot.seed], settings=settings, progress=False, drift=False,
        )  # fmt: skip
    except Diverged as error:
        return {"score": None, "error": str(error)}
    say(f"  {shot.name}: {found.score:.4f}")
    return {"score": found.score, "like": found.like[0], "steps": found.first.steps, "error": None}


def remapped(task: Task) -> Task:
    """The same task with its classes in another order, and so with other numbers."""
    draw = np.random.RandomState(len(task.labels))
    order = np.arange(len(task.labels))
    while (order == np.arange(len(order))).any():  # every class gets another number
        order = draw.permutation(len(task.labels))
    number = np.argsort(order)  # of each class before
    splits = {}
    for split, table in task.splits.items():
        labels = pa.array(number[table["label"].to_numpy()], table.schema.field("label").type)
        splits[split] = table.set_column(table.schema.get_field_index("label"), "label", labels)
    return replace(task, labels=tuple(task.labels[old] for old in order), splits=splits)
