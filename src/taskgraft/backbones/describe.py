"""`tg.describe`: what is on a model, where, and how much of it trains."""

from __future__ import annotations

from typing import Any

import torch

from taskgraft.backbones.api import grafts_of
from taskgraft.backbones.count import form_of
from taskgraft.backbones.insert import Grafts
from taskgraft.methods import Adapter
from taskgraft.nn.bottleneck import bottleneck, kernel_for


def describe(model: Any) -> str:
    """A readable table of a grafted model: its tasks, its sites, the kernel in use, and what is trained of what."""
    grafts = grafts_of(model)
    added = {id(p) for kind in grafts.kinds.values() for bank in kind.banks.values() for p in bank.parameters()}
    backbone = sum(p.numel() for p in model.parameters() if id(p) not in added)
    lines = [f"{type(model).__name__} ({model.config.model_type}), {backbone:,} parameters, frozen"]
    if not grafts.tasks:
        return lines[0] + "; no tasks"
    lines += [
        "",
        *_table(
            ["task", "method", "size", "branch", "head", "trained", "of backbone", "state"], _tasks(grafts, backbone)
        ),
    ]
    lines += ["", *_table(["site", "layers", "order", "kernel", "kinds"], _sites(grafts))]
    trained = sum(trained_parameters(grafts, task) for task in grafts.trained) - _counted_twice(grafts)
    lines += [
        "",
        f"{trained:,} parameters train, {100 * trained / backbone:.2f} % of the backbone's {backbone:,} "
        f"(all of its weights, embeddings included); backbone dropout is {_dropout(grafts)} while training.",
    ]
    return "\n".join(lines)


def trained_parameters(grafts: Grafts, task: str) -> int:
    """The parameters of one task in their true sizes, padding left out."""
    entry = grafts.tasks[task]
    total = 0
    for key in entry.kinds:
        kind = grafts.kinds[key]
        for bank in kind.banks.values():
            for weight in bank.layout(kind.slots.size[task]).values():
                total += torch.Size(weight.shape).numel() if weight.role != "state" else 0
    return total + sum(p.numel() for p in grafts.backbone.parameters_of(entry.method).values())


def _counted_twice(grafts: Grafts) -> int:
    """Weights that several trained tasks share, beyond their first counting."""
    twice = 0
    for kind in grafts.kinds.values():
        for bank in kind.banks.values():
            for weight in bank.weights.values():
                if weight.shared:
                    twice += (max(len(kind.slots.trained), 1) - 1) * torch.Size(weight.shape).numel()
    return twice


def _tasks(grafts: Grafts, backbone: int) -> list[list[str]]:
    table = []
    for name, task in grafts.tasks.items():
        count = trained_parameters(grafts, name)
        head = "none" if task.head is None else f"{task.head.kind} {task.head.width}"
        if task.head is not None and not task.head.per_token:
            head += f", {task.method.pooling}"
        size = str(task.method.bottleneck_size(grafts.width)) if isinstance(task.method, Adapter) else ""
        state = "training" if name in grafts.trained else "at rest"
        share = f"{100 * count / backbone:.2f} %"
        table.append([name, task.method.name, size, branch_size(grafts, name), head, f"{count:,}", share, state])
    return table


@torch.no_grad()
def branch_size(grafts: Grafts, task: str) -> str:
    """How far a task's adapters are from the identity: |y - x| over |x| on unit normal input, the mean of its sites."""
    method = grafts.tasks[task].method
    if not isinstance(method, Adapter) or grafts.device.type == "meta":
        return ""
    kind = grafts.kinds[grafts.tasks[task].kinds[0]]
    size = kind.slots.size[task]
    x = torch.randn(1, 64, grafts.width, generator=torch.Generator().manual_seed(0))
    sizes = []
    for bank in kind.banks.values():
        weights = {name: value[None].float().cpu() for name, value in bank.read(kind.slots.of[task], size).items()}
        y = bottleneck(x, None, weights, form_of(method), sizes=torch.tensor([size]))
        sizes.append(float((y - x).norm() / x.norm()))
    return f"{sum(sizes) / len(sizes):.2g} of x"


def _sites(grafts: Grafts) -> list[list[str]]:
    """One line for each place of each stack that holds adapters, and one for the norms."""
    forms = {
        key: form_of(task.method)
        for task in grafts.tasks.values()
        if isinstance(task.method, Adapter)
        for key in task.kinds[:1]
    }
    places: dict[tuple[str, str], list[int]] = {}
    example = torch.empty(0, device=grafts.device)
    kinds: dict[tuple[str, str], set[str]] = {}
    orders: dict[tuple[str, str], str] = {}
    for site in grafts.backbone.sites:
        stack, _, place = site.name.split(".")
        here = {key for key in forms if site.name in grafts.kinds[key].banks}
        if here:
            places.setdefault((stack, place), []).append(site.layer)
            kinds.setdefault((stack, place), set()).update(here)
            orders[stack, place] = site.place.order
    table = []
    for (stack, place), layers in places.items():
        here = kinds[stack, place]
        kernel = ", ".join(sorted({kernel_for(example, forms[key]) for key in here}))
        order = orders[stack, place]
        if all(forms[key].parallel for key in here):
            order += ", parallel"
        table.append([f"{stack} {place}", f"{len(layers)}", order, kernel, ", ".join(sorted(here))])
    norms = {name for key, kind in grafts.kinds.items() if key.startswith("norms_") for name in kind.banks}
    if norms:
        table.append(
            [
                "norms",
                f"{len(norms)}",
                "in place",
                "eager",
                ", ".join(sorted(k for k in grafts.kinds if k.startswith("norms_"))),
            ]
        )
    return table


def _dropout(grafts: Grafts) -> str:
    methods = [grafts.tasks[name].method for name in grafts.trained]
    return "off" if methods and not methods[0].backbone_dropout else "on"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
