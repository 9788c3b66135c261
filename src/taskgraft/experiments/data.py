"""The tasks of the experiments: the papers' sets, judged by one metric each, at a size that a budget allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from taskgraft.experiments.names import Protocol
from taskgraft.tasks.benchmarks import BENCHMARKS, benchmark_named, load_benchmark
from taskgraft.tasks.task import Task

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")  # WNLI is left out, as in both papers
CLASSIFICATION = tuple(row.name.split("/")[1] for row in BENCHMARKS.values() if row.group == "classification")
TRANSFER = ("scitail", "cb", "boolq", "imdb", "yelp_polarity", "paws", "trec")  # HyperFormer's, for new tasks
SQUAD = "squad"
METRICS = {"mrpc": "f1", "qqp": "f1", "stsb": "spearman"}  # one each, as Houlsby et al. report them


def load(name: str, data: Path | None, rows: int | None, protocol: Protocol = "houlsby", draw: int = 0) -> Task:
    """A task whose test rows chose nothing, judged as one of the papers does.

    Houlsby et al.: validation rows are held out of train; for GLUE and SQuAD the test rows are the published validation
    rows, since the labels of the test rows are hidden; one metric each. HyperFormer: the published validation rows of
    small tasks are halved into validation and test; all metrics of GLUE.
    """
    task = load_benchmark(name, data, whole_dev=protocol == "houlsby")
    if protocol == "houlsby" and name in METRICS:
        task = replace(task, metrics=(METRICS[name],))
    return capped(task, rows, draw)


def judged_on(task: Task, rows: int) -> Task:
    """The same with at most so many test rows, drawn at random, always the same ones."""
    test = task.split("test")
    kept = np.sort(np.random.RandomState(0).permutation(test.num_rows)[:rows])
    return replace(task, splits={**task.splits, "test": test.take(pa.array(kept))})


def is_at_hand(name: str, data: Path | None) -> bool:
    benchmark = benchmark_named(name)
    return benchmark is not None and benchmark.is_at_hand(data)


def capped(task: Task, rows: int | None, draw: int = 0) -> Task:
    """At most so many training rows, drawn at random, for one draw always the same ones."""
    train = task.split("train")
    if rows is None or train.num_rows <= rows:
        return task
    # RandomState and not a Generator: its draws are promised never to change.
    kept = np.sort(np.random.RandomState(draw).permutation(train.num_rows)[:rows])
    note = f"{rows:,} of {train.num_rows:,} training rows are used, drawn at random."
    return replace(task, splits={**task.splits, "train": train.take(pa.array(kept))}, notes=(*task.notes, note))
