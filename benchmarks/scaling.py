"""What a mixed batch costs beside the bare backbone, against the tasks, the rows, the tokens and the adapters' size.

Four series through one centre, in each of which one of the four varies; and all combinations of the four axes' ends.
Combinations that do not fit into the memory are listed as skipped. Every row is of another task where there are enough.

  python benchmarks/scaling.py

scaling.json, a table and a figure go into benchmarks/results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ours import logits, method
from plots import AXES, draw_scaling, listed, number, point_words
from side_by_side import RESULTS, SMOKE
from stock import Setting, Variant, batch, captured, drawn_rows, hidden, perturb, stock_model, task_names
from timing import hardware, interleaved, summary, versions

import taskgraft as tg

MINUTES = 8.0
BARE, BARE_GRAPHS = "bare backbone", "bare backbone, CUDA graphs"
AS_USUAL, GRAPHS = "launched as usual", "CUDA graphs"
WAYS = {AS_USUAL: "o-", GRAPHS: "s:"}


@dataclass(frozen=True)
class Point:
    """One combination."""

    tasks: int
    rows: int
    length: int
    size: int


@dataclass(frozen=True)
class Plan:
    """The values of each axis, and the centre that the series go through."""

    centre: Point
    tasks: tuple[int, ...]
    rows: tuple[int, ...]
    length: tuple[int, ...]
    size: tuple[int, ...]

    def points(self) -> list[Point]:
        """The series and the corners; large banks last, since filling them takes the longest."""
        series = [replace(self.centre, **{axis: value}) for axis in AXES for value in getattr(self, axis)]
        ends = [(getattr(self, axis)[0], getattr(self, axis)[-1]) for axis in AXES]
        corners = [Point(*values) for values in itertools.product(*ends)]

        def place(p: Point) -> tuple[bool | int, ...]:
            return p.tasks > self.centre.tasks, p.size != self.centre.size, p.size, p.tasks, p.rows, p.length

        return sorted({*series, *corners}, key=place)


FULL = Plan(
    Point(1000, 256, 128, 64),
    tasks=(1, 10, 100, 1000, 10_000),
    rows=(8, 16, 32, 64, 128, 256, 512, 1024),
    length=(32, 64, 128, 256, 512),
    size=(8, 16, 32, 64, 128, 256),
)
TINY = Plan(Point(4, 4, 8, 4), tasks=(1, 4, 8), rows=(2, 4), length=(4, 8), size=(4, 8))


def bytes_needed(point: Point, setting: Setting, config: Any) -> int:
    """The bank, whose room for tasks is a power of two, and what the widest part of a layer holds at once."""
    width = torch.finfo(getattr(torch, setting.dtype)).bits // 8
    slots = 1 << point.tasks.bit_length()
    bank = slots * tg.count(tg.Adapter(size=point.size), config, labels=2)
    layer = point.rows * point.length * (2 * config.intermediate_size + 8 * config.hidden_size)
    return int(width * (bank + layer))


def memory_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Bank:
    """A grafted model whose bank grows as the points ask for more tasks; a new one for each size."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model: Any = None
        self.graft: Any = None
        self.size, self.tasks = 0, 0

    def of(self, point: Point, until: float) -> Any:
        setting = replace(self.setting, size=point.size)
        if point.size != self.size or point.tasks < self.tasks:
            self.model = None
            empty_cache(setting.device)
            self.model = tg.graft(stock_model(setting), method(setting), {"t0": 2}).eval()
            tg.train_only(self.model, [])
            self.size, self.tasks, self.graft = point.size, 1, tg.get_graft(self.model, "t0")
            perturb(self.model)
        missing = task_names(point.tasks)[self.tasks :]
        for name in missing:
            if time.monotonic() > until:
                raise TimeoutError(f"the time was over at {self.tasks:,} tasks in the bank.")
            tg.add_graft(self.model, self.graft, name)
            self.tasks += 1
        return perturb(self.model) if missing else self.model


def empty_cache(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def variants_of(point: Point, setting: Setting, bare: Any, grafted: Any) -> dict[str, Variant]:
    inputs, draws = batch(setting, point.rows, point.length), drawn_rows(point.tasks, point.rows)
    variants = {
        BARE: Variant(lambda: hidden(bare, inputs)),
        AS_USUAL: Variant(lambda: logits(grafted, inputs, next(draws))),
    }
    if setting.device.startswith("cuda"):
        graphed = tg.Graphed(grafted)
        with torch.no_grad():
            variants[BARE_GRAPHS] = captured(lambda held: bare(**held).last_hidden_state, inputs)

        def play() -> Any:
            with torch.no_grad():
                return graphed(next(draws), inputs)

        variants[GRAPHS] = Variant(play)
    return variants


def measured(point: Point, setting: Setting, bare: Any, grafted: Any, repeats: int) -> dict[str, Any]:
    values = interleaved(variants_of(point, setting, bare, grafted), repeats, 3, setting.device)
    found = {AS_USUAL: summary({name: values[name] for name in (BARE, AS_USUAL)}, BARE)}
    if GRAPHS in values:
        found[GRAPHS] = summary({name: values[name] for name in (BARE_GRAPHS, GRAPHS)}, BARE_GRAPHS)
    ms = {name: numbers["median_ms"] for part in found.values() for name, numbers in part.items()}
    return {**asdict(point), "ms": ms, "ratios": {way: part[way]["ratio"] for way, part in found.items()}}


def run(plan: Plan, setting: Setting, repeats: int, limit_bytes: int, until: float) -> Iterator[dict[str, Any]]:
    """A record for each point: its times and ratios, or the reason why it was skipped."""
    bare, bank = stock_model(setting), Bank(setting)
    for point in plan.points():
        needed = bytes_needed(point, setting, bare.config)
        if needed > limit_bytes:
            reason = f"over the memory: it needs {needed / 2**30:,.3g} GiB of {limit_bytes / 2**30:,.3g} GiB."
            yield {**asdict(point), "skipped": reason}
            continue
        try:
            if time.monotonic() > until:
                raise TimeoutError("the time was over.")
            grafted = bank.of(point, until)
            yield measured(point, setting, bare, grafted, repeats)
        except TimeoutError as error:
            yield {**asdict(point), "skipped": str(error)}
        except torch.OutOfMemoryError:
            bank.model, bank.size = None, 0
            empty_cache(setting.device)
            yield {**asdict(point), "skipped": f"out of memory, though {needed / 2**30:,.3g} GiB were to be enough."}


def write_table(record: dict[str, Any], path: Path) -> None:
    lines = [f"# {record['title']}", "", f"`{record['command']}`", "", f"Machine: {listed(record['hardware'])}.", ""]
    lines += [f"Versions: {listed(record['versions'])}.", ""]
    lines += ["| tasks | rows | tokens | size | bare ms | ours ms | ratio | graphs: bare ms | ours ms | ratio |"]
    lines += ["|---" * 10 + "|"]
    for point in record["points"]:
        cells = [f"{point[axis]:,}" for axis in AXES]
        for way, base in ((AS_USUAL, BARE), (GRAPHS, BARE_GRAPHS)):
            if way in point["ratios"]:
                cells += [number(point["ms"][base]), number(point["ms"][way]), f"{point['ratios'][way]:.3f}"]
            else:
                cells += [""] * 3
        lines.append(f"| {' | '.join(cells)} |")
    if record["skipped"]:
        lines += ["", "## Skipped", ""]
    for point in record["skipped"]:
        lines.append(f"- {point_words(point)}: {point['skipped']}")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="points that come later are skipped")
    parser.add_argument("--memory-gib", type=float, help="what may be used (default: nine tenths of what is there)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, few repeats: does it run?")
    options = parser.parse_args()
    start = time.monotonic()
    plan, setting, repeats = (TINY, SMOKE, 2) if options.smoke else (FULL, Setting(), 12)
    if options.memory_gib is None:
        limit_bytes = int(0.9 * memory_bytes(setting.device))
    else:
        limit_bytes = int(options.memory_gib * 2**30)
    record: dict[str, Any] = {
        "title": "What a mixed batch costs",
        "command": "python benchmarks/scaling.py",
        "hardware": hardware(setting.device),
        "versions": versions("torch", "transformers", "taskgraft"),
        "setting": asdict(setting),
        "centre": asdict(plan.centre),
        "ways": WAYS if setting.device.startswith("cuda") else {AS_USUAL: WAYS[AS_USUAL]},
        "points": [],
        "skipped": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "scaling.json"
    for point in run(plan, setting, repeats, limit_bytes, start + 60 * options.minutes):
        record["skipped" if "skipped" in point else "points"].append(point)
        print(f"[{time.monotonic() - start:6.1f} s] {point}", file=sys.stderr, flush=True)
        target.write_text(json.dumps(record, indent=1) + "\n")
    write_table(record, target.with_suffix(".md"))
    print(target.with_suffix(".md").read_text())
    try:
        draw_scaling(record, target.with_suffix(".png"))
    except ImportError:
        print("no figure: matplotlib is not here. Later: python benchmarks/plots.py scaling.json", file=sys.stderr)


if __name__ == "__main__":
    main()
