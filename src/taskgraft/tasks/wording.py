"""A task put into words, for backbones that write text, and their answers read back.

As in HyperFormer (Mahabadi et al., 2021) and T5: each text comes after its column's name, a class is written as its
number, and a quantity is rounded to steps so that few strings stand for all of them (STS-B: "0.0", "0.2", ... "5.0").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.tasks.task import Task, schema_of

WRITTEN = ("classification", "regression", "text")
STEPS = 25  # into which the range of the training labels is divided, about


@dataclass(frozen=True)
class Wording:
    """How a task's rows are read and its answers are written."""

    kind: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]  # the names put before text (and pair); (): the text as it is
    prefix: str = ""  # what every input begins with: "", or the task's name
    step: float = 0.0  # regression: what numbers are rounded to, 1, 2 or 5 times a power of ten
    default: float = 0.0  # regression: what an answer that is no number counts as

    def __post_init__(self) -> None:
        if self.kind not in WRITTEN:
            raise GraftError(
                f"a task of kind {self.kind!r} cannot be put into words for a model that writes "
                f"({', '.join(WRITTEN)} can): use an encoder backbone."
            )
        if not all(isinstance(name, str) for name in (self.prefix, *self.labels, *self.columns)):
            raise GraftError(f"the labels, columns and prefix of {self} must be strings: write them as such.")
        if self.kind == "classification" and not self.labels:
            raise GraftError("a classification without labels has no answers to write: name its classes.")
        if len(self.columns) > 2 or not (self.columns or self.kind == "text"):
            raise GraftError(f"a {self.kind} task with columns {self.columns} cannot be worded: name one, or two.")
        is_step = math.isfinite(self.step) and self.step > 0 and self.step == nice(self.step)
        if self.kind == "regression" and not (is_step and math.isfinite(self.default)):
            raise GraftError(
                f"a regression with step={self.step} and default={self.default} cannot be worded: the step must be "
                "1, 2 or 5 times a power of ten, and the default a number."
            )

    @classmethod
    def of(cls, task: Task, prefix: bool = False) -> Wording:
        """The wording of a task; `prefix` puts its name first, for a model that learns several without adapters."""
        columns: tuple[str, ...] = ()
        if task.has_pairs:
            columns = (task.columns.get("text", "sentence1"), task.columns.get("pair", "sentence2"))
        elif task.kind != "text":
            columns = (task.columns.get("text", "sentence"),)
        step, default = 0.0, 0.0
        if task.kind == "regression":
            values = task.split("train")["label"].to_numpy()
            low, high, default = float(values.min()), float(values.max()), float(values.mean())
            if not math.isfinite(high - low):
                raise GraftError(f"the training labels of task {task.name!r} go from {low} to {high}: use finite ones.")
            step = nice((high - low or abs(high) or STEPS) / STEPS)
        return cls(task.kind, task.labels, columns, task.name if prefix else "", step, default)

    def table(self, table: pa.Table) -> pa.Table:
        """A split's rows as those of a task of kind "text"; without answers if the split has none."""
        roles = [role for role in ("text", "pair") if role in table.column_names]
        if len(roles) != max(1, len(self.columns)):
            wanted = "a text and a pair" if len(self.columns) == 2 else "one text"
            raise GraftError(f"the rows have the columns {table.column_names}: this task needs {wanted}.")
        parts: list[Any] = [self.prefix] if self.prefix else []
        for place, role in enumerate(roles):
            parts += [f"{self.columns[place]}:", table[role]] if self.columns else [table[role]]
        text = pc.binary_join_element_wise(*parts, " ")
        if "label" not in table.column_names:
            return pa.table({"text": text})
        return pa.table({"text": text, "label": self._targets(table["label"])}, schema_of("text", False))

    def _targets(self, labels: pa.ChunkedArray) -> Any:
        if self.kind != "regression":
            return labels.cast(pa.string())
        # 3.3 / 0.2 is 16.499999999999996, and less exact where labels were float32: mended before halves go to even
        steps = np.rint(np.round(labels.to_numpy() / self.step, 4)) + 0.0  # -0.0 becomes 0.0
        decimals = max(0, -exponent(self.step))
        return pa.array([f"{value:.{decimals}f}" for value in (steps * self.step).tolist()], pa.string())

    @property
    def candidates(self) -> tuple[str, ...]:
        """Every answer as it is written; () where there is no end of them."""
        return tuple(str(place) for place in range(len(self.labels))) if self.kind == "classification" else ()

    def answer(self, written: str) -> Any:
        """What was written, as the task's metrics take it; None where it is no class."""
        written = written.strip()
        if self.kind == "text":
            return written
        if self.kind == "classification":
            return int(written) if written in self.candidates else None
        try:
            value = float(written)
        except ValueError:
            return self.default
        return value if math.isfinite(value) else self.default

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "labels": list(self.labels), "columns": list(self.columns)}

    @classmethod
    def from_json(cls, record: Any) -> Wording:
        """Read what `to_json` wrote; what else the record holds is left out."""
        fields = list(cls.__dataclass_fields__)
        if not isinstance(record, Mapping) or not all(name in record for name in fields):
            raise GraftError(f"the wording {record!r} cannot be read: it must be an object with {', '.join(fields)}.")
        labels, columns, step, default = (record[name] for name in ("labels", "columns", "step", "default"))
        if not (isinstance(labels, list) and isinstance(columns, list)):
            raise GraftError(f"the wording's labels={labels!r} and columns={columns!r} must be lists of strings.")
        if not all(isinstance(number, int | float) for number in (step, default)):
            raise GraftError(f"the wording's step={step!r} and default={default!r} must be numbers.")
        return cls(record["kind"], tuple(labels), tuple(columns), record["prefix"], float(step), float(default))


def nice(value: float) -> float:
    """The nearest in proportion of 1, 2 and 5 times the powers of ten."""
    near = [float(f"{digit}e{exponent(value)}") for digit in (1, 2, 5, 10)]
    return min(near, key=lambda step: abs(math.log(step / value)))


def exponent(value: float) -> int:
    """The power of ten of a number's first digit."""
    return int(f"{value:e}".split("e")[1])
