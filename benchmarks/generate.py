"""What writing text costs with 8 tasks in a batch: the bare T5, grafts written out, and a hypernetwork that generates.

32 rows of 64 tokens, 4 rows of each of 8 tasks, 16 new tokens each, greedy, float32, two threads. The tasks are
HyperFormer++'s (reduction 32), with weights moved off their initial values; the same tasks written out
(`tg.materialise`) are plain grafts. The variants take turns, in an order shuffled in every round; ratios are medians of
the rounds' own. The command, with a folder that `from_pretrained` can load:

  python benchmarks/generate.py --backbone FOLDER --json benchmarks/results/generate.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import keep_memory, measure

import taskgraft as tg

ROWS, TASKS, LENGTH, NEW = 32, 8, 64, 16


def perturbed(model: Any) -> Any:
    """Weights of the order that training leaves: generated adapters that act, tasks that differ."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in tg.trainable(model).values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", required=True, help="a T5 or another encoder-decoder: a folder or a name")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_memory()
    torch.set_num_threads(2)
    before = os.getloadavg()[0]
    names = [f"task{i}" for i in range(TASKS)]
    rows = [names[row % TASKS] for row in range(ROWS)]
    bare = tg.load_backbone(arguments.backbone, dtype=torch.float32).model
    hyper = tg.load_backbone(arguments.backbone, dtype=torch.float32).model
    perturbed(tg.graft(hyper, tg.HyperFormer(shared=True, reduction=32), names))
    tg.train_only(hyper, [])
    plain = tg.load_backbone(arguments.backbone, dtype=torch.float32).model
    for name in names:
        tg.add_graft(plain, tg.materialise(hyper, name))
    ids = torch.randint(10, bare.config.vocab_size - 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def written(model: Any) -> Any:
        with torch.inference_mode():
            return model.generate(**inputs, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)

    def with_rows(model: Any) -> Any:
        with tg.rows(model, rows):
            return written(model)

    same = torch.equal(with_rows(hyper), with_rows(plain))
    changed = not torch.equal(with_rows(hyper), written(bare))
    variants = {
        "bare": lambda: written(bare),
        "grafts written out": lambda: with_rows(plain),
        "HyperFormer++": lambda: with_rows(hyper),
    }
    found = measure(variants, arguments.rounds, warmups=2)
    grafts, generating = found["grafts written out"]["ratio"], found["HyperFormer++"]["ratio"]
    print(f"load before: {before:.2f}; both write the same tokens: {same}; others than the bare backbone: {changed}")
    for name, figures in found.items():
        print(f"{name:<20} {figures['median_ms']:8.1f} ms  {figures['ratio']:.3f} of bare")
    print(f"HyperFormer++ / grafts written out: {generating / grafts:.3f}")
    if arguments.json:
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
        setting = {"rows": ROWS, "tasks": TASKS, "length": LENGTH, "new_tokens": NEW, "rounds": arguments.rounds}
        record = {"load_before": before, "same_tokens": same, **about, **setting, "sections": found}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
