"""Six made tasks that share structure, on a tiny T5: HyperFormer++ learns them all, and a seventh from 16 examples.

A sentence holds one word that carries a sign, among words that carry none. A task says the sign, for some of those
words; half of the tasks say the opposite. The tiny T5 is first taught to write such a word out, as a pretrained one
would know words. Chance is 0.5 everywhere: both answers are equally frequent.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import taskgraft as tg
from taskgraft.tasks.task import schema_of
from taskgraft.training.few_shot import examples, few_shot

from families import T5

PLUS, MINUS = [f"plus{i}" for i in range(6)], [f"minus{i}" for i in range(6)]
PLAIN = [f"word{i}" for i in range(12)]
WORDS = ["<pad>", "</s>", "<unk>", *PLUS, *MINUS, *PLAIN, *"0123456789", "text:"]
CHANCE, LEARNED, MARGIN = 0.5, 0.9, 0.05
SEEDS = range(5)


def sentence(draw: random.Random, word: str) -> str:
    words = [draw.choice(PLAIN) for _ in range(draw.randint(2, 5))]
    words.insert(draw.randint(0, len(words)), word)
    return " ".join(words)


def signs(name: str, numbers: list[int], opposite: bool, seed: int) -> tg.Task:
    """The task of telling the sign of these words."""
    draw, splits = random.Random(seed), {}
    for split, count in (("train", 160), ("validation", 100), ("test", 100)):
        rows = []
        for row in range(count):
            positive = row % 2 == 1
            word = draw.choice(PLUS if positive else MINUS)[:-1] + str(draw.choice(numbers))
            rows.append({"text": sentence(draw, word), "label": int(positive != opposite)})
        splits[split] = pa.Table.from_pylist(rows, schema_of("classification", False))
    return tg.Task(name, "classification", ("no", "yes"), ("accuracy",), splits)


@pytest.fixture(scope="module")
def backbone() -> tg.Backbone:
    """A tiny T5 that has learned to write out the word that carries a sign, and how many words there are."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer: Any = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=40
    )
    torch.manual_seed(0)
    config = hf.T5Config(**{**T5, "vocab_size": len(WORDS), "d_model": 64, "d_ff": 128})
    model: Any = hf.T5ForConditionalGeneration(config)
    draw, steps = random.Random(0), 300
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40) * (1 - step / steps))
    for _ in range(steps):
        chosen = [draw.choice(PLUS + MINUS) for _ in range(64)]
        texts = [sentence(draw, word) for word in chosen]
        inputs = tokenizer([f"text: {text}" for text in texts], padding=True, return_tensors="pt")
        answers = [f"{word} {len(text.split())}" for word, text in zip(chosen, texts, strict=True)]
        labels = tokenizer(answers, padding=True, return_tensors="pt")["input_ids"]
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        model(input_ids=ids, attention_mask=mask, labels=labels.masked_fill(labels == 0, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return tg.Backbone(model.eval(), tokenizer, "tiny-t5")


@pytest.fixture(scope="module")
def run(backbone: tg.Backbone) -> Any:
    tasks = [signs(f"task{i}", [i, (i + 1) % 6], opposite=i >= 3, seed=i) for i in range(6)]
    method = tg.HyperFormer(shared=True, size=8)
    return tg.fit(backbone, tasks, method, epochs=8, batches="mixed", learning_rate=3e-3, progress=False)


def test_every_task_is_learned(run: Any) -> None:
    scores = {name: found["score"] for name, found in run.results.items()}
    assert min(scores.values()) >= LEARNED > CHANCE, scores
    assert run.score == pytest.approx(statistics.mean(scores.values()))


def test_greedy_decoding_says_the_same_as_the_likeliest_label(backbone: tg.Backbone, run: Any) -> None:
    graft = run.grafts["task3"]
    texts = signs("task3", [3, 4], opposite=True, seed=8).splits["test"]["text"].to_pylist()
    likeliest = [row.answer for row in tg.predict(backbone, graft, texts)]
    settings = {**graft.training["settings"], "decoding": "greedy"}
    written = dataclasses.replace(graft, training={**graft.training, "settings": settings})
    assert [row.answer for row in tg.predict(backbone, written, texts)] == likeliest
    assert {0, 1} == set(likeliest)


def test_a_related_task_is_learned_from_16_examples_better_than_by_a_fresh_adapter(
    backbone: tg.Backbone, run: Any
) -> None:
    """Its words are those of several tasks: none can do it alone. The fresh adapter has the better of two rates."""
    new = signs("new", [0, 1, 2, 3], opposite=False, seed=99)
    found = few_shot(backbone, run.joint, new, 16, seeds=SEEDS, epochs=60, progress=False)
    assert found.rows == 16 and found.score is not None
    starts = [losses[str(like)] for like, losses in zip(found.like, found.losses, strict=True)]
    assert max(starts) < 0.1 < min(max(losses.values()) for losses in found.losses), "it starts from one that fits"
    fresh = []
    for rate in (2e-3, 1e-2):
        scores = []
        for seed in SEEDS:
            few = dataclasses.replace(new, splits={"train": examples(new, 16, seed), "test": new.splits["test"]})
            alone = tg.fit(backbone, few, tg.Adapter(size=8), seed=seed, epochs=60, learning_rate=rate, progress=False)
            scores.append(alone.score)
        fresh.append(statistics.mean(score for score in scores if score is not None))
    assert found.score >= max(fresh) + MARGIN, (found.score, fresh)
    assert found.score >= LEARNED
