"""Our side of a benchmark: the sections' variants, and what adding tasks takes. Run by side_by_side.py as a worker."""

from __future__ import annotations

import functools
import time
from statistics import fmean
from typing import Any

import torch
from stock import (
    Setting,
    Variant,
    Variants,
    bare_forward,
    batch,
    captured,
    check_rows,
    drawn_rows,
    full_fine_tuning,
    labels,
    perturb,
    repeated,
    stock_model,
    task_names,
    training_step,
)
from timing import Values
from worker import serve

import taskgraft as tg


def method(setting: Setting, **changes: Any) -> tg.Adapter:
    return tg.Adapter(size=setting.size, pooling="mean", **changes)


@functools.cache
def grafted(setting: Setting, tasks: int) -> Any:
    """A backbone with this many tasks at rest; kept, since a large bank takes its time."""
    model = tg.graft(stock_model(setting), method(setting), {"t0": 2})
    tg.train_only(model, [])
    graft = tg.get_graft(model, "t0")
    for name in task_names(tasks)[1:]:
        tg.add_graft(model, graft, name)
    return perturb(model).eval()


def logits(model: Any, inputs: dict[str, Any], rows: str | list[str]) -> Any:
    with torch.inference_mode(), tg.rows(model, rows):
        return model(**inputs).logits


def mixed(setting: Setting, rows: int, model: Any, tasks: int) -> Variant:
    """A forward whose rows are of tasks drawn anew each time; naming them is part of what is timed."""
    inputs, draws = batch(setting, rows), drawn_rows(tasks, rows)
    if tasks > 1:
        names = ["t0"] * (rows // 2) + ["t1"] * (rows - rows // 2)
        check_rows(logits(model, inputs, names), logits(model, inputs, "t0"), rows // 2)
    return Variant(lambda: logits(model, inputs, next(draws)))


def forward(setting: Setting, rows: int) -> Variants:
    """On a GPU as grafts are run there, by kernels and CUDA graphs; without graphs, and by eager torch, beside it."""

    def reference() -> Variant:
        model = grafted.__wrapped__(setting, setting.few)  # its own: the choice of kernels is a model's
        tg.use_kernels(model, "eager")
        return mixed(setting, rows, model, setting.few)

    def plain(tasks: int) -> Variant:
        return mixed(setting, rows, grafted(setting, tasks), tasks)

    on_gpu = setting.device.startswith("cuda")
    variants: Variants = {"bare backbone": lambda: bare_forward(setting, rows)}
    for tasks in (1, setting.few, setting.many):
        variants[counted(tasks)] = lambda tasks=tasks: (  # type: ignore[misc]
            recorded(setting, rows, tasks) if on_gpu else plain(tasks)
        )
    if on_gpu:
        variants[f"{counted(setting.few)}, no graphs"] = lambda: plain(setting.few)
        variants[f"{counted(setting.few)}, eager torch"] = reference
    return variants


def counted(tasks: int) -> str:
    return "1 task" if tasks == 1 else f"{tasks:,} tasks"


def recorded(setting: Setting, rows: int, tasks: int) -> Variant:
    """The same as `mixed`, by CUDA graphs."""
    inputs, run, draws = batch(setting, rows), tg.Graphed(grafted(setting, tasks)), drawn_rows(tasks, rows)

    def once() -> Any:
        with torch.inference_mode():
            return run(next(draws), inputs)

    return Variant(once)


def graphs(setting: Setting, rows: int) -> Variants:
    """Forwards as CUDA graphs beside the bare backbone as one."""
    inputs = batch(setting, rows)

    def bare() -> Variant:
        model = stock_model(setting)
        with torch.no_grad():
            return captured(lambda held: model(**held).last_hidden_state, inputs)

    variants: Variants = {"bare backbone": bare}
    for tasks in (1, setting.few, setting.many):
        variants[counted(tasks)] = lambda tasks=tasks: recorded(setting, rows, tasks)  # type: ignore[misc]
    return variants


def trained(setting: Setting, tasks: int, **changes: Any) -> Any:
    names = task_names(tasks)
    return perturb(tg.graft(stock_model(setting), method(setting, **changes), dict.fromkeys(names, 2))).train()


def adapter_step(setting: Setting, rows: int, graphed: bool = False, dropout: bool = False) -> Variant:
    """A training step of one task; without the backbone's dropout, as is our default, or with it, as the peers have."""
    model = trained(setting, 1, backbone_dropout=dropout)
    inputs, wanted, names = batch(setting, rows), labels(setting, rows), ["t0"] * rows
    optimiser = tg.AdamW(model, lr=1e-5)
    if graphed:
        run = tg.Graphed(model)
        return training_step(model, optimiser, lambda: tg.loss(model, run(names, inputs), wanted, rows=names))
    return training_step(model, optimiser, lambda: model(**inputs, labels=wanted).loss)


def training(setting: Setting, rows: int) -> Variants:
    variants: Variants = {
        "full fine-tuning": lambda: full_fine_tuning(setting, rows),
        "adapter": lambda: adapter_step(setting, rows),
        "adapter, dropout on": lambda: adapter_step(setting, rows, dropout=True),
    }
    if setting.device.startswith("cuda"):
        variants["adapter, graphs"] = lambda: adapter_step(setting, rows, graphed=True)
    return variants


def one_pass(setting: Setting, rows: int, graphed: bool = False) -> Variant:
    """A step of all runs at once, each with rows and a rate of its own; the loss is the sum of their own means."""
    runs = setting.runs
    model = trained(setting, runs)
    names = [name for name in task_names(runs) for _ in range(rows)]
    inputs, wanted = batch(setting, runs * rows), labels(setting, runs * rows)
    optimiser = tg.AdamW(model, lr={name: 1e-5 * (1 + i) for i, name in enumerate(task_names(runs))})
    run = tg.Graphed(model) if graphed else None

    def output() -> Any:
        if run is not None:
            return run(names, inputs)
        with tg.rows(model, names):
            return model(**inputs)

    def loss() -> Any:
        losses = tg.loss(model, output(), wanted, rows=names, reduction="none")
        return losses.view(runs, rows).mean(1).sum()

    return training_step(model, optimiser, loss)


def many(setting: Setting, rows: int) -> Variants:
    """A step of each of several runs: one run after the other, or all in one pass."""
    variants: Variants = {
        "full fine-tuning": lambda: repeated(full_fine_tuning(setting, rows), setting.runs),
        "one after the other": lambda: repeated(adapter_step(setting, rows), setting.runs),
        "in one pass": lambda: one_pass(setting, rows),
    }
    if setting.device.startswith("cuda"):
        variants["one after the other, graphs"] = lambda: repeated(
            adapter_step(setting, rows, graphed=True), setting.runs
        )
        variants["in one pass, graphs"] = lambda: one_pass(setting, rows, graphed=True)
    return variants


def adding(setting: Setting, rows: int, until: float) -> tuple[Values, dict[str, str]]:
    """Milliseconds to put a trained graft on a model that runs a batch of its newest tasks after every hundred."""
    grafted.cache_clear()
    model = perturb(tg.graft(stock_model(setting), method(setting), {"t0": 2})).eval()
    tg.train_only(model, [])
    graft, run = tg.get_graft(model, "t0"), tg.Graphed(model)
    names, inputs, spent = task_names(setting.bank), batch(setting, rows), list[float]()
    for number, name in enumerate(names[1:], start=1):
        start = time.perf_counter()
        tg.add_graft(model, graft, name)
        if setting.device.startswith("cuda"):
            torch.cuda.synchronize()
        spent.append(1e3 * (time.perf_counter() - start))
        if number % 100 == 0:
            with torch.inference_mode():
                run((names[:rows] + names[: number + 1])[-rows:], inputs)
            if time.monotonic() > until:
                break
    stopped = {}
    if len(spent) + 1 < len(names):
        stopped = {counted(len(names)): f"the time limit came after {counted(len(spent) + 1)}."}
    return {"amortised": [fmean(spent)], "first hundred": spent[:100], "last hundred": spent[-100:]}, stopped


if __name__ == "__main__":
    kinds = {"forward": forward, "graphs": graphs, "training": training, "many": many}
    serve(("torch", "transformers", "taskgraft"), kinds, adding)
