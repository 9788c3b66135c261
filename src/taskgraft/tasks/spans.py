"""Answers that are spans of a context, in the two forms that data sets have them in, and the check that they are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.tasks.columns import Columns, is_list
from taskgraft.tasks.files import Rows
from taskgraft.tasks.task import LABEL_TYPES

BATCH = 1024


def span_answers(rows: Rows, name: str) -> pa.ChunkedArray:
    """Each row's answers as a list of {start, text}, from {"text": [...], "answer_start": [...]} or a list of such."""
    column = rows.table[name].combine_chunks()
    kind = column.type.value_type if is_list(column.type) else column.type
    fields = {field.name for field in kind} if pa.types.is_struct(kind) else set()
    start = next((field for field in ("answer_start", "start") if field in fields), None)
    if start is None or "text" not in fields:
        raise GraftError(f"column {name!r} of {rows.source} holds {column.type}, and answers are needed there, such as "
                         '{"text": ["Paris"], "answer_start": [17]}.')  # fmt: skip
    if is_list(column.type):
        lengths, flat = pc.list_value_length(column), column.flatten()
        texts, starts = flat.field("text"), flat.field(start)
    else:
        lengths, others = (pc.list_value_length(pc.struct_field(column, field)) for field in ("text", start))
        unequal = pc.not_equal(pc.fill_null(lengths, 0), pc.fill_null(others, 0)).to_numpy(zero_copy_only=False)
        if unequal.any():
            row = int(unequal.argmax())
            raise GraftError(f"{rows.where(row)} has {lengths[row]} answer texts and {others[row]} starts in column "
                             f"{name!r}: give each text its start.")  # fmt: skip
        texts, starts = (pc.list_flatten(pc.struct_field(column, field)) for field in ("text", start))
    try:
        spans = pa.StructArray.from_arrays([starts.cast(pa.int64()), texts.cast(pa.string())], ["start", "text"])
    except pa.ArrowException as error:
        raise GraftError(
            f"column {name!r} of {rows.source} has answers whose start is no whole number ({error})."
        ) from error
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(lengths, 0))])
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), spans)
    return pa.chunked_array([lists.cast(LABEL_TYPES["spans"])])


def check_spans(rows: Rows, columns: Columns) -> None:
    """Refuse an answer that does not stand in its context where it says."""
    for first in range(0, rows.table.num_rows, BATCH):
        batch = rows.table.slice(first, BATCH)
        for row, (context, answers) in enumerate(
            zip(batch["pair"].to_pylist(), batch["label"].to_pylist(), strict=True)
        ):
            for answer in answers:
                start, text = answer["start"], answer["text"]
                if start is None or not text or start < 0 or context[start : start + len(text)] != text:
                    raise GraftError(f"{rows.where(first + row)} has the answer {text!r} at character {start}, where "
                                     f"column {columns.pair!r} has other text: correct its start.")  # fmt: skip
