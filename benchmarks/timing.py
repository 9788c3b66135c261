"""Measuring: variants that take turns, medians with their quartiles, and a record of where it was.

A ratio is the median of the ratios of one turn, so that a machine that speeds up or slows down cancels out.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from stock import Run, Variant

Values = dict[str, list[float]]  # by variant, one for each repeat
Summary = dict[str, dict[str, float]]


def stopwatch(device: str) -> Callable[[Run], float]:
    """What times one run, in milliseconds: events on a GPU, around all of its work; the clock elsewhere."""
    if not device.startswith("cuda"):

        def on_cpu(run: Run) -> float:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)

        return on_cpu
    import torch

    def on_gpu(run: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return on_gpu


def interleaved(
    variants: Mapping[str, Variant],
    repeats: int,
    warmups: int,
    device: str = "cpu",
    order: random.Random | None = None,
    until: float = float("inf"),
) -> Values:
    """What each variant takes, the variants taking turns in an order shuffled in every turn.

    `until`, by the monotonic clock, ends it early: after whole turns, and at least one.
    """
    order = order or random.Random(0)
    timed = stopwatch(device)
    values: Values = {name: [] for name in variants}
    gc.disable()
    gc.collect()
    gc.freeze()  # what is built stays; the collections below are then short
    try:
        for turn in range(warmups + repeats):
            if turn > warmups and time.monotonic() > until:
                break
            gc.collect()
            for name in order.sample(list(variants), len(variants)):
                variant = variants[name]
                if variant.before is not None:
                    variant.before()
                spent = timed(variant.run)
                if turn >= warmups:
                    values[name].append(spent)
    finally:
        gc.unfreeze()
        gc.enable()
    return values


def measure(variants: Mapping[str, Run], rounds: int, warmups: int, device: str = "cpu") -> Summary:
    """What each variant takes in milliseconds; ratios are to the first of them."""
    values = interleaved({name: Variant(run) for name, run in variants.items()}, rounds, warmups, device)
    return summary(values, next(iter(variants)))


def summary(values: Mapping[str, Sequence[float]], baseline: str | None, unit: str = "ms") -> Summary:
    """Median, quartiles and minimum of each variant, and its ratio to the baseline where that was measured."""
    found: Summary = {}
    for name, own in values.items():
        q1, q2, q3 = quantiles(own, n=4, method="inclusive") if len(own) > 1 else [own[0]] * 3
        found[name] = {"rounds": len(own), f"median_{unit}": q2, f"q1_{unit}": q1, f"q3_{unit}": q3}
        found[name][f"min_{unit}"] = min(own)
        base = values.get(baseline, ()) if baseline is not None else ()
        if base:
            found[name] |= {"ratio": paired_ratio(own, base), "ratio_of_minima": min(own) / min(base)}
    return found


def paired_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """The median of the turns' own ratios."""
    return median(a / b for a, b in zip(own, other, strict=False))


def keep_memory() -> None:
    """Let glibc keep freed memory: else page faults, up to a tenth of a forward, hit whichever variant comes next."""
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((-3, 1 << 30), (-1, (1 << 31) - 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


def versions(*packages: str) -> dict[str, str]:
    """Of Python and these packages, the first on the path where there are two."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from source"
    return found


def hardware(device: str) -> dict[str, Any]:
    """The machine that a section ran on, and how busy it was before."""
    import torch

    found: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "load before": round(os.getloadavg()[0], 1)}
    if not device.startswith("cuda"):
        return found | {"threads": torch.get_num_threads()}
    gpu = torch.cuda.get_device_properties(0)
    found |= {"gpu": gpu.name, "gpu memory GiB": round(gpu.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        found["driver"] = told[0] if told else "unknown"
    return found


def cpu_model() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return next((x.split(": ")[1] for x in info.splitlines() if x.startswith("model name")), platform.processor())
