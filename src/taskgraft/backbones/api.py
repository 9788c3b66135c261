"""The functions that users call on a model: `tg.graft` and its companions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from taskgraft.backbones.insert import Grafts
from taskgraft.errors import GraftError
from taskgraft.methods import Method
from taskgraft.nn.heads import Head
from taskgraft.nn.rows import Kernel, bind

Tasks = Sequence[str] | Mapping[str, "Head | int | Sequence[str] | None"]


def graft(model: Any, method: Method, tasks: Tasks = ("task",), *, seed: int = 0) -> Any:
    """Freeze `model` and give it tasks, all of them being trained; the same object comes back.

    `tasks` are names, or names with what each predicts: a number of classes, their labels, a `tg.Head`, or None. Names
    alone get a head like the model class's own, if it has one.
    """
    if getattr(model, "taskgraft", None) is not None:
        raise GraftError("this model is already grafted: add a task with tg.add_task, or tg.ungraft it first.")
    if isinstance(tasks, str):
        raise GraftError(f"tasks={tasks!r} is one string: give a list, [{tasks!r}].")
    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        raise GraftError(f"{type(model).__name__} is not a Transformers model: pass the model, not a wrapper of it.")
    names = list(tasks)
    if len(set(names)) != len(names):
        raise GraftError(f"tasks {names} name a task twice.")
    grafts = Grafts(model)
    heads = {name: Head.of(tasks[name]) if isinstance(tasks, Mapping) else grafts.own_head for name in names}
    grafts.install()
    try:
        for number, name in enumerate(names):
            grafts.add(name, method, heads[name], seed=seed + number)
        grafts.train(names)
    except Exception:
        grafts.uninstall(restore=True)
        raise
    return model


def grafts_of(model: Any) -> Grafts:
    grafts = getattr(model, "taskgraft", None)
    if not isinstance(grafts, Grafts):
        raise GraftError(f"this {type(model).__name__} is not grafted: call tg.graft(model, method, tasks) first.")
    return grafts


def ungraft(model: Any, *, restore: bool = True) -> Any:
    """Take every graft off and give the original model back, to the bit.

    `restore=False` keeps what full fine-tuning or top-layers have changed in the backbone itself.
    """
    grafts_of(model).uninstall(restore)
    return model


def add_task(
    model: Any,
    name: str,
    method: Method,
    head: Head | int | Sequence[str] | None = None,
    *,
    seed: int = 0,
    train: bool = True,
    like: str | None = None,
) -> None:
    """Put one more task on a grafted model; by default it joins those being trained (make the optimiser after that).

    `like` names a task of the same method whose adapter or embedding it starts from.
    """
    grafts = grafts_of(model)
    grafts.check_company(name, method)
    if train:
        grafts.check_trained_together([*(grafts.tasks[task].method for task in grafts.trained), method])
    grafts.add(name, method, Head.of(head), seed=seed, like=like)
    if train:
        try:
            grafts.train([*grafts.trained, name], grafts.trains_shared)
        except GraftError:
            grafts.remove(name)
            raise


def remove_task(model: Any, name: str) -> None:
    """Take a task off a model; its slot is free for another."""
    grafts_of(model).remove(name)


def train_only(model: Any, tasks: Sequence[str] | str, *, shared: bool = True) -> None:
    """Make these the tasks being trained; all others are at rest, where no optimiser reaches them.

    `shared=False` trains what is the tasks' own (embedding, adapter, head) and nothing that they share with others.
    """
    grafts_of(model).train([tasks] if isinstance(tasks, str) else list(tasks), shared)


def rows(model: Any, names: Sequence[str | None] | str | None, *, lengths: Sequence[int] | None = None) -> bind:
    """Name the task of each row of the batches that run inside this `with` block, on this thread.

    None is the bare backbone; one string stands for every row. `lengths` are those of sequences packed end to end.
    """
    grafts = grafts_of(model)
    return bind(grafts.bound, grafts.route_of(names, lengths))


def use_kernels(model: Any, kernel: Kernel) -> None:
    """Choose what computes the bottlenecks and norms of a model: "triton", "eager" (the reference), or "auto".

    "auto" takes the kernels on a GPU wherever they have the form; `tg.describe` shows which it is. Rows that are
    already named keep what they have.
    """
    if kernel not in get_args(Kernel):
        raise GraftError(f"kernel {kernel!r} is unknown: use {', '.join(get_args(Kernel))}.")
    grafts = grafts_of(model)
    grafts.kernel = kernel
    grafts.refresh()


def task_ids(model: Any, names: Sequence[str | None]) -> Tensor:
    """The numbers that stand for tasks in a batch's `task_ids` (0: the bare backbone), for loaders and Trainers."""
    grafts = grafts_of(model)
    return torch.tensor([0 if name is None else grafts.require(name).number for name in names])


def tasks_of(model: Any) -> list[str]:
    """The names of the tasks on a model, in the order they came."""
    return list(grafts_of(model).tasks)


def trainable(model: Any) -> dict[str, Tensor]:
    """The parameters that train, by name; nothing else does."""
    grafts_of(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
