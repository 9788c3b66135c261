"""Does dropout in the frozen part pay? Adapters of size 64 on the embedded default, several places for dropout.

For each place, every task and seed is a graft of its own and all of them train in one pass: 32 rows of each in one
batch. 5 epochs, AdamW at 1e-3 with 10 % warm-up and linear decay, clipped at 1; the score of the last step on the
evaluation split (no selection). GLUE tasks from a folder of parquet files, the three small ones from CSV files.

    python experiments/dropout.py --backbone FOLDER --glue DATA/glue --csv DEMO --json results.json
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr
from sklearn.metrics import f1_score, matthews_corrcoef

import taskgraft as tg

PLACES: dict[str, dict[str, Any]] = {
    "on": {"backbone_dropout": True},
    "hidden states only": {"backbone_dropout": True, "attention": 0.0},
    "off": {},
    "embeddings 0.1": {"embeddings": 0.1},
    "branch 0.1": {"dropout": 0.1},
    "branch 0.3": {"dropout": 0.3},
    "embeddings 0.1, branch 0.1": {"embeddings": 0.1, "dropout": 0.1},
    "embeddings 0.2, branch 0.2": {"embeddings": 0.2, "dropout": 0.2},
}
GLUE = {  # columns, score
    "cola": (("sentence",), "matthews"),
    "mrpc": (("sentence1", "sentence2"), "f1"),
    "rte": (("sentence1", "sentence2"), "accuracy"),
    "stsb": (("sentence1", "sentence2"), "pearson"),
    "sst2": (("sentence",), "accuracy"),
    "mnli": (("premise", "hypothesis"), "accuracy"),
}
CSV = {"review_sentiment": "accuracy", "tweet_mood": "pearson", "complaint_routing": "accuracy"}
BATCH = 32


class Data:
    """A task's token ids and labels, train and evaluation, on the device."""

    def __init__(self, task: str, arguments: Any, tokenizer: Any) -> None:
        train, evaluation, self.score = read(task, arguments)
        self.train = encode(tokenizer, train[: arguments.rows], arguments.device)
        self.evaluation = encode(tokenizer, evaluation[:2000], arguments.device)
        labels = torch.cat([self.train["labels"], self.evaluation["labels"]])
        self.head: Any = tg.Head("regression") if self.score == "pearson" else int(labels.max()) + 1
        self.steps = arguments.epochs * (len(self.train["labels"]) // BATCH)


def read(task: str, arguments: Any) -> tuple[list[Any], list[Any], str]:
    if task in CSV:
        rows = list(csv.DictReader((arguments.csv / f"{task}.csv").open(encoding="utf-8")))
        names = sorted({row["label"] for row in rows})
        label = float if CSV[task] == "pearson" else names.index
        train, test = (
            [((row["text"],), label(row["label"])) for row in rows if row["split"] == split]
            for split in ("train", "test")
        )
        return train, test, CSV[task]
    import pyarrow.parquet as pq

    columns, score = GLUE[task]
    splits = ("train", "validation_matched" if task == "mnli" else "validation")
    train, test = (
        [
            (tuple(row[c] for c in columns), row["label"])
            for row in pq.read_table(arguments.glue / task / f"{split}.parquet").to_pylist()
        ]
        for split in splits
    )
    return train, test, score


def encode(tokenizer: Any, rows: list[Any], device: str) -> dict[str, torch.Tensor]:
    columns = [list(column) for column in zip(*(texts for texts, _ in rows), strict=True)]
    encoded = tokenizer(*columns, padding="max_length", truncation=True, max_length=128, return_tensors="pt")
    labels = torch.tensor([float(label) for _, label in rows])
    return {**{key: value.to(device) for key, value in encoded.items()}, "labels": labels.to(device)}


def batch_of(parts: list[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.cat([data[key][rows] for data, rows in parts]) for key in parts[0][0]}
    longest = int(batch["attention_mask"].sum(1).max())
    return {key: value[:, :longest] if value.dim() == 2 else value for key, value in batch.items()}


def score_of(name: str, predictions: list[float], labels: list[float]) -> float:
    if name == "pearson":
        return float(pearsonr(predictions, labels)[0])
    if name == "matthews":
        return float(matthews_corrcoef(labels, predictions))
    if name == "f1":
        return float(f1_score(labels, predictions))
    return statistics.mean(p == y for p, y in zip(predictions, labels, strict=True))


def train_all(backbone: Any, tasks: dict[str, Data], place: dict[str, Any], arguments: Any) -> list[dict[str, Any]]:
    """One pass: a graft for every task and seed, each with its own order of rows and its own schedule."""
    options = dict(place)
    attention, embeddings = options.pop("attention", None), options.pop("embeddings", None)
    model = backbone.model
    runs = {f"{task}-{seed}": (task, seed) for task in tasks for seed in range(arguments.seeds)}
    method = tg.Adapter(size=64, pooling="mean", head_dropout=0.1, **{"backbone_dropout": False, **options})
    tg.graft(model, method, {name: tasks[task].head for name, (task, _) in runs.items()})
    if attention is not None:
        for layer in model.encoder.layer:
            layer.attention.self.dropout.p = attention
    if embeddings is not None:
        model.embeddings.dropout.p = embeddings
    optimizer = tg.AdamW(model, lr=1e-3, clip_norm=1.0)
    place_of = {name: optimizer.owners.index(name) for name in runs}
    torch.manual_seed(0)
    model.train()
    for step in range(max(data.steps for data in tasks.values())):
        now = [name for name, (task, _) in runs.items() if step < tasks[task].steps]
        parts = []
        for name in now:
            task, seed = runs[name]
            data = tasks[task]
            per_epoch = len(data.train["labels"]) // BATCH
            epoch, at = divmod(step, per_epoch)
            if at == 0:
                order = torch.Generator().manual_seed(1000 * seed + epoch)
                data.__dict__[name] = torch.randperm(len(data.train["labels"]), generator=order).to(arguments.device)
            parts.append((data.train, data.__dict__[name][at * BATCH : (at + 1) * BATCH]))
            warm = data.steps // 10
            rate = (step + 1) / warm if step < warm else (data.steps - step) / (data.steps - warm)
            optimizer.rate[place_of[name]] = rate
        batch = batch_of(parts)
        labels = batch.pop("labels")
        optimizer.zero_grad()
        names = [name for name in now for _ in range(BATCH)]
        with tg.rows(model, names), torch.autocast(arguments.device, torch.bfloat16):
            output = model(**batch)
        # The sum over grafts of each one's own mean, so that each trains as if alone.
        (tg.loss(model, output, labels, rows=names, reduction="sum") / BATCH).backward()
        optimizer.step()
    model.eval()
    results = []
    for name, (task, seed) in runs.items():
        data, found = tasks[task], []
        with torch.inference_mode(), tg.rows(model, name):
            for start in range(0, len(data.evaluation["labels"]), 256):
                rows = torch.arange(start, min(start + 256, len(data.evaluation["labels"])), device=arguments.device)
                batch = batch_of([(data.evaluation, rows)])
                batch.pop("labels")
                logits = model(**batch).logits
                found += (logits[:, 0] if data.score == "pearson" else logits.argmax(-1)).tolist()
        score = score_of(data.score, found, data.evaluation["labels"].tolist())
        results.append({"task": task, "seed": seed, "score": score})
    tg.ungraft(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = model.config.hidden_dropout_prob
    return results


def table(runs: list[dict[str, Any]], tasks: list[str]) -> str:
    lines = ["| dropout | " + " | ".join(tasks) + " | mean |", "|---" * (len(tasks) + 2) + "|"]
    for place in PLACES:
        cells, means = [], []
        for task in tasks:
            scores = [100 * run["score"] for run in runs if (run["task"], run["place"]) == (task, place)]
            if scores:
                means.append(statistics.mean(scores))
                cells.append(f"{means[-1]:.1f} ± {statistics.stdev(scores) if len(scores) > 1 else 0:.1f}")
        if means:
            lines.append(f"| {place} | " + " | ".join(cells) + f" | {statistics.mean(means):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", type=Path)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000, help="training rows of a task at most")
    parser.add_argument("--tasks", nargs="*", default=[*CSV, *GLUE])
    parser.add_argument("--places", nargs="*", default=list(PLACES))
    arguments = parser.parse_args()
    backbone = tg.load_backbone(arguments.backbone, dtype=torch.float32)
    backbone.model.to(arguments.device)
    tasks = {task: Data(task, arguments, backbone.tokenizer) for task in arguments.tasks}
    runs: list[dict[str, Any]] = []
    for place in arguments.places:
        started = time.perf_counter()
        runs += [{"place": place, **run} for run in train_all(backbone, tasks, PLACES[place], arguments)]
        print(f"{place}: {time.perf_counter() - started:.0f} s", flush=True)
        record = {"epochs": arguments.epochs, "rows": arguments.rows, "seeds": arguments.seeds, "runs": runs}
        arguments.json.write_text(json.dumps(record, indent=1))
    print(table(runs, arguments.tasks))


if __name__ == "__main__":
    main()
