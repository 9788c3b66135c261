"""The adapter written out from its equations, for one row and one task, to check everything else against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from taskgraft.nn.bottleneck import ACTIVATIONS, Form
from taskgraft.nn.rows import RowIndex, Slots, numbered


def one_row(x: Tensor, w: dict[str, Tensor], form: Form, x_in: Tensor) -> Tensor:
    """The equations of docs/methods.md for one row [length, d] and one task's weights."""

    def norm(h: Tensor, kind: str) -> Tensor:
        mean, var = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
        return (h - mean) / torch.sqrt(var + 1e-5) * w[f"{kind}_weight"] + w[f"{kind}_bias"]

    act = torch.nn.GELU(approximate="tanh") if form.activation == "gelu_new" else ACTIVATIONS[form.activation]
    h = x_in if form.parallel or form.reads or form.keeps else x
    h = norm(h, "before") if form.norm_before else h
    h = h @ w["down"] + w["down_bias"]
    h = norm(h, "inside") if form.norm_inside == "layer" else h
    if form.norm_inside == "batch":
        h = (h - w["inside_mean"]) / torch.sqrt(w["inside_var"] + 1e-5) * w["inside_weight"] + w["inside_bias"]
    h = act(h)
    for i in range(form.depth - 1):
        h = act(h @ w[f"middle{i}"] + w[f"middle{i}_bias"])
    branch = h @ w["up"] + w["up_bias"]
    branch = norm(branch, "after") if form.norm_after and not form.norm_sum else branch
    branch = form.scaling * branch
    y = x * (1 + branch) if form.multiplicative else x + branch
    return norm(y, "after") if form.norm_sum else y


def row_index(slots: Slots, names: Sequence[str | None]) -> RowIndex | None:
    """Where the weights of these rows lie in the banks of one kind."""
    lookup = slots.look_up(names, numbered(names))
    if lookup is None:
        return None
    return lookup.index(torch.tensor(values) for values in lookup.lists if values is not None)
