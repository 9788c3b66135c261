"""Tasks that learn together, on a GPU: what a step takes, how many kernels it is, and what several runs come to.

Eight made-up tasks of texts about as long as GLUE's, 64 rows a step, on a model that writes, as `tg.fit` trains it. The
first half of the steps is not counted: shapes are recorded there. With `--processes 12` as many runs share the device,
each in a process of its own, the methods taking turns; `--shares 100,25` starts them anew with each held to such a
percentage of the processors (the server of `nvidia-cuda-mps-control -d` must run); their steps are counted together.

    python benchmarks/company.py --backbone t5-small --processes 12 --shares 100,25 --out results
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

METHODS = ("full", "dagger", "hyperformer", "hyperformer++")
LENGTHS = (10, 12, 45, 26, 26, 33, 42, 60)  # words of a text, in the mean, of each task
ROWS, BATCH, PROFILED = 1_000, 64, 10
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def made_up(number: int, length: int) -> Any:
    """A task of two classes whose texts are long as a real one's."""
    import pyarrow as pa

    import taskgraft as tg

    draw = random.Random(number)
    words = [f"w{word}" for word in range(50)]
    counts = [max(3, round(draw.gauss(length, length / 3))) for _ in range(ROWS)]
    texts = [" ".join(draw.choices(words, k=count)) for count in counts]
    table = pa.table({"text": texts, "label": [draw.randrange(2) for _ in range(ROWS)]})
    return tg.Task(f"task{number}", "classification", ("no", "yes"), ("accuracy",), {"train": table})


def tiny() -> Any:
    """A model that writes, to see whether everything works."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    import taskgraft as tg

    words = {word: place for place, word in enumerate(["<pad>", "</s>", "<unk>", *"0123456789"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer: Any = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=20, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return tg.Backbone(hf.T5ForConditionalGeneration(config), tokenizer, "tiny")


class Watched:
    """When each step was taken; on a GPU, the kernels of some of them."""

    def __init__(self, steps: int, profile: bool) -> None:
        self.steps, self.profile, self.times = steps, profile, list[float]()
        self.profiler: Any = None

    def begin(self, name: str, steps: int, done: int) -> None: ...
    def epoch(self, epoch: int, metric: str, score: float) -> None: ...
    def end(self) -> None: ...

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        import torch

        if self.profile and done == self.steps - PROFILED - 2:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.__enter__()
        elif self.profile and done == self.steps - 2:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
        self.times.append(time.time())

    @property
    def kernels(self) -> tuple[float, float] | None:
        """How many a step has, and how many milliseconds they take one after the other."""
        if self.profiler is None:
            return None
        found: Counter[str] = Counter()
        for event in self.profiler.events():
            if event.device_type.name == "CUDA":
                found["kernels"] += 1
                found["us"] += event.device_time_total
        return found["kernels"] / PROFILED, found["us"] / PROFILED / 1e3


def one(method: str, backbone: str | None, steps: int, profile: bool) -> dict[str, Any]:
    """One run: what its steps took, after the first half."""
    import torch

    import taskgraft as tg
    from taskgraft.backbones import graphs

    recordings: list[Any] = []
    record: Any = graphs.Recording._record

    def counted(self: Any, *given: Any) -> None:
        recordings.append(self)
        record(self, *given)

    setattr(graphs.Recording, "_record", counted)  # noqa: B010 - for as long as this process is
    methods: dict[str, tg.Method] = {
        "full": tg.FullFineTuning(),
        "dagger": tg.Adapter(reduction=32, norm_after="shared", backbone_dropout=True),
        "hyperformer": tg.HyperFormer.paper(False),
        "hyperformer++": tg.HyperFormer.paper(True),
    }
    loaded = tiny() if backbone is None else tg.load_backbone(backbone, dtype=torch.float32)
    tasks = [made_up(number, length) for number, length in enumerate(LENGTHS)]
    watched = Watched(steps, profile and torch.cuda.is_available())
    settings = tg.Settings(epochs=1, epoch_steps=steps, batch_size=BATCH, learning_rate=3e-4, average=0.0)
    tg.fit(loaded, tasks, methods[method], settings=settings, progress=watched)
    last = steps - 1 - (PROFILED + 3 if watched.profile else 0)
    first = last // 2
    kernels = watched.kernels
    return {
        "method": method,
        "ms": 1e3 * (watched.times[last] - watched.times[first]) / (last - first),
        "kernels": None if kernels is None else kernels[0],
        "busy_ms": None if kernels is None else kernels[1],
        "recordings": len(recordings),
        "times": watched.times[first:],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def started(method: str, arguments: argparse.Namespace, profile: bool, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", method, "--steps", str(arguments.steps)]
    command += [] if arguments.smoke else ["--backbone", arguments.backbone]
    command += ["--profile"] if profile else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def came_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a run ended with {process.returncode}: {process.args!r}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def at_once(arguments: argparse.Namespace, share: int) -> dict[str, Any]:
    """Several runs at the same time: their steps a second together, while all of them are at it."""
    methods = [METHODS[number % len(METHODS)] for number in range(arguments.processes)]
    running = [started(method, arguments, profile=False, **{SHARE: str(share)}) for method in methods]
    runs = [came_of(process) for process in running]
    begin, end = max(run["times"][0] for run in runs), min(run["times"][-1] for run in runs)
    steps = sum(begin <= moment <= end for run in runs for moment in run["times"])
    return {
        "processes": arguments.processes,
        "share": share,
        "steps_a_second": steps / (end - begin) if end > begin else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="t5-small")
    parser.add_argument("--methods", default=",".join(METHODS), help="each by itself; nothing: none")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--shares", default="100", help="of the processors, in percent, for each process")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.backbone = None
    if arguments.work:
        backbone = arguments.backbone if "--backbone" in sys.argv else None
        print(json.dumps(one(arguments.work, backbone, arguments.steps, arguments.profile)))
        return
    record: dict[str, Any] = {"backbone": arguments.backbone or "tiny", "alone": [], "at_once": []}
    for method in filter(None, arguments.methods.split(",")):
        found = came_of(started(method, arguments, profile=True))
        del found["times"]
        record["alone"].append(found)
        kernels = (
            "" if found["kernels"] is None else f", {found['kernels']:.0f} kernels of {found['busy_ms']:.2f} ms in all"
        )
        print(f"{method:14s} {found['ms']:8.2f} ms a step{kernels}, {found['recordings']} recordings", flush=True)
    for share in map(int, arguments.shares.split(",")) if arguments.processes else ():
        together = at_once(arguments, share)
        record["at_once"].append(together)
        print(
            f"{arguments.processes} processes, {share} % each: {together['steps_a_second'] or 0:.0f} steps a second",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "company.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
