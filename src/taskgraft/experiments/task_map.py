"""Which tasks' learned embeddings lie together (Karimi Mahabadi et al., Figure 3)."""

from __future__ import annotations

import statistics
from itertools import permutations

from scipy.spatial.distance import cdist

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab
from taskgraft.experiments.report import Report, about
from taskgraft.experiments.study import study
from taskgraft.reports.tables import markdown_table
from taskgraft.reports.taskmap import separation_of, stacked, task_map, task_map_figure

TASKS = GLUE
GROUPS = {
    "mnli": "inference", "rte": "inference", "qnli": "inference",
    "mrpc": "paraphrase", "qqp": "paraphrase", "stsb": "paraphrase",
    "cola": "one sentence", "sst2": "one sentence",
}  # fmt: skip


def run(lab: Lab) -> Report:
    """The map of HyperFormer++ as `hyper-glue` trains it, one for each seed; the figure is the first seed's."""
    tasks = lab.chosen(TASKS)
    groups = {name: GROUPS[name] for name in tasks}
    found = study(lab, tasks, [company.arm(lab, company.PLUS, company.hyperformer(lab))])
    runs = found.cell(company.PLUS, tasks[0]).runs
    maps = [task_map(run["embeddings"], groups=groups) for run in runs]
    chances = [chance(run["embeddings"], groups) for run in runs]
    body = [[f"seed {seed}", number(each.separation), number(share)]
            for seed, (each, share) in enumerate(zip(maps, chances, strict=True))]  # fmt: skip
    known = [each.separation for each in maps if each.separation is not None]
    body.append(["mean", number(statistics.fmean(known) if known else None), ""])
    header = ["", "between over within", "groupings at least as far apart"]
    note = (
        "Mean distance between the embeddings of tasks of different groups over that within a group: above 1, related "
        "tasks lie together. Beside it, of all ways to part the tasks into groups of these sizes, the share that lie "
        f"as far apart or farther. Groups: {'; '.join(f'{name}: {of}' for name, of in grouped(groups).items())}.\n"
    )
    nearest = [[task, *(each.neighbours[task][0] for each in maps)] for task in tasks]
    neighbours = ["task", *(f"nearest, seed {seed}" for seed in range(len(maps)))]
    return Report(
        f"Task embeddings on {lab.backbone.name}",
        [about(lab), markdown_table(header, body), note, markdown_table(neighbours, nearest)],
        {"separations": [each.separation for each in maps], "chances": chances,
         "maps": [each.to_json() for each in maps]},
        found.records,
        (),
        {"task-map": task_map_figure(maps[0])},
    )  # fmt: skip


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def grouped(groups: dict[str, str]) -> dict[str, str]:
    return {group: ", ".join(name for name, own in groups.items() if own == group) for group in groups.values()}


def chance(embeddings: dict[str, list[float]], groups: dict[str, str]) -> float | None:
    """The share of all groupings of the same sizes whose separation is at least that of these groups."""
    vectors = stacked({name: embeddings[name] for name in groups})
    distances = cdist(vectors, vectors)
    own = separation_of(distances, list(groups.values()))
    if own is None:
        return None
    every = [separation_of(distances, list(other)) or 0.0 for other in set(permutations(groups.values()))]
    return sum(value >= own - 1e-12 for value in every) / len(every)
