"""The promises of the design, written once and run for every family in the table of sites."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.backbones.describe import trained_parameters
from taskgraft.backbones.sites import FAMILIES
from taskgraft.methods import Activation

from families import FAMILY_NAMES, SAMPLES, WRITERS, batch, build, perturb, result

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
families = pytest.mark.parametrize("name", FAMILY_NAMES)


def is_new(path: str) -> bool:
    """Whether a parameter is one that taskgraft added."""
    return ".bank." in path or path.startswith("taskgraft_heads.")


def labels_for(name: str, classes: int) -> int | None:
    return None if SAMPLES[name].writes else classes


def grafted(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with three tasks, two of one kind and one of another kind and size, every new weight perturbed."""
    model = build(name, dtype)
    method = tg.Adapter(size=8, **changes)
    tg.graft(model, method, {"a": labels_for(name, 2), "b": labels_for(name, 5)})
    tg.add_task(model, "c", dataclasses.replace(method, size=3, activation="sigmoid"), labels_for(name, 3))
    perturb(model, seed=1, only=is_new)
    return model.eval()


ROWS = ["a", "b", None, "c", "b", "a"]


def numbers(values: Tensor) -> Tensor:
    """Logits with the padding of narrower heads as zero."""
    return torch.where(torch.isfinite(values), values, 0.0)


def one_row(inputs: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {key: value[i : i + 1] for key, value in inputs.items()}


def run(model: Any, inputs: dict[str, Tensor], rows: Any) -> Tensor:
    with tg.rows(model, rows):
        return result(model, inputs)


def state_bits(model: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[key], after[key]) for key in before)


def steps(model: Any, name: str, rows: list[str | None], count: int, lr: float = 1e-2) -> None:
    optimizer = tg.AdamW(model, lr=lr, weight_decay=0.1)
    for step in range(count):
        loss = numbers(run(model, batch(model, rows=len(rows), seed=step), rows)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_every_family_of_the_table_is_tested() -> None:
    assert {SAMPLES[name].config().model_type for name in SAMPLES} == set(FAMILIES)


@families
@torch.no_grad()
def test_a_fresh_graft_leaves_the_output_as_it_was(name: str) -> None:
    model = build(name)
    inputs = batch(model)
    before = result(model, inputs)
    tg.graft(model, tg.Adapter(size=8), {"a": None})
    after = run(model, inputs, "a")
    assert not torch.equal(before, after)
    assert (after - before).norm() <= 1e-2 * before.norm()


@families
def test_exactly_the_task_trains(name: str) -> None:
    model = build(name)
    backbone = {path for path, _ in model.named_parameters()}
    tg.graft(model, tg.Adapter(size=8), {"a": labels_for(name, 2)})
    trained = tg.trainable(model)
    assert not backbone & set(trained)
    assert {path for path, p in model.named_parameters() if p.requires_grad} == set(trained)
    expected = tg.count(tg.Adapter(size=8), model.config, labels=labels_for(name, 2))
    assert sum(p.numel() for p in trained.values()) == expected == trained_parameters(model.taskgraft, "a")
    model.train()
    numbers(run(model, batch(model), "a")).square().sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in trained.values())
    assert all(p.grad is None for path, p in model.named_parameters() if path not in trained)


@families
def test_training_changes_no_other_bit(name: str) -> None:
    model = build(name)
    original = state_bits(model)
    tg.graft(model, tg.Adapter(size=8), {"a": labels_for(name, 2), "b": labels_for(name, 5)})
    assert set(original) <= set(model.state_dict())
    steps(model, name, ["b", "b", None], 2)
    tg.train_only(model, "a")
    resting = model.taskgraft.read("b")
    started = model.taskgraft.read("a")
    inputs = batch(model, seed=9)
    with torch.no_grad():
        prediction = run(model, inputs, "b")
    steps(model, name, ["a", "a", None], 3)
    assert same_bits(original, model.state_dict())
    assert same_bits(resting, model.taskgraft.read("b"))
    moved = model.taskgraft.read("a")
    assert all(not torch.equal(started[key], moved[key]) for key in started)
    with torch.no_grad():
        assert torch.equal(prediction, run(model, inputs, "b"))


@families
@torch.no_grad()
def test_ungraft_gives_the_model_back_to_the_bit(name: str) -> None:
    model = build(name)
    inputs = batch(model)
    modules = dict(model.named_modules())
    required = {path: p.requires_grad for path, p in model.named_parameters()}
    attributes = set(vars(model))
    original, before = state_bits(model), result(model, inputs)
    tg.graft(model, tg.Adapter(size=8, parallel=True), {"a": labels_for(name, 2)})
    tg.add_task(model, "b", tg.NormsOnly(backbone_dropout=False), labels_for(name, 5))
    with torch.enable_grad():
        steps(model.train(), name, ["a", "b", None], 2)
    assert tg.ungraft(model.eval()) is model
    assert list(original) == list(model.state_dict()) and same_bits(original, model.state_dict())
    assert all(modules[path] is module for path, module in model.named_modules())
    assert required == {path: p.requires_grad for path, p in model.named_parameters()}
    assert set(vars(model)) == attributes
    assert torch.equal(before, result(model, inputs))


@families
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_mixed_batch_equals_its_rows_alone(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = grafted(name, dtype)
    tg.train_only(model, ["a", "c"])  # "b" at rest: stored, trained and bare rows in one batch
    inputs = batch(model)
    weights = torch.randn(len(ROWS), 1, 1, dtype=dtype)

    def scalar(values: Tensor, row_weights: Tensor) -> Tensor:
        return (numbers(values).square() * row_weights.view(-1, *(1,) * (values.dim() - 1))).sum()

    mixed = run(model, inputs, ROWS)
    scalar(mixed, weights).backward()
    together = {path: p.grad.clone() for path, p in tg.trainable(model).items()}
    model.zero_grad()
    for i, task in enumerate(ROWS):
        if task is None and not SAMPLES[name].writes:
            assert not torch.isfinite(mixed[i]).any()
            continue
        alone = run(model, one_row(inputs, i), [task])
        assert torch.allclose(
            numbers(mixed[i, ..., : alone.shape[-1]]), numbers(alone[0]), rtol=tolerance, atol=tolerance
        )
        loss = scalar(alone, weights[i : i + 1])
        if loss.requires_grad:
            loss.backward()
    for path, p in tg.trainable(model).items():
        scale = together[path].abs().max().clamp(min=1)
        assert (together[path] - p.grad).abs().max() <= tolerance * scale, path

    order = torch.randperm(len(ROWS))
    shuffled = run(model, {k: v[order] for k, v in inputs.items()}, [ROWS[i] for i in order])
    assert torch.allclose(numbers(shuffled), numbers(mixed[order]), rtol=tolerance, atol=tolerance)


@families
def test_every_activation_mixes_after_training(name: str) -> None:
    model = build(name, torch.float64)
    activations = list(get_args(Activation))
    tg.graft(model, tg.Adapter(size=4, activation=activations[0]), {activations[0]: labels_for(name, 2)})
    for number, activation in enumerate(activations[1:]):
        method = tg.Adapter(size=3 + number % 3, activation=activation)
        tg.add_task(model, activation, method, labels_for(name, 2 + number), seed=number)
        tg.add_task(model, f"{activation} small", dataclasses.replace(method, size=2), labels_for(name, 2), train=False)
    rows = [*activations, None]
    steps(model, name, rows, 20)
    inputs = batch(model, rows=len(rows))
    with torch.no_grad():
        mixed = run(model, inputs, rows)
        for i, task in enumerate(rows):
            alone = run(model, one_row(inputs, i), [task])
            if task is not None or SAMPLES[name].writes:
                assert torch.allclose(numbers(mixed[i]), numbers(alone[0]), rtol=1e-10, atol=1e-10), task


@families
@torch.no_grad()
def test_bfloat16_agrees_with_float32(name: str) -> None:
    model = grafted(name)
    inputs = batch(model)
    exact = run(model, inputs, ROWS)
    half = run(model.to(torch.bfloat16), inputs, ROWS)
    assert half.dtype == torch.bfloat16
    assert (numbers(half.float()) - numbers(exact)).norm() <= 5e-2 * numbers(exact).norm()


@families
@torch.no_grad()
def test_compiles_to_one_graph_with_equal_output(name: str) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = grafted(name)
    inputs = batch(model)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (ROWS, ROWS[::-1], ["b", "c", "a", None, "a", "b"]):
        with tg.rows(model, rows):
            assert torch.allclose(numbers(result(compiled, inputs)), numbers(result(model, inputs)), atol=1e-5)
    assert counter.frame_count == 1, "naming other rows of the same kinds must not compile again"


@pytest.mark.parametrize("name", ["bert", "t5"])
@torch.no_grad()
def test_compiles_under_inductor(name: str) -> None:
    torch._dynamo.reset()
    model = grafted(name)
    inputs = batch(model)
    compiled = torch.compile(model, fullgraph=True)
    with tg.rows(model, ROWS):
        assert torch.allclose(numbers(result(compiled, inputs)), numbers(result(model, inputs)), atol=1e-4)


@families
def test_dropout_of_the_frozen_part_can_be_off_while_training(name: str) -> None:
    model = grafted(name, head_dropout=0.0)
    inputs = batch(model)
    with torch.no_grad():
        still = run(model, inputs, ROWS)
        assert torch.allclose(numbers(run(model.train(), inputs, ROWS)), numbers(still), atol=1e-6)
        tg.ungraft(model)
        rates = [v for m in model.modules() for k, v in vars(m).items() if "drop" in k or k == "p"]
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            torch.manual_seed(0)
            first = result(model, inputs)
            assert not torch.equal(first, result(model, inputs))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", [True, False])
@torch.no_grad()
def test_generate_with_a_task_per_row(name: str, beams: int, cache: bool) -> None:
    model = perturb(grafted(name), seed=2, std=1.0, only=is_new)  # far enough from the backbone to write otherwise
    inputs = batch(model, rows=4)
    inputs.pop("decoder_input_ids", None)
    if not model.config.is_encoder_decoder:
        inputs = {key: value.flip(1) for key, value in inputs.items()}  # padding on the left
    rows = ["a", None, "c", "b"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams, "use_cache": cache, "do_sample": False}
    with tg.rows(model, rows):
        together = model.generate(**inputs, **options)
    alone = []
    for i, task in enumerate(rows):
        with tg.rows(model, [task]):
            alone.append(model.generate(**one_row(inputs, i), **options)[0])
    assert torch.equal(together, torch.stack(alone))
    assert len({tuple(row.tolist()) for row in together}) > 1
    by_ids = model.generate(**inputs, **options, task_ids=tg.task_ids(model, rows))
    assert torch.equal(together, by_ids)


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if SAMPLES[n].checkpoints])
def test_checkpointing_keeps_the_rows_of_its_own_forward(name: str) -> None:
    model = grafted(name, torch.float64, head_dropout=0.0).train()
    inputs, others = batch(model), batch(model, seed=5)

    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        with tg.rows(model, ROWS):
            first = model(**inputs, use_cache=False) if SAMPLES[name].writes else model(**inputs)
        with tg.rows(model, ROWS[::-1]):
            second = model(**others, use_cache=False) if SAMPLES[name].writes else model(**others)
        # Both contexts have closed before anything is recomputed.
        (numbers(first.logits).square().mean() + numbers(second.logits).square().mean()).backward()
        return {path: p.grad.clone() for path, p in tg.trainable(model).items()}

    plain, recomputed = gradients(False), gradients(True)
    for path in plain:
        assert torch.allclose(plain[path], recomputed[path], rtol=1e-10, atol=1e-12), path


@families
def test_a_deep_copy_is_a_model_of_its_own(name: str) -> None:
    model = grafted(name)
    inputs = batch(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = run(model, inputs, ROWS)
        assert torch.equal(before, run(twin, inputs, ROWS))
        perturb(twin, seed=3, only=is_new)
        assert not torch.equal(before, run(twin, inputs, ROWS))
        assert torch.equal(before, run(model, inputs, ROWS))


@torch.no_grad()
def test_one_graph_serves_every_task_alone() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = grafted("bert")
    tg.train_only(model, [])
    for number in range(4):
        tg.add_task(model, f"d{number}", tg.Adapter(size=8, init_std=0.1), 2, seed=number, train=False)
    inputs = batch(model)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for number in range(4):
        with tg.rows(model, f"d{number}"):
            assert torch.allclose(numbers(result(compiled, inputs)), numbers(result(model, inputs)), atol=1e-5)
    assert counter.frame_count == 1
