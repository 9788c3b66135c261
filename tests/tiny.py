"""A tiny backbone with a made tokenizer, in memory or in a folder, and small tasks that it can learn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import taskgraft as tg
from taskgraft.tasks.task import schema_of

from families import SMALL, T5

GOOD, BAD = ["good", "lovely"], ["bad", "awful"]
FILLER = ["the", "a", "film", "shop", "phone", "was", "is", "very", "and", "we", "saw", "it", "today", "again"]
NUMBERS = [str(n) for n in range(10)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def tokenizer() -> Any:
    words = [*SPECIAL, *GOOD, *BAD, *FILLER, *NUMBERS]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=40,
    )


def backbone(folder: Path | None = None) -> tg.Backbone:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**SMALL)).eval()
    torch.nn.init.normal_(model.embeddings.word_embeddings.weight)  # words that differ more than their positions do
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return tg.Backbone(model, tokenizer(), "tiny")


def writer() -> tg.Backbone:
    torch.manual_seed(0)
    return tg.Backbone(hf.T5ForConditionalGeneration(hf.T5Config(**T5)).eval(), tokenizer(), "tiny-t5")


def sentence(draw: random.Random, words: list[str]) -> str:
    chosen = [draw.choice(FILLER) for _ in range(draw.randint(1, 5))]
    for word in words:
        chosen.insert(draw.randint(0, len(chosen)), word)
    return " ".join(chosen)


def rows(kind: str, count: int, seed: int = 0) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Rows of a task of this kind whose answer can be read off one word, and its labels."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for i in range(count):
        good = draw.random() < 0.5
        word = draw.choice(GOOD if good else BAD)
        if kind == "classification":
            found.append({"text": sentence(draw, [word]), "label": int(good)})
        elif kind == "multilabel":
            label = [n for n in range(2) if draw.random() < 0.5]
            found.append({"text": sentence(draw, [(GOOD, BAD)[n][0] for n in label]), "label": label})
        elif kind == "regression":
            found.append({"text": sentence(draw, [word]), "label": 500.0 + (20.0 if good else -20.0)})
        elif kind == "tokens":
            words = sentence(draw, [word]).split()
            found.append({"text": words, "label": [0 if w in GOOD else 1 if w in BAD else 2 for w in words]})
        elif kind == "spans":
            text = sentence(draw, [word])
            answer = [{"start": text.index(word), "text": word}]
            found.append({"text": "it was", "pair": text, "label": answer, "id": str(i)})
        else:
            found.append({"text": sentence(draw, [word]), "label": "good" if good else "bad"})
    labels = {
        "classification": ("bad", "good"),
        "multilabel": ("good", "bad"),
        "tokens": ("B-good", "B-bad", "O"),
    }.get(kind, ())
    return found, labels


METRICS = {
    "classification": "accuracy",
    "multilabel": "micro_f1",
    "regression": "pearson",
    "tokens": "entity_f1",
    "spans": "squad_f1",
    "text": "exact_match",
}


def task(kind: str = "classification", count: int = 240, name: str = "mood", seed: int = 0) -> tg.Task:
    schema = schema_of(kind, False)
    splits = {}
    labels: tuple[str, ...] = ()
    for number, split in enumerate(("train", "validation", "test")):
        found, labels = rows(kind, count if split == "train" else count // 3, seed=10 * seed + number)
        splits[split] = pa.Table.from_pylist(found, schema)
    return tg.Task(name, kind, labels, (METRICS[kind],), splits)  # type: ignore[arg-type]
