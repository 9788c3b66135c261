"""AdamW over slots: every task has its own step count, learning rate, clipping and moments.

Trained weights are stacked by task, so a stock optimiser would decay, and move by momentum, a task that has no rows in
a step. Here a task whose gradients are all exactly zero, which is what having no rows gives, changes in no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from taskgraft.backbones.api import grafts_of
from taskgraft.backbones.kinds import HyperKind
from taskgraft.errors import GraftError
from taskgraft.nn.bank import padded_to
from taskgraft.nn.bottleneck import has_triton
from taskgraft.training.settings import epsilon_of

MOST_TABLES = 8  # sets of parameters that have gradients in one step or another


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter) for the trained tasks of a grafted model.

    `lr`, `weight_decay` and `clip_norm` are numbers, or a mapping by task. A scheduler acts on
    `param_groups[i]["lr"]`, which scales every task's own rate; `set_rates` sets the rates themselves. Weight decay
    goes by role: matrices yes; biases, norms, embeddings and hypernetworks no. `eps` is 1e-6, or 1e-8 where
    HyperFormer's own generators are trained, whose gradients are small.
    What tasks share (norms, a hypernetwork, a fully fine-tuned backbone) steps as one more slot. Make it after the
    tasks to train have been chosen.
    """

    def __init__(
        self,
        model: Any,
        lr: float | Mapping[str, float] = 1e-3,
        *,
        weight_decay: float | Mapping[str, float] = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float | None = None,
        clip_norm: float | Mapping[str, float] | None = None,
    ) -> None:
        self.grafts = grafts_of(model)
        self.generation = self.grafts.generation
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
                slots = [[number[owner] for owner in owners] for _, owners in parameters]
                groups.append({"params": [p for p, _ in parameters], "decays": decays, "slots": slots})
        if eps is None:
            eps = min(epsilon_of(self.grafts.tasks[task].method) for task in self.grafts.trained)
        super().__init__(groups, {"lr": base, "betas": betas, "eps": eps})
        count = len(self.owners)
        clips = per_owner("clip_norm", float("inf") if clip_norm is None else clip_norm, self.owners)
        self.rate = torch.tensor([rate / base for rate in rates], dtype=torch.float64)  # share of the group's rate
        self.clip_norm = torch.tensor(clips, dtype=torch.float64)
        self.weight_decay = torch.tensor(per_owner("weight_decay", weight_decay, self.owners), dtype=torch.float64)
        self.steps = torch.zeros(count)  # how many steps each task has taken
        self.active = torch.ones(count, dtype=torch.bool)  # a task switched off here never changes
        self._tables: dict[tuple[int, ...], Any] = {}  # where everything lies, for the kernels
        self.sets_rates = False  # whether `rate` is a rate, and not a share of the group's

    def set_active(self, task: str, active: bool) -> None:
        """Let a task take part in steps, or hold it still, moments included."""
        self.active[self.owners.index(task)] = active

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """The learning rates of these tasks from now on; what a scheduler does to the groups then multiplies them."""
        if not self.sets_rates:
            self.rate *= self.param_groups[0]["lr"]
            self.sets_rates = True
            for group in self.param_groups:
                group["lr"] = 1.0
        for task, rate in rates.items():
            self.rate[self.owners.index(task)] = rate

    def steps_of(self, task: str) -> float:
        """How many steps a task has taken."""
        return float(self.steps[self.owners.index(task)])

    def set_steps(self, task: str, steps: float) -> None:
        self.steps[self.owners.index(task)] = steps

    @torch.no_grad()
    def restart(self, old: str, new: str, *, weight_decay: float, clip_norm: float) -> None:
        """Let a task take the slot of another that it was swapped with: no steps taken yet, no moments."""
        number = self.owners.index(old)
        self.owners[number] = new
        self._tables.clear()
        self.weight_decay[number], self.clip_norm[number] = weight_decay, clip_norm
        self.steps[number], self.active[number] = 0, True
        for group in self.param_groups:
            for parameter, slots in zip(group["params"], group["slots"], strict=True):
                for moment in self.state[parameter].values() if number in slots else ():
                    by_slot(moment, slots)[slots.index(number)].zero_()

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """The running means of a parameter's gradient and of its square, each of the parameter's shape."""
        state: dict[str, Tensor] = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter)
            elif state[key].shape != parameter.shape:  # the bank was widened for a larger task
                state[key] = padded_to(parameter.shape[1:], state[key])
        return state

    def gradient_norms(self) -> dict[str, float]:
        """The norm of each task's gradient now; 0 for a task without rows."""
        return dict(zip(self.owners, self._norms().tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        slots = {
            owner: {"step": step, "active": active, "rate": rate}
            for owner, step, active, rate in zip(
                self.owners, self.steps.tolist(), self.active.tolist(), self.rate.tolist(), strict=True
            )
        }
        return {**super().state_dict(), "slots": slots, "sets_rates": self.sets_rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if list(state_dict["slots"]) != self.owners:
            raise GraftError(
                f"this state is of the tasks {list(state_dict['slots'])}, and {self.owners} are being trained."
            )
        super().load_state_dict(state_dict)
        self._tables.clear()
        self.sets_rates = state_dict["sets_rates"]
        self.rate = torch.tensor([slot["rate"] for slot in state_dict["slots"].values()], dtype=torch.float64)
        self.steps = torch.tensor([slot["step"] for slot in state_dict["slots"].values()])
        self.active = torch.tensor([slot["active"] for slot in state_dict["slots"].values()])

    def _stacks(self) -> Iterator[tuple[dict[str, Any], Tensor, list[int]]]:
        for group in self.param_groups:
            for parameter, slots in zip(group["params"], group["slots"], strict=True):
                if parameter.grad is not None:
                    yield group, parameter, slots

    def _norms(self) -> Tensor:
        """The norm of each task's gradient, over all of its stacks."""
        squares = torch.zeros(len(self.owners), dtype=torch.float64)
        owners: list[int] = []
        norms: dict[torch.device, list[Tensor]] = {}
        for _, parameter, slots in self._stacks():
            grad = by_slot(cast(Tensor, parameter.grad), slots).flatten(1)
            dtype = torch.promote_types(grad.dtype, torch.float32)
            norms.setdefault(grad.device, []).append(torch.linalg.vector_norm(grad, dim=1, dtype=dtype).double())
            owners += slots
        if norms:
            found = torch.cat([torch.cat(part).cpu() for part in norms.values()])
            squares.index_add_(0, torch.tensor(owners), found.square())
        return squares.sqrt()

    def _with_rows(self, norms: Tensor) -> Tensor:
        """Which tasks have any gradient at all; a norm may be zero because its square is too small to write."""
        found = norms != 0
        if not found[self.active].all():
            for _, parameter, slots in self._stacks():
                some = (by_slot(cast(Tensor, parameter.grad), slots) != 0).flatten(1).any(1).cpu()
                found[torch.tensor(slots)[some]] = True
        return found

    def _check_current(self) -> None:
        if self.grafts.generation != self.generation:
            raise GraftError(
                f"the tasks being trained have changed since this optimiser was made for {', '.join(self.owners)}: "
                "make a new one."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_current()
        if self._can_fuse():
            self._fused_step()
            return loss
        norms = self._norms()
        active = self.active & self._with_rows(norms)
        clip = torch.where(norms > self.clip_norm, self.clip_norm / norms, 1.0)
        together = (
            active.all()
            and (clip == 1).all()
            and all(len(set(each.tolist())) == 1 for each in (self.rate, self.weight_decay, self.steps))
        )
        if together:  # nothing tells the tasks apart in this step: whole stacks
            self._update(None, 0, 1.0)
        else:
            for owner in active.nonzero()[:, 0].tolist():
                self._update(owner, owner, float(clip[owner]))
        self.steps = self.steps.cpu() + active
        return loss

    def _can_fuse(self) -> bool:
        """Whether the kernels can take the step: float32 on one GPU, and one rate for all groups."""
        one_rate = len({(group["lr"], group["betas"], group["eps"]) for group in self.param_groups}) == 1
        first = self.param_groups[0]["params"][0]
        if not (one_rate and first.is_cuda and has_triton()):
            return False
        return all(
            p.dtype == torch.float32 and p.device == first.device and p.is_contiguous()
            for group in self.param_groups
            for p in group["params"]
        )

    def _fused_step(self) -> None:
        """The same step in three launches, without waiting for the GPU."""
        from taskgraft.nn.adamw_kernels import Stack, Table

        owned = list(self._stacks())  # a parameter without a gradient is left alone, as everywhere
        if not owned:
            return
        places = tuple(parameter.data_ptr() for _, parameter, _ in owned)
        if places not in self._tables:
            stacks = []
            for group, p, slots in owned:
                moments, gradient = self.moments(p), cast(Tensor, p.grad)
                decay = [float(self.weight_decay[owner]) if group["decays"] else 0.0 for owner in slots]
                stacks.append(Stack(p, gradient, moments["exp_avg"], moments["exp_avg_sq"], slots, decay))
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[places] = Table(stacks, len(self.owners), owned[0][1].device)
        table = self._tables[places]
        gradients = [cast(Tensor, p.grad) for _, p, _ in owned]
        moved = [(own, now) for own, now in zip(table.gradients, gradients, strict=True) if now is not own]
        if moved:  # the table knows the gradients by where they lay at first
            torch._foreach_copy_([own for own, _ in moved], [now for _, now in moved])
        group = self.param_groups[0]
        self.steps = self.steps.to(table.device)
        now = torch.stack([self.rate * group["lr"], self.clip_norm, self.active.double()])
        rates, clips, active = now.to(table.device, non_blocking=True)
        table.step(rates, clips, active, self.steps, group["betas"], group["eps"])
        torch.autograd.graph.increment_version([parameter for _, parameter, _ in owned])  # written by address

    def _update(self, only: int | None, owner: int, clip: float) -> None:
        """One AdamW step of one task's slots, or (None) of every slot, with the settings of `owner`."""
        for group in self.param_groups:
            lists: tuple[list[Tensor], ...] = ([], [], [], [])
            for parameter, slots in zip(group["params"], group["slots"], strict=True):
                if parameter.grad is None or (only is not None and only not in slots):
                    continue
                state = self.moments(parameter)
                stacks = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                for values, stack in zip(lists, stacks, strict=True):
                    values.append(stack if only is None else by_slot(stack, slots)[slots.index(only)])
            parameters, grads, means, squares = lists
            if not parameters:
                continue
            if clip != 1:
                grads = list(torch._foreach_mul(grads, clip))
            adamw(
                parameters,
                grads,
                means,
                squares,
                [],
                [torch.full((), float(self.steps[owner]), device=p.device) for p in parameters],
                fused=all(p.device.type in ("cpu", "cuda") for p in parameters),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"] * self.rate[owner]),
                weight_decay=float(self.weight_decay[owner]) if group["decays"] else 0.0,
                eps=group["eps"],
                maximize=False,
            )
            torch.autograd.graph.increment_version(parameters)  # which a fused step does not count


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


def owned_parameters(model: Any) -> Iterator[tuple[torch.nn.Parameter, list[str], bool]]:
    """Every trained parameter, the task of each of its slots, and whether it is decayed."""
    grafts = grafts_of(model)
    seen = set()
    for kind in grafts.kinds.values():
        tasks = kind.slots.trained
        banks = [(bank, False) for bank in kind.banks.values()]
        if isinstance(kind, HyperKind):
            banks.append((kind.shared_bank, True))
        for bank, all_shared in banks:
            for name, weight in bank.weights.items():
                parameter = bank._parameters.get(name)
                if parameter is not None:
                    seen.add(id(parameter))
                    owners = [shared_by(tasks)] if all_shared or weight.shared else list(tasks)
                    yield parameter, owners, weight.role == "matrix"
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in seen:
            one = len(grafts.trained) == 1  # a backbone with one head is that task's own
            yield parameter, [grafts.trained[0] if one else shared_by(grafts.trained)], parameter.dim() > 1


def shared_by(tasks: list[str]) -> str:
    """What tasks share steps, and is clipped, as one more slot."""
    return f"(shared by {', '.join(tasks)})"
