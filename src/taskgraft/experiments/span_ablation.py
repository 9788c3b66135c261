"""Adapters of layers i to j taken out of a trained model, for every i and j, without retraining (Figure 6, left)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from taskgraft.backbones import api
from taskgraft.backbones.wrap import Site
from taskgraft.experiments import arms
from taskgraft.experiments.lab import Lab, say
from taskgraft.experiments.report import Report, about
from taskgraft.grafts.graft import Graft, add_graft
from taskgraft.reports.experiments import heat_figure
from taskgraft.reports.tables import markdown_table
from taskgraft.tasks.metrics import evaluate as judge
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import Task
from taskgraft.training.evaluate import encoded_for, evaluate, on_model
from taskgraft.training.many import Trial, fit_many
from taskgraft.training.session import lent

TASKS = ("mnli", "cola")
MEASURED = 256  # test rows that the sizes of branches are means over


def run(lab: Lab) -> Report:
    names, layers = lab.chosen(TASKS), arms.layers(lab)
    found: dict[str, Any] = {}
    sections, figures, records = [about(lab)], {}, []
    for name in names:
        setup = [name, lab.setup.rows, lab.setup.epochs, lab.setup.seeds, lab.setup.pooling]
        measured = lab.once(f"span-ablation.{name}", setup, partial(measure, lab, name))
        seeds = measured["seeds"]
        whole = statistics.fmean(seed["score"] for seed in seeds)
        kept = {(i, j): statistics.fmean(seed["spans"][n][2] for seed in seeds) / whole
                for n, (i, j, _) in enumerate(seeds[0]["spans"])}  # fmt: skip
        branch = [[statistics.fmean(seed["branches"][layer][site] for seed in seeds) for site in (0, 1)]
                  for layer in range(layers)]  # fmt: skip
        floor = majority(lab.task(name))
        matrix = np.full((layers, layers), np.nan)
        for (i, j), value in kept.items():
            matrix[i, j] = 100 * (value - 1)
        sections.append(section(name, whole, kept, branch, floor))
        figures[name] = heat_figure(matrix, branch, f"{name}: adapters of layers i to j removed, {lab.backbone.name}")
        records += [{"name": f"{name}.seed{seed['seed']}", "where": measured["where"], **seed} for seed in seeds]
        found[name] = {"score": whole, "branches": branch, "majority": floor,
                       "kept": [[i, j, value] for (i, j), value in kept.items()]}  # fmt: skip
    return Report(f"Spans of adapters removed on {lab.backbone.name}", sections, found, records, (), figures)


def measure(lab: Lab, name: str) -> dict[str, Any]:
    """Train adapters of size 64 with each seed; the score without each span, and the size of each layer's branches."""
    task, layers = lab.task(name), arms.layers(lab)
    trials = [
        Trial(f"{name}.seed{seed}", task, arms.adapter(lab), lab.settings(name, 1e-3, arms.LONG, seed))
        for seed in range(lab.setup.seeds)
    ]
    seeds = []
    for seed, run in enumerate(fit_many(lab.backbone, trials, progress=False).values()):
        assert run.graft is not None
        spans, whole = ablated(lab, run.graft, task, layers)
        say(f"  {name}, seed {seed}: {whole:.4f} whole, {spans[0, layers - 1]:.4f} without any adapter")
        seeds.append({"task": name, "seed": seed, "score": whole, "branches": branch_sizes(lab, run.graft, task),
                      "spans": [[i, j, value] for (i, j), value in spans.items()]})  # fmt: skip
    return {"seeds": seeds}


def ablated(lab: Lab, graft: Graft, task: Task, layers: int) -> tuple[dict[tuple[int, int], float], float]:
    """The score without the adapters of each span of layers, and with all."""
    encoded = encoded_for(lab.backbone, graft, task.split("test"))
    spans = [(first, last) for first in range(layers) for last in range(first, layers)]

    def score(what: Graft) -> float:
        return evaluate(lab.backbone, what, task, encoded=encoded)["score"]

    with on_model(lab.backbone.model, graft):  # beside it the others come and go, and nothing is recorded anew
        return {span: score(without(graft, *span)) for span in spans}, score(graft)


def without(graft: Graft, first: int, last: int) -> Graft:
    """The graft with the branches of these layers at zero: the identity. Norms and head stay as they were trained."""
    removed = {f"encoder.{layer}" for layer in range(first, last + 1)}

    def kept(name: str, value: torch.Tensor) -> torch.Tensor:
        stack_and_layer, _, weight = name.rpartition(".")
        gone = stack_and_layer.rpartition(".")[0] in removed and weight in ("up", "up_bias")
        return torch.zeros_like(value) if gone else value

    return dataclasses.replace(graft, tensors={name: kept(name, value) for name, value in graft.tensors.items()})


def branch_sizes(lab: Lab, graft: Graft, task: Task) -> list[list[float]]:
    """Of each layer's two adapters: the length of what it adds over the length of what comes in, mean over tokens."""
    found: dict[str, list[float]] = {}
    rows = task.split("test").slice(0, MEASURED)
    tokenizer, model = lab.backbone.tokenizer, lab.backbone.model
    pairs = rows["pair"].to_pylist() if task.has_pairs else None
    batch = tokenizer(
        rows["text"].to_pylist(), pairs, truncation=True, max_length=128, padding=True, return_tensors="pt"
    )
    inputs = {name: value.to(model.device) for name, value in batch.items()}
    mask = inputs["attention_mask"].bool()
    with lent(model), torch.no_grad():
        model.eval()
        add_graft(model, graft, "measured")
        with heard(model, mask, found), api.rows(model, "measured"):
            model(**inputs)
    names = list(found)
    return [[found[names[i]][0], found[names[i + 1]][0]] for i in range(0, len(names), 2)]


@contextmanager
def heard(model: Any, mask: torch.Tensor, found: dict[str, list[float]]) -> Iterator[None]:
    """While it is open, every adapter's site tells the relative size of its branch."""

    def tell(site: Site) -> Any:
        adapt = site.adapt

        def told(x: torch.Tensor, origin: Any = None) -> torch.Tensor:
            after = adapt(x, origin)
            ratio = (after - x)[mask].norm(dim=-1) / x[mask].norm(dim=-1)
            found.setdefault(site.name, []).append(float(ratio.mean()))
            return after

        return told

    sites = [module for module in model.modules() if isinstance(module, Site)]
    for site in sites:
        site.__dict__["adapt"] = tell(site)
    try:
        yield
    finally:
        for site in sites:
            del site.__dict__["adapt"]


def majority(task: Task) -> float:
    """The score of the commonest answer."""
    answers = task.split("test")["label"].to_pylist()
    commonest = statistics.mode(task.split("train")["label"].to_pylist())
    scores = judge(task.kind, task.metrics, task.labels, answers, [commonest] * len(answers))
    return score_of(task.metrics, scores)


def section(
    name: str, whole: float, kept: dict[tuple[int, int], float], branch: list[list[float]], floor: float
) -> str:
    """The heat map as a table: what is left of the score, in percent, and each layer's branch beside it."""
    layers = len(branch)
    body = []
    for first in range(layers):
        cells = [f"{100 * kept[first, last]:.0f}" if last >= first else "" for last in range(layers)]
        body.append([str(first), *cells, *(f"{size:.3f}" for size in branch[first])])
    header = ["from layer", *(f"to {last}" for last in range(layers)), "attention branch", "feed-forward branch"]
    half, end = layers // 2, layers - 1
    worst = min(range(layers), key=lambda layer: kept[layer, layer])

    def lost(first: int, last: int) -> str:
        return f"{100 * (1 - kept[first, last]):.1f} %"

    sentence = (
        f"Whole: {100 * whole:.1f} points. Without the adapters of one layer at most {lost(worst, worst)} is lost "
        f"(layer {worst}); without those of the lower half {lost(0, half - 1)}, of the upper half {lost(half, end)}, "
        f"of all {lost(0, end)}: {100 * kept[0, end] * whole:.1f} points are left, and the commonest answer has "
        f"{100 * floor:.1f}.\n"
    )
    note = "Cells: percent of the whole score. Branches: the length of what an adapter adds, over that of its input.\n"
    return f"## {name}\n\n{sentence}\n{markdown_table(header, body)}\n{note}"
