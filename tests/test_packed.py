"""Frozen layers laid out for inference on a CPU: the same numbers, and the layers themselves for all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import taskgraft as tg
from taskgraft.backbones.api import grafts_of
from taskgraft.backbones.packed import PACKED, pack, unpack

from families import SAMPLES, batch, build, perturb

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="this torch has no oneDNN",
)


def grafted(name: str) -> Any:
    model = build(name)
    tg.graft(model, tg.Adapter(size=4), {"a": None if SAMPLES[name].writes else 2})
    return perturb(model, seed=1, only=lambda path: ".bank." in path)


def packed_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if PACKED in module.__dict__]


def logits(model: Any, rows: int = 3) -> Tensor:
    values: Tensor = model(**batch(model, rows, 5)).logits
    return torch.where(torch.isfinite(values), values, 0.0)


@pytest.mark.parametrize("name", ["bert", "distilbert", "deberta-v2", "t5", "bart", "llama", "gemma3_text"])
def test_the_same_numbers(name: str) -> None:
    model = grafted(name)
    with torch.inference_mode():
        wanted = {rows: logits(model, rows) for rows in (1, 3, 40)}
        pack(grafts_of(model))
        assert packed_layers(model)
        for rows, value in wanted.items():
            assert (logits(model, rows) - value).norm() <= 1e-5 * value.norm()
        unpack(grafts_of(model))
        assert not packed_layers(model) and torch.equal(logits(model), wanted[3])


def test_gradients_and_other_precisions_go_through_the_layers_themselves() -> None:
    model = grafted("bert")
    wanted = logits(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = logits(model)
    pack(grafts_of(model))
    found = logits(model)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert all(p.grad is not None for p in tg.trainable(model).values())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(logits(model), half)
    unpack(grafts_of(model))


def test_layers_that_do_more_than_multiply_are_left_alone() -> None:
    model = grafted("bert")
    first, second, *_ = [module for module in model.encoder.modules() if isinstance(module, nn.Linear)]
    handle = first.register_forward_hook(lambda *_: None)
    second.__dict__["forward"] = second.forward
    pack(grafts_of(model))
    assert PACKED not in first.__dict__ and PACKED not in second.__dict__ and packed_layers(model)
    unpack(grafts_of(model))
    assert "forward" in second.__dict__
    handle.remove()


def test_only_float32_is_laid_out() -> None:
    model = grafted("bert").to(torch.bfloat16)
    pack(grafts_of(model))
    assert not packed_layers(model)


def test_ungraft_after_unpack_gives_the_original_back() -> None:
    model, bare = grafted("bert"), build("bert")
    pack(grafts_of(model))
    unpack(grafts_of(model))
    tg.ungraft(model)
    with torch.inference_mode():
        inputs = batch(bare, 2, 5)
        assert torch.equal(model(**inputs).last_hidden_state, bare(**inputs).last_hidden_state)
