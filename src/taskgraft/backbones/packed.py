"""Frozen layers for inference on a CPU: their weights laid out once as oneDNN reads them, instead of at every call.

That is a copy of the backbone's linear layers, and takes a third off a small batch, a sixth off a large one.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskgraft.backbones.join import is_frozen_linear

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts

PACKED = "taskgraft_packed"
TOKENS = 256  # that the layout is chosen for; it serves any number


def packed_forward(self: nn.Linear, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return F.linear(x, self.weight, self.bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.__dict__[PACKED], self.bias, "none", [], "")
    return result


def pack(grafts: Grafts) -> None:
    """Let the linear layers of a model's blocks work so, for as long as nothing changes their weights."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for layer in dict.fromkeys(site.layer_path for site in grafts.backbone.sites):
        for module in grafts.model.get_submodule(layer).modules():
            cpu = isinstance(module, nn.Linear) and module.weight.device.type == "cpu"
            if cpu and is_frozen_linear(module) and module.weight.dtype == torch.float32:
                weight = module.weight.detach()
                module.__dict__[PACKED] = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
                module.__dict__["forward"] = types.MethodType(packed_forward, module)


def unpack(grafts: Grafts) -> None:
    for module in grafts.model.modules():
        if module.__dict__.pop(PACKED, None) is not None:
            del module.__dict__["forward"]
