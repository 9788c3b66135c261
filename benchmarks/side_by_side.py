"""Ours and the peers side by side: rounds that alternate between their processes, section by section, on one machine.

Each side times its own baseline (the bare forward, full fine-tuning) and ratios are taken there. Results are written
after every section, so that what was measured survives whatever comes after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from plots import draw_bars, write_table
from stock import Setting
from timing import Values, paired_ratio, summary
from worker import Order, Worker, WorkerError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SIDES = ("ours", "adapters", "peft")
NO_PEERS = (
    "no packages for it: give --peer-python, an interpreter that has adapters 1.3.0 and peft 0.21.2, or --peers, a "
    "folder into which their wheels were unpacked (see benchmarks/README.md)."
)
SMOKE = Setting(
    "cpu", "float32", layers=2, width=32, heads=2, length=8, size=4, few=2, many=4, bank=6, runs=2, threads=1
)


@dataclass(frozen=True)
class Target:
    """One of our variants may take at most `limit` times what another took (None: `limit` is in the section's unit)."""

    variant: str
    limit: float
    of: tuple[str, str] | None  # a side and its variant

    @property
    def words(self) -> str:
        if self.of is None:
            return f"{self.variant}: at most {self.limit:g}"
        other = self.of[1] if self.of[0] == "ours" else f"{self.of[0]}, {self.of[1]}"
        if self.limit > 0.5:
            return f"{self.variant}: at most {self.limit:.2f} of {other}"
        return f"{self.variant}: at least {1 / self.limit:g} times faster than {other}"


@dataclass(frozen=True)
class Section:
    """One comparison. `kind` is what the workers know it by; `limit_s` ends its rounds, whatever is left of them."""

    name: str
    kind: str
    rows: int
    baseline: str | None
    limit_s: float
    rounds: int = 4
    repeats: int = 6  # of each variant in a round
    warmups: int = 3
    measure: Literal["time", "memory", "adding"] = "time"
    sides: tuple[str, ...] = SIDES
    targets: tuple[Target, ...] = ()

    @property
    def unit(self) -> str:
        return "mib" if self.measure == "memory" else "ms"


def smoke(sections: Sequence[Section]) -> list[Section]:
    """The same sections, as short as they can be."""
    return [replace(section, rows=4, rounds=2, repeats=2, warmups=1) for section in sections]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both commands have."""
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has `adapters` and `peft`")
    parser.add_argument("--peers", metavar="FOLDER", help="their wheels, unpacked; first on the peers' PYTHONPATH")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=RESULTS, help="default: benchmarks/results")
    parser.add_argument("--only", metavar="TEXT", help="only the sections whose name contains this")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, few repeats: does it run?")


def workers_for(options: argparse.Namespace, setting: Setting) -> dict[str, Worker | str]:
    """A worker for each side, or the reason why it has none."""
    path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    workers: dict[str, Worker | str] = {"ours": Worker([sys.executable, str(HERE / "ours.py")], setting, path)}
    for peer in SIDES[1:]:
        if options.peers and not Path(options.peers).is_dir():
            workers[peer] = f"the folder {options.peers!r} of --peers does not exist."
        elif options.peers or options.peer_python:
            command = [options.peer_python or sys.executable, str(HERE / "peers.py"), peer]
            folder = str(Path(options.peers).resolve()) if options.peers else None
            workers[peer] = Worker(command, setting, folder)
        else:
            workers[peer] = NO_PEERS
    return workers


def run(
    title: str,
    file: str,
    sections: Sequence[Section],
    setting: Setting,
    options: argparse.Namespace,
    minutes: float,
    backbone: str = "random weights of this shape",
) -> None:
    """Measure the sections; write `file`.json and its table after each, and the figure in the end."""
    start = time.monotonic()
    deadline = start + 60 * minutes

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    record: dict[str, Any] = {"title": title, "command": f"python benchmarks/{file}.py", "setting": asdict(setting)}
    if setting.backbone is not None:  # its name; its shape is its own
        record["setting"] |= {"backbone": backbone, "layers": None, "width": None, "heads": None}
    record |= {"smoke": options.smoke, "sides": {}, "skipped": {}, "sections": {}}
    workers = greeted(workers_for(options, setting), record, deadline, say)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{file}.json"
    try:
        for section in sections:
            if options.only and options.only not in section.name:
                continue
            if time.monotonic() > deadline - 10:
                record["skipped"][section.name] = f"the {minutes:g} minutes of the whole command were over."
                say(f"{section.name}: skipped, {record['skipped'][section.name]}")
                continue
            record["sections"][section.name] = measured(section, workers, deadline, say)
            target.write_text(json.dumps(record, indent=1) + "\n")
            write_table(record, target.with_suffix(".md"))
    finally:
        for worker in workers.values():
            worker.close()
    if not record["sections"]:
        raise SystemExit(f"no section was measured: --only {options.only!r} is in the name of none.")
    try:
        draw_bars(record, target.with_suffix(".png"))
    except ImportError:
        say(f"no figure: matplotlib is not here. Later: python benchmarks/plots.py {target.name}")
    print(target.with_suffix(".md").read_text())
    say(f"written: {target} and what is beside it")


def greeted(
    workers: Mapping[str, Worker | str], record: dict[str, Any], deadline: float, say: Callable[[str], None]
) -> dict[str, Worker]:
    """Start all workers at once; those that come up, and into the record what they say of themselves."""
    ready: dict[str, Worker] = {}
    for side, worker in workers.items():
        if isinstance(worker, Worker):
            try:
                worker.start()
                ready[side] = worker
                continue
            except WorkerError as lost:
                worker = str(lost)
        record["skipped"][side] = worker
    for side, found in list(ready.items()):
        try:
            hello = found.hello(min(180.0, deadline - time.monotonic()))
            record["sides"][side] = hello["versions"]
            record.setdefault("hardware", hello["hardware"])
            say(f"{side} is ready: {', '.join(f'{name} {version}' for name, version in hello['versions'].items())}")
        except WorkerError as lost:
            record["skipped"][side] = str(lost)
            del ready[side]
    for side, reason in record["skipped"].items():
        say(f"{side}: skipped, {reason}")
    if "ours" not in ready:
        raise SystemExit(f"our own side did not come up: {record['skipped']['ours']}")
    return ready


def measured(
    section: Section, workers: dict[str, Worker], deadline: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """A section's rounds: in each, every side's turn, in an order shuffled anew."""
    start = time.monotonic()
    until = min(start + section.limit_s, deadline)
    draw = random.Random(0)
    values: dict[str, Values] = {side: {} for side in section.sides if side in workers}
    skipped: dict[tuple[str, str], str] = {}
    rounds = section.rounds if section.measure == "time" else 1
    for number in range(1, rounds + 1):
        if number > 1 and time.monotonic() > until:
            say(f"{section.name}: its time is over after round {number - 1} of {rounds}")
            break
        for side in draw.sample(list(values), len(values)):
            say(f"{section.name}: round {number} of {rounds}, {side}")
            left = max(1.0, until - time.monotonic())
            order = Order(section.name, section.kind, section.rows, section.measure, section.repeats, section.warmups,
                          left)  # fmt: skip
            try:
                answer = workers[side].ask(order, min(1.5 * left + 60, max(10.0, deadline + 20 - time.monotonic())))
            except WorkerError as lost:
                answer = {"error": str(lost)}
            if "error" in answer:
                say(f"{section.name}: {side} failed: {answer['error']}")
                skipped[side, ""] = answer["error"]
                workers[side].close()  # a GPU that has failed a process once fails it for good: a new one next time
                continue
            for variant, found in answer["values"].items():
                values[side].setdefault(variant, []).extend(found)
            skipped |= {(side, variant): reason for variant, reason in answer["skipped"].items()}
    return recorded(section, values, skipped, time.monotonic() - start)


def recorded(
    section: Section, values: Mapping[str, Values], skipped: Mapping[tuple[str, str], str], seconds: float
) -> dict[str, Any]:
    """A section as it is written down."""
    variants = [
        {"side": side, "variant": variant, **numbers}
        for side, found in values.items()
        for variant, numbers in summary(found, section.baseline, section.unit).items()
    ]
    return {
        "kind": section.kind,
        "rows": section.rows,
        "unit": section.unit,
        "baseline": section.baseline,
        "seconds": round(seconds, 1),
        "variants": variants,
        "skipped": [{"side": side, "variant": name, "reason": reason} for (side, name), reason in skipped.items()],
        "targets": [judged(target, section, values) for target in section.targets],
    }


def judged(target: Target, section: Section, values: Mapping[str, Values]) -> dict[str, Any]:
    """A target and what was found; `bar` is where its line stands in the figure: a ratio to our own baseline."""
    found: dict[str, Any] = {"variant": target.variant, "words": target.words, "limit": target.limit}
    own = values.get("ours", {}).get(target.variant)
    other = values.get(target.of[0], {}).get(target.of[1]) if target.of else None
    if not own or (target.of is not None and not other):
        return found | {"measured": None, "met": None, "bar": None}
    number = paired_ratio(own, other) if other else median(own)
    base = values["ours"].get(section.baseline or "")
    bar = target.limit * median(other) / median(base) if other and base else None
    return found | {"measured": number, "met": number <= target.limit, "bar": bar}
