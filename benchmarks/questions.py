"""What the serving benchmark asks: a store of grafts, a stream of questions to them, and the answers that are right.

The grafts are not trained: weights at their initial values, moved by noise of std 0.02, cost what trained ones cost.
They have the heads of the three bundled tasks, in turn. Texts come from those tasks' test splits, in equal shares.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

import taskgraft as tg

TASKS = ("review_sentiment", "tweet_mood", "complaint_routing")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
Question = dict[str, Any]  # task, text, and the right answer as the server writes it


def bundled() -> list[tg.Task]:
    return [tg.load_task(str(files("taskgraft") / "data" / f"{name}.csv")) for name in TASKS]


def tiny_backbone(folder: Path) -> Path:
    """A BERT of random weights that spells what it reads, for runs whose times mean nothing."""
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    words = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)
    return folder


def make_store(folder: Path, backbone: tg.Backbone, count: int, size: int) -> list[str]:
    """Put so many grafts into a new store; their names, the kinds taking turns."""
    bases = []
    for task in bundled():
        kind: Any = task.kind
        head = tg.Head(kind, task.labels)
        model = tg.graft(backbone.model, tg.Adapter(size=size), {task.name: head}, seed=0)
        about = {"kind": task.kind, "labels": list(task.labels), "columns": dict(task.columns)}
        bases.append(tg.get_graft(model, task.name, task_record=about, backbone=backbone.name))
        tg.ungraft(model)
    store, draw = tg.Store(folder), torch.Generator().manual_seed(0)
    names = []
    for number in range(count):
        base = bases[number % len(bases)]
        names.append(f"{base.name}_{number:04d}")
        moved = {
            key: value + 0.02 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
            for key, value in base.tensors.items()
        }
        store.put(replace(base, name=names[-1], tensors=moved))
    return names


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of the three tasks, in equal shares and in an order that the seed decides."""
    draw = random.Random(seed)
    splits = [task.splits["test"]["text"].to_pylist() for task in bundled()]
    found = [draw.choice(splits[number % len(splits)]) for number in range(count)]
    draw.shuffle(found)
    return found


def questions(names: Sequence[str], asked: Sequence[str], seed: int = 0) -> list[tuple[str, str]]:
    """A task for each text, whatever task the text is from: with more tasks or fewer, the same texts are asked."""
    draw = random.Random(seed)
    return [(draw.choice(names), text) for text in asked]


def answered(engine: tg.Engine, asked: Sequence[tuple[str, str]]) -> list[Question]:
    """The questions with the engine's own answers, to which a server's are compared."""
    found = engine.predict(asked)
    return [{"task": t, "text": x, "answer": a.to_json()} for (t, x), a in zip(asked, found, strict=True)]


def pack(store: Path, name: str, target: Path) -> Path:
    """A graft of a store as the zip file that PUT takes; not compressed, since weights hardly shrink."""
    folder = tg.Store(store).locate(name).folder
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file in ("graft.json", "graft.safetensors"):
            archive.write(folder / file, file)
    return target
