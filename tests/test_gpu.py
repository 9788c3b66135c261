"""The promises once more on a CUDA device, where there is one: kernels compiled, calls recorded, steps fused.

`test_kernels.py`, `test_norm_kernels.py`, `test_adamw_kernels.py` and `test_join.py` run compiled there, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.backbones import graphs
from taskgraft.backbones.fused import fused
from taskgraft.grafts.fingerprint import fingerprint

import tiny
from families import SAMPLES, batch, build, perturb

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROWS = ["a", "b", None, "c", "b", "a"]


def grafted(name: str) -> Any:
    model = build(name, torch.float64).to("cuda")
    heads = (None, None, None) if SAMPLES[name].writes else (2, 5, 3)
    tg.graft(model, tg.Adapter(size=8, head_dropout=0.0), {"a": heads[0], "b": heads[1]})
    tg.add_task(model, "c", tg.Adapter(size=3, activation="sigmoid", head_dropout=0.0), heads[2])
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_heads."))


def logits(model: Any, inputs: dict[str, Tensor], rows: Any) -> Tensor:
    with tg.rows(model, rows):
        values = model(**{key: value.to("cuda") for key, value in inputs.items()}).logits
    return torch.where(torch.isfinite(values), values, 0.0)


@pytest.mark.parametrize("name", ["bert", "t5", "llama", "modernbert"])
def test_a_mixed_batch_equals_its_rows_alone(name: str) -> None:
    model = grafted(name)
    tg.train_only(model, ["a", "c"])
    inputs = batch(model)
    mixed = logits(model, inputs, ROWS)
    mixed.square().sum().backward()
    together = {path: p.grad.clone() for path, p in tg.trainable(model).items()}
    model.zero_grad()
    for i, task in enumerate(ROWS):
        alone = (
            logits(model, {key: value[i : i + 1] for key, value in inputs.items()}, [task])
            if (task is not None or SAMPLES[name].writes)
            else mixed[i : i + 1].detach()
        )
        length = int(inputs["attention_mask"][i].sum()) if not model.config.is_encoder_decoder else None
        assert torch.allclose(mixed[i][:length], alone[0][:length], rtol=1e-8, atol=1e-8)
        if alone.requires_grad:
            alone.square().sum().backward()
    for path, p in tg.trainable(model).items():
        assert torch.allclose(together[path], p.grad, rtol=1e-6, atol=1e-8), path


@pytest.mark.parametrize("autocast", [False, True])
def test_a_task_without_rows_changes_in_no_bit(autocast: bool) -> None:
    model = grafted("bert").float().train()
    optimizer = tg.AdamW(model, lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    labels = torch.tensor([0, 1, 1], device="cuda")

    def step(rows: list[str], seed: int) -> float:
        inputs = {key: value.to("cuda") for key, value in batch(model, rows=3, seed=seed).items()}
        with tg.rows(model, rows), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step(["a", "b", "c"], 0)
    before = model.taskgraft.read("b")
    losses = [step(["a", "a", "c"], 1) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[key]) for key, value in model.taskgraft.read("b").items())


@torch.no_grad()
def test_half_precision_and_generate() -> None:
    model = grafted("t5").to(torch.bfloat16)
    inputs = {key: value.to("cuda") for key, value in batch(model, rows=3).items() if key != "decoder_input_ids"}
    rows = ["a", None, "c"]
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 2}
    with tg.rows(model, rows):
        assert model.generate(**inputs, **options).shape == (3, 5)


@torch.no_grad()
def test_a_graft_moves_between_devices(tmp_path: Any) -> None:
    model = grafted("bert").float()
    inputs = batch(model)
    tg.get_graft(model, "b").save(tmp_path / "b")
    there = build("bert", torch.float64).float()
    tg.add_graft(there, tmp_path / "b")
    found = there(**inputs).logits
    assert torch.allclose(found.to("cuda"), logits(model, inputs, "b")[:, : found.shape[1]], atol=1e-4)


# -- kernels, compiled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(100, 104))
def test_bottlenecks_of_random_shapes(seed: int, dtype: torch.dtype) -> None:
    from test_kernels import check, random_case

    check(*random_case(seed, widest=4096, most_units=300, longest=300), dtype, seed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [None, "own"])
def test_the_largest_bottleneck(norm: str | None, dtype: torch.dtype) -> None:
    from taskgraft.nn.bottleneck import Form
    from test_kernels import Shape, check

    check(Shape(count=4, length=130, d=8192, m=512, slots=3, rows=(2, 0, 2, 2)), Form(norm_after=norm), dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(100, 104))
def test_norms_of_random_shapes(seed: int, dtype: torch.dtype) -> None:
    from test_norm_kernels import check, random_case

    check(*random_case(seed, widest=8192, longest=300), dtype, seed)


def test_a_gradient_has_the_same_bits_each_time() -> None:
    from taskgraft.nn.bottleneck import Form
    from test_kernels import Shape, computed, drawn

    shape = Shape(count=64, length=100, d=256, m=16, slots=5, rows=tuple(i * 7 % 5 for i in range(64)))
    inputs, form = drawn(shape, True), Form(norm_after="own")
    first, again = (computed(inputs, shape, form, "triton") for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_float32_is_not_tf32() -> None:
    """Also where the user allows TF32 to everything else."""
    from taskgraft.nn.bottleneck import Form
    from test_kernels import Shape, check

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check(Shape(length=64, d=1024, m=64), Form("identity"))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("poisoned")
def test_the_fused_optimiser_equals_float64_and_the_plain_one() -> None:
    import test_adamw_kernels

    test_adamw_kernels.test_each_task_steps_as_torch_adamw_does_in_float64()
    test_adamw_kernels.test_the_fused_step_equals_the_plain_one()


# -- whole models: what `auto` takes, and recordings

A, B, C, D = "abcd"
MIXED, OTHERS, BARE = [A, B, A, C], [D, C, B, B], [A, None, B, None]


def small(name: str, method: tg.Method | None = None, dtype: torch.dtype = torch.float32) -> Any:
    model = build(name, dtype).to("cuda")
    heads = dict.fromkeys("abcd") if SAMPLES[name].writes else {task: 2 + i for i, task in enumerate("abcd")}
    tg.graft(model, method or tg.Adapter(size=8), heads)
    return perturb(model, seed=1, only=lambda path: ".bank." in path or path.startswith("taskgraft_"))


def given(model: Any, rows: int = 4, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    return {key: value.to("cuda") for key, value in batch(model, rows, length, seed).items()}


def options(model: Any) -> dict[str, Any]:
    """A recording gives tensors alone, and a cache of keys is none."""
    return {"use_cache": False} if model.config.is_encoder_decoder else {}


def finite(output: Any) -> Tensor:
    return torch.where(output.logits.isfinite(), output.logits, 0.0)


def plain(model: Any, rows: Any, inputs: dict[str, Tensor]) -> Tensor:
    with tg.rows(model, rows):
        return finite(model(**inputs, **options(model)))


def played(graphed: tg.Graphed, rows: Any, inputs: dict[str, Tensor]) -> Tensor:
    return finite(graphed(rows, inputs, **options(graphed.model)))


def gradients(model: Any) -> dict[str, Tensor]:
    """A copy of them; zeros for a parameter that has none."""
    named = tg.trainable(model).items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in named}


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative; 0 where both are zeros."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def close(found: Tensor, wanted: Tensor, at_most: float = 1e-5) -> bool:
    return error(found, wanted) <= at_most


def all_close(found: dict[str, Tensor], wanted: dict[str, Tensor], at_most: float = 1e-5) -> bool:
    return found.keys() == wanted.keys() and all(close(found[name], wanted[name], at_most) for name in wanted)


def recorded(model: Any, calls: Iterable[Sequence[str | None] | str], **shape: int) -> tg.Graphed:
    """A `Graphed` that has recorded these rows."""
    graphed = tg.Graphed(model)
    for rows in calls:
        for _ in range(2):
            graphed(rows, given(model, **shape), **options(model))
    assert graphed.refused is None and len(graphed.recordings) > 0
    return graphed


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["bert", "deberta-v2", "t5", "llama", "gemma3_text"])
def test_auto_takes_the_kernels_and_they_equal_torchs_operations(name: str, autocast: bool) -> None:
    model = small(name)
    assert "triton" in tg.describe(model) and "eager" not in tg.describe(model)

    def computed(kernel: str, rows: list[str | None], autocast: bool) -> dict[str, Tensor]:
        tg.use_kernels(model, kernel)  # type: ignore[arg-type]
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            values = plain(model, rows, given(model))
        values.float().square().sum().backward()
        return {"logits": values.detach(), **gradients(model)}

    for rows in (MIXED, BARE, [B] * 4):
        wanted, found = computed("eager", rows, False), computed("auto", rows, autocast)
        eager = computed("eager", rows, autocast)
        for key, value in wanted.items():
            assert error(found[key], value) <= (2 * error(eager[key], value) + 5e-2 if autocast else 1e-4), key


@pytest.mark.parametrize("name", ["bert", "t5"])
@pytest.mark.parametrize("training", [True, False], ids=["trained", "at rest"])
@torch.no_grad()
def test_recorded_inference_follows_the_rows(name: str, training: bool) -> None:
    model = small(name)
    if not training:
        tg.train_only(model, [])
    graphed = recorded(model, [MIXED, BARE, [A] * 4, "a"])
    count = len(graphed.recordings)
    same = [(MIXED, OTHERS, [C, D, C, C]), (BARE, [None, D, None, C]), ([A] * 4, [D] * 4), ("a", "b", "d")]
    for seed, alike in enumerate(same):
        for rows in (*alike, *reversed(alike)):
            inputs = given(model, seed=seed)
            assert close(played(graphed, rows, inputs), plain(model, rows, inputs)), rows
    assert len(graphed.recordings) == count, "other tasks in the same composition need no recording of their own"


@pytest.mark.parametrize("name", ["bert", "t5"])
@torch.no_grad()
def test_recorded_inference_follows_tasks_that_come_and_go(name: str) -> None:
    model = small(name)
    tg.train_only(model, [])
    graphed = recorded(model, [MIXED])
    head = None if SAMPLES[name].writes else 2
    inputs = given(model)

    def check(rows: list[str]) -> Tensor:
        for _ in range(3):  # as it is, recorded, and played
            found = played(graphed, rows, inputs).clone()
            assert close(found, plain(model, rows, inputs)), rows
        return found

    for number in range(5):  # the store grows on the way
        tg.add_task(model, f"new{number}", tg.Adapter(size=8, init_std=0.2), head, seed=number, train=False)
        check([f"new{number}", A, "new0", A])
    before = check([B, A, B, A])
    tg.remove_task(model, B)
    recordings = list(graphed.recordings.values())
    tg.add_task(model, "late", tg.Adapter(size=8, init_std=0.2), head, seed=9, train=False)
    after = check(["late", A, "late", A])
    assert list(graphed.recordings.values()) == recordings, "it took the place of the one that left"
    width = min(before.shape[-1], after.shape[-1])
    assert not close(before[0, ..., :width], after[0, ..., :width], 1e-2)
    assert close(before[1, ..., :width], after[1, ..., :width])
    tg.add_task(model, "wide", tg.Adapter(size=24, init_std=0.2), head, train=False)
    check(["wide", A, "late", A])


@torch.no_grad()
def test_recorded_inference_follows_a_task_that_takes_anothers_place() -> None:
    model = small("bert", tg.Adapter(size=8, init_std=0.2))
    graphed, inputs = recorded(model, [MIXED]), given(model)
    before = played(graphed, MIXED, inputs).clone()
    recordings = list(graphed.recordings.values())
    model.taskgraft.swap(A, "new", tg.Adapter(size=8, init_std=0.2), tg.Head.of(2), seed=7)
    rows = ["new", B, "new", C]
    after = played(graphed, rows, inputs)
    assert close(after, plain(model, rows, inputs))
    assert list(graphed.recordings.values()) == recordings
    assert not close(after[0], before[0], 1e-2) and close(after[1], before[1])


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@torch.no_grad()
def test_recorded_inference_follows_the_weights(autocast: bool) -> None:
    """A cast that was made before a recording must not be a part of it."""
    model = small("bert")
    at_most = 2e-2 if autocast else 1e-5
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        plain(model, MIXED, given(model))
        graphed, inputs = recorded(model, [MIXED]), given(model)
        recordings = list(graphed.recordings.values())
        for _ in range(3):
            before = played(graphed, MIXED, inputs).clone()
            for parameter in tg.trainable(model).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            after = played(graphed, MIXED, inputs)
            assert close(after, plain(model, MIXED, inputs), at_most) and not close(after, before, 0.1)
        assert list(graphed.recordings.values()) == recordings
    for _ in range(3):  # outside, it is another call
        assert close(played(graphed, MIXED, inputs), plain(model, MIXED, inputs))


@torch.no_grad()
def test_the_least_recently_used_recording_goes() -> None:
    model = small("bert")
    graphed = tg.Graphed(model, most=2)
    for length in (3, 4, 5, 3, 4, 5, 4):
        for _ in range(2):
            inputs = given(model, 4, length, seed=length)
            assert close(played(graphed, MIXED, inputs), plain(model, MIXED, inputs))
    assert len(graphed.recordings) == 2


@torch.no_grad()
def test_a_model_whose_output_is_more_than_tensors_is_refused_in_a_sentence() -> None:
    model = small("t5")
    graphed, inputs = tg.Graphed(model), given(model)
    graphed(MIXED, inputs, use_cache=True)
    with pytest.raises(tg.GraftError, match=r"gives tensors, and .*past_key_values.* call the model itself"):
        graphed(MIXED, inputs, use_cache=True)


# -- training by recordings


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_recorded_gradients_equal_plain_ones(name: str) -> None:
    model = small(name).train()
    graphed = recorded(model, [MIXED, BARE, [A] * 4])
    for seed, rows in enumerate((MIXED, OTHERS, BARE, [C] * 4, [D, None, D, None], MIXED)):
        inputs, found = given(model, seed=seed), []
        for by_recording in (True, False):
            model.zero_grad(set_to_none=True)
            values = played(graphed, rows, inputs) if by_recording else plain(model, rows, inputs)
            values.square().sum().backward()
            found.append({"logits": values.detach().clone(), **gradients(model)})
        assert all_close(found[0], found[1], 1e-4), rows


def test_recorded_gradients_add_up_and_are_cleared_either_way() -> None:
    model = small("bert").train()
    graphed = recorded(model, [MIXED])
    batches = [(MIXED, given(model, seed=1)), (OTHERS, given(model, seed=2))]
    for to_none in (True, False, True):
        model.zero_grad(set_to_none=True)
        for rows, inputs in batches:
            plain(model, rows, inputs).square().sum().backward()
        wanted = gradients(model)
        model.zero_grad(set_to_none=to_none)
        for rows, inputs in batches:
            played(graphed, rows, inputs).square().sum().backward()
        assert all_close(gradients(model), wanted, 1e-4)
    model.zero_grad(set_to_none=True)
    plain(model, *batches[0]).square().sum().backward()
    played(graphed, *batches[1]).square().sum().backward()
    assert all_close(gradients(model), wanted, 1e-4), "what was there before stays"
    model.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in tg.trainable(model).values())


def test_recorded_gradients_under_autocast_and_after_a_step() -> None:
    model = small("bert").train()
    with torch.autocast("cuda", torch.bfloat16):
        graphed = recorded(model, [MIXED])
    for seed in range(3):
        inputs, found = given(model, seed=seed), []
        for by_recording in (True, False):
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                values = played(graphed, MIXED, inputs) if by_recording else plain(model, MIXED, inputs)
            values.float().square().sum().backward()
            found.append(gradients(model))
        assert all_close(found[0], found[1], 3e-2)
        with torch.no_grad():
            for parameter in tg.trainable(model).values():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_a_loss_that_was_not_let_go_does_not_stand_in_the_way_of_a_recording() -> None:
    """A shape's first call is plain, and what it leaves with autograd belongs to another stream than a recording."""
    model = small("bert", tg.Adapter(size=8, backbone_dropout=True)).train()
    graphed, held = tg.Graphed(model), []
    with torch.autocast("cuda", torch.bfloat16):
        for length in (5, 6, 7, 5, 6, 7):
            loss = played(graphed, MIXED, given(model, length=length)).square().sum()
            loss.backward()
            held.append(loss)
    assert len(graphed.recordings) == 3 and graphed.refused is None


def test_after_a_recording_that_failed_calls_are_plain_ones() -> None:
    model = small("bert", tg.Adapter(size=8, backbone_dropout=True)).train()
    graphed, inputs = tg.Graphed(model), given(model)
    site = model.encoder.layer[0].output
    hook = site.register_forward_hook(lambda module, given, output: output * float(output.sum().isfinite()))
    graphed(MIXED, inputs)
    with pytest.warns(UserWarning, match="no CUDA graphs for BertModel"):
        graphed(MIXED, inputs).logits.nansum().backward()
    hook.remove()
    torch.manual_seed(3)
    found = played(graphed, MIXED, inputs)
    torch.manual_seed(3)
    assert graphed.refused and torch.equal(found, plain(model, MIXED, inputs))
    other = tg.Graphed(model)
    for _ in range(3):
        played(other, MIXED, inputs).sum().backward()
    assert other.recordings


SENTENCE = "before the backward pass of its last output"


def test_a_backward_pass_that_comes_too_late_is_refused() -> None:
    model = small("bert").train()
    graphed, inputs = recorded(model, [MIXED]), given(model)
    late, last = played(graphed, MIXED, inputs), played(graphed, OTHERS, inputs)
    with pytest.raises(tg.GraftError, match=SENTENCE):
        late.sum().backward()
    last.sum().backward()


def test_a_backward_pass_after_a_call_without_gradients_is_refused() -> None:
    model = small("bert").train()
    graphed, inputs = recorded(model, [MIXED]), given(model)
    with torch.no_grad():
        for _ in range(2):
            graphed(OTHERS, given(model, length=5))
    late = played(graphed, MIXED, inputs)
    with torch.no_grad():
        graphed(OTHERS, given(model, length=5))
    with pytest.raises(tg.GraftError, match=SENTENCE):
        late.sum().backward()


def test_recorded_dropout_draws_anew_and_by_the_seed() -> None:
    method = tg.Adapter(size=8, backbone_dropout=True, head_dropout=0.1)
    model = small("bert", method).train()
    graphed, inputs = recorded(model, [MIXED]), given(model)

    def drawn(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [played(graphed, MIXED, inputs).detach().clone() for _ in range(2)]

    first, again, other = drawn(5), drawn(5), drawn(6)
    assert not close(first[0], first[1], 1e-3), "two calls draw differently"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not close(first[0], other[0], 1e-3)


@pytest.mark.parametrize("method", [tg.Adapter(size=8), tg.HyperFormer(size=8, task_dim=8, norms="none")])
def test_training_by_recordings_and_fused_steps_equals_training_in_float64(method: tg.Method) -> None:
    """Rows come and go, rates and clipping differ, and what has no rows in a step changes in no bit."""
    fast, exact = small("bert", method).train(), small("bert", method, torch.float64).train()
    graphed = tg.Graphed(fast)
    same: dict[str, Any] = {"weight_decay": 0.1, "clip_norm": 0.5}
    optimizers = [tg.AdamW(model, lr=3e-3, **same) for model in (fast, exact)]
    assert optimizers[0]._can_fuse() and not optimizers[1]._can_fuse()
    labels = torch.tensor([0, 1, 1, 0], device="cuda")
    adapters = isinstance(method, tg.Adapter)
    for step, rows in enumerate([MIXED, OTHERS, MIXED, [A, B, B, A], OTHERS, MIXED]):
        untouched = fast.taskgraft.read(D)
        for model, optimizer in zip((fast, exact), optimizers, strict=True):
            optimizer.zero_grad()
            inputs = given(model, seed=step)
            if model is fast:
                loss = tg.loss(model, graphed(rows, inputs), labels, rows=rows)
            else:
                with tg.rows(model, rows):
                    loss = tg.loss(model, model(**inputs), labels)
            loss.backward()
            optimizer.step()
        if adapters and D not in rows:
            assert all(torch.equal(value, untouched[key]) for key, value in fast.taskgraft.read(D).items())
    assert graphed.recordings and graphed.refused is None
    wanted = tg.trainable(exact)
    for name, parameter in tg.trainable(fast).items():
        assert close(parameter.detach(), wanted[name].detach(), 1e-3), name


TOGETHER = [
    tg.Adapter(size=8, norm_after="shared", norms="all"),
    tg.HyperFormer(size=8, task_dim=8),
    tg.HyperFormer(size=8, task_dim=8, shared=True),
    tg.FullFineTuning(),
]


@pytest.mark.parametrize("method", TOGETHER, ids=["dagger", "hyperformer", "hyperformer++", "full"])
def test_fused_forms_under_autocast_are_as_near_to_float32_as_the_models_own(method: tg.Method) -> None:
    model = small("t5-v1.1", method)

    def computed(autocast: bool, *contexts: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                values = plain(model, MIXED, given(model))
        values.float().square().sum().backward()
        return {"logits": values.detach(), **gradients(model)}

    wanted, own, found = computed(False), computed(True), computed(True, fused(model, torch.bfloat16))
    for key, value in wanted.items():
        assert error(found[key], value) <= 2 * error(own[key], value) + 2e-2, key
    assert {value.dtype for value in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("method", TOGETHER, ids=["dagger", "hyperformer", "hyperformer++", "full"])
def test_tasks_in_company_learn_by_few_recordings(method: tg.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, with numbers that are written greedily among the tasks."""
    made: list[Any] = []
    record = graphs.Recording._record
    monkeypatch.setattr(graphs.Recording, "_record", lambda self, *given: (made.append(self), record(self, *given)))
    tasks = [tiny.task(count=200, name="one"), tiny.task(count=90, name="two", seed=4), tiny.task("regression", 90)]
    settings = tg.Settings(epochs=3, epoch_steps=40, learning_rate=3e-3, average=0.0, precision="bf16")
    backbone = tiny.writer()
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    run = tg.fit(backbone, tasks, method, settings=settings, progress=False)
    losses = [entry["loss"] for entry in run.history]
    assert losses[-1] < 0.7 * losses[0] and 1 <= len(made) <= 8
    assert all(torch.equal(value.cpu(), before[name]) for name, value in backbone.model.state_dict().items())


def test_many_runs_at_once_equal_each_alone() -> None:
    task, other = tiny.task(count=48), tiny.task("regression", 40, "price", seed=3)

    def trial(name: str, of: tg.Task, size: int, **changes: Any) -> tg.Trial:
        same = {"epochs": 2, "learning_rate": 3e-3, "precision": "fp32", "patience": 9, "batch_size": 8}
        return tg.Trial(name, of, tg.Adapter(size=size), tg.Settings(**{**same, **changes}))

    trials = [
        trial("a", task, 4),
        trial("b", task, 8, learning_rate=1e-3, seed=2),
        trial("c", other, 4, batch_size=5, clip_norm=0.05),
        trial("d", other, 8, epochs=3, weight_decay=0.3),
    ]
    together = tg.fit_many(tiny.backbone(), trials, lanes=3, progress=False)
    for each in trials:
        alone = tg.fit(tiny.backbone(), each.task, each.method, settings=each.settings, progress=False)
        run = together[each.name]
        assert run.graft is not None and alone.graft is not None and run.steps == alone.steps
        for name, value in alone.graft.tensors.items():
            assert (run.graft.tensors[name].cpu() - value.cpu()).abs().max() <= 1e-4, (each.name, name)
        assert run.score == pytest.approx(alone.score, abs=1e-3)


def test_many_runs_at_once_in_bfloat16_are_judged_and_kept_as_they_will_be_used() -> None:
    backbone, task = tiny.backbone(), tiny.task(count=48)
    settings = tg.Settings(epochs=2, batch_size=8, precision="bf16")
    trials = [tg.Trial(name, task, tg.Adapter(size=4), settings) for name in ("a", "b", "c")]
    before = fingerprint(backbone.model)
    runs = tg.fit_many(backbone, trials, lanes=2, progress=False)
    for run in runs.values():
        assert run.graft is not None and run.graft.backbone["sha256"] == before.sha256
        assert tg.evaluate(backbone, run.graft, task)["score"] == pytest.approx(run.score, abs=1e-6)


def test_a_run_that_has_ended_holds_no_memory() -> None:
    backbone, settings = tiny.backbone(), tg.Settings(epochs=2, batch_size=8, precision="bf16")
    held = []
    gc.disable()  # what is freed must not wait for it
    try:
        for _ in range(3):
            run = tg.fit(backbone, tiny.task(count=48), tg.FullFineTuning(), settings=settings, progress=False)
            del run
            held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert held[2] - held[1] < 2**12, held  # workspaces of matrix products are made once
