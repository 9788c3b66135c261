"""The processes that train one run together: each reads its share of every batch, and all take the same step.

They are what `accelerate launch` or torchrun started. The gradients of the trained weights, which are few, are summed
here and not by DistributedDataParallel: a row's loss counts for its share of the whole step, so the sum is what is
wanted, however uneven the shares; a process without rows in a batch makes no pass at all; and what a CUDA graph plays
back calls no hooks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from taskgraft.errors import GraftError

BUCKET_BYTES = 25 << 20  # of gradients that are sent at once
SHARDED = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """This process among those that train together. A team of one sends nothing."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the main process: the one that writes, shows progress and decides."""
        return self.rank == 0

    def turns(self, values: Sequence[T]) -> Sequence[T]:
        """The values that are this process's to work on."""
        return values[self.rank :: self.size]

    def pooled(self, own: dict[int, T]) -> dict[int, T]:
        """What all processes have found, by number."""
        if self.size == 1:
            return own
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, own)
        return {number: value for part in found for number, value in part.items()}

    def from_main(self, value: T) -> T:
        """The main process's value, on all of them."""
        if self.size == 1:
            return value
        sent = [value if self.leads else None]
        torch.distributed.broadcast_object_list(sent, src=0)
        found: Any = sent[0]
        return found  # type: ignore[no-any-return]

    def check_same(self, key: str) -> None:
        """Refuse processes that would train different things."""
        keys = self.pooled({self.rank: key})
        others = [rank for rank, other in keys.items() if other != keys[0]]
        if others:
            raise GraftError(
                f"process {others[0]} of {self.size} has other rows, settings or another backbone than process 0: give "
                "every process the same command, files and versions."
            )

    @torch.no_grad()
    def start_alike(self, weights: Iterable[Tensor]) -> None:
        """Let all processes begin with the main one's weights."""
        for weight in weights if self.size > 1 else ():
            torch.distributed.broadcast(weight, src=0)

    @torch.no_grad()
    def summed(self, parameters: Iterable[Parameter], others: Tensor) -> Tensor:
        """Let every gradient be the sum over all processes, and give that of `others`, a vector.

        A parameter that has a gradient in no process has none afterwards.
        """
        if self.size == 1:
            return others
        parameters = list(parameters)
        there = torch.tensor([p.grad is not None for p in parameters], dtype=others.dtype, device=others.device)
        told = torch.cat([others, there])
        torch.distributed.all_reduce(told)
        others, there = told[: len(others)], told[len(others) :]
        for begin, end in buckets(parameters):
            some = parameters[begin:end]
            flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in some])
            torch.distributed.all_reduce(flat)
            own = torch.split(flat, [p.numel() for p in some])
            for number, (p, values) in enumerate(zip(some, own, strict=True), begin):
                if p.grad is not None:
                    p.grad.copy_(values.view_as(p))
                elif there[number]:
                    p.grad = values.view_as(p).clone()
        return others

    def seed_step(self, seed: int, step: int) -> None:
        """Let dropout draw by seed, step and process: processes differ, and a run that is resumed does not."""
        if self.size > 1:
            (number,) = np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(number))


ALONE = Team()


def buckets(parameters: Sequence[Parameter]) -> list[tuple[int, int]]:
    """Where neighbours of one type that are sent together begin and end."""
    bounds = [0]
    size_bytes = 0
    for number, parameter in enumerate(parameters):
        own_bytes = parameter.numel() * parameter.element_size()
        same = parameter.dtype == parameters[bounds[-1]].dtype
        if number > bounds[-1] and (not same or size_bytes + own_bytes > BUCKET_BYTES):
            bounds.append(number)
            size_bytes = 0
        size_bytes += own_bytes
    return list(zip(bounds, [*bounds[1:], len(parameters)], strict=True))


def team_of() -> Team:
    """The processes that this one was started with."""
    state = accelerate_state()
    return Team(state.process_index, state.num_processes)


def accelerate_state() -> Any:
    """What Accelerate knows of the processes, once that is known to be what was asked for."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    started, on_cpu = int(os.environ.get("WORLD_SIZE", "1")), parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=on_cpu or (started > 1 and not torch.accelerator.is_available()))
    if state.num_processes < started:
        raise GraftError(
            f"{started} processes were started, and Accelerate was set up for one before: "
            "let taskgraft come first, or set ACCELERATE_USE_CPU=true."
        )
    if state.num_processes == 1 and on_cpu and "MASTER_ADDR" in os.environ:
        raise GraftError(
            "Accelerate was asked for several processes on CPUs and has started one, as it does without mpirun: start "
            "them with `torchrun --nproc-per-node 2 -m taskgraft.cli train ...` (or unset MASTER_ADDR for one)."
        )
    for variable, name in SHARDED.items():
        if state.num_processes > 1 and parse_flag_from_env(variable):
            raise GraftError(
                f"every process holds the whole frozen backbone, so there is nothing for {name}: leave it out."
            )
    return state
