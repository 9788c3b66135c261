"""The adapter written out from its equations, for one row and one task, to check everything else against."""

from __future__ import annotations

import torch
from torch import Tensor

from taskgraft.nn.bottleneck import ACTIVATIONS, Form


def one_row(x: Tensor, w: dict[str, Tensor], form: Form, x_in: Tensor) -> Tensor:
    """The equations of docs/methods.md for one row [length, d] and one task's weights."""

    def norm(h: Tensor, kind: str) -> Tensor:
        mean, var = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
        return (h - mean) / torch.sqrt(var + 1e-5) * w[f"{kind}_weight"] + w[f"{kind}_bias"]

    act = torch.nn.GELU(approximate="tanh") if form.activation == "gelu_new" else ACTIVATIONS[form.activation]
    h = x_in if form.parallel else x
    h = norm(h, "before") if form.norm_before else h
    h = h @ w["down"] + w["down_bias"]
    h = norm(h, "inside") if form.norm_inside == "layer" else h
    if form.norm_inside == "batch":
        h = (h - w["inside_mean"]) / torch.sqrt(w["inside_var"] + 1e-5) * w["inside_weight"] + w["inside_bias"]
    h = act(h)
    for i in range(form.depth - 1):
        h = act(h @ w[f"middle{i}"] + w[f"middle{i}_bias"])
    branch = h @ w["up"] + w["up_bias"]
    branch = norm(branch, "after") if form.norm_after else branch
    branch = form.scaling * branch
    return x * (1 + branch) if form.multiplicative else x + branch
