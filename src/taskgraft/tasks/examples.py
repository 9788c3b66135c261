"""From raw columns to the rows of a task: its kind and labels found, rows without text or label refused or left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.tasks.columns import Columns, holds_records, is_list
from taskgraft.tasks.files import Rows
from taskgraft.tasks.spans import span_answers
from taskgraft.tasks.task import LABEL_TYPES, schema_of

MOST_CLASSES = 20  # whole numbers with more distinct values than this are taken for quantities
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
VISIBLE = r"[^\s\p{Z}]"
SEPARATORS = ("|", ";", ",")
SHOWN = 12  # labels that a message lists


def decide_kind(parts: Sequence[Rows], columns: Columns) -> str:
    """What the answers look like: lists, records, numbers or classes."""
    kind = parts[0].table.schema.field(columns.label).type
    if holds_records(parts[0], columns.label):
        return "spans"
    if is_list(kind):
        return "tokens" if is_list(parts[0].table.schema.field(columns.text).type) else "multilabel"
    values = pc.unique(
        pa.chunked_array([pc.unique(stripped(strings(rows, columns.label))) for rows in parts])
    ).drop_null()
    if not len(values) or not pc.all(pc.match_substring_regex(values, NUMBER)).as_py():
        return "classification"
    numbers = np.unique(values.cast(pa.float64()).to_numpy())
    whole = bool((numbers == np.floor(numbers)).all())
    return "classification" if whole and len(numbers) <= MOST_CLASSES else "regression"


def shape(parts: Sequence[Rows], columns: Columns, kind: str) -> list[Rows]:
    """The chosen columns as text, pair, label, split and id, in strings or lists of them; what is missing is null."""
    separator = None
    if kind == "multilabel" and not all(is_list(rows.table.schema.field(columns.label).type) for rows in parts):
        values = [strings(rows, columns.label) for rows in parts]
        used = [mark for mark in SEPARATORS if any(pc.any(pc.match_substring(v, mark)).as_py() for v in values)]
        separator = used[0] if used else SEPARATORS[0]
    return [replace(rows, table=pa.table(shaped(rows, columns, kind, separator))) for rows in parts]


def shaped(rows: Rows, columns: Columns, kind: str, separator: str | None) -> dict[str, pa.ChunkedArray]:
    if kind == "tokens":
        found = {"text": string_lists(rows, columns.text), "label": string_lists(rows, columns.label)}
    elif kind == "multilabel":
        found = {"text": strings(rows, columns.text), "label": string_lists(rows, columns.label, separator)}
    elif kind == "spans":
        found = {"text": strings(rows, columns.text), "label": span_answers(rows, columns.label)}
    else:
        answers = strings(rows, columns.label)
        found = {"text": strings(rows, columns.text), "label": answers if kind == "text" else stripped(answers)}
    if columns.pair is not None:
        found["pair"] = strings(rows, columns.pair)
    if columns.split is not None and columns.split in rows.table.column_names:
        found["split"] = stripped(strings(rows, columns.split))
    if kind == "spans" and columns.id is not None and columns.id in rows.table.column_names:
        found["id"] = strings(rows, columns.id)
    elif kind == "spans":
        found["id"] = pa.array(rows.numbers).cast(pa.string())
    return found


def without_gaps(rows: Rows, columns: Columns, kind: str, skip: bool) -> Rows:
    """Refuse the first row that lacks its text or label, or leave all such rows out."""
    gaps = {role: ~present(rows.table[role], kind, role) for role in columns.named}
    bad = np.logical_or.reduce(list(gaps.values()))
    if not bad.any():
        return rows
    if skip:
        return rows.keep(~bad)
    first = int(bad.argmax())
    role = next(role for role, mask in gaps.items() if mask[first])
    others = f", and so do {bad.sum() - 1} others" if bad.sum() > 1 else ""
    raise GraftError(f"{rows.where(first)} has no {role} (column {columns.named[role]!r}){others}: fill it in, or "
                     "leave such rows out with skip_bad_rows=True (--skip-bad-rows).")  # fmt: skip


def present(column: pa.ChunkedArray, kind: str, role: str) -> npt.NDArray[np.bool_]:
    if kind == "multilabel" and role == "label":  # an empty list is an answer
        return as_mask(column.is_valid())
    if is_list(column.type):
        return as_mask(pc.greater(pc.list_value_length(column), 0))
    return as_mask(pc.match_substring_regex(column, VISIBLE))


def find_labels(parts: Sequence[Rows], kind: str) -> tuple[str, ...]:
    """The classes that occur, sorted as numbers where all are numbers, else as strings."""
    if kind not in ("classification", "multilabel", "tokens"):
        return ()
    found: set[str] = set()
    for rows in parts:
        column = rows.table["label"]
        flat = pc.list_flatten(column) if is_list(column.type) else column
        found.update(pc.unique(stripped(flat)).drop_null().to_pylist())
    if all(re.fullmatch(NUMBER, label) for label in found):
        return tuple(sorted(found, key=lambda label: (float(label), label)))
    return tuple(sorted(found))


def encode(rows: Rows, columns: Columns, kind: str, labels: Sequence[str]) -> pa.Table:
    """Shaped rows in the schema of a task; a label that is unknown, or no number, is refused with its line."""
    column = rows.table["label"]
    if kind == "classification":
        label = label_numbers(rows, columns, column, np.arange(rows.table.num_rows), labels)
    elif kind == "regression":
        label = quantities(rows, columns)
    elif kind in ("multilabel", "tokens"):
        label = label_lists(rows, columns, kind, labels)
    else:
        label = column
    table = rows.table.set_column(rows.table.column_names.index("label"), "label", label)
    schema = schema_of(kind, columns.pair is not None)
    return table.select(schema.names).cast(schema)


def label_numbers(
    rows: Rows,
    columns: Columns,
    values: pa.ChunkedArray | pa.Array,
    owners: npt.NDArray[np.int64],
    labels: Sequence[str],
) -> pa.ChunkedArray | pa.Array:
    """Each value's position among the labels; `owners` are the rows the values belong to."""
    positions = pc.index_in(values, value_set=pa.array(labels, pa.string()))
    if positions.null_count:
        first = int(np.argmax(as_mask(positions.is_null())))
        known = ", ".join(labels[:SHOWN]) + (f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else "")
        raise GraftError(f"{rows.where(int(owners[first]))} has the label {values[first].as_py()!r} in column "
                         f"{columns.label!r}, and the known labels are {known}: correct it.")  # fmt: skip
    return positions.cast(pa.int64())


def label_lists(rows: Rows, columns: Columns, kind: str, labels: Sequence[str]) -> pa.Array:
    """Lists of labels as lists of positions: in order for tokens, each once and ascending for multilabel."""
    lists = rows.table["label"].combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(lists)), lengths)
    values = stripped(lists.flatten())
    if kind == "tokens":
        empty = pc.list_parent_indices(rows.table["text"]).filter(pc.list_flatten(rows.table["text"]).is_null())
        if len(empty):
            raise GraftError(
                f"{rows.where(empty[0].as_py())} has a word that is null (column {columns.text!r}): fill it in."
            )
        words = pc.list_value_length(rows.table["text"]).to_numpy()
        if (words != lengths).any():
            first = int((words != lengths).argmax())
            raise GraftError(f"{rows.where(first)} has {words[first]} words (column {columns.text!r}) and "
                             f"{lengths[first]} tags (column {columns.label!r}): give each word one tag.")  # fmt: skip
        positions = label_numbers(rows, columns, values, owners, labels).to_numpy()
    else:
        named = as_mask(values.is_valid())
        owners, values = owners[named], values.drop_null()
        found = label_numbers(rows, columns, values, owners, labels).to_numpy()
        owners, positions = np.unique(np.stack([owners, found], axis=1), axis=0).reshape(-1, 2).T
        lengths = np.bincount(owners, minlength=len(lists))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(positions, pa.int64())).cast(
        LABEL_TYPES[kind]
    )


def quantities(rows: Rows, columns: Columns) -> pa.ChunkedArray:
    column = rows.table["label"]
    finite = as_mask(pc.match_substring_regex(column, NUMBER))
    numbers = pc.if_else(pa.array(finite), column, None).cast(pa.float64())
    finite &= as_mask(pc.is_finite(numbers))
    if not finite.all():
        first = int((~finite).argmax())
        raise GraftError(f"{rows.where(first)} has {column[first].as_py()!r} in column {columns.label!r}, which is no "
                         "finite number as regression needs: correct it, or say kind=... (--kind).")  # fmt: skip
    return numbers


# -- columns of strings


def strings(rows: Rows, name: str) -> pa.ChunkedArray:
    """A column as strings; NaN is what is missing."""
    column = rows.table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        if not pa.types.is_nested(column.type):
            return column.cast(pa.string())
    except pa.ArrowException:
        pass
    raise GraftError(f"column {name!r} of {rows.source} holds {column.type}, and strings or numbers are needed there: "
                     "name another column, or say kind=... (--kind).")  # fmt: skip


def string_lists(rows: Rows, name: str, separator: str | None = None) -> pa.ChunkedArray:
    """A column as lists of strings; a string is cut at the separator, or else at white space."""
    column = rows.table[name]
    if is_list(column.type) and not pa.types.is_nested(column.type.value_type):
        return column.cast(pa.list_(pa.string()))
    column = strings(rows, name)
    return (
        pc.split_pattern(column, separator) if separator else pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))
    )


def stripped(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Without white space around; what is then empty is missing."""
    column = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.equal(column, ""), None, column)


def as_mask(flags: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bool_]:
    """Flags as numpy's; null is False."""
    mask: npt.NDArray[np.bool_] = pc.fill_null(flags, False).to_numpy(zero_copy_only=False)
    return mask
