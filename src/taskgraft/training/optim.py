"""AdamW over slots: every task has its own step count, learning rate, clipping and moments.

Trained weights are stacked by task, so a stock optimiser would decay, and move by momentum, a task that has no rows in
a step. Here a task whose gradients are all exactly zero, which is what having no rows gives, changes in no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from taskgraft.backbones.api import grafts_of
from taskgraft.errors import GraftError
from taskgraft.nn.bank import Weight


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter) for the trained tasks of a grafted model.

    `lr` and `clip_norm` are numbers, or a mapping by task. A scheduler acts on `param_groups[i]["lr"]`, which scales
    every task's own rate. Weight decay goes by role: matrices yes; biases and norms no. Weights that tasks share (and a
    fully fine-tuned backbone) step as one more slot. Make it after the tasks to train have been chosen.
    """

    def __init__(
        self,
        model: Any,
        lr: float | Mapping[str, float] = 1e-3,
        *,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        clip_norm: float | Mapping[str, float] | None = None,
    ) -> None:
        owned = list(owned_parameters(model))
        if not owned:
            raise GraftError("no task of this model is being trained: choose some with tg.train_only.")
        self.owners: list[str] = list(dict.fromkeys(owner for _, owners, _ in owned for owner in owners))
        number = {owner: i for i, owner in enumerate(self.owners)}
        rates = per_owner("lr", lr, self.owners)
        base = max(rates)
        if base <= 0:
            raise GraftError(f"lr={lr} must be above 0.")
        groups = []
        for decays in (True, False):
            parameters = [(p, owners) for p, owners, decayed in owned if decayed == decays]
            if parameters:
                decay = weight_decay if decays else 0.0
                slots = [[number[owner] for owner in owners] for _, owners in parameters]
                groups.append({"params": [p for p, _ in parameters], "weight_decay": decay, "slots": slots})
        super().__init__(groups, {"lr": base, "betas": betas, "eps": eps})
        infinite = float("inf")
        self.rate = torch.tensor(
            [rate / base for rate in rates], dtype=torch.float64
        )  # each task's share of the group's rate
        clips = per_owner("clip_norm", infinite if clip_norm is None else clip_norm, self.owners)
        self.clip_norm = torch.tensor(clips, dtype=torch.float64)
        self.active = torch.ones(len(self.owners), dtype=torch.bool)  # a task switched off here never changes

    def set_active(self, task: str, active: bool) -> None:
        """Let a task take part in steps, or hold it still, moments included."""
        self.active[self.owners.index(task)] = active

    def gradient_norms(self) -> dict[str, float]:
        """The norm of each task's gradient now; 0 for a task without rows."""
        return dict(zip(self.owners, self._norms().tolist(), strict=True))

    def _stacks(self) -> Iterator[tuple[dict[str, Any], Tensor, list[int]]]:
        for group in self.param_groups:
            for parameter, slots in zip(group["params"], group["slots"], strict=True):
                if parameter.grad is not None:
                    yield group, parameter, slots

    def _norms(self) -> Tensor:
        squares: dict[torch.device, Tensor] = {}
        for _, parameter, slots in self._stacks():
            grad = by_slot(cast(Tensor, parameter.grad), slots).flatten(1)
            zeros = torch.zeros(len(self.owners), dtype=torch.float64, device=grad.device)
            square = grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum(1)
            squares.setdefault(grad.device, zeros).index_add_(
                0, torch.tensor(slots, device=grad.device), square.double()
            )
        result = torch.zeros(len(self.owners), dtype=torch.float64)
        for total in squares.values():
            result += total.cpu()
        return result.sqrt()

    def _with_rows(self, norms: Tensor) -> Tensor:
        """Which tasks have any gradient at all; a norm may be zero because its square is too small to write."""
        found = norms != 0
        if not found.all():
            for _, parameter, slots in self._stacks():
                some = (by_slot(cast(Tensor, parameter.grad), slots) != 0).flatten(1).any(1).cpu()
                found.index_put_((torch.tensor(slots)[some],), torch.ones((), dtype=torch.bool))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "active": dict(zip(self.owners, self.active.tolist(), strict=True))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for owner, active in state_dict.get("active", {}).items():
            self.set_active(owner, active)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norms = self._norms()
        active = self.active & self._with_rows(norms)
        clip = torch.where(norms > self.clip_norm, self.clip_norm / norms, 1.0)
        for group, parameter, slots in self._stacks():
            chosen = [i for i, slot in enumerate(slots) if active[slot]]
            if not chosen:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(len(slots))
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"][chosen] += 1
            owners = torch.tensor([slots[i] for i in chosen])
            lr = group["lr"] * self.rate[owners]
            self._update(group, parameter, slots, chosen, state, lr, clip[owners])
        return loss

    def _update(
        self,
        group: dict[str, Any],
        parameter: Tensor,
        slots: list[int],
        chosen: list[int],
        state: dict[str, Tensor],
        lr: Tensor,
        clip: Tensor,
    ) -> None:
        """One AdamW step of the chosen slots of a stack; the others are not even read."""
        beta1, beta2 = group["betas"]
        stacks = [
            by_slot(t, slots) for t in (parameter, cast(Tensor, parameter.grad), state["exp_avg"], state["exp_avg_sq"])
        ]
        everything = len(chosen) == len(slots)
        index = torch.tensor(chosen, device=parameter.device)
        value, grad, mean, square = stacks if everything else [stack.index_select(0, index) for stack in stacks]

        def spread(numbers: Tensor) -> Tensor:
            return numbers.to(value).view(-1, *(1,) * (value.dim() - 1))

        steps = state["step"][chosen].double()
        if (clip != 1).any():
            grad = grad * spread(clip)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        value.mul_(spread(1 - lr * group["weight_decay"]))
        denominator = (square / spread(1 - beta2**steps)).sqrt_().add_(group["eps"])
        value.sub_(spread(lr / (1 - beta1**steps)) * mean / denominator)
        if not everything:
            for stack, changed in zip((stacks[0], stacks[2], stacks[3]), (value, mean, square), strict=True):
                stack.index_copy_(0, index, changed)


def by_slot(tensor: Tensor, slots: list[int]) -> Tensor:
    """A stack as it is; a backbone's own parameter as a stack of one."""
    return tensor if tensor.dim() and tensor.shape[0] == len(slots) and len(slots) > 1 else tensor[None]


def per_owner(field: str, value: float | Mapping[str, float], owners: list[str]) -> list[float]:
    if not isinstance(value, Mapping):
        return [float(value)] * len(owners)
    unknown = sorted(set(value) - set(owners))
    if unknown:
        raise GraftError(f"{field} names {unknown}, which are not being trained: {', '.join(owners)} are.")
    missing = [owner for owner in owners if owner not in value]
    if missing:
        raise GraftError(f"{field} names no value for {missing}.")
    return [float(value[owner]) for owner in owners]


SHARED = "(shared)"


def owned_parameters(model: Any) -> Iterator[tuple[torch.nn.Parameter, list[str], bool]]:
    """Every trained parameter, the task of each of its slots, and whether it is decayed."""
    grafts = grafts_of(model)
    seen = set()
    for kind in grafts.kinds.values():
        for bank in kind.banks.values():
            for name, weight in bank.weights.items():
                parameter = bank._parameters.get(name)
                if parameter is not None:
                    seen.add(id(parameter))
                    yield parameter, owners_of(weight, kind.slots.trained), weight.role == "matrix"
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in seen:
            yield parameter, [grafts.trained[0]], parameter.dim() > 1


def owners_of(weight: Weight, tasks: list[str]) -> list[str]:
    return [SHARED] if weight.shared and len(tasks) > 1 else list(tasks[:1] if weight.shared else tasks)
