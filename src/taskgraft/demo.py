"""`make demo`: two tasks on the embedded default backbone, a mixed batch, and what holds of it, checked as it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import taskgraft as tg

TEXTS: list[tuple[str | None, str]] = [
    ("tone", "Thanks, this is lovely."),
    ("topic", "The central bank left its rates where they were."),
    (None, "A row of no task goes through the bare backbone."),
    ("tone", "I have been waiting for three weeks now."),
    ("topic", "They won it in the last minute of extra time."),
]


def run(say: Callable[[str], Any]) -> None:
    backbone = tg.load_backbone()
    model = backbone.model
    say(f"Backbone: {backbone.name}, the embedded default (sha256 of its weights checked).\n")
    names = [name for name, _ in TEXTS]
    batch = backbone.tokenizer([text for _, text in TEXTS], padding=True, return_tensors="pt")
    with torch.inference_mode():
        bare = model(**batch).last_hidden_state

    tg.graft(model, tg.Adapter(size=64), {"tone": ["bad", "good"], "topic": ["business", "science", "sport", "world"]})
    say(tg.describe(model) + "\n")

    with torch.inference_mode():
        with tg.rows(model, names):
            mixed = model(**batch).logits
        say("One batch, a task per row (untrained heads; -inf where a row's own head has no class):")
        for (name, text), row in zip(TEXTS, mixed.tolist(), strict=True):
            say(f"  {name or 'bare':6s} {'  '.join(f'{value:+.3f}' for value in row):42s} {text}")
        worst = 0.0
        for i, name in enumerate(names):
            with tg.rows(model, [name]):
                if name is not None:
                    alone = model(**{key: value[i : i + 1] for key, value in batch.items()}).logits[0]
                    exists = torch.isfinite(alone)
                    worst = max(worst, float((alone[exists] - mixed[i][exists]).abs().max()))
        say(f"\nEach row alone gives the same logits: largest difference {worst:.1e}.")
        with tg.rows(model, None):
            say(
                f"With no task on any row the backbone's output is its own to the bit: {_yes(model(**batch)[0], bare)}."
            )

    with tempfile.TemporaryDirectory() as folder:
        store = tg.Store(folder)
        for name in tg.tasks_of(model):
            tg.get_graft(model, name).save(Path(folder) / name)
        for entry in store.list():
            say(f"Saved {entry.name!r}: {entry.parameters:,} parameters, {entry.bytes:,} bytes.")
        other = tg.load_backbone().model
        for name in store.names():
            tg.add_graft(other, Path(folder) / name)
        with torch.inference_mode(), tg.rows(other, names):
            same = _yes(other(**batch).logits, mixed)
        say(f"Loaded into another copy of the backbone, the logits are the same to the bit: {same}.")

    tg.ungraft(model)
    with torch.inference_mode():
        same = _yes(model(**batch).last_hidden_state, bare)
    say(f"Ungrafted, the model is the original to the bit: {same}.")
    say("\nNext: README.md shows the same in ten lines of Python, and how to train under transformers.Trainer.")


def _yes(a: torch.Tensor, b: torch.Tensor) -> str:
    return "yes" if torch.equal(a, b) else "NO"
