"""The CPU's quicker dropout: the same law, its own mask in backward, and nothing at all while evaluating."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from taskgraft.nn.dropout import dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_drops_with_the_probability_asked_for(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(500, 401, dtype=dtype)
    y = dropout(nn.Dropout(p).train(), x)
    kept = (y != 0).double()
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    assert torch.allclose(y[y != 0].double(), torch.tensor(1 / (1 - p)).double(), rtol=1e-2)
    neighbours = (kept[:, 1:] * kept[:, :-1]).mean()
    assert abs(neighbours - (1 - p) ** 2) < 10 * deviation, "neighbours are independent"


def test_backward_uses_the_forwards_mask() -> None:
    x = torch.ones(50, 7, requires_grad=True)
    y = dropout(nn.Dropout(0.3).train(), x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_the_seed_decides_the_mask() -> None:
    layer, x = nn.Dropout(0.3).train(), torch.randn(9, 9)
    torch.manual_seed(1)
    first, second = dropout(layer, x), dropout(layer, x)
    torch.manual_seed(1)
    assert torch.equal(first, dropout(layer, x)) and not torch.equal(first, second)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3).eval(), nn.Dropout(0.0).train(), nn.Identity(), nn.Linear(9, 9)])
def test_everything_else_is_called_as_it_is(layer: nn.Module) -> None:
    x = torch.randn(9, 9)
    assert torch.equal(dropout(layer, x), layer(x))
