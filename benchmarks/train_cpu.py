"""Training throughput on a CPU: the bundled tasks at default settings, beside AdapterHub's `adapters` and its Trainer.

Both train adapters of 64 units after attention and feed-forward of all-MiniLM-L6-v2 in float32, batches of 16, one
epoch over the first `--rows` training rows of each task, no validation, after a warm-up in the same process. The peer
pads dynamically (DataCollatorWithPadding) or to 128 tokens, as its own examples do. The variants take turns, each in a
process of its own, for `--rounds` rounds; ratios are taken within a round. `--scores` also trains review_sentiment
whole, with the same number of epochs (ours at its default rate, the peer at 1e-3), and gives the test accuracy.

    python benchmarks/train_cpu.py --peer-python peer/bin/python --json train_cpu.json --scores
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

TASKS = ("review_sentiment", "tweet_mood", "complaint_routing")
VARIANTS = ("taskgraft", "adapters, dynamic padding", "adapters, padded to 128")
BATCH, LENGTH, SIZE, PEER_RATE, WARM_UP = 16, 128, 64, 1e-3, 64
SCORED = "review_sentiment"


def ours(order: dict[str, Any]) -> dict[str, Any]:
    """Rows a second for each task, or the score of one; everything else as `tg.fit` has it."""
    import pyarrow as pa

    import taskgraft as tg

    backbone = tg.load_backbone(order["backbone"])

    def task(name: str, rows: int | None) -> tg.Task:
        data = order["tasks"][name]
        schema = pa.schema([("text", pa.string()), ("label", pa.float64() if data["regression"] else pa.int64())])
        columns = {"text": data["text"][:rows], "label": data["label"][:rows]}
        splits = {"train": pa.table(columns, schema)}
        if rows is None:
            splits["test"] = pa.table({"text": data["test_text"], "label": data["test_label"]}, schema)
        kind: Any = "regression" if data["regression"] else "classification"
        return tg.Task(name, kind, tuple(data["labels"]), ("pearson" if data["regression"] else "accuracy",), splits)

    if order["score"]:
        run = tg.fit(backbone, task(SCORED, None), epochs=order["epochs"], batch_size=BATCH)
        return {"score": run.score}
    found = {}
    for name in TASKS:
        tg.fit(backbone, task(name, WARM_UP), epochs=1, batch_size=BATCH)
        run = tg.fit(backbone, task(name, order["rows"]), epochs=1, batch_size=BATCH)
        found[name] = order["rows"] / run.seconds
    return found


def peer(order: dict[str, Any]) -> dict[str, Any]:
    """The same under `adapters`: AdapterTrainer, its own double_seq_bn with 64 units, its own heads."""
    import numpy as np
    import torch
    from adapters import AdapterTrainer, BertAdapterModel, DoubleSeqBnConfig
    from transformers import AutoTokenizer, DataCollatorWithPadding, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(order["backbone"])
    padded = order["variant"].endswith("128")

    def rows(texts: list[str], labels: list[Any]) -> list[dict[str, Any]]:
        padding = "max_length" if padded else False
        encoded = tokenizer(texts, truncation=True, max_length=LENGTH, padding=padding)
        return [{**{key: encoded[key][i] for key in encoded}, "labels": label} for i, label in enumerate(labels)]

    def trainer(name: str, count: int | None, epochs: int, folder: str) -> Any:
        data = order["tasks"][name]
        torch.manual_seed(0)
        model = BertAdapterModel.from_pretrained(order["backbone"])
        model.add_adapter("task", config=DoubleSeqBnConfig(reduction_factor=model.config.hidden_size / SIZE))
        model.add_classification_head("task", num_labels=1 if data["regression"] else len(data["labels"]))
        model.train_adapter("task")
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=2 * BATCH,
            num_train_epochs=epochs,
            learning_rate=PEER_RATE,
            warmup_ratio=0.1,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return AdapterTrainer(
            model,
            arguments,
            train_dataset=rows(data["text"][:count], data["label"][:count]),
            data_collator=DataCollatorWithPadding(tokenizer),
        )

    with tempfile.TemporaryDirectory() as folder:
        if order["score"]:
            made = trainer(SCORED, None, order["epochs"], folder)
            made.train()
            data = order["tasks"][SCORED]
            logits = made.predict(rows(data["test_text"], data["test_label"])).predictions
            return {"score": float(np.mean(logits.argmax(-1) == np.asarray(data["test_label"])))}
        found = {}
        for name in TASKS:
            trainer(name, WARM_UP, 1, folder).train()
            made = trainer(name, order["rows"], 1, folder)
            found[name] = order["rows"] / made.train().metrics["train_runtime"]
        return found


def prepare() -> dict[str, Any]:
    """The tasks' training and test rows as plain lists, so that both sides train on the same ones."""
    from importlib.resources import files

    import taskgraft as tg

    tasks = {}
    for name in TASKS:
        task = tg.load_task(str(files("taskgraft") / "data" / f"{name}.csv"))
        train, test = task.splits["train"], task.splits["test"]
        tasks[name] = {
            "regression": task.kind == "regression",
            "labels": list(task.labels),
            "text": train["text"].to_pylist(),
            "label": train["label"].to_pylist(),
            "test_text": test["text"].to_pylist(),
            "test_label": test["label"].to_pylist(),
        }
    return tasks


def run_variant(variant: str, python: str, order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**order, "variant": variant}, file)
        file.flush()
        command = [python, __file__, "--work", file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python that has `adapters` 1.3.0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=960)
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--epochs", type=int, default=4, help="of the runs for --scores")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        order = json.loads(arguments.work.read_text())
        print(json.dumps((ours if order["variant"] == VARIANTS[0] else peer)(order)))
        return
    if arguments.peer_python is None:
        parser.error("--peer-python is needed: python -m venv peer && peer/bin/pip install torch adapters==1.3.0")
    from taskgraft.backbones.load import embedded_folder

    print(f"load before the start: {os.getloadavg()[0]:.2f}; {platform.processor() or platform.machine()}, "
          f"{os.cpu_count()} cores", flush=True)  # fmt: skip
    order = {
        "backbone": str(embedded_folder()),
        "tasks": prepare(),
        "rows": arguments.rows,
        "epochs": arguments.epochs,
        "score": False,
    }
    pythons = {variant: arguments.peer_python if "adapters" in variant else sys.executable for variant in VARIANTS}
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(arguments.rounds):
        turn = VARIANTS[number % 3 :] + VARIANTS[: number % 3]
        rounds.append({variant: run_variant(variant, pythons[variant], order) for variant in turn})
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", flush=True)
    record: dict[str, Any] = {"rows": arguments.rows, "rounds": rounds, "ratios": {}}
    for name in TASKS:
        for variant in VARIANTS[1:]:
            ratio = median(found[VARIANTS[0]][name] / found[variant][name] for found in rounds)
            record["ratios"].setdefault(variant, {})[name] = ratio
            own = median(found[VARIANTS[0]][name] for found in rounds)
            print(f"{name:18s} {own:6.1f} rows/s, {ratio:.2f}x {variant}")
    if arguments.scores:
        order["score"] = True
        record["scores"] = {v: run_variant(v, pythons[v], order)["score"] for v in VARIANTS[:2]}
        print(f"{SCORED}, {arguments.epochs} epochs: {record['scores']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
