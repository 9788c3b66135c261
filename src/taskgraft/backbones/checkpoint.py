"""The names of the trained tasks in a model's `state_dict`: stacked weights alone do not say whose they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts

TASKS = "taskgraft_tasks"
KEY = "names"


class TrainedTasks(nn.Module):
    """A child without weights that writes the trained tasks, in order, and refuses the weights of others."""

    grafts: Grafts

    def __init__(self, grafts: Grafts) -> None:
        super().__init__()
        self.__dict__["grafts"] = grafts
        self.register_state_dict_post_hook(write_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(check_names)  # type: ignore[no-untyped-call]


def write_names(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    assert isinstance(module, TrainedTasks)
    if module.grafts.trained:
        state[prefix + KEY] = torch.tensor(list(json.dumps(module.grafts.trained).encode()), dtype=torch.uint8)


def check_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(module, TrainedTasks)
    names = state.pop(prefix + KEY, None)
    if names is None:  # a plain backbone's
        return
    saved = json.loads(bytes(names.tolist()))
    if saved != module.grafts.trained:
        raise GraftError(
            f"this checkpoint holds the tasks {saved}, in this order, and {module.grafts.trained} are being trained: "
            "choose them with tg.train_only first."
        )
