"""Does dropout in the frozen part pay? Adapters of size 64 on the embedded default, several places for dropout.

Every run: 5 epochs of batches of 32, AdamW at 1e-3 with 10 % warm-up and linear decay, the score of the last epoch on
the evaluation split (no selection). GLUE tasks from a folder of parquet files, the three small tasks from CSV files.

    python experiments/dropout.py --backbone FOLDER --glue DATA/glue --csv DEMO --json results.json [--workers 12]
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing as mp
import statistics
import time
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "backbone dropout on": {"backbone_dropout": True},
    "on, but not in the attention": {"backbone_dropout": True, "quiet_attention": True},
    "off": {},
    "off, branch 0.1": {"dropout": 0.1},
    "off, branch 0.3": {"dropout": 0.3},
    "off, head 0.3": {"head_dropout": 0.3},
    "off, embeddings 0.1": {"embedding_dropout": 0.1},
}
GLUE = {  # columns, rows of train, score
    "cola": (("sentence",), 8551, "matthews"),
    "mrpc": (("sentence1", "sentence2"), 3668, "f1"),
    "rte": (("sentence1", "sentence2"), 2490, "accuracy"),
    "stsb": (("sentence1", "sentence2"), 5749, "pearson"),
    "sst2": (("sentence",), 8000, "accuracy"),
    "mnli": (("premise", "hypothesis"), 8000, "accuracy"),
}
CSV = {"review_sentiment": "accuracy", "tweet_mood": "pearson", "complaint_routing": "accuracy"}


def read(task: str, glue: Path, csv_folder: Path) -> tuple[list[Any], list[Any], list[Any], list[Any], str]:
    """Texts (or pairs) and labels of train and evaluation, and the score's name."""
    if task in CSV:
        rows = list(csv.DictReader((csv_folder / f"{task}.csv").open(encoding="utf-8")))
        names = sorted({row["label"] for row in rows})
        label = float if CSV[task] == "pearson" else names.index
        parts = [[row for row in rows if row["split"] == split] for split in ("train", "test")]
        (a, x), (b, y) = [([row["text"] for row in part], [label(row["label"]) for row in part]) for part in parts]
        return a, x, b, y, CSV[task]
    import pyarrow.parquet as pq

    columns, count, score = GLUE[task]
    tables = []
    for split in ("train", "validation_matched" if task == "mnli" else "validation"):
        table = pq.read_table(glue / task / f"{split}.parquet").to_pylist()
        table = table[:count] if split == "train" else table[:2000]
        tables.append(([tuple(row[c] for c in columns) for row in table], [row["label"] for row in table]))
    return *tables[0], *tables[1], score


def score_of(name: str, predictions: Any, labels: list[Any]) -> float:
    from scipy.stats import pearsonr
    from sklearn.metrics import f1_score, matthews_corrcoef

    if name == "pearson":
        return float(pearsonr(predictions, labels)[0])
    if name == "matthews":
        return float(matthews_corrcoef(labels, predictions))
    if name == "f1":
        return float(f1_score(labels, predictions))
    return sum(int(p == y) for p, y in zip(predictions, labels, strict=True)) / len(labels)


def one_run(backbone: Any, data: Any, variant: dict[str, Any], seed: int, epochs: int) -> float:
    import torch
    from transformers import get_linear_schedule_with_warmup

    import taskgraft as tg

    texts, labels, eval_texts, eval_labels, score = data
    options = dict(variant)
    quiet, embedding = options.pop("quiet_attention", False), options.pop("embedding_dropout", 0.0)
    model = backbone.model
    method = tg.Adapter(size=64, pooling="mean", **{"backbone_dropout": False, **options})
    head = tg.Head("regression") if score == "pearson" else max(labels) + 1
    tg.graft(model, method, {"task": head}, seed=seed)
    if quiet:
        for layer in model.encoder.layer:
            layer.attention.self.dropout.p = 0.0
    before = model.embeddings.dropout.p
    if embedding:
        model.embeddings.dropout.p = embedding
    torch.manual_seed(seed)
    optimizer = tg.AdamW(model, lr=1e-3, clip_norm=1.0)
    steps = epochs * ((len(texts) + 31) // 32)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    device = next(model.parameters()).device

    def tensors(part: list[Any]) -> dict[str, Any]:
        columns = list(zip(*part, strict=True)) if isinstance(part[0], tuple) else [part]
        encoded = backbone.tokenizer(
            *map(list, columns), padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        return {key: value.to(device) for key, value in encoded.items()}

    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
        for start in range(0, len(order), 32):
            rows = order[start : start + 32]
            target = torch.tensor([labels[i] for i in rows], device=device)
            optimizer.zero_grad()
            model(**tensors([texts[i] for i in rows]), labels=target).loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    found: list[Any] = []
    with torch.inference_mode():
        for start in range(0, len(eval_texts), 128):
            logits = model(**tensors(eval_texts[start : start + 128])).logits
            found += (logits[:, 0] if score == "pearson" else logits.argmax(-1)).tolist()
    model.embeddings.dropout.p = before
    tg.ungraft(model)
    if quiet:
        for layer in model.encoder.layer:
            layer.attention.self.dropout.p = 0.1
    return score_of(score, found, eval_labels)


def work(arguments: Any, jobs: Any, results: Any) -> None:
    import torch

    import taskgraft as tg

    torch.set_num_threads(1)
    backbone = tg.load_backbone(arguments.backbone, dtype=torch.float32)
    backbone.model.to(arguments.device)
    data: dict[str, Any] = {}
    while (job := jobs.get()) is not None:
        task, variant, seed = job
        data[task] = data.get(task) or read(task, arguments.glue, arguments.csv)
        started = time.perf_counter()
        try:
            score = one_run(backbone, data[task], VARIANTS[variant], seed, arguments.epochs)
        except Exception as error:
            results.put({"task": task, "variant": variant, "seed": seed, "error": repr(error)})
            raise
        seconds = time.perf_counter() - started
        results.put({"task": task, "variant": variant, "seed": seed, "score": score, "seconds": seconds})


def table(runs: list[dict[str, Any]]) -> str:
    tasks = [task for task in (*CSV, *GLUE) if any(run["task"] == task for run in runs)]
    lines = ["| dropout | " + " | ".join(tasks) + " | mean |", "|---" * (len(tasks) + 2) + "|"]
    for variant in VARIANTS:
        cells, means = [], []
        for task in tasks:
            scores = [100 * run["score"] for run in runs if (run["task"], run["variant"]) == (task, variant)]
            if scores:
                means.append(statistics.mean(scores))
                cells.append(f"{means[-1]:.1f} ± {statistics.stdev(scores) if len(scores) > 1 else 0:.1f}")
            else:
                cells.append("")
        if means:
            lines.append(f"| {variant} | " + " | ".join(cells) + f" | {statistics.mean(means):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", type=Path)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=[*CSV, *GLUE])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this long")
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    todo = [(task, v, seed) for seed in range(arguments.seeds) for task in arguments.tasks for v in VARIANTS]
    processes = [context.Process(target=work, args=(arguments, jobs, results)) for _ in range(arguments.workers)]
    for process in processes:
        process.start()
    started, runs, waiting = time.perf_counter(), [], 0
    while todo or waiting:
        while todo and waiting < 2 * arguments.workers and time.perf_counter() - started < arguments.seconds:
            jobs.put(todo.pop(0))
            waiting += 1
        if not waiting:
            break
        runs.append(results.get(timeout=600))
        waiting -= 1
        arguments.json.write_text(json.dumps({"runs": runs, "left_out": todo}, indent=1))
    for _ in processes:
        jobs.put(None)
    for process in processes:
        process.join(30)
    print(table([run for run in runs if "score" in run]))
    print(f"{len(runs)} runs, {len(todo)} left out, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
