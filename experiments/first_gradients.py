"""How large are the gradients that a method begins with, beside the epsilon that AdamW adds to them?

The first steps of runs of `taskgraft reproduce hyper-glue`, at the rates of their warm-up, on a few rows of each task.
The size of a weight's gradient is the root of the mean of its squares so far, which AdamW divides by. Weights that no
row has touched yet, as the embeddings of other words in full fine-tuning, are counted apart.

    python experiments/first_gradients.py --backbone t5-small --data-dir data --json first_gradients.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from taskgraft import Method, fit
from taskgraft.experiments import company
from taskgraft.experiments.data import GLUE
from taskgraft.experiments.lab import Lab, Setup
from taskgraft.training.settings import epsilon_of

ROWS, WARMUP = 400, 500
EPSILONS = (1e-6, 1e-8)


def methods(lab: Lab) -> dict[str, Method]:
    return {
        **company.together(lab),
        "HyperFormer, no conditional norm": company.hyperformer(lab, shared=False, conditional_norm=False),
        "HyperFormer, no task projector": company.hyperformer(lab, shared=False, projector=False),
    }


def sizes(optimizer: Any) -> torch.Tensor:
    """Of the gradients of all trained weights, so far."""
    steps = float(optimizer.steps.max())
    beta = optimizer.param_groups[0]["betas"][1]
    squares = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    found: torch.Tensor = (squares / (1 - beta**steps)).sqrt()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    lab = Lab(Setup(Path(), options.backbone, options.data_dir, ROWS, epochs=1, pooling="mean", protocol="hyperformer"))
    whole = [lab.task(name) for name in lab.chosen(GLUE)]
    tasks = [replace(task, splits={"train": task.split("train")}) for task in whole]
    found: dict[str, dict[str, float]] = {}
    last: dict[str, Any] = {}
    register_optimizer_step_post_hook(lambda optimizer, *_: last.update(optimizer=optimizer))
    for name, method in methods(lab).items():
        rate = company.rates(lab, method)[0] * options.steps / WARMUP  # reached at the last of these steps
        settings = lab.settings_together(rate, options.steps, 0, warmup=0.999)
        fit(lab.backbone, tasks, method, settings=settings, progress=False)
        every = sizes(last["optimizer"])
        touched = every[every > 0]
        found[name] = {
            "epsilon": epsilon_of(method),
            "untouched": 1 - len(touched) / len(every),
            "median": float(touched.median()),
            **{f"below {epsilon:g}": float((touched < epsilon).double().mean()) for epsilon in EPSILONS},
        }
        print(name, found[name], flush=True)
        record = {"backbone": lab.backbone.name, "steps": options.steps, "rows": ROWS, "methods": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
