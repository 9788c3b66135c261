"""What trains on a GPU in fewer kernels: the same functions, and gone after the block."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers as hf

import taskgraft as tg
from taskgraft.backbones.fused import (
    Cast,
    Fused,
    cast_once,
    cast_together,
    fused,
    norms_for_linears,
    position_bias,
    replaceable,
    rms_norm,
)
from taskgraft.grafts.fingerprint import fingerprint

import tiny
from families import T5, perturb


@pytest.fixture(scope="module")
def model() -> Any:
    config = hf.T5Config(**{**T5, "feed_forward_proj": "gated-gelu"})
    model = hf.T5ForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def forms(model: Any, dtype: torch.dtype | None = None) -> dict[Any, Any]:
    """The fused forwards by module."""
    return {module: other for module, method, other in replaceable(model, dtype) if method == "forward"}


def test_every_norm_and_activation_of_a_t5_has_a_form_that_computes_the_same(model: Any) -> None:
    places = list(replaceable(model))
    kinds = {(type(module).__name__, method) for module, method, _ in places}
    assert kinds == {
        ("T5LayerNorm", "forward"),
        ("NewGELUActivation", "forward"),
        ("T5Attention", "compute_bias"),
    }
    for module, forward in forms(model).items():
        x = 3 * torch.randn(3, 5, model.config.d_model, requires_grad=True)
        own, other = module(x), forward(x)
        assert torch.allclose(own, other, atol=1e-6)
        (own_gradient,), (other_gradient,) = (torch.autograd.grad(y.square().sum(), x) for y in (own, other))
        assert torch.allclose(own_gradient, other_gradient, atol=1e-4)


def test_a_norm_in_bfloat16_keeps_its_own_casts(model: Any) -> None:
    module, forward = next(pair for pair in forms(model).items() if "Norm" in type(pair[0]).__name__)
    x = torch.randn(3, 5, model.config.d_model, dtype=torch.bfloat16)
    assert torch.equal(module(x), forward(x))


def test_norms_that_linear_layers_alone_read_write_what_these_cast_it_to(model: Any) -> None:
    norms = norms_for_linears(model)
    assert len(norms) == 2 * 2 + 2 * 3 + 2  # of a sub-layer each, and the last of each stack
    x = torch.randn(3, 5, model.config.d_model)
    narrow = forms(model, torch.bfloat16)
    assert all(torch.equal(narrow[norm](x), rms_norm(norm, x).bfloat16()) for norm in norms)
    headless = hf.T5EncoderModel(hf.T5Config(**T5))  # its last norm is the output
    assert headless.encoder.final_layer_norm not in norms_for_linears(headless)
    assert len(norms_for_linears(headless)) == 2 * 2


def test_frozen_layers_are_cast_once_and_give_what_autocast_gives(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tg.graft(model, tg.Adapter(reduction=4, norm_after="shared"), ["a", "b"])
    try:
        perturb(model)
        inputs = {"input_ids": torch.randint(1, 90, (4, 6)), "decoder_input_ids": torch.randint(1, 90, (4, 3))}

        def logits() -> torch.Tensor:
            with tg.rows(model, ["a", "b", "b", "a"]), torch.autocast("cpu", torch.bfloat16):
                found: torch.Tensor = model(**inputs, use_cache=False).logits
            return found

        plain, weights = logits(), {name: id(value) for name, value in model.named_parameters()}
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        with Fused(cast_once(model, torch.bfloat16)):
            kinds = {name: value.dtype for name, value in model.named_parameters()}
            assert torch.equal(logits(), plain)
        linear = [name for name, value in kinds.items() if value == torch.bfloat16]
        assert len(linear) == 2 * 7 + 2 * 11 + 1 and not any("bank" in name or "shared" in name for name in linear)
        assert {name: id(value) for name, value in model.named_parameters()} == weights
    finally:
        monkeypatch.undo()
        tg.ungraft(model)


def test_what_is_trained_is_cast_together_and_gets_its_gradients(model: Any) -> None:
    tg.graft(model, tg.FullFineTuning(), {"a": None})
    try:
        with Fused(cast_once(model, torch.bfloat16)):
            assert {value.dtype for value in model.parameters()} == {torch.float32}
        inputs = {"input_ids": torch.randint(1, 90, (4, 6)), "decoder_input_ids": torch.randint(1, 90, (4, 3))}

        def computed() -> list[torch.Tensor]:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(**inputs, use_cache=False).logits
            logits.float().square().sum().backward()
            return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

        plain, forward, weights = computed(), model.forward, [id(p) for p in model.parameters()]
        with Fused(cast_together(model, torch.bfloat16)):
            assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(forward).parameters)
            found = computed()
        assert model.forward == forward and [id(p) for p in model.parameters()] == weights
        for one, other in zip(plain, found, strict=True):
            assert torch.allclose(one, other, rtol=0.02, atol=0.02 * float(one.abs().max())) and other.any()
    finally:
        tg.ungraft(model)


def test_weights_that_a_call_does_not_reach_have_no_gradient(model: Any) -> None:
    used, unused = (torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    first, _ = Cast.apply(torch.bfloat16, used, unused)
    first.float().sum().backward()
    assert used.grad is not None and torch.equal(used.grad, torch.ones(3, 3)) and unused.grad is None


def test_the_position_bias_lies_as_attention_kernels_take_it(model: Any) -> None:
    first = model.encoder.block[0].layer[0].SelfAttention
    own, other = first.compute_bias(5, 5), position_bias(first, None, 5, 5)
    assert not own.is_contiguous() and other.is_contiguous() and torch.equal(own, other)
    assert torch.equal(position_bias(first, torch.bfloat16, 5, 5), own.bfloat16())


def test_on_a_cpu_and_after_the_block_a_model_is_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fused(model):
        assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with fused(model):
        changed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
        assert "compute_bias" in vars(model.decoder.block[0].layer[0].SelfAttention)
    assert changed == {"T5LayerNorm", "NewGELUActivation"}
    assert not any({"forward", "compute_bias"} & set(vars(module)) for module in model.modules())


def test_set_aside_a_model_is_as_it_was_and_the_same_forms_come_back() -> None:
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    own = layer.weight
    with Fused([*cast_once(layer, torch.bfloat16), *cast_once(layer, torch.float16)]) as forms:
        inside = layer.weight
        assert inside.dtype == torch.float16
        with forms.set_aside():
            assert layer.weight is own
        assert layer.weight is inside  # a recording reads its memory
    assert layer.weight is own


def test_runs_that_end_among_others_are_judged_and_kept_as_without_the_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskgraft.training.loop.fused", lambda model, dtype: Fused(cast_once(model, dtype)))
    backbone, task = tiny.backbone(), tiny.task(count=24)
    settings = tg.Settings(epochs=1, precision="bf16", batch_size=8)
    trials = [tg.Trial(name, task, tg.Adapter(size=4), settings) for name in ("a", "b")]
    before = fingerprint(backbone.model)
    runs = tg.fit_many(backbone, trials, lanes=1, progress=False)
    for run in runs.values():
        assert run.graft is not None and run.graft.backbone["sha256"] == before.sha256
        assert tg.evaluate(backbone, run.graft, task)["score"] == run.score
