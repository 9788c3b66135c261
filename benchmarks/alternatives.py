"""What one would do without a mixed batch: swap one model's adapters for each request, or keep a model for each task.

Run by serve.py as a process of its own for each way and number of tasks, with a Trial in a JSON file; prints what it
found. It runs under the peers' packages too: torch and Transformers 4.57 or later, and `adapters` for swapping.

Requests never leave the process: no HTTP, no queue between threads, which favours these ways. As many as there are
clients are waiting at any time, in the order in which they came; each is tokenised when it comes.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from timing import versions

SWAPPED, GROUPED, MODELS = "adapters swapped", "adapters swapped, by task", "a model per task"
LENGTH = 128  # tokens of a text, at most; as ours
HEADS = (2, 1, 8)  # outputs, as the bundled tasks have


@dataclass(frozen=True)
class Trial:
    """One way, for so many tasks. `questions` is a file of numbers of tasks, and texts."""

    way: str
    backbone: str
    tasks: int
    size: int  # units of an adapter
    questions: str
    waiting: int  # requests at any time
    tokens: int  # of a batch, padding included
    seconds: float
    warmup_s: float


@dataclass(frozen=True)
class Request:
    task: int
    ids: list[int]


Run = Callable[[int, Any], Any]  # a task and its inputs, to the hidden states


def swapping(trial: Trial) -> Run:
    """One model with all adapters: bottlenecks of the same size at the same two sites; one of them is active."""
    import adapters
    import torch

    model = load(trial)
    adapters.init(model)
    config = adapters.DoubleSeqBnConfig(reduction_factor=model.config.hidden_size / trial.size)
    before = {name for name, _ in model.named_parameters()}
    for task in range(trial.tasks):
        model.add_adapter(f"t{task}", config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name not in before:
                value += 0.02 * torch.randn_like(value)
    model.eval()

    def run(task: int, inputs: Any) -> Any:
        model.set_active_adapters(f"t{task}")
        return model(**inputs).last_hidden_state

    return run


def a_model_each(trial: Trial) -> Run:
    """A whole backbone for each task, no two alike, as full fine-tuning leaves it."""
    import torch

    model = load(trial)
    models = [copy.deepcopy(model) for _ in range(trial.tasks)]
    with torch.no_grad():
        for number, own in enumerate(models):
            for value in own.parameters():
                value *= 1 + 0.001 * (number + 1)

    def run(task: int, inputs: Any) -> Any:
        return models[task](**inputs).last_hidden_state

    return run


def load(trial: Trial) -> Any:
    from transformers import BertModel

    return BertModel.from_pretrained(trial.backbone, add_pooling_layer=False).eval()


def mean(hidden: Any, mask: Any) -> Any:
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def first_alone(waiting: deque[Request], tokens: int) -> list[Request]:
    """One request at a time, as a server that swaps does."""
    return [waiting.popleft()]


def first_with_its_task(waiting: deque[Request], tokens: int) -> list[Request]:
    """The request that came first, with those of its task that are next to it in length, up to a batch of tokens."""
    first = waiting[0]
    alike = [one for one in waiting if one.task == first.task]
    alike.sort(key=lambda one: abs(len(one.ids) - len(first.ids)))
    batch: list[Request] = []
    for one in alike:
        if batch and max(len(other.ids) for other in [*batch, one]) * (len(batch) + 1) > tokens:
            break
        batch.append(one)
    chosen = set(map(id, batch))
    for _ in range(len(waiting)):  # the others stay in their order
        if id(one := waiting.popleft()) not in chosen:
            waiting.append(one)
    return batch


WAYS = {
    SWAPPED: (swapping, first_alone),
    GROUPED: (swapping, first_with_its_task),
    MODELS: (a_model_each, first_with_its_task),
}


def measure(trial: Trial) -> dict[str, Any]:
    """Requests answered a second, and the memory of this process after them."""
    import torch
    from transformers import AutoTokenizer

    build, choose = WAYS[trial.way]
    tokenizer: Any = AutoTokenizer.from_pretrained(trial.backbone)
    stream = cycle(json.loads(Path(trial.questions).read_text()))
    run = build(trial)
    torch.manual_seed(1)
    width = check(run, tokenizer, trial)
    heads = [torch.nn.Linear(width, HEADS[task % len(HEADS)]) for task in range(trial.tasks)]
    waiting: deque[Request] = deque()
    answers = batches = 0

    def step() -> int:
        while len(waiting) < trial.waiting:
            task, text = next(stream)
            waiting.append(Request(task, tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"]))
        batch = choose(waiting, trial.tokens)
        inputs = tokenizer.pad({"input_ids": [one.ids for one in batch]}, return_tensors="pt")
        task = batch[0].task
        pooled = mean(run(task, inputs), inputs["attention_mask"])
        return len(heads[task](pooled).softmax(-1).tolist())

    with torch.inference_mode():
        until = time.perf_counter() + trial.warmup_s
        while time.perf_counter() < until:
            step()
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + trial.seconds:
            answers += step()
            batches += 1
    packages = ("torch", "transformers", *(("adapters",) if build is swapping else ()))
    rates = {"throughput": answers / (now - start), "batch_rows": answers / batches}
    return {**rates, **memory("self"), "versions": versions(*packages)}


def check(run: Run, tokenizer: Any, trial: Trial) -> int:
    """Tasks that say the same would mean that one model answered for all. Returns the width of what they say."""
    import torch

    inputs = tokenizer(["a text", "another, longer text"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        found = [run(task, inputs) for task in (0, trial.tasks - 1)]
    if trial.tasks > 1 and torch.allclose(found[0], found[1], atol=1e-4):
        raise SystemExit("two tasks say the same of a text: nothing to time.")
    return int(found[0].shape[-1])


def memory(pid: int | str) -> dict[str, int]:
    """What a process holds in memory, in bytes: all its pages, and with those it shares counted by their share."""
    status = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) << 10 for line in status}
    return {"rss_bytes": fields["Rss"], "pss_bytes": fields["Pss"]}


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


if __name__ == "__main__":
    print(json.dumps(measure(Trial(**json.loads(Path(sys.argv[1]).read_text())))))
