"""The ways to learn a task that the experiments compare, and what each may choose from.

At the default size a method has six trials for each task; `full` has the grids of Houlsby et al.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskgraft.experiments.lab import Lab
from taskgraft.experiments.study import Arm, Option, options
from taskgraft.methods import Adapter, FullFineTuning, HeadOnly, NormsOnly, TopLayers

SIZES, PAPER_SIZES = (8, 24, 64), (8, 64, 256)
PAPER_RATES, PAPER_EPOCHS = (3e-5, 3e-4, 3e-3), (3, 20)
EPOCHS, LONG = (5, 15), 15
ADAPTERS, ADAPTER, FULL, NORMS, HEAD = (
    "adapters, best size", "adapters 64", "full fine-tuning", "norms only", "head only"
)  # fmt: skip


def adapter(lab: Lab, size: int = 64, **changes: Any) -> Adapter:
    """The paper's adapter, read out as the setup says."""
    return Adapter.paper(size, **{"pooling": lab.setup.pooling, **changes})


def adapters(lab: Lab) -> Arm:
    """The best of several sizes."""
    if lab.setup.full:
        methods = [adapter(lab, size) for size in PAPER_SIZES]
        return Arm(ADAPTERS, options(methods, PAPER_RATES, PAPER_EPOCHS))
    return Arm(ADAPTERS, options([adapter(lab, size) for size in SIZES], (1e-3, 3e-3), (LONG,)))


def adapters_of(lab: Lab, size: int, name: str) -> Arm:
    """One size alone."""
    if lab.setup.full:
        return Arm(name, options([adapter(lab, size)], PAPER_RATES, PAPER_EPOCHS))
    return Arm(name, options([adapter(lab, size)], (3e-4, 1e-3, 3e-3), EPOCHS))


def full(lab: Lab) -> Arm:
    method = FullFineTuning(pooling=lab.setup.pooling)
    if lab.setup.full:
        return Arm(FULL, options([method], PAPER_RATES, PAPER_EPOCHS))
    return Arm(FULL, options([method], (3e-5, 1e-4, 3e-4), (3, 10)))


def norms(lab: Lab) -> Arm:
    return Arm(NORMS, options([NormsOnly(pooling=lab.setup.pooling)], (1e-3, 3e-3, 1e-2), EPOCHS))


def head(lab: Lab) -> Arm:
    return Arm(HEAD, options([HeadOnly(pooling=lab.setup.pooling)], (1e-3, 3e-3, 1e-2), (15, 60)))


def layers(lab: Lab) -> int:
    """Of the backbone."""
    return int(lab.backbone.model.config.num_hidden_layers)


def top(lab: Lab, k: int, rates: Sequence[float], epochs: Sequence[int]) -> tuple[Option, ...]:
    return options([TopLayers(k=k, pooling=lab.setup.pooling)], rates, epochs)
