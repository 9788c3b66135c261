"""A task: texts with their answers, in splits, and the metrics that judge it. Arrow tables hold the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pyarrow as pa

from taskgraft.errors import GraftError

Kind = Literal["classification", "multilabel", "regression", "tokens", "spans", "text"]
KINDS: tuple[str, ...] = get_args(Kind)
SPLITS = ("train", "validation", "test")

# The columns of a split's table. `pair` is there only where the task has a second text; spans have an `id` too.
ANSWER = pa.struct([("start", pa.int64()), ("text", pa.string())])
TEXT_TYPES: dict[str, pa.DataType] = {"tokens": pa.list_(pa.string())}  # elsewhere a string; spans: the question
LABEL_TYPES: dict[str, pa.DataType] = {
    "classification": pa.int64(),  # a position in Task.labels
    "multilabel": pa.list_(pa.int64()),  # positions in Task.labels, ascending; may be empty
    "regression": pa.float64(),
    "tokens": pa.list_(pa.int64()),  # one for each word of `text`
    "spans": pa.list_(ANSWER),  # every accepted answer; `pair` is the context that `start` counts characters of
    "text": pa.string(),
}


def text_type(kind: str) -> pa.DataType:
    return TEXT_TYPES.get(kind, pa.string())


def schema_of(kind: str, pair: bool) -> pa.Schema:
    """The columns that every split of a task of this kind has."""
    fields = [("text", text_type(kind))]
    if pair or kind == "spans":
        fields.append(("pair", pa.string()))
    fields.append(("label", LABEL_TYPES[kind]))
    if kind == "spans":
        fields.append(("id", pa.string()))
    return pa.schema(fields)


@dataclass(frozen=True, eq=False)
class Task:
    """Rows to learn from and to be judged on.

    `metrics` are what selects and is reported first: a task's score is their mean. `source` says where the rows came
    from, in words; `notes` what was done to them on the way (rows left out, splits made), a sentence each.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]  # classes, in the order of the head; () for numbers, spans and text
    metrics: tuple[str, ...]
    splits: Mapping[str, pa.Table] = field(repr=False)  # some of SPLITS
    source: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)  # the file's own names of text, pair, label
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GraftError(f"a task of kind {self.kind!r} is unknown: use one of {', '.join(KINDS)}.")
        for split, table in self.splits.items():
            if split not in SPLITS:
                raise GraftError(f"a split named {split!r} is unknown: use {', '.join(SPLITS)}.")
            expected = schema_of(self.kind, self.has_pairs)
            if not table.schema.equals(expected):
                raise GraftError(
                    f"the {split} split of task {self.name!r} has columns {table.schema.names} of types "
                    f"{table.schema.types}, and needs {expected.names} of {expected.types}."
                )

    @property
    def has_pairs(self) -> bool:
        return any("pair" in table.column_names for table in self.splits.values())

    def __len__(self) -> int:
        return sum(table.num_rows for table in self.splits.values())

    def split(self, name: str) -> pa.Table:
        """The rows of one split, or a sentence that says which there are."""
        if name not in self.splits or not self.splits[name].num_rows:
            known = ", ".join(split for split, table in self.splits.items() if table.num_rows) or "none"
            raise GraftError(f"task {self.name!r} has no {name} rows: its splits are {known}.")
        return self.splits[name]

    def to_json(self) -> dict[str, Any]:
        """What a graft remembers of its task: everything but the rows."""
        return {
            "name": self.name,
            "kind": self.kind,
            "labels": list(self.labels),
            "metrics": list(self.metrics),
            "rows": {split: table.num_rows for split, table in self.splits.items()},
            "source": self.source,
            "columns": dict(self.columns),
            "notes": list(self.notes),
        }
