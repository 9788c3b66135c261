"""Does full fine-tuning learn a new task better if its head learns as fast as HyperFormer++'s?

On an encoder the head of a new task in `taskgraft reproduce few-shot` has a rate of its own with HyperFormer++, and the
backbone's with full fine-tuning. Here full fine-tuning has both in turn, on the same examples, after a run in company.
What ended is in the folder of runs, and the same command does the rest.

    python experiments/head_rates.py --data-dir data --runs runs --json head_rates.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE, judged_on
from taskgraft.experiments.few_shot import less, with_interval
from taskgraft.experiments.lab import Job, Lab, Record, Setup, say
from taskgraft.experiments.shots import FEW, JUDGED, SIZES, settings_of
from taskgraft.experiments.study import TOGETHER
from taskgraft.training.few_shot import few_shot
from taskgraft.training.settings import RATES

FAST = RATES["adapter"]  # of what is a task's own beside HyperFormer


def score(lab: Lab, start: Job, name: str, rows: int, seed: int, own_rate: float | None) -> float:
    """What full fine-tuning comes to on a new task."""
    settings = replace(settings_of(lab, start, rows), own_rate=own_rate)

    def learned() -> Record:
        task = judged_on(lab.task(name), JUDGED)
        found = few_shot(lab.backbone, lab.joint(start), task, rows, seeds=[seed], settings=settings, progress=False,
                         drift=False)  # fmt: skip
        say(f"  {name}, {rows} rows, seed {seed}, {own_rate}: {found.score:.4f}")
        return {"score": found.score}

    about = [lab.path(start).stem, name, rows, settings.to_json(), seed, lab.hash(name)]
    return float(lab.once(f"head-rates.{name}.{rows}.seed{seed}", about, learned)["score"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tasks", default="trec,scitail")
    parser.add_argument("--steps", type=int, default=500, help="of the run in company")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    lab = Lab(Setup(options.runs, None, options.data_dir, pooling="mean", steps=options.steps, protocol="hyperformer"))
    method = company.together(lab)[company.FULL]
    rate = company.rates(lab, method)[0]
    start = Job(TOGETHER, method, lab.settings_together(rate, None, 0), tuple(lab.chosen(GLUE)))
    found = {}
    for name in options.tasks.split(","):
        for rows in (size for size in SIZES if size <= FEW):
            slow, fast = (
                [score(lab, start, name, rows, seed, own) for seed in range(options.seeds)] for own in (None, FAST)
            )
            found[f"{name}, {rows} examples"] = {f"{rate:g}": slow, f"{FAST:g}": fast}
            both = f"{100 * statistics.fmean(slow):.1f} at {rate:g}, {100 * statistics.fmean(fast):.1f} at {FAST:g}"
            print(f"{name}, {rows} examples: {both}: {with_interval(less(fast, slow))}", flush=True)
            record = {"backbone": lab.backbone.name, "steps": options.steps, "heads": found}
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
