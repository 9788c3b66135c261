"""T5's norm and activation in fused form: the same functions, and gone after the block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from taskgraft.backbones.fused import fused, replaceable

from families import T5


@pytest.fixture(scope="module")
def model() -> Any:
    config = hf.T5Config(**{**T5, "feed_forward_proj": "gated-gelu"})
    model = hf.T5ForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def test_every_norm_and_activation_of_a_t5_has_a_form_that_computes_the_same(model: Any) -> None:
    places = list(replaceable(model))
    kinds = {type(module).__name__ for module, _ in places}
    assert kinds == {"T5LayerNorm", "NewGELUActivation"}
    for module, forward in places:
        x = 3 * torch.randn(3, 5, model.config.d_model, requires_grad=True)
        own, other = module(x), forward(x)
        assert torch.allclose(own, other, atol=1e-6)
        (own_gradient,), (other_gradient,) = (torch.autograd.grad(y.square().sum(), x) for y in (own, other))
        assert torch.allclose(own_gradient, other_gradient, atol=1e-4)


def test_a_norm_in_bfloat16_keeps_its_own_casts(model: Any) -> None:
    module, forward = next(pair for pair in replaceable(model) if "Norm" in type(pair[0]).__name__)
    x = torch.randn(3, 5, model.config.d_model, dtype=torch.bfloat16)
    assert torch.equal(module(x), forward(x))


def test_on_a_cpu_and_after_the_block_a_model_is_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fused(model):
        assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with fused(model):
        changed = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert changed == {"T5LayerNorm", "NewGELUActivation"}
    assert not any("forward" in vars(module) for module in model.modules())
