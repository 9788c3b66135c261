"""The roofline: how near the bottleneck and a whole forward come to what the machine allows.

Operations and the fewest bytes (each input read once, each output written once) are counted from the shape. Two
ceilings are measured on the device: a large copy, and a large matrix product. The floor of an operation is the larger
of its two times; that of a forward is the sum over its operations.

  python benchmarks/roofline.py

roofline.md goes into benchmarks/results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ours import grafted, mixed, one_pass, recorded
from plots import listed, number
from side_by_side import RESULTS, SMOKE
from stock import Setting, Variant, bare_forward
from timing import hardware, interleaved, stopwatch, versions

import taskgraft as tg
from taskgraft.nn.rows import Segments


@dataclass(frozen=True)
class Work:
    """What one operation must do."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do in a second."""

    operations: float
    bytes: float

    def floor_ms(self, works: list[Work]) -> float:
        """Operations one after the other, each at the ceiling that binds it."""
        return 1e3 * sum(max(w.operations / self.operations, w.bytes / self.bytes) for w in works)

    def binds(self, works: list[Work]) -> str:
        arithmetic = sum(w.operations for w in works) / self.operations
        moving = sum(w.bytes for w in works) / self.bytes
        return "arithmetic" if arithmetic > moving else "memory"


@dataclass(frozen=True)
class Shape:
    """Of a batch: its rows and their length; of the backbone; of the adapters and the tasks among the rows."""

    rows: int
    length: int
    d: int
    f: int  # of the feed-forward
    layers: int
    m: int
    tasks: int  # different ones in the batch
    width: int  # bytes of a number

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def adapter_bytes(self) -> int:
        return self.width * self.tasks * (2 * self.d * self.m + self.d + self.m)


def bottleneck_forward(s: Shape) -> Work:
    """x in, y out, the weights of each task once; two products."""
    return Work(4 * s.tokens * s.d * s.m, s.width * 2 * s.tokens * s.d + s.adapter_bytes)


def bottleneck_backward(s: Shape) -> Work:
    """x, dy and the weights in, dx and the weights' gradients out; the hidden units again, and four products."""
    return Work(10 * s.tokens * s.d * s.m, s.width * 3 * s.tokens * s.d + 2 * s.adapter_bytes)


def layer_forward(s: Shape) -> list[Work]:
    """A layer of the bare backbone: each matrix product with its bias and activation, attention, two adds and norms."""
    n, d, f, b = s.tokens, s.d, s.f, s.width
    return [
        Work(6 * n * d * d, b * (4 * n * d + 3 * d * d)),  # query, key, value
        Work(4 * n * s.length * d, b * 4 * n * d),  # attention
        Work(2 * n * d * d, b * (2 * n * d + d * d)),  # its output
        Work(0, b * 3 * n * d),  # add and norm
        Work(2 * n * d * f, b * (n * d + n * f + d * f)),  # feed-forward
        Work(2 * n * d * f, b * (n * f + n * d + d * f)),
        Work(0, b * 3 * n * d),
    ]


def forward(s: Shape, adapters: bool) -> list[Work]:
    added = 2 * [bottleneck_forward(s)] if adapters else []
    return s.layers * [*layer_forward(s), *added]


def ceilings(setting: Setting, smoke: bool) -> Ceilings:
    """A copy of 2 GiB, counting what is read and what is written, and a product of two 8,192-square matrices."""
    side, elements = (256, 1 << 20) if smoke else (8192, 1 << 30)
    dtype = getattr(torch, setting.dtype)
    source, target = (torch.randn(elements, device=setting.device, dtype=dtype) for _ in range(2))
    moved = 2 * source.numel() * source.element_size()
    a, b = (torch.randn(side, side, device=setting.device, dtype=dtype) for _ in range(2))
    copy_s = 1e-3 * once(setting, lambda: target.copy_(source))
    product_s = 1e-3 * once(setting, lambda: a @ b)
    return Ceilings(2 * side**3 / product_s, moved / copy_s)


def once(setting: Setting, run: Any, repeats: int = 20) -> float:
    timed = stopwatch(setting.device)
    for _ in range(3):
        run()
    return median(timed(run) for _ in range(repeats))


def alone(setting: Setting, run: Any, count: int = 20) -> float:
    """Milliseconds of an operation without what launching it costs: so many of them in one CUDA graph."""
    if not setting.device.startswith("cuda"):
        return once(setting, run)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return once(setting, graph.replay) / count


def bottleneck_ms(setting: Setting, s: Shape) -> tuple[float, float]:
    """The operation alone, forward and backward (both less the first), each row of a task drawn at random."""
    dtype = getattr(torch, setting.dtype)

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, device=setting.device)).to(dtype).requires_grad_()

    x, received = values(s.rows, s.length, s.d), torch.randn(s.rows, s.length, s.d, device=setting.device).to(dtype)
    weights = {
        "down": values(s.tasks, s.d, s.m, scale=0.02),
        "down_bias": values(s.tasks, s.m, scale=0.02),
        "up": values(s.tasks, s.m, s.d, scale=0.02),
        "up_bias": values(s.tasks, s.d, scale=0.02),
    }
    rows = torch.randperm(s.rows, device=setting.device) % s.tasks
    if s.tasks == 1:
        rows = rows[:1]
    segments = Segments.of(rows, s.tasks) if s.tasks > 1 else None

    def apply() -> torch.Tensor:
        return tg.bottleneck(x, rows, weights, segments=segments)

    with torch.no_grad():
        forward_ms = alone(setting, apply)
    wanted = [x, *weights.values()]
    both_ms = alone(setting, lambda: torch.autograd.grad(apply(), wanted, received))
    return forward_ms, both_ms - forward_ms


def lines_of(setting: Setting, rows: int, found: Ceilings) -> Iterator[str]:
    """A line for each thing that was counted and measured."""
    width = torch.finfo(getattr(torch, setting.dtype)).bits // 8
    whole = Shape(rows, setting.length, setting.width, 4 * setting.width, setting.layers, setting.size, 1, width)
    variants: dict[str, Variant] = {"bare": bare_forward(setting, rows)}
    for tasks in (1, setting.few, setting.many):
        on_gpu = setting.device.startswith("cuda")
        variants[str(tasks)] = (
            recorded(setting, rows, tasks) if on_gpu else mixed(setting, rows, grafted(setting, tasks), tasks)
        )
    measured = {name: median(ms) for name, ms in interleaved(variants, 20, 5, setting.device).items()}
    yield line("bare forward", forward(whole, adapters=False), measured["bare"], found)
    for tasks in (1, setting.few, setting.many):
        s = replace(whole, tasks=min(tasks, rows))
        words = f"{s.tasks:,} task{'s' * (s.tasks > 1)} in the batch"
        yield line(f"forward, {words}", forward(s, adapters=True), measured[str(tasks)], found)
        forward_ms, backward_ms = bottleneck_ms(setting, s)
        yield line(f"bottleneck, forward, {words}", [bottleneck_forward(s)], forward_ms, found)
        yield line(f"bottleneck, backward, {words}", [bottleneck_backward(s)], backward_ms, found)


def line(name: str, works: list[Work], measured_ms: float, found: Ceilings) -> str:
    operations, moved = sum(w.operations for w in works), sum(w.bytes for w in works)
    floor = found.floor_ms(works)
    cells = [name, number(operations / 1e9), number(moved / 1e6), f"{floor:.4f}", found.binds(works)]
    return f"| {' | '.join([*cells, f'{measured_ms:.4f}', f'{measured_ms / floor:.2f}'])} |"


# What a kernel's name tells of it, in this order.
SHARES = {
    "bottlenecks, norms, AdamW": r"^_(forward|input_gradient|weight_gradient|backward|summed|squares|settle|update)$",
    "attention": r"sdpa|flash|fmha|dot_do_o|convert_dq",
    "matrix products": r"gemm|nvjet|cutlass|cublas",
    "GELU": r"[Gg]elu",
    "sums, casts and copies": r".",
}


def shares_of(setting: Setting, rows: int) -> Iterator[str]:
    """Where the GPU's time goes in a training step of many runs in one pass, by the profiler: a line for each share."""
    from torch.profiler import ProfilerActivity, profile

    step = one_pass(setting, rows, graphed=True)
    for _ in range(3):
        step.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        step.run()
        torch.cuda.synchronize()
    ms = dict.fromkeys(SHARES, 0.0)
    for event in watched.key_averages():
        share = next(name for name, pattern in SHARES.items() if re.search(pattern, event.key))
        ms[share] += event.self_device_time_total / 1e3
    total = sum(ms.values())
    for name, spent in sorted(ms.items(), key=lambda item: -item[1]):
        yield f"| {name} | {spent:.1f} | {100 * spent / total:.0f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does it run?")
    options = parser.parse_args()
    setting, rows = (SMOKE, 4) if options.smoke else (Setting(), 256)
    found = ceilings(setting, options.smoke)
    text = [
        "# Roofline",
        "",
        "`python benchmarks/roofline.py`" + (" **A smoke run: its times mean nothing.**" if options.smoke else ""),
        "",
        f"Machine: {listed(hardware(setting.device))}. Versions: {listed(versions('torch', 'transformers'))}.",
        "",
        f"Batch: {rows} rows of {setting.length} tokens, {setting.dtype}; a BERT of {setting.layers} layers, hidden "
        f"{setting.width}; adapters of size {setting.size} at two sites of each layer.",
        "",
        f"Ceilings, as measured: {found.operations / 1e12:,.3g} TFLOP/s (a product of two large square matrices), "
        f"{found.bytes / 1e12:,.3g} TB/s (a large copy, bytes read and written).",
        "",
        "Counted are the operations of the matrix products, and the fewest bytes: each input of an operation read "
        "once, each output written once, each different task's weights once. The floor of an operation is the larger "
        "of its two times at the ceilings; that of a forward is the sum over its operations, with bias, activation and "
        "residual inside the products, and nothing for embeddings, heads and launches.",
        "",
        "| what | GFLOP | MB | floor ms | bound by | measured ms | measured / floor |",
        "|---|---|---|---|---|---|---|",
        *lines_of(setting, rows, found),
    ]
    if setting.device.startswith("cuda"):
        text += [
            "",
            f"A training step of {setting.runs} runs of 32 rows in one pass, by the profiler:",
            "",
            "| what | ms | share |",
            "|---|---|---|",
            *shares_of(setting, 32),
        ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "roofline.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
