"""Which tasks' learned embeddings lie together (Karimi Mahabadi et al., Figure 3)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab, Record
from taskgraft.experiments.report import Report, about
from taskgraft.experiments.study import Study, study
from taskgraft.methods import HyperFormer, Method
from taskgraft.reports.tables import markdown_table
from taskgraft.reports.taskmap import TaskMap, separation_of, stacked, task_map, task_map_figure
from taskgraft.training.session import mounted

TASKS = GLUE
GROUPS = {
    "mnli": "inference", "rte": "inference", "qnli": "inference",
    "mrpc": "paraphrase", "qqp": "paraphrase", "stsb": "paraphrase",
    "cola": "one sentence", "sst2": "one sentence",
}  # fmt: skip
HEADER = ["", "between over within", "groupings at least as far apart", "at the start", "added by training", "moved"]
Vectors = Mapping[str, Sequence[float]]


def run(lab: Lab) -> Report:
    """The map of HyperFormer++ as `hyper-glue` trains it, one for each seed; the figure is the first seed's."""
    tasks = lab.chosen(TASKS)
    found = study(lab, tasks, [company.arm(lab, company.PLUS, company.hyperformer(lab))])
    maps = [learned_map(lab, company.hyperformer(lab), run, tasks) for run in found.cell(company.PLUS, tasks[0]).runs]
    body = [[f"seed {seed}", *each.cells] for seed, each in enumerate(maps)]
    separations, added = [each.map.separation for each in maps], [each.added for each in maps]
    body.append(["mean", number(mean(separations)), "", "", number(mean(added)), ""])
    nearest = [[task, *(each.map.neighbours[task][0] for each in maps)] for task in tasks]
    neighbours = ["task", *(f"nearest, seed {seed}" for seed in range(len(maps)))]
    return Report(
        f"Task embeddings on {lab.backbone.name}",
        [
            about(lab),
            f"HyperFormer++ after {found.records[0]['steps']:,} steps of {company.batch_size(lab)} rows.\n",
            markdown_table(HEADER, body),
            note(tasks),
            markdown_table(neighbours, nearest),
        ],
        {"separations": separations, "maps": [each.to_json() for each in maps]},
        found.records,
        (),
        {"task-map": task_map_figure(maps[0].map)},
    )


@dataclass(frozen=True, eq=False)
class Learned:
    """The map of a run's task embeddings, and how they came there."""

    map: TaskMap
    chance: float | None  # the share of all groupings of the same sizes that are at least as far apart
    start: float | None  # the separation of the embeddings that the run began with
    added: float | None  # the separation of what they have become less what they began as
    moved: float  # how far an embedding has gone, as a share of its length

    @property
    def cells(self) -> list[str]:
        numbers = (self.map.separation, self.chance, self.start, self.added)
        return [*map(number, numbers), f"{100 * self.moved:.1f} %"]

    def to_json(self) -> dict[str, Any]:
        own = {"chance": self.chance, "start": self.start, "added": self.added, "moved": self.moved}
        return {**self.map.to_json(), **own}


def note(tasks: Sequence[str]) -> str:
    """What the columns are."""
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(GROUPS[task], []).append(task)
    said = "; ".join(f"{name}: {', '.join(own)}" for name, own in groups.items())
    return (
        "Mean distance between the embeddings of tasks of different groups over that within a group: above 1, related "
        "tasks lie together. Beside it, of all ways to part the tasks into groups of these sizes, the share that lie "
        "as far apart or farther; the same ratio before training, when embeddings are random, and of what training "
        f"added to them; and how far an embedding has moved, as a share of its length. Groups: {said}.\n"
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def first_maps(found: Study) -> dict[str, Learned]:
    """Of each line of a study that has task embeddings, those of its first seed."""
    maps = {}
    for arm in found.arms:
        cell = found.cell(arm, found.tasks[0])
        if isinstance(cell.option.method, HyperFormer):
            maps[arm] = learned_map(found.lab, cell.option.method, cell.runs[0], found.tasks)
    return maps


def maps_section(maps: Mapping[str, Learned], tasks: Sequence[str]) -> str:
    body = [[name, *each.cells] for name, each in maps.items()]
    return f"## Their task embeddings, first seed\n\n{markdown_table(HEADER, body)}\n{note(tasks)}"


def learned_map(lab: Lab, method: Method, run: Record, tasks: Sequence[str]) -> Learned:
    groups = {name: GROUPS[name] for name in tasks}
    first = first_embeddings(lab, method, tasks, run["seed"])
    last: Vectors = {name: run["embeddings"][name] for name in tasks}
    before, after = stacked(first), stacked(last)
    moved = np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1)
    return Learned(
        map=task_map(last, groups=groups),
        chance=chance(last, groups),
        start=separation_of(cdist(before, before), list(groups.values())),
        added=separation_of(cdist(after - before, after - before), list(groups.values())),
        moved=float(moved.mean()),
    )


def first_embeddings(lab: Lab, method: Method, tasks: Sequence[str], seed: int) -> Vectors:
    """Those that a run begins with, which its seed decides."""
    model = lab.backbone.model
    with mounted(model, dict.fromkeys(tasks), method, seed):
        return {name: model.taskgraft.read(name)["task.embedding"].tolist() for name in tasks}


def chance(embeddings: Vectors, groups: Mapping[str, str]) -> float | None:
    """The share of all groupings of the same sizes whose separation is at least that of these groups."""
    vectors = stacked({name: embeddings[name] for name in groups})
    distances = cdist(vectors, vectors)
    own = separation_of(distances, list(groups.values()))
    if own is None:
        return None
    every = [separation_of(distances, list(other)) or 0.0 for other in set(permutations(groups.values()))]
    return sum(value >= own - 1e-12 for value in every) / len(every)
