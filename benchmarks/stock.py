"""What every side runs in the same way: the stock backbone, the batch, the bare forward, full fine-tuning.

This file runs under the peers' packages too: torch and Transformers 4.57 or later, nothing else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """One setting of a benchmark: the backbone, what a row is, and the adapters."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    backbone: str | None = None  # a folder of a BERT; None: random weights of the shape below
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 128
    size: int = 64  # units of an adapter
    few: int = 32  # tasks of the mixed batch that the peers run too
    many: int = 1000  # tasks of the large bank
    bank: int = 10_000  # tasks that are added one by one
    runs: int = 16  # that are trained in one pass
    threads: int = 0  # of the CPU; 0: as torch finds it


@dataclass(frozen=True)
class Variant:
    """One way to do a section's work. `before` is not timed: it draws rows for those who cannot take them as given."""

    run: Run
    before: Run | None = None


Variants = dict[str, Callable[[], Variant]]  # built one by one, so that one that cannot be built costs no other


def stock_model(setting: Setting) -> Any:
    """The stock backbone in evaluation mode, anew for every variant, since grafting changes a model in place."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    if setting.backbone is None:
        config = BertConfig(
            hidden_size=setting.width,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            intermediate_size=4 * setting.width,
        )
        model: Any = BertModel(config, add_pooling_layer=False)
    else:
        model = BertModel.from_pretrained(setting.backbone, add_pooling_layer=False)
    model.stock_names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return model.to(setting.device, getattr(torch, setting.dtype)).eval()


def batch(setting: Setting, rows: int, length: int | None = None) -> dict[str, Any]:
    """Rows of [CLS] words [SEP] without padding, with the mask a tokenizer gives; words by Zipf's law, as in a text."""
    import torch

    draws = torch.rand(rows, length or setting.length, generator=torch.Generator().manual_seed(0))
    ids = 1996 + (28000**draws).long()
    ids[:, 0], ids[:, -1] = 101, 102
    ids = ids.to(setting.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def labels(setting: Setting, rows: int) -> Any:
    import torch

    return torch.arange(rows, device=setting.device) % 2


def perturb(model: Any, added: str = "") -> Any:
    """Move every new weight (those whose names hold `added`) off its initial value: nothing is timed on zeros."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in model.stock_names and added in name and value.is_floating_point():
                value.add_(torch.randn_like(value), alpha=0.02)
    return model


def bare_forward(setting: Setting, rows: int) -> Variant:
    model, inputs = stock_model(setting), batch(setting, rows)
    return Variant(lambda: hidden(model, inputs))


def hidden(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(**inputs, **options).last_hidden_state


def training_step(model: Any, optimiser: Any, loss: Run) -> Variant:
    model.train()

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad()

    return Variant(step)


def step_with_head(setting: Setting, model: Any, rows: int) -> Variant:
    """A training step of what requires gradients in `model`, with a linear head on the mean of its hidden states."""
    import torch

    inputs, wanted = batch(setting, rows), labels(setting, rows)
    head = torch.nn.Linear(model.config.hidden_size, 2).to(setting.device, getattr(torch, setting.dtype))

    def loss() -> Any:
        return torch.nn.functional.cross_entropy(head(model(**inputs).last_hidden_state.mean(1)).float(), wanted)

    parameters = [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad]
    return training_step(model, torch.optim.AdamW(parameters, lr=1e-5, fused=True), loss)  # the default of Trainer


def full_fine_tuning(setting: Setting, rows: int) -> Variant:
    return step_with_head(setting, stock_model(setting), rows)


def repeated(variant: Variant, times: int) -> Variant:
    """So many runs one after the other, timed as one."""

    def run() -> None:
        for _ in range(times):
            variant.run()

    return Variant(run, variant.before)


def captured(forward: Callable[[dict[str, Any]], Any], inputs: dict[str, Any]) -> Variant:
    """A forward as a CUDA graph; each run copies the inputs in and replays it."""
    import torch

    held = {name: value.clone() for name, value in inputs.items()}
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = forward(held)

    def run() -> Any:
        for name, value in held.items():
            value.copy_(inputs[name])
        graph.replay()
        return output

    run.__dict__["forward"] = forward  # a graph does not hold the weights that it reads
    return Variant(run)


def task_names(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


def drawn_rows(tasks: int, rows: int) -> Iterator[list[str]]:
    """The tasks of the rows, drawn beforehand and anew for each repeat; all different where there are enough."""
    draw = random.Random(0)
    names = task_names(tasks) * -(-rows // tasks)
    return itertools.cycle([draw.sample(names, rows) for _ in range(64)])


def check_rows(mixed: Any, alone: Any, first: int) -> None:
    """The `first` rows of a mixed batch went through t0, the rest did not; `alone` has all of them through t0."""

    def distance(a: Any, b: Any) -> float:
        return float((a.float() - b.float()).norm() / b.float().norm())

    same, other = distance(mixed[:first], alone[:first]), distance(mixed[first:], alone[first:])
    if not (same < 0.05 and other > 2 * same + 1e-3):
        raise RuntimeError(
            f"the rows of a mixed batch did not go through their own tasks (those of one task differ by {same:.4f} "
            f"from that task alone, the others by {other:.4f}): nothing to time."
        )
