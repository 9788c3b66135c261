"""`tg.describe`: what is on a model, where, and how much of it trains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from taskgraft.backbones.api import grafts_of
from taskgraft.backbones.count import form_of, size_of
from taskgraft.backbones.insert import Grafts
from taskgraft.backbones.kinds import HyperKind, Kind
from taskgraft.methods import Adapter, HyperFormer, Method
from taskgraft.nn.bottleneck import Form, bottleneck, has_triton, kernel_for


def describe(model: Any) -> str:
    """A readable table of a grafted model: its tasks, its sites, the kernel in use, and what is trained of what."""
    grafts = grafts_of(model)
    added = {id(p) for kind in grafts.kinds.values() for bank in kind.all_banks for p in bank.parameters()}
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
    trained = _trained(grafts)
    lines += [
        "",
        f"{trained:,} parameters train, {100 * trained / backbone:.2f} % of the backbone's {backbone:,} "
        f"(all of its weights, embeddings included); backbone dropout is {_dropout(grafts)} while training.",
    ]
    return "\n".join(lines)


def trained_parameters(grafts: Grafts, task: str) -> int:
    """The parameters of one task in their true sizes, padding left out, with all that it shares."""
    entry = grafts.tasks[task]
    total = 0
    for key in entry.kinds:
        kind = grafts.kinds[key]
        for bank in kind.all_banks:
            total += sum(size_of(bank.layout(kind.slots.size[task]), shared) for shared in (True, False))
    return total + sum(p.numel() for p in grafts.backbone.parameters_of(entry.method).values())


def _counted_twice(grafts: Grafts) -> int:
    """Weights that several trained tasks share, beyond their first counting."""
    twice = 0
    for kind in grafts.kinds.values():
        others = max(len(kind.slots.trained), 1) - 1
        twice += others * sum(size_of(bank.weights, shared=True) for bank in kind.banks.values())
        if isinstance(kind, HyperKind):
            twice += others * size_of(kind.shared_bank.weights, shared=False)
    own = [
        sum(p.numel() for p in grafts.backbone.parameters_of(grafts.tasks[t].method).values()) for t in grafts.trained
    ]
    return twice + sum(own[1:])


def _trained(grafts: Grafts) -> int:
    """All that trains now, in true sizes."""
    if grafts.trains_shared:
        return sum(trained_parameters(grafts, task) for task in grafts.trained) - _counted_twice(grafts)
    return sum(
        size_of(bank.layout(kind.slots.size[task]), shared=False)
        for kind in grafts.kinds.values()
        for task in kind.slots.trained
        for bank in kind.banks.values()
    )


def _tasks(grafts: Grafts, backbone: int) -> list[list[str]]:
    table = []
    for name, task in grafts.tasks.items():
        count = trained_parameters(grafts, name)
        head = "none" if task.head is None else f"{task.head.kind} {task.head.width}"
        if task.head is not None and not task.head.per_token:
            head += f", {task.method.pooling}"
        size = ""
        if isinstance(task.method, (Adapter, HyperFormer)):
            size = str(task.method.bottleneck_size(grafts.width))
        state = "training" if name in grafts.trained else "at rest"
        share = f"{100 * count / backbone:.2f} %"
        table.append([name, called(task.method), size, branch_size(grafts, name), head, f"{count:,}", share, state])
    return table


def called(method: Method) -> str:
    if isinstance(method, HyperFormer) and method.shared:
        return f"{method.name}++" if method.shared is True else f"{method.name} (shared by layers)"
    return method.name


@torch.no_grad()
def branch_size(grafts: Grafts, task: str) -> str:
    """How far a task's adapters are from the identity: |y - x| over |x| on unit normal input, the mean of its sites."""
    method = grafts.tasks[task].method
    if not isinstance(method, (Adapter, HyperFormer)) or grafts.device.type == "meta":
        return ""
    kind = grafts.kinds[grafts.tasks[task].kinds[0]]
    weights = kind.written_out(task, grafts.device) if isinstance(kind, HyperKind) else kind.read(task)
    sites: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        site, _, tensor = name.rpartition(".")
        sites.setdefault(site, {})[tensor] = value[None].float().cpu()
    x = torch.randn(1, 64, grafts.width, generator=torch.Generator().manual_seed(0))
    size, form = torch.tensor([kind.slots.size[task]]), form_of(method)
    sizes = [float((bottleneck(x, None, w, form, sizes=size) - x).norm() / x.norm()) for w in sites.values()]
    return f"{sum(sizes) / len(sizes):.2g} of x"


def sites_of(kind: Kind) -> Collection[str]:
    return kind.shared_bank.plan.places if isinstance(kind, HyperKind) else kind.banks.keys()


def _sites(grafts: Grafts) -> list[list[str]]:
    """One line for each place of each stack that holds adapters, and one for the norms."""
    forms = {
        key: form_of(task.method)
        for task in grafts.tasks.values()
        if isinstance(task.method, (Adapter, HyperFormer))
        for key in task.kinds[:1]
    }
    places: dict[tuple[str, str], list[int]] = {}
    kinds: dict[tuple[str, str], set[str]] = {}
    orders: dict[tuple[str, str], str] = {}
    for site in grafts.backbone.sites:
        stack, _, place = site.name.split(".")
        here = {key for key in forms if site.name in sites_of(grafts.kinds[key])}
        if here:
            places.setdefault((stack, place), []).append(site.layer)
            kinds.setdefault((stack, place), set()).update(here)
            orders[stack, place] = site.place.order
    table = []
    for (stack, place), layers in places.items():
        here = kinds[stack, place]
        kernel = ", ".join(sorted({kernel_of(grafts, key, forms[key]) for key in here}))
        order = orders[stack, place]
        if all(forms[key].parallel for key in here):
            order += ", parallel"
        reads = {forms[key].reads for key in here}
        if len(reads) == 1 and None not in reads:
            order += f", reads the {reads.pop()}"
        table.append([f"{stack} {place}", f"{len(layers)}", order, kernel, ", ".join(sorted(here))])
    norms = {name for key, kind in grafts.kinds.items() if key.startswith("norms_") for name in kind.banks}
    if norms:
        table.append(
            [
                "norms",
                f"{len(norms)}",
                "in place",
                "triton" if grafts.device.type == "cuda" and grafts.kernel != "eager" and has_triton() else "eager",
                ", ".join(sorted(k for k in grafts.kinds if k.startswith("norms_"))),
            ]
        )
    return table


def kernel_of(grafts: Grafts, key: str, form: Form) -> str:
    """What computes the bottlenecks of a kind."""
    sizes = grafts.kinds[key].slots.sizes
    return kernel_for(grafts.device, grafts.dtype, form, grafts.width, max(sizes), choice=grafts.kernel)


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
