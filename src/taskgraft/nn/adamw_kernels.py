"""AdamW over slots in three launches: each task's gradient norm, its clipping and step, and the update itself.

Every trained tensor is cut into blocks of one task each; a table of addresses says where they lie. Nothing is read back
to the host, so a step can be taken before the one before it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _squares(table, squares, some, BLOCK: tl.constexpr):
    """A block's sum of squared gradients, and whether any is not zero."""
    block = tl.program_id(0).to(tl.int64)
    entry = table + block * 6
    gradient = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    count = tl.load(entry + 4)
    place = tl.arange(0, BLOCK)
    g = tl.load(gradient + place, mask=place < count, other=0.0)
    tl.store(squares + block, tl.sum(g * g, 0))
    tl.store(some + block, tl.max((g != 0).to(tl.float32), 0))


@triton.jit
def _settle(squares, some, starts, rates, clips, active, steps, norms, factors, log1, log2, CHUNK: tl.constexpr):
    """For each task: the norm, what its gradient is scaled by, whether it steps, and its two bias corrections."""
    owner = tl.program_id(0)
    first, last = tl.load(starts + owner), tl.load(starts + owner + 1)
    place = tl.arange(0, CHUNK)
    total, any_of = tl.zeros([CHUNK], tl.float64), tl.zeros([CHUNK], tl.float32)
    for begin in range(first, last, CHUNK):
        here = begin + place < last
        total += tl.load(squares + begin + place, mask=here, other=0.0).to(tl.float64)
        any_of = tl.maximum(any_of, tl.load(some + begin + place, mask=here, other=0.0))
    norm = tl.sqrt(tl.sum(total, 0))
    tl.store(norms + owner, norm)
    clip = tl.load(clips + owner)
    moves = (tl.max(any_of, 0) > 0) & (tl.load(active + owner) != 0)
    step = tl.load(steps + owner) + tl.where(moves, 1.0, 0.0)
    tl.store(steps + owner, step)
    counted = tl.maximum(step, 1.0).to(tl.float64)
    correction1, correction2 = 1 - tl.exp(counted * log1), 1 - tl.exp(counted * log2)
    rate = tl.load(rates + owner)
    tl.store(factors + owner * 5, tl.where(norm > clip, clip / norm, 1.0).to(tl.float32))
    tl.store(factors + owner * 5 + 1, (rate / correction1).to(tl.float32))
    tl.store(factors + owner * 5 + 2, (1 / tl.sqrt(correction2)).to(tl.float32))
    tl.store(factors + owner * 5 + 3, rate.to(tl.float32))
    tl.store(factors + owner * 5 + 4, tl.where(moves, 1.0, 0.0))


@triton.jit
def _update(table, decays, factors, rest1, beta2, rest2, eps, BLOCK: tl.constexpr):
    """`rest1` and `rest2` are 1 - beta, which float32 would round if they were taken here."""
    block = tl.program_id(0).to(tl.int64)
    entry = table + block * 6
    owner = tl.load(entry + 5)
    pace, rate = tl.load(factors + owner * 5 + 1), tl.load(factors + owner * 5 + 3)
    if tl.load(factors + owner * 5 + 4) != 0:  # else the task has no rows, or is held still: it changes in no bit
        parameter = tl.load(entry).to(tl.pointer_type(tl.float32))
        gradient = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
        mean = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        square = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
        place = tl.arange(0, BLOCK)
        here = place < tl.load(entry + 4)
        clip, root = tl.load(factors + owner * 5), tl.load(factors + owner * 5 + 2)
        decay = tl.load(decays + block)
        p = tl.load(parameter + place, mask=here, other=0.0)
        g = tl.load(gradient + place, mask=here, other=0.0) * clip
        m = tl.load(mean + place, mask=here, other=0.0)
        v = tl.load(square + place, mask=here, other=0.0)
        m += rest1 * (g - m)
        v = beta2 * v + rest2 * g * g
        p = p * (1 - rate * decay) - pace * m / (tl.sqrt(v) * root + eps)
        tl.store(parameter + place, p, here)
        tl.store(mean + place, m, here)
        tl.store(square + place, v, here)


@dataclass(frozen=True, eq=False)
class Stack:
    """A trained tensor [slots, ...] with its gradient and moments, all contiguous float32; `owners` of its slots."""

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    owners: Sequence[int]
    decay: Sequence[float]  # by slot


class Table:
    """The blocks of some stacks, sorted by owner. It holds the tensors; none of them may be given other memory."""

    def __init__(self, stacks: Sequence[Stack], owners: int, device: torch.device) -> None:
        self.stacks, self.device = list(stacks), device  # the addresses are of these tensors
        blocks: list[tuple[int, tuple[int, ...], float]] = []
        for stack in stacks:
            size = stack.parameter.numel() // len(stack.owners)
            tensors = (stack.parameter, stack.gradient, stack.mean, stack.square)
            for slot, (owner, decay) in enumerate(zip(stack.owners, stack.decay, strict=True)):
                for begin in range(0, size, BLOCK):
                    offset = 4 * (slot * size + begin)
                    places = tuple(tensor.data_ptr() + offset for tensor in tensors)
                    blocks.append((owner, (*places, min(BLOCK, size - begin), owner), decay))
        blocks.sort(key=lambda block: block[0])
        counts = torch.bincount(torch.tensor([owner for owner, _, _ in blocks]), minlength=owners)
        self.blocks = len(blocks)
        self.table = torch.tensor([entry for _, entry, _ in blocks]).to(device)
        self.decays = torch.tensor([decay for _, _, decay in blocks], dtype=torch.float32).to(device)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).to(device)
        self.squares = torch.empty(self.blocks, device=device)
        self.some = torch.empty(self.blocks, device=device)
        self.norms = torch.empty(owners, dtype=torch.float64, device=device)
        self.factors = torch.empty(owners, 5, device=device)

    @property
    def gradients(self) -> list[Tensor]:
        return [stack.gradient for stack in self.stacks]

    def step(
        self, rates: Tensor, clips: Tensor, active: Tensor, steps: Tensor, betas: tuple[float, float], eps: float
    ) -> None:
        """One step of every task that has a gradient; `rates` and `clips` in float64, `steps` counted up in place."""
        _squares[(self.blocks,)](self.table, self.squares, self.some, BLOCK=BLOCK)
        _settle[(len(rates),)](
            self.squares, self.some, self.starts, rates, clips, active, steps, self.norms, self.factors,
            math.log(betas[0]), math.log(betas[1]), CHUNK=1024,
        )  # fmt: skip
        rests = (1 - betas[0], betas[1], 1 - betas[1])
        _update[(self.blocks,)](self.table, self.decays, self.factors, *rests, eps, BLOCK=BLOCK)
