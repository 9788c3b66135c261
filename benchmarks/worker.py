"""One side of a benchmark as a process of its own: it stays loaded and measures a section when asked.

Orders and answers are lines of JSON on its standard input and output. So rounds alternate between ours and the peers on
one machine, each under its own packages, and only one of them runs at a time.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from stock import Setting, Variant, Variants
from timing import Values, hardware, interleaved, keep_memory, versions

Kinds = Mapping[str, Callable[[Setting, int], Variants]]  # a section's variants, for a number of rows
Adding = Callable[[Setting, int, float], tuple[Values, dict[str, str]]]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What a worker is asked for: repeats of a section, or its peak memory, or what adding tasks takes."""

    section: str
    kind: str
    rows: int
    measure: Literal["time", "memory", "adding"]
    repeats: int
    warmups: int
    limit_s: float


class WorkerError(Exception):
    """A worker that did not answer; its message says why."""


# -- inside the worker


def serve(packages: Sequence[str], kinds: Kinds, adding: Adding | None = None) -> None:
    """Say hello, then answer orders until the input ends. The last argument of the command line is the setting."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    setting = Setting(**json.loads(sys.argv[-1]))
    try:
        for package in packages:
            importlib.import_module(package)
        import torch

        keep_memory()
        if setting.threads:
            torch.set_num_threads(setting.threads)
        say({"versions": versions(*packages), "hardware": hardware(setting.device)})
    except Exception as error:
        say({"error": sentence(error)})
        return
    bench = Bench(setting, kinds, adding)
    for line in sys.stdin:
        try:
            say(bench.answer(Order(**json.loads(line))))
        except Exception as error:
            say({"error": sentence(error)})


class Bench:
    """The variants of the section at hand, kept from one round to the next."""

    def __init__(self, setting: Setting, kinds: Kinds, adding: Adding | None) -> None:
        self.setting, self.kinds, self.adding = setting, kinds, adding
        self.section = ""
        self.built: dict[str, Variant] = {}
        self.skipped: dict[str, str] = {}
        self.order = random.Random(0)

    def answer(self, order: Order) -> Answer:
        until = time.monotonic() + order.limit_s
        if order.measure == "adding":
            self.drop()
            if self.adding is None:
                return {"values": {}, "skipped": {}}
            values, skipped = self.adding(self.setting, order.rows, until)
            self.drop()
            return {"values": values, "skipped": skipped}
        variants = self.kinds[order.kind](self.setting, order.rows) if order.kind in self.kinds else {}
        if order.measure == "memory":
            self.drop()
            return {"values": self.peaks(variants), "skipped": self.skipped}
        warmups = 1  # caches, clocks and allocator, after another side's turn
        if order.section != self.section:
            self.drop()
            self.section, warmups = order.section, order.warmups
            for name, build in variants.items():
                self.build(name, build)
        values = interleaved(self.built, order.repeats, warmups, self.setting.device, self.order, until)
        self.free()
        return {"values": values, "skipped": self.skipped}

    def build(self, name: str, build: Callable[[], Variant]) -> None:
        """Build a variant and run it once; one that cannot is left out, with the reason."""
        try:
            variant = build()
            if variant.before is not None:
                variant.before()
            variant.run()
            self.built[name] = variant
        except Exception as error:
            self.skipped[name] = sentence(error)

    def peaks(self, variants: Variants) -> Values:
        """The most memory that a step of each variant holds, in MiB, each alone in this process."""
        import torch

        if not self.setting.device.startswith("cuda"):
            self.skipped = dict.fromkeys(variants, "peak memory is read on a CUDA device only.")
            return {}
        values: Values = {}
        for name, build in variants.items():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()  # at once: what a CUDA graph holds is taken while it is recorded
            self.build(name, build)
            if name in self.built:
                self.built[name].run()
                self.built[name].run()
                values[name] = [(torch.cuda.max_memory_allocated() - before) / 2**20]
            self.built.clear()
            gc.collect()
            self.free()
        return values

    def drop(self) -> None:
        self.section = ""
        self.built, self.skipped = {}, {}
        gc.collect()  # models refer to themselves
        self.free()

    def free(self) -> None:
        """Give the GPU's unused memory to the next side."""
        import torch

        if self.setting.device.startswith("cuda"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


# -- outside of it


class Worker:
    """A side's process, as the one who asks sees it. It is started again after it was lost."""

    def __init__(self, command: Sequence[str], setting: Setting, python_path: str | None) -> None:
        self.command = [*command, json.dumps(asdict(setting))]
        self.environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.environment |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if python_path is not None:
            self.environment["PYTHONPATH"] = python_path
        self.process: subprocess.Popen[str] | None = None
        self.greeted = False

    def start(self) -> None:
        self.greeted = False
        try:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise WorkerError(f"{self.command[0]} could not be started: {error}.") from error

    def hello(self, limit_s: float) -> Answer:
        """What it says of itself once it is ready."""
        if self.process is None:
            self.start()
        answer = self._read(limit_s)
        if "error" in answer:
            self.close()
            raise WorkerError(str(answer["error"]))
        self.greeted = True
        return answer

    def ask(self, order: Order, limit_s: float) -> Answer:
        deadline = time.monotonic() + limit_s
        if not self.greeted:
            self.hello(limit_s)
        assert self.process is not None and self.process.stdin is not None
        try:
            print(json.dumps(asdict(order)), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._ended()) from None
        return self._read(deadline - time.monotonic())

    def _read(self, limit_s: float) -> Answer:
        assert self.process is not None and self.process.stdout is not None
        output: IO[str] = self.process.stdout
        if not select.select([output], [], [], max(0.0, limit_s))[0]:
            self.close()
            raise WorkerError(f"it did not answer within {limit_s:.0f} s.")
        line = output.readline()
        if not line:
            raise WorkerError(self._ended())
        answer: Answer = json.loads(line)
        return answer

    def _ended(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        self.process, self.greeted = None, False
        return f"its process ended with code {code}; its own words are on the standard error above."

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self.greeted = None, False
