"""Is the search without a backbone ahead on long texts because it reads all of them?

The search of `taskgraft reproduce classification` again, on texts cut to the tokens that the backbone reads.

    python experiments/first_tokens.py --data-dir data --json first_tokens.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from taskgraft import automl, load_backbone
from taskgraft.experiments.data import load
from taskgraft.experiments.names import EXPERIMENTS
from taskgraft.tasks.task import Task
from taskgraft.training.settings import TEXT_LENGTH

TASKS = ("20_newsgroups", "customer_complaints")


def cut(task: Task, tokenizer: Any) -> Task:
    """The task with each text up to the last token that fits."""

    def first(text: str) -> str:
        ends = tokenizer(text, truncation=True, max_length=TEXT_LENGTH, return_offsets_mapping=True)["offset_mapping"]
        return text[: max(end for _, end in ends)]

    splits = {}
    for split, table in task.splits.items():
        texts = pa.array([first(text) for text in table["text"].to_pylist()], pa.string())
        splits[split] = table.set_column(table.schema.get_field_index("text"), "text", texts)
    return replace(task, splits=splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = load_backbone().tokenizer
    found: dict[str, Any] = {}
    for name in TASKS:
        whole = load(name, options.data_dir, EXPERIMENTS["classification"].rows)
        task = cut(whole, tokenizer)
        lengths = [sum(map(len, each.split("train")["text"].to_pylist())) for each in (task, whole)]
        scores = [automl(task, seed=seed).test["accuracy"] for seed in range(options.seeds)]
        found[name] = {"accuracy": scores, "mean": statistics.fmean(scores), "letters_kept": lengths[0] / lengths[1]}
        print(name, found[name], flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
