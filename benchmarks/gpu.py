"""Speed on a GPU: ours, `adapters` and `peft` side by side, at BERT-base's shape in bfloat16, 128 tokens, size 64.

  forward    rows of 1, 32 and 1,000 tasks beside the bare backbone, at 256 rows and at 32, and beside its CUDA graph
  training   a step beside full fine-tuning, at 256 rows and at 32, and the peak memory of it
  many       a step of 16 runs of 32 rows: one after the other, or all in one pass
  adding     milliseconds to put a task on a model in use, up to 10,000

In under 8 minutes on an H200: gpu.json, a table and a figure in benchmarks/results. The peers' wheels are in a folder:

  for wheel in peers/*.whl; do python -m zipfile -e $wheel unpacked; done
  python benchmarks/gpu.py --peers unpacked
"""

from __future__ import annotations

import argparse

from side_by_side import SMOKE, Section, Target, add_options, run, smoke
from stock import Setting

MINUTES = 7.5


def sections(setting: Setting) -> list[Section]:
    bare, full, few, many = "bare backbone", "full fine-tuning", f"{setting.few:,} tasks", f"{setting.many:,} tasks"
    tasks = ("1 task", few, many)
    together = f"a step of {setting.runs} runs, 32 rows each"
    return [
        Section(
            "forward, 256 rows", "forward", 256, bare, 80, warmups=5,
            targets=tuple(Target(name, 1.10, ("ours", bare)) for name in tasks),
        ),
        Section("forward, 32 rows", "forward", 32, bare, 60, warmups=5),
        Section("forward, 256 rows, CUDA graphs", "graphs", 256, bare, 40, warmups=5, sides=("ours",)),
        Section(
            "forward, 32 rows, CUDA graphs", "graphs", 32, bare, 50, warmups=5, sides=("ours",),
            targets=tuple(Target(name, 1.30, ("ours", bare)) for name in tasks),
        ),
        Section(
            "training step, 256 rows", "training", 256, full, 70,
            targets=(Target("adapter, graphs", 0.72, ("ours", full)),),
        ),
        Section(
            "training step, 32 rows", "training", 32, full, 50,
            targets=(Target("adapter, graphs", 1 / 3.5, ("adapters", "adapter")),),
        ),
        Section(
            together, "many", 32, full, 100, repeats=5,
            targets=(
                Target("in one pass, graphs", 1 / 8, ("adapters", "one after the other")),
                Target("in one pass, graphs", 1 / 2, ("ours", "one after the other, graphs")),
            ),
        ),
        Section(
            "peak memory of training, 256 rows", "training", 256, full, 40, measure="memory",
            targets=(Target("adapter", 0.70, ("ours", full)),),
        ),
        Section(
            "adding a task", "adding", 32, None, 75, measure="adding", sides=("ours",),
            targets=(Target("amortised", 5.0, None),),
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    setting = SMOKE if options.smoke else Setting()
    planned = smoke(sections(setting)) if options.smoke else sections(setting)
    run("Grafts beside the bare backbone and the peers, on a GPU", "gpu", planned, setting, options, MINUTES)


if __name__ == "__main__":
    main()
