"""The peers' side of a benchmark: AdapterHub's `adapters`, and `peft`. Run by side_by_side.py as a worker of each.

`adapters` has bottlenecks of the same size at the same two sites (its `double_seq_bn`), many tasks in a batch by
`BatchSplit`. `peft` has no bottlenecks: LoRA on query and value of rank r = size trains 2 r d weights in each, as a
bottleneck does but for its biases, many tasks in a batch by `adapter_names`. Both keep the backbone's norms.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

from stock import (
    Setting,
    Variant,
    Variants,
    bare_forward,
    batch,
    check_rows,
    drawn_rows,
    full_fine_tuning,
    hidden,
    perturb,
    repeated,
    step_with_head,
    stock_model,
    task_names,
)
from worker import serve


def with_adapters(setting: Setting, tasks: int) -> Any:
    import adapters

    model = stock_model(setting)
    adapters.init(model)
    config = adapters.DoubleSeqBnConfig(reduction_factor=model.config.hidden_size // setting.size)
    for name in task_names(tasks):
        model.add_adapter(name, config)
    return perturb(model.to(setting.device, model.dtype), added="adapters")


def adapters_forward(setting: Setting, rows: int) -> Variants:
    def one() -> Variant:
        model, inputs = with_adapters(setting, 1), batch(setting, rows)
        model.set_active_adapters("t0")
        return Variant(lambda: hidden(model, inputs))

    def mixed() -> Variant:
        import adapters

        model, inputs, names = with_adapters(setting, setting.few), batch(setting, rows), task_names(setting.few)
        if rows % setting.few:
            raise ValueError(f"BatchSplit needs as many rows of each task: {rows} rows of {setting.few} tasks.")
        sizes, draw = [rows // setting.few] * setting.few, random.Random(0)

        def split(names: list[str]) -> None:
            model.set_active_adapters(adapters.BatchSplit(*names, batch_sizes=sizes))

        split(names)
        together = hidden(model, inputs)
        model.set_active_adapters("t0")
        check_rows(together, hidden(model, inputs), rows // setting.few)
        return Variant(lambda: hidden(model, inputs), before=lambda: split(draw.sample(names, len(names))))

    return {
        "bare backbone": lambda: bare_forward(setting, rows),
        "1 task": one,
        f"{setting.few:,} tasks": mixed,
    }


def adapters_step(setting: Setting, rows: int) -> Variant:
    model = with_adapters(setting, 1)
    model.train_adapter("t0")
    return step_with_head(setting, model, rows)


def with_lora(setting: Setting, tasks: int, trains: bool = False) -> Any:
    """LoRA in the backbone's dtype, so that no cast is timed; while training in float32, as is its default."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=setting.size, lora_alpha=setting.size, target_modules=["query", "value"])
    first, *others = task_names(tasks)
    model = peft.get_peft_model(stock_model(setting), config, adapter_name=first, autocast_adapter_dtype=trains)
    for name in others:
        model.add_adapter(name, config, autocast_adapter_dtype=trains)
    return perturb(model.to(setting.device), added="lora_").eval()


def peft_forward(setting: Setting, rows: int) -> Variants:
    def one() -> Variant:
        model, inputs = with_lora(setting, 1), batch(setting, rows)
        return Variant(lambda: hidden(model, inputs))

    def mixed() -> Variant:
        model, inputs, draws = with_lora(setting, setting.few), batch(setting, rows), drawn_rows(setting.few, rows)
        names = ["t0"] * (rows // 2) + ["t1"] * (rows - rows // 2)
        check_rows(hidden(model, inputs, adapter_names=names), hidden(model, inputs), rows // 2)
        return Variant(lambda: hidden(model, inputs, adapter_names=next(draws)))

    return {
        "bare backbone": lambda: bare_forward(setting, rows),
        "1 task": one,
        f"{setting.few:,} tasks": mixed,
    }


def lora_step(setting: Setting, rows: int) -> Variant:
    return step_with_head(setting, with_lora(setting, 1, trains=True), rows)


STEPS = {"adapters": ("adapter", adapters_step), "peft": ("LoRA", lora_step)}


def main() -> None:
    peer = sys.argv[1]
    name, step = STEPS[peer]

    def training(setting: Setting, rows: int) -> Variants:
        return {
            "full fine-tuning": lambda: full_fine_tuning(setting, rows),
            name: lambda: step(setting, rows),
        }

    def many(setting: Setting, rows: int) -> Variants:
        return {
            "full fine-tuning": lambda: repeated(full_fine_tuning(setting, rows), setting.runs),
            "one after the other": lambda: repeated(step(setting, rows), setting.runs),
        }

    forward = adapters_forward if peer == "adapters" else peft_forward
    serve(("torch", "transformers", peer), {"forward": forward, "training": training, "many": many})


if __name__ == "__main__":
    main()
