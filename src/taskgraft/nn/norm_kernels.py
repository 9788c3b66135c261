"""A norm with each row's own weights in Triton: LayerNorm and the RMS norms, read once and written once.

In eager torch a norm whose weights differ from row to row takes a second pass over the tokens, and an RMS norm several.
The residual that a post-norm layer adds before its norm is added here too, which saves one more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from taskgraft.nn.rows import Segments

STRETCH = 32  # tokens whose share of the weights' gradients one program sums up; a quarter of it where they are few
MANY_TOKENS = 16_384


@triton.jit
def _forward(
    x, residual, rows, weight, bias, total, y, mean, rstd, length, eps, offset,
    D: tl.constexpr, ONE: tl.constexpr, ADDS: tl.constexpr, BIASED: tl.constexpr, RMS: tl.constexpr, SAVE: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = 0 * row if rows is None else tl.load(rows + (0 if ONE else row)).to(tl.int64)
    place = tl.program_id(0) * BT + tl.arange(0, BT)
    token, here = row * length + place, place < length
    d = tl.arange(0, BD)
    inside = d < D
    both = here[:, None] & inside[None, :]
    xs = tl.load(x + token[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
    if ADDS:
        xs += tl.load(residual + token[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
        if SAVE:
            xs = xs.to(total.dtype.element_ty)
            tl.store(total + token[:, None] * D + d[None, :], xs, both)
            xs = xs.to(tl.float32)
    centre = tl.zeros([BT], tl.float32)
    if not RMS:
        centre = tl.sum(xs, 1) / D
        xs = tl.where(inside[None, :], xs - centre[:, None], 0.0)
    spread = 1 / tl.sqrt(tl.sum(xs * xs, 1) / D + eps)
    if SAVE:
        tl.store(mean + token, centre, here)
        tl.store(rstd + token, spread, here)
    w = tl.load(weight + slot * D + d, mask=inside, other=0.0).to(tl.float32) + offset
    out = xs * spread[:, None] * w[None, :]
    if BIASED:
        out += tl.load(bias + slot * D + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + token[:, None] * D + d[None, :], out.to(y.dtype.element_ty), both)


@triton.jit
def _backward(
    x, dy, rows, weight, mean, rstd, dx, d_weight, d_bias, length, offset,
    D: tl.constexpr, ONE: tl.constexpr, BIASED: tl.constexpr, RMS: tl.constexpr, STRETCH: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dx of a stretch of one row's tokens, and the stretch's share of the weights' gradients."""
    row = tl.program_id(1).to(tl.int64)
    slot = 0 * row if rows is None else tl.load(rows + (0 if ONE else row)).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < D
    w = tl.load(weight + slot * D + d, mask=inside, other=0.0).to(tl.float32) + offset
    sum_weight, sum_bias = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for begin in range(0, STRETCH, BT):
        place = tl.program_id(0) * STRETCH + begin + tl.arange(0, BT)
        token, here = row * length + place, place < length
        both = here[:, None] & inside[None, :]
        xs = tl.load(x + token[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
        g = tl.load(dy + token[:, None] * D + d[None, :], mask=both, other=0.0).to(tl.float32)
        spread = tl.load(rstd + token, mask=here, other=0.0)
        if not RMS:
            xs = xs - tl.load(mean + token, mask=here, other=0.0)[:, None]
        xs = tl.where(both, xs * spread[:, None], 0.0)
        sum_weight += tl.sum(g * xs, 0)
        sum_bias += tl.sum(g, 0)
        g *= w[None, :]
        out = g - xs * (tl.sum(g * xs, 1) / D)[:, None]
        if not RMS:
            out -= (tl.sum(g, 1) / D)[:, None]
        tl.store(dx + token[:, None] * D + d[None, :], (out * spread[:, None]).to(dx.dtype.element_ty), both)
    at = (row * tl.num_programs(0) + tl.program_id(0)) * D
    tl.store(d_weight + at + d, sum_weight, inside)
    if BIASED:
        tl.store(d_bias + at + d, sum_bias, inside)


@triton.jit
def _summed(
    shares, rows, order, starts, total, stretches, count, D: tl.constexpr, ONE: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The shares of a slot's rows, BR of them at a time, in their order; those of the bias after the weight's."""
    slot, number_of = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shares += number_of * count * stretches * D
    total += number_of * tl.num_programs(1) * D
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    if rows is None:
        first, items = 0 * slot, count * stretches
    elif ONE:
        first, items = 0 * slot, tl.where(tl.load(rows) == slot, count * stretches, 0)
    else:
        first = tl.load(starts + slot)
        items = (tl.load(starts + slot + 1) - first) * stretches
    found = tl.zeros([BR, BD], tl.float32)
    for begin in range(0, items, BR):
        number = begin + tl.arange(0, BR)
        here = number < items
        at = number
        if not ONE:
            row = tl.load(order + first + number // stretches, mask=here, other=0)
            at = row * stretches + number % stretches
        found += tl.load(shares + at[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
    tl.store(total + slot * D + d, tl.sum(found, 0), d < D)


class RowNorm(torch.autograd.Function):
    """x [rows, length, d], with a residual or without, normalised by the weights [slots, d] of each row's slot.

    One entry of `rows` is the slot of all; without them there is one slot.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, rows: Tensor | None, order: Tensor | None, starts: Tensor | None,
        weight: Tensor, bias: Tensor | None, eps: float, offset: float, rms: bool, dtype: torch.dtype, save: bool,
    ) -> Tensor:  # fmt: skip
        count, length, d = x.shape
        y = torch.empty_like(x, dtype=dtype)
        total = x
        if residual is not None and save:
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        statistics = x.new_empty(2, count * length if save else 0, dtype=torch.float32)
        wide, one = triton.next_power_of_2(d), rows is None or len(rows) == 1
        tokens = max(1, min(4, 4096 // wide))
        _forward[(triton.cdiv(length, tokens), count)](
            x, residual, rows, weight, bias, total, y, statistics[0], statistics[1], length, eps, offset,
            D=d, ONE=one, ADDS=residual is not None, BIASED=bias is not None, RMS=rms, SAVE=save,
            BD=wide, BT=tokens,
        )  # fmt: skip
        if save:
            ctx.save_for_backward(total, rows, order, starts, weight, bias, statistics)
            ctx.offset, ctx.rms, ctx.dtypes = offset, rms, (x.dtype, None if residual is None else residual.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, order, starts, weight, bias, statistics = ctx.saved_tensors
        count, length, d = x.shape
        stretch = STRETCH if count * length > MANY_TOKENS else STRETCH // 4
        stretches, wide = triton.cdiv(length, stretch), triton.next_power_of_2(d)
        one = rows is None or len(rows) == 1
        shares = x.new_empty(1 if bias is None else 2, count * stretches, d, dtype=torch.float32)
        dx = torch.empty_like(x)
        _backward[(stretches, count)](
            x, dy.contiguous(), rows, weight, statistics[0], statistics[1], dx, shares[0], shares[-1], length,
            ctx.offset, D=d, ONE=one, BIASED=bias is not None, RMS=ctx.rms, STRETCH=stretch, BD=wide,
            BT=max(1, min(4, 2048 // wide)),
        )  # fmt: skip
        gradients: list[Tensor | None] = [None, None]
        if any(ctx.needs_input_grad[5:7]):
            total = x.new_empty(len(shares), *weight.shape, dtype=torch.float32)
            _summed[(triton.cdiv(d, 32), weight.shape[0], len(shares))](
                shares,
                rows,
                order,
                starts,
                total,
                stretches,
                count,
                D=d,
                ONE=one,
                BR=64,
                BD=32,
            )
            gradients = [total[0].to(weight.dtype), None if bias is None else total[1].to(bias.dtype)]
        own, other = ctx.dtypes
        return (dx.to(own), None if other is None else dx.to(other), None, None, None, *gradients, *(None,) * 5)


def row_norm(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    rms: bool = False,
    dtype: torch.dtype,
    segments: Segments | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [rows, ..., d] normalised with the weights [slots, d] of each row's slot; arguments as for `bottleneck`."""
    count, slots = x.shape[0], weight.shape[0]
    learns = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    if rows is None:  # already in row order: segments would be of other slots
        rows, segments = torch.arange(slots, device=x.device) if slots > 1 else None, None
    if learns and segments is None and rows is not None and len(rows) > 1:
        segments = Segments.of(rows, slots)
    order, spans = (None, None) if segments is None else (segments.order, segments.starts)
    needs = x.requires_grad or (residual is not None and residual.requires_grad)
    flat = x.reshape(count, -1, x.shape[-1]).contiguous()
    residual = None if residual is None else residual.reshape(flat.shape).contiguous()
    bias = None if bias is None else bias.contiguous()
    result: Tensor = RowNorm.apply(
        flat, residual, rows, order, spans, weight.contiguous(), bias, eps, offset, rms, dtype,
        torch.is_grad_enabled() and (learns or needs),
    )  # fmt: skip
    return result.view(x.shape)
