"""Which tasks' learned embeddings lie together (Karimi Mahabadi et al., Figure 3)."""

from __future__ import annotations

import statistics

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Job, Lab
from taskgraft.experiments.report import Report, about
from taskgraft.experiments.study import TOGETHER
from taskgraft.reports.tables import markdown_table
from taskgraft.reports.taskmap import task_map, task_map_figure

TASKS = GLUE
GROUPS = {
    "mnli": "inference", "rte": "inference", "qnli": "inference",
    "mrpc": "paraphrase", "qqp": "paraphrase", "stsb": "paraphrase",
    "cola": "one sentence", "sst2": "one sentence",
}  # fmt: skip


def run(lab: Lab) -> Report:
    """The map of HyperFormer++ as `hyper-glue` trains it, one for each seed; the figure is the first seed's."""
    tasks = tuple(lab.chosen(TASKS))
    groups = {name: GROUPS[name] for name in tasks}
    seeds = range(lab.setup.seeds)
    jobs = [Job(TOGETHER, company.hyperformer(lab), lab.settings_together(company.PAPER_RATE, None, seed), tasks)
            for seed in seeds]  # fmt: skip
    found = lab.run(jobs)
    maps = [task_map(found[job]["embeddings"], groups=groups) for job in jobs]
    separations = [each.separation for each in maps]
    known = [value for value in separations if value is not None]
    nearest = [[task, *(each.neighbours[task][0] for each in maps)] for task in tasks]
    said = f"{statistics.fmean(known):.3f}" if known else "not to be said of so few tasks"
    each_said = ", ".join("-" if value is None else f"{value:.3f}" for value in separations)
    sentence = (
        f"Mean distance between tasks of different groups over that within a group, mean over seeds: {said} (above 1: "
        f"related tasks lie together). Seeds: {each_said}.\n"
    )
    header = ["task", *(f"nearest, seed {seed}" for seed in seeds)]
    return Report(
        f"Task embeddings on {lab.backbone.name}",
        [about(lab), sentence, markdown_table(header, nearest)],
        {"separations": separations, "maps": [each.to_json() for each in maps], "sentence": sentence},
        list(found.values()),
        (),
        {"task-map": task_map_figure(maps[0])},
    )
