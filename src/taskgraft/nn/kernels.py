"""The bottleneck in Triton: each row's weights used where they lie in the bank, one pass over `x`.

Forward and input gradient read a block of tokens, go through the hidden units on chip, and write once. The weight
gradients are a segmented matmul: one program for each task and slice of `d`, over that task's rows alone, summed in a
fixed order, so that a step gives the same bits each time. Products accumulate in float32; float32 is not TF32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from taskgraft.nn.bottleneck import NONZERO_AT_ZERO, NORM_EPS, Form, Origin
from taskgraft.nn.rows import Segments

MOST_UNITS, MOST_WIDTH, WIDTH_STEP = 512, 8192, 16
TOKENS = 128  # of a stretch, where all rows share one task and are cut anew
PROGRAMS = 264  # that fill a large GPU, two on each processor: work is cut into so many parts
MOST_SUMS = 2_000_000  # numbers: sums of parts that lie side by side before they are added up
NAMES = ("down", "down_bias", "up", "up_bias", "after_weight", "after_bias")


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _activate(z, ACT: tl.constexpr):
    if ACT == "gelu_new":
        h = 0.5 * z * (1 + _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif ACT == "gelu":
        h = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif ACT == "relu":
        h = tl.maximum(z, 0.0)
    elif ACT == "silu":
        h = z * tl.sigmoid(z)
    elif ACT == "tanh":
        h = _tanh(z)
    elif ACT == "sigmoid":
        h = tl.sigmoid(z)
    elif ACT == "softplus":
        h = tl.maximum(z, 0.0) + tl.log(1 + tl.exp(-tl.abs(z)))
    elif ACT == "leaky_relu":
        h = tl.where(z > 0, z, 0.01 * z)
    elif ACT == "elu":
        h = tl.where(z > 0, z, tl.exp(tl.minimum(z, 0.0)) - 1)
    else:
        h = z
    return h


@triton.jit
def _slope(z, ACT: tl.constexpr):
    """The activation's derivative at z."""
    if ACT == "gelu_new":
        t = _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        s = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * z * z)
    elif ACT == "gelu":
        s = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACT == "relu":
        s = tl.where(z > 0, 1.0, 0.0)
    elif ACT == "silu":
        g = tl.sigmoid(z)
        s = g * (1 + z * (1 - g))
    elif ACT == "tanh":
        t = _tanh(z)
        s = 1 - t * t
    elif ACT == "sigmoid":
        g = tl.sigmoid(z)
        s = g * (1 - g)
    elif ACT == "softplus":
        s = tl.sigmoid(z)
    elif ACT == "leaky_relu":
        s = tl.where(z > 0, 1.0, 0.01)
    elif ACT == "elu":
        s = tl.where(z > 0, 1.0, tl.exp(tl.minimum(z, 0.0)))
    else:
        s = z * 0 + 1
    return s


@triton.jit
def _forward(
    x, rows, sizes, down, down_bias, up, up_bias, after_weight, after_bias, y, z, mean, rstd, length, tokens, scaling,
    D: tl.constexpr, M: tl.constexpr, ACT: tl.constexpr, ROUTE: tl.constexpr, MASKED: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, SAVE: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    BL: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y = x + scaling * branch for a block of BL tokens of one row; z are the hidden units before the activation."""
    row = tl.program_id(1).to(tl.int64)
    slot = row if ROUTE == "own" else tl.load(rows + (row if ROUTE == "rows" else 0)).to(tl.int64)
    place = tl.program_id(0) * BL + tl.arange(0, BL)
    token = row * length + place
    here = (place < length) & (token < tokens)
    units, column = tl.arange(0, BM), tl.arange(0, BD)
    real = units < M
    x += token[:, None] * D
    y += token[:, None] * D
    down += slot * D * M
    up += slot * M * D
    up_bias += slot * D
    hidden = tl.zeros([BL, BM], tl.float32)
    for start in range(0, D, BD):
        d = start + column
        xs = tl.load(x + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(down + d[:, None] * M + units[None, :], mask=(d < D)[:, None] & real[None, :], other=0.0)
        hidden = tl.dot(xs.to(KIND), w.to(KIND), hidden, input_precision=PRECISION)
    hidden += tl.load(down_bias + slot * M + units, mask=real, other=0.0).to(tl.float32)[None, :]
    if SAVE:
        tl.store(z + token[:, None] * M + units[None, :], hidden.to(z.dtype.element_ty), here[:, None] & real[None, :])
    hidden = _activate(hidden, ACT)
    if MASKED:
        hidden = tl.where((units < tl.load(sizes + row))[None, :], hidden, 0.0)
    h = tl.where(real[None, :], hidden, 0.0).to(KIND)
    if NORM:  # Chan's merging of the slices' means and sums of squares
        centre, square, count = tl.zeros([BL], tl.float32), tl.zeros([BL], tl.float32), 0.0
        for start in range(0, D, BD):
            d = start + column
            w = tl.load(up + units[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
            b = tl.dot(h, w.to(KIND), input_precision=PRECISION)
            b += tl.load(up_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            width = tl.minimum(D - start, BD) * 1.0
            own = tl.sum(tl.where((d < D)[None, :], b, 0.0), 1) / width
            off = tl.where((d < D)[None, :], b - own[:, None], 0.0)
            delta = own - centre
            square += tl.sum(off * off, 1) + delta * delta * (count * width / (count + width))
            centre += delta * (width / (count + width))
            count += width
        spread = 1 / tl.sqrt(square / D + EPS)
        if SAVE:
            tl.store(mean + token, centre, here)
            tl.store(rstd + token, spread, here)
    for start in range(0, D, BD):
        d = start + column
        inside = (d < D)[None, :]
        w = tl.load(up + units[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0.0)
        b = tl.dot(h, w.to(KIND), input_precision=PRECISION)
        b += tl.load(up_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        if NORM:
            b = (b - centre[:, None]) * spread[:, None]
            b *= tl.load(after_weight + slot * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            b += tl.load(after_bias + slot * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        xs = tl.load(x + d[None, :], mask=here[:, None] & inside, other=0.0).to(tl.float32)
        tl.store(y + d[None, :], (xs + scaling * b).to(y.dtype.element_ty), here[:, None] & inside)


@triton.jit
def _input_gradient(
    dy, rows, sizes, down, up, up_bias, after_weight, z, mean, rstd, dx, dz, h, c1, c2, length, tokens, scaling,
    D: tl.constexpr, M: tl.constexpr, ACT: tl.constexpr, ROUTE: tl.constexpr, MASKED: tl.constexpr,
    NORM: tl.constexpr, NEEDED: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    BL: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dz, h = act(z), and dx = dy + dz @ down^T where needed; with a norm, also the means of its gradient, c1, c2."""
    row = tl.program_id(1).to(tl.int64)
    slot = row if ROUTE == "own" else tl.load(rows + (row if ROUTE == "rows" else 0)).to(tl.int64)
    place = tl.program_id(0) * BL + tl.arange(0, BL)
    token = row * length + place
    here = (place < length) & (token < tokens)
    units, column = tl.arange(0, BM), tl.arange(0, BD)
    real = units < M
    dy += token[:, None] * D
    down += slot * D * M
    up += slot * M * D
    up_bias += slot * D
    zs = tl.load(z + token[:, None] * M + units[None, :], mask=here[:, None] & real[None, :], other=0.0).to(tl.float32)
    on = real
    if MASKED:
        on = on & (units < tl.load(sizes + row))
    units_out = tl.where(on[None, :], _activate(zs, ACT), 0.0).to(KIND)
    tl.store(h + token[:, None] * M + units[None, :], units_out, here[:, None] & real[None, :])
    if NORM:
        centre = tl.load(mean + token, mask=here, other=0.0)
        spread = tl.load(rstd + token, mask=here, other=0.0)
        first, second = tl.zeros([BL], tl.float32), tl.zeros([BL], tl.float32)
        for start in range(0, D, BD):
            d = start + column
            inside = (d < D)[None, :]
            w = tl.load(up + units[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0.0)
            b = tl.dot(units_out, w.to(KIND), input_precision=PRECISION)
            b += tl.load(up_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            g = tl.load(dy + d[None, :], mask=here[:, None] & inside, other=0.0).to(tl.float32) * scaling
            g *= tl.load(after_weight + slot * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            first += tl.sum(g, 1)
            second += tl.sum(g * (b - centre[:, None]) * spread[:, None], 1)
        first /= D
        second /= D
        tl.store(c1 + token, first, here)
        tl.store(c2 + token, second, here)
    hidden = tl.zeros([BL, BM], tl.float32)
    for start in range(0, D, BD):
        d = start + column
        inside = (d < D)[None, :]
        g = tl.load(dy + d[None, :], mask=here[:, None] & inside, other=0.0).to(tl.float32) * scaling
        if NORM:
            w = tl.load(up + units[:, None] * D + d[None, :], mask=real[:, None] & inside, other=0.0)
            b = tl.dot(units_out, w.to(KIND), input_precision=PRECISION)
            b += tl.load(up_bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            g *= tl.load(after_weight + slot * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            g = spread[:, None] * (g - first[:, None] - (b - centre[:, None]) * spread[:, None] * second[:, None])
            g = tl.where(inside, g, 0.0)
        wt = tl.load(up + units[None, :] * D + d[:, None], mask=real[None, :] & (d < D)[:, None], other=0.0)
        hidden = tl.dot(g.to(KIND), wt.to(KIND), hidden, input_precision=PRECISION)
    hidden = tl.where(on[None, :], hidden * _slope(zs, ACT), 0.0)
    tl.store(dz + token[:, None] * M + units[None, :], hidden.to(dz.dtype.element_ty), here[:, None] & real[None, :])
    if NEEDED:
        dx += token[:, None] * D
        h_grad = hidden.to(KIND)
        for start in range(0, D, BD):
            d = start + column
            inside = (d < D)[None, :]
            wt = tl.load(down + d[None, :] * M + units[:, None], mask=inside & real[:, None], other=0.0)
            g = tl.load(dy + d[None, :], mask=here[:, None] & inside, other=0.0).to(tl.float32)
            g += tl.dot(h_grad, wt.to(KIND), input_precision=PRECISION)
            tl.store(dx + d[None, :], g.to(dx.dtype.element_ty), here[:, None] & inside)


@triton.jit
def _weight_gradient(
    x, dy, h, dz, rows, order, starts, up, up_bias, after_weight, mean, rstd, c1, c2,
    d_down, d_down_bias, d_up, d_up_bias, d_after_weight, d_after_bias, stride, stretches, length, tokens, scaling,
    D: tl.constexpr, M: tl.constexpr, ROUTE: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One task's gradients for BD columns of d, over every `parts`-th row of its segment."""
    slot, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    units, step = tl.arange(0, BM), tl.arange(0, BT)
    real, inside = units < M, d < D
    acc_down, acc_up = tl.zeros([BD, BM], tl.float32), tl.zeros([BM, BD], tl.float32)
    acc_down_bias, acc_up_bias = tl.zeros([BM], tl.float32), tl.zeros([BD], tl.float32)
    if NORM:
        acc_weight, acc_bias = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        w = tl.load(up + slot * M * D + units[:, None] * D + d[None, :], real[:, None] & inside[None, :], other=0.0)
        base = tl.load(up_bias + slot * D + d, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(after_weight + slot * D + d, mask=inside, other=0.0).to(tl.float32)
    if ROUTE == "rows":
        first, last = tl.load(starts + slot), tl.load(starts + slot + 1)
    elif ROUTE == "one":
        first, last = 0 * slot, tl.where(tl.load(rows) == slot, stretches, 0).to(tl.int64)
    else:
        first, last = slot, slot + 1
    for number in range(first + part, last, parts):
        row = tl.load(order + number).to(tl.int64) if ROUTE == "rows" else number + 0 * slot
        for begin in range(0, length, BT):
            place = begin + step
            token = row * length + place
            here = (place < length) & (token < tokens)
            wide, narrow = here[:, None] & inside[None, :], here[:, None] & real[None, :]
            xs = tl.load(x + token[:, None] * D + d[None, :], mask=wide, other=0.0)
            g = tl.load(dy + token[:, None] * D + d[None, :], mask=wide, other=0.0).to(tl.float32) * scaling
            hs = tl.load(h + token[:, None] * M + units[None, :], mask=narrow, other=0.0)
            zg = tl.load(dz + token[:, None] * M + units[None, :], mask=narrow, other=0.0)
            if NORM:
                b = tl.dot(hs, w.to(KIND), input_precision=PRECISION) + base[None, :]
                spread = tl.load(rstd + token, mask=here, other=0.0)
                b = (b - tl.load(mean + token, mask=here, other=0.0)[:, None]) * spread[:, None]
                acc_weight += tl.sum(g * b, 0)
                acc_bias += tl.sum(g, 0)
                shift = tl.load(c1 + token, mask=here, other=0.0)
                tilt = tl.load(c2 + token, mask=here, other=0.0)
                g = spread[:, None] * (g * gain[None, :] - shift[:, None] - b * tilt[:, None])
                g = tl.where(wide, g, 0.0)
            acc_down = tl.dot(tl.trans(xs.to(KIND)), zg.to(KIND), acc_down, input_precision=PRECISION)
            acc_up = tl.dot(tl.trans(hs), g.to(KIND), acc_up, input_precision=PRECISION)
            acc_down_bias += tl.sum(zg.to(tl.float32), 0)
            acc_up_bias += tl.sum(g, 0)
    at = part.to(tl.int64) * stride
    tl.store(d_down + at + (slot * D + d[:, None]) * M + units[None, :], acc_down, inside[:, None] & real[None, :])
    tl.store(d_up + at + (slot * M + units[:, None]) * D + d[None, :], acc_up, real[:, None] & inside[None, :])
    tl.store(d_up_bias + at + slot * D + d, acc_up_bias, inside)
    if tl.program_id(0) == 0:
        tl.store(d_down_bias + at + slot * M + units, acc_down_bias, real)
    if NORM:
        tl.store(d_after_weight + at + slot * D + d, acc_weight, inside)
        tl.store(d_after_bias + at + slot * D + d, acc_bias, inside)


def tiles(units: int, length: int, tokens: int, wide: bool, backward: bool = False) -> dict[str, int]:
    """Block sizes for a number of hidden units: tokens, slice of d, units. Few tokens are cut finer, to fill a GPU."""
    bm = max(16, triton.next_power_of_2(units))
    bl = {256: 32, 512: 16}.get(bm, 64)
    bl = bl // 2 if bl > 16 and (wide or tokens < PROGRAMS * bl) else bl
    bl = min(bl, max(16, triton.next_power_of_2(length)))
    bd = 32 if wide else 64 if bm > 64 or backward else 128
    warps = 4 if backward and bm <= 64 else 8
    return {"BL": bl, "BD": bd, "BM": bm, "num_warps": warps, "num_stages": 3 if bm <= 64 and not wide else 2}


def weight_tiles(units: int, length: int, wide: bool) -> dict[str, int]:
    bm = max(16, triton.next_power_of_2(units))
    bd = {256: 32, 512: 16}.get(bm, 64)
    bt = 32 if wide or bm > 128 else 128 if bm <= 64 else 64
    bt = min(bt, max(16, triton.next_power_of_2(length)))
    return {"BT": bt, "BD": min(bd, 32) if wide else bd, "BM": bm, "num_warps": 8 if bm > 64 else 4, "num_stages": 2}


def parts_of(stretches: int, blocks: int, weights: int, route: str) -> int:
    """Into how many parts the rows of a slot are cut for their gradients, each with a sum of its own.

    Most rows of a batch may be of one slot, and the others' programs then end at once: there may be more of them than
    a GPU runs side by side, as long as their sums are little to write.
    """
    if route == "own":
        return 1
    if route == "one":
        return max(1, min(stretches // 2, PROGRAMS // blocks))
    return max(1, min(-(-stretches // 4), 4 * PROGRAMS // blocks, MOST_SUMS // weights))


class FusedBottleneck(torch.autograd.Function):
    """`eager` for the forms in `supports`. Tokens lie in stretches of `length`, each of one slot; the last may be cut.

    `route` says how they find it: "rows" [stretches] are their slots, or the "one" entry of it all stretches', or a
    stretch's number is its "own". `order` and `starts` list the stretches of each slot, for the first of these.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, origin: Origin | None, rows: Tensor | None, sizes: Tensor | None, order: Tensor | None,
        starts: Tensor | None, route: str, stretches: int, length: int, form: Form, dtype: torch.dtype, save: bool,
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        kept = [weight.dtype for weight in weights]
        down, down_bias, up, up_bias = weights[:4]
        if any(ctx.needs_input_grad[12:]):  # few slots, read often; a store at rest is cast where it is read
            down, up = down.to(dtype), up.to(dtype)
        normed = form.norm_after is not None
        after_weight, after_bias = weights[4:] if normed else (up_bias, up_bias)
        d, m = down.shape[1:]
        tokens = x.numel() // d
        y = torch.empty_like(x)
        z = x.new_empty(tokens if save else 0, m, dtype=dtype)
        statistics = x.new_empty(2, tokens if save and normed else 0, dtype=torch.float32)
        block = tiles(m, length, tokens, dtype == torch.float32)
        _forward[(triton.cdiv(length, block["BL"]), stretches)](
            x, rows, sizes, down, down_bias, up, up_bias, after_weight, after_bias, y, z,
            statistics[0], statistics[1], length, tokens, form.scaling,
            D=d, M=m, ACT=form.activation, ROUTE=route, MASKED=sizes is not None,
            NORM=normed, EPS=NORM_EPS, SAVE=save, KIND=KINDS[dtype][0], PRECISION=KINDS[dtype][1], **block,
        )  # fmt: skip
        if save:
            read, frozen, bias = (
                (x, None, None) if origin is None else (origin.x.contiguous(), origin.weight, origin.bias)
            )
            used = (down, down_bias, up, up_bias, *weights[4:])
            ctx.save_for_backward(read, frozen, bias, rows, sizes, order, starts, z, statistics, *used)
            ctx.route, ctx.stretches, ctx.length = route, stretches, length
            ctx.form, ctx.dtype, ctx.kept = form, dtype, kept
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, frozen, frozen_bias, rows, sizes, order, starts, z, statistics, *weights = ctx.saved_tensors
        route, stretches, length, dy = ctx.route, ctx.stretches, ctx.length, dy.contiguous()
        form, dtype = ctx.form, ctx.dtype
        down, _, up, up_bias = weights[:4]
        normed = form.norm_after is not None
        after_weight = weights[4] if normed else up_bias
        (slots, d, m), tokens = down.shape, z.shape[0]
        wide = dtype == torch.float32
        shared = {"D": d, "M": m, "NORM": normed, "KIND": KINDS[dtype][0], "PRECISION": KINDS[dtype][1]}
        dz, h, means = torch.empty_like(z), torch.empty_like(z), torch.empty_like(statistics)
        needed = ctx.needs_input_grad[0]
        dx = torch.empty_like(dy) if needed else dy
        block = tiles(m, length, tokens, wide, backward=True)
        _input_gradient[(triton.cdiv(length, block["BL"]), stretches)](
            dy, rows, sizes, down, up, up_bias, after_weight, z, statistics[0], statistics[1], dx, dz, h,
            means[0], means[1], length, tokens, form.scaling, ACT=form.activation, ROUTE=route,
            MASKED=sizes is not None, NEEDED=needed, **shared, **block,
        )  # fmt: skip
        gradients: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[12:]):
            block = weight_tiles(m, length, wide)
            sizes_of = [weight.numel() for weight in weights]
            parts = parts_of(stretches, slots * triton.cdiv(d, block["BD"]), sum(sizes_of), route)
            sums = x.new_empty(parts, sum(sizes_of), dtype=torch.float32)  # all weights side by side: summed at once
            first = list(torch.split(sums[0], sizes_of))
            _weight_gradient[(triton.cdiv(d, block["BD"]), slots, parts)](
                x, dy, h, dz, rows, order, starts, up, up_bias, after_weight, statistics[0], statistics[1], means[0],
                means[1], *first[:4], *(first[4:] or first[3:4] * 2), sums.shape[1], stretches, length, tokens,
                form.scaling, ROUTE=route, **shared, **block,
            )  # fmt: skip
            summed, kinds = sums[0] if parts == 1 else sums.sum(0), set(ctx.kept)
            if frozen is None and len(kinds) == 1:
                summed = summed.to(*kinds)  # all at once
            total = list(torch.split(summed, sizes_of))
            if frozen is not None:  # x = a @ W^T + b, so x^T @ dz = W @ (a^T @ dz) + b (sum of dz)
                total[0] = torch.matmul(frozen.float(), total[0].view(slots, d, m))
                if frozen_bias is not None:
                    total[0] += frozen_bias.float()[:, None] * total[1].view(slots, 1, m)
            gradients = [part.view(w.shape).to(t) for part, w, t in zip(total, weights, ctx.kept, strict=True)]
        return (dx if needed else None, *(None,) * 11, *gradients)


KINDS = {
    torch.float32: (tl.float32, "ieee"),
    torch.bfloat16: (tl.bfloat16, "tf32"),
    torch.float16: (tl.float16, "tf32"),
}


def supports(form: Form, d: int, m: int, training: bool) -> bool:
    """Whether the kernels have this form and these sizes."""
    plain = Form(activation=form.activation, norm_after=form.norm_after, scaling=form.scaling, dropout=form.dropout)
    drops = training and form.dropout > 0
    return form == plain and not drops and 1 <= m <= MOST_UNITS and d % WIDTH_STEP == 0 and d <= MOST_WIDTH


def fused(
    x: Tensor,
    rows: Tensor | None,
    weights: Mapping[str, Tensor],
    form: Form,
    dtype: torch.dtype,
    sizes: Tensor | None,
    segments: Segments | None,
    origin: Origin | None = None,
) -> Tensor:
    """The bottleneck by the kernels, computed in `dtype`, whatever the weights are kept in; else as `bottleneck`."""
    stacks = [weights[name].contiguous() for name in NAMES if name in weights]
    slots, (count, length) = stacks[0].shape[0], x.shape[:2]
    sizes = sizes if form.activation in NONZERO_AT_ZERO else None
    learns = torch.is_grad_enabled() and any(stack.requires_grad for stack in stacks)
    order = starts = None
    route = "own" if rows is None else "rows"
    if slots == 1 or (rows is not None and rows.shape[0] == 1):  # one task: its tokens are cut anew, all alike
        route, count, length = "one", triton.cdiv(count * length, TOKENS), TOKENS
        rows = torch.zeros(1, dtype=torch.long, device=x.device) if rows is None else rows
        sizes = None if sizes is None else sizes[:1].expand(count).contiguous()
    elif learns and rows is not None:
        segments = segments or Segments.of(rows, slots)
        order, starts = segments.order, segments.starts
    save = learns or (torch.is_grad_enabled() and x.requires_grad)
    if origin is not None and (not learns or origin.x.shape != x.shape or origin.x.dtype != x.dtype):
        origin = None
    result: Tensor = FusedBottleneck.apply(
        x.contiguous(), origin, rows, sizes, order, starts, route, count, length, form, dtype, save, *stacks
    )
    return result
