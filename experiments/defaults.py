"""Which settings should be the defaults? The three bundled tasks, several settings and seeds, many runs at a time.

    python experiments/defaults.py --backbone FOLDER --json results.json --workers 12 --plan plan.json

A plan is a list of [method name, settings, tasks, seeds]; without one, the default settings and full fine-tuning at
three learning rates run on all tasks with seeds 0 to 2. The task "together" is all three in one run. Runs are written
as they end. The table gives, per task, the
validation score (accuracy or Pearson), by which to choose, and in brackets the test score with its deviation.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

TASKS = ("review_sentiment", "tweet_mood", "complaint_routing")
TOGETHER = "together"
PLAN: list[Any] = [
    ["adapter-64", {}, TASKS, [0, 1, 2]],
    ["full@2e-5", {}, TASKS, [0, 1, 2]],
    ["full@5e-5", {}, TASKS, [0, 1, 2]],
    ["full@1e-4", {}, TASKS, [0, 1, 2]],
]


def work(backbone_folder: str | None, jobs: Any, results: Any) -> None:
    import torch

    import taskgraft as tg
    from taskgraft.training.compare import method_named, method_run

    torch.set_num_threads(1)
    backbone = tg.load_backbone(backbone_folder, dtype=torch.float32)
    tasks = {name: tg.load_task(str(files("taskgraft") / "data" / f"{name}.csv")) for name in TASKS}
    while (job := jobs.get()) is not None:
        name, settings, task, seed = job
        settings = dict(settings)
        options = settings.pop("method", {})
        method, rate = method_named(name)
        if options:
            method = type(method)(**{**{k: v for k, v in vars(method).items() if v is not None}, **options})
        if rate is not None:
            settings["learning_rate"] = rate
        if task == TOGETHER:
            results.put(joint_runs(backbone, list(tasks.values()), name, method, seed, settings, job[1]))
            continue
        run = method_run(backbone, tasks[task], name, method, seed, False, settings)
        results.put([{"task": task, "asked": job[1], **run}])


def joint_runs(backbone: Any, tasks: Any, name: str, method: Any, seed: int, settings: Any, asked: Any) -> Any:
    import taskgraft as tg

    run = tg.fit(backbone, tasks, method, progress=False, **{**settings, "seed": seed})
    shared = {"method": f"{name}, together", "seed": seed, "asked": asked, "trained": run.trained, "steps": run.steps}
    shared |= {"seconds": run.seconds, "epoch": run.epoch, "settings": run.settings.to_json()}
    return [
        {"task": task, "validation": found["validation"], "metrics": found["test"], **shared}
        for task, found in run.results.items()
    ]


def table(runs: list[dict[str, Any]]) -> str:
    lines = ["| method, settings | " + " | ".join(TASKS) + " | mean | runs |", "|---" * (len(TASKS) + 3) + "|"]
    for key in dict.fromkeys((run["method"], json.dumps(run["asked"])) for run in runs):
        mine = [run for run in runs if (run["method"], json.dumps(run["asked"])) == key]
        cells, means = [], []
        for task in TASKS:
            found = [run for run in mine if run["task"] == task]
            if found:
                chosen_by, test = (
                    [metrics.get("accuracy", metrics.get("pearson")) for metrics in (run[key_] for run in found)]
                    for key_ in ("validation", "metrics")
                )
                means.append(statistics.mean(chosen_by))
                spread = statistics.stdev(test) if len(test) > 1 else 0
                cells.append(f"{means[-1]:.4f} ({statistics.mean(test):.4f} ± {spread:.4f})")
            else:
                cells.append("")
        lines.append(f"| {key[0]} {key[1]} | {' | '.join(cells)} | {statistics.mean(means):.4f} | {len(mine)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop handing out runs after this")
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text()) if arguments.plan else PLAN
    todo = [(name, settings, task, seed) for name, settings, tasks, seeds in plan for seed in seeds for task in tasks]
    context = mp.get_context("spawn")
    jobs, results = context.Queue(1), context.Queue()
    workers = [context.Process(target=work, args=(arguments.backbone, jobs, results)) for _ in range(arguments.workers)]
    for worker in workers:
        worker.start()
    started, handed, ended = time.perf_counter(), 0, 0
    runs: list[dict[str, Any]] = []
    try:
        while ended < len(todo) and time.perf_counter() - started < arguments.seconds:
            if handed < len(todo) and jobs.empty():
                jobs.put(todo[handed])
                handed += 1
            while not results.empty():
                runs += results.get()
                ended += 1
                arguments.json.write_text(json.dumps(runs, indent=1))
            time.sleep(0.02)
            if not any(worker.is_alive() for worker in workers):
                raise SystemExit("every worker has died")
    finally:
        for worker in workers:
            worker.terminate()
    print(table(runs))
    print(f"{ended} of {len(todo)} runs in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
