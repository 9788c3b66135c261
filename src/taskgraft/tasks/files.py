"""Data files as raw Arrow columns: CSV, TSV, JSON lines, Parquet. Text is streamed, and each row knows its line."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taskgraft.errors import GraftError
from taskgraft.tasks.json_rows import read_json
from taskgraft.tasks.lines import batched, text_lines

TABLES, RECORDS, PARQUET = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson", ".json"), ".parquet"
SUFFIXES = (*TABLES, *RECORDS, PARQUET, *(suffix + ".gz" for suffix in (*TABLES, *RECORDS)))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows with the numbers by which their source counts them: lines of a text file, else rows from 1."""

    table: pa.Table
    source: str
    numbers: npt.NDArray[np.int64]
    unit: str = "line"

    @classmethod
    def counted(cls, table: pa.Table, source: str) -> Rows:
        return cls(table, source, np.arange(1, table.num_rows + 1), "row")

    def where(self, row: int) -> str:
        """How a message names a row."""
        return f"{self.source}, {self.unit} {self.numbers[row]}"

    def keep(self, mask: npt.NDArray[np.bool_]) -> Rows:
        return replace(self, table=self.table.filter(pa.array(mask)), numbers=self.numbers[mask])


def data_suffix(path: Path) -> str:
    """The ending that says how a file is to be read (".csv", ".jsonl.gz"), or ""."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def read_rows(path: Path, encoding: str | None = None, delimiter: str | None = None) -> Rows:
    """Every column of a data file in the file's own types; CSV and JSON hold strings, or lists and structs of them."""
    suffix = data_suffix(path)
    if not path.is_file():
        raise GraftError(f"there is no file {path}: check the path.")
    if not suffix:
        raise GraftError(f"{path} is not of a known format: name it {', '.join(SUFFIXES[:7])} (text also .gz).")
    if suffix == PARQUET:
        return read_parquet(path)
    lines = text_lines(path, encoding)
    if suffix.startswith(RECORDS):
        return Rows(*read_json(path, lines))
    return read_csv(path, lines, "\t" if suffix.startswith(".tsv") and delimiter is None else delimiter)


def check_names(source: Path | str, names: Sequence[str]) -> None:
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise GraftError(f"{source} has {list(names).count(twice)} columns called {twice!r}: rename all but one.")


# -- CSV


def read_csv(path: Path, lines: Iterator[str], delimiter: str | None) -> Rows:
    """A table with a header; every field is a string."""
    head: list[str] = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    else:
        raise GraftError(f"{path} is empty: it needs a header, such as text,label, and rows.")
    if delimiter is None:
        delimiter = next((mark for mark in ",;\t|" if mark in head[-1]), ",")
    delimiter = delimiter.replace("\\t", "\t")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise GraftError(f"delimiter {delimiter!r} cannot be used: give one character, such as ',' or '\\t'.")
    rows = csv_rows(path, itertools.chain(head, lines), delimiter)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    check_names(path, header)
    batches, starts = [], []
    for batch in batched(rows):
        numbers, values = zip(*batch, strict=True)
        columns = zip(*values, strict=True)
        batches.append(pa.record_batch([pa.array(column, pa.string()) for column in columns], header))
        starts.append(np.array(numbers, dtype=np.int64))
    if not batches:
        raise GraftError(f"{path} has a header and no rows: its columns are {', '.join(header)}.")
    return Rows(pa.Table.from_batches(batches), str(path), np.concatenate(starts))


def csv_rows(path: Path, lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Each row with the line on which it begins, the header first; blank lines are passed over."""
    # A process-wide setting, never lowered again: that could break another thread's reading.
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    began, width = 1, 0
    try:
        for row in reader:
            if len(row) > 1 or "".join(row).strip():
                width = width or len(row)
                if len(row) != width:
                    raise GraftError(
                        f"{path}, line {began} has {len(row)} field{'s' if len(row) > 1 else ''} where the header has "
                        f"{width}: put a text that holds {delimiter!r} in double quotes, or say what separates the "
                        "fields with delimiter=... (--delimiter)."
                    )
                yield began, row
            began = reader.line_num + 1
    except csv.Error:
        raise GraftError(
            f"{path}, line {began}: the row that begins here has a quote that is not closed, or text after a closed "
            'one: close it, and write a quote inside of a quoted field as "".'
        ) from None


# -- Parquet


def read_parquet(path: Path) -> Rows:
    try:
        table = pq.ParquetFile(path, memory_map=True).read()
    except (pa.ArrowException, OSError) as error:
        raise GraftError(f"{path} could not be read as Parquet: {str(error).splitlines()[0].rstrip('.')}.") from error
    check_names(path, table.column_names)
    if not table.num_rows:
        raise GraftError(f"{path} has no rows: its columns are {', '.join(table.column_names)}.")
    return Rows.counted(with_class_names(table), str(path))


def with_class_names(table: pa.Table) -> pa.Table:
    """Classes by their names, where a data set of Hugging Face wrote them beside their numbers; -1 is no label."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    for name, feature in metadata.get("info", {}).get("features", {}).items():
        inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        if not isinstance(inner, Mapping) or inner.get("_type") != "ClassLabel" or name not in table.column_names:
            continue
        names = pa.array(inner["names"], pa.string())
        chunks = [named_classes(chunk, names) for chunk in table[name].chunks]
        table = table.set_column(table.column_names.index(name), name, pa.chunked_array(chunks))
    return table


def named_classes(numbers: pa.Array, names: pa.Array) -> pa.Array:
    if pa.types.is_list(numbers.type) or pa.types.is_large_list(numbers.type):
        lengths = pc.list_value_length(numbers)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.fill_null(0))]), pa.int32())
        return pa.ListArray.from_arrays(offsets, named_classes(numbers.flatten(), names), mask=numbers.is_null())
    if not pa.types.is_integer(numbers.type):  # already names: the metadata are of an earlier form of the file
        return numbers
    known = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(names)))
    return names.take(pc.if_else(known, numbers, None))
