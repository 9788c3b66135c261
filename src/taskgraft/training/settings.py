"""How a task is trained: one frozen dataclass, with defaults that need no tuning."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from taskgraft.errors import GraftError
from taskgraft.methods import METHODS, HyperFormer, Method

Precision = Literal["auto", "fp32", "bf16"]
Batches = Literal["mixed", "single"]
Weighting = Literal["sampling", "loss"]
Decoding = Literal["auto", "labels", "greedy"]

# What each method learns at. Epochs go down with the square root of the rows; a head on cached features costs nothing.
RATES = {"adapter": 2e-3, "hyperformer": 3e-4, "full": 5e-5, "top-layers": 1e-4, "norms": 3e-3, "head": 1e-2}
EPOCHS_TIMES_ROOT = {"adapter": 150, "hyperformer": 600, "full": 110, "top-layers": 150, "norms": 150, "head": 1000}
FEWEST_EPOCHS, MOST_EPOCHS = (
    3,
    {"adapter": 20, "hyperformer": 20, "full": 10, "top-layers": 20, "norms": 20, "head": 60},
)
# AdamW divides by the size of a gradient and this: 1e-6 is Houlsby's. Where every place has a generator of its own,
# which reads a projected embedding as it is, gradients begin at 1e-9 and would hardly count beside 1e-6: 1e-8 is that
# of HyperFormer's released code.
EPSILON, EPSILON_OF_GENERATORS = 1e-6, 1e-8
TEXT_LENGTH, SPAN_LENGTH = 128, 384  # tokens of a text, and of a window of a text that spans are looked for in
assert set(RATES) == set(EPOCHS_TIMES_ROOT) == set(MOST_EPOCHS) == set(METHODS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a run besides the task, the method and the backbone.

    None means: by the method and the size of the task (`resolved`). `average` is the share of a run's steps over which
    the running mean of the weights reaches back; that mean is what is validated and kept. `patience` is how many epochs
    without a better validation score end a run. `taskgraft train --help` has a line on each of the others.

    Of several tasks that are trained together, each counts by `(rows / all rows) ** (1 / temperature)`: it is drawn
    that often, or (`weighting="loss"`) drawn by its rows and weighted. `batches` are mixed, or of a "single" task each.
    `own_rate` is the learning rate of what is a task's own (embedding, head), beside weights that tasks share.
    `epoch_steps` are the steps of what counts as an epoch there; None: as many as all tasks' rows make.
    `decoding` is for models that write: the likeliest of a task's labels, or what greedy decoding gives.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int = 16
    accumulation: int = 1
    max_length: int | None = None
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    epsilon: float | None = None
    label_smoothing: float = 0.0
    balance_classes: bool = False
    average: float = 0.4
    patience: int = 3
    precision: Precision = "auto"
    temperature: float = 10.0
    batches: Batches = "mixed"
    weighting: Weighting = "sampling"
    own_rate: float | None = None
    epoch_steps: int | None = None
    decoding: Decoding = "auto"
    seed: int = 0
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in ("epochs", "batch_size", "accumulation", "max_length", "patience", "epoch_steps"):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (field in ("epochs", "max_length", "epoch_steps") and value is None):
                raise GraftError(f"{field}={value!r} must be a whole number of at least 1.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise GraftError(f"seed={self.seed!r} must be a whole number of at least 0.")
        for field in ("warmup", "average", "label_smoothing"):
            if not 0 <= getattr(self, field) < 1:
                raise GraftError(f"{field}={getattr(self, field)!r} must be at least 0 and below 1.")
        for field in ("weight_decay", "checkpoint_seconds"):
            if not getattr(self, field) >= 0:
                raise GraftError(f"{field}={getattr(self, field)!r} must not be negative.")
        for field in ("learning_rate", "own_rate", "clip_norm", "epsilon"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise GraftError(f"{field}={value!r} must be above 0.")
        if not self.temperature > 0:
            raise GraftError(
                f"temperature={self.temperature!r} must be above 0: 1 draws tasks by their size, inf all alike."
            )
        choices = {"precision": Precision, "batches": Batches, "weighting": Weighting, "decoding": Decoding}
        for field, known in choices.items():
            if getattr(self, field) not in get_args(known):
                raise GraftError(f"{field}={getattr(self, field)!r} is unknown: use {', '.join(get_args(known))}.")

    def resolved(self, method: Method, kind: str, rows: int, *, has_heads: bool = True) -> Settings:
        """These settings with nothing left open, for a method, a kind of task and a number of training rows."""
        wanted = math.ceil(EPOCHS_TIMES_ROOT[method.name] / math.sqrt(rows))
        epochs = self.epochs or min(MOST_EPOCHS[method.name], max(FEWEST_EPOCHS, wanted))
        rate = self.learning_rate or RATES[method.name]
        length = self.max_length or (SPAN_LENGTH if kind == "spans" else TEXT_LENGTH)
        own = self.own_rate
        if own is None and method.name == HyperFormer.name and has_heads:
            own = max(
                rate, RATES["adapter"]
            )  # a head learns as beside an adapter; only the hypernetwork must go slowly
        epsilon = self.epsilon or epsilon_of(method)
        return dataclasses.replace(
            self, epochs=epochs, learning_rate=rate, max_length=length, own_rate=own, epsilon=epsilon
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def epsilon_of(method: Method) -> float:
    """AdamW's, unless it is given."""
    apart = isinstance(method, HyperFormer) and not method.shared
    return EPSILON_OF_GENERATORS if apart else EPSILON
