"""JSON lines, or one array of objects, as Arrow columns: read row by row, each with the line it begins on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from taskgraft.errors import GraftError
from taskgraft.tasks.lines import batched

SPACE = re.compile(r"[ \t\r\n]*")
SHAPES: dict[type, str] = {str: "text or a number", list: "a list", dict: "an object"}


def read_json(path: Path, lines: Iterator[str]) -> tuple[pa.Table, str, npt.NDArray[np.int64]]:
    """The columns, the file and each row's line. Scalars become the strings that a CSV would hold."""
    shapes: dict[str, type] = {}
    tables, starts = [], []
    for batch in batched(json_objects(path, lines)):
        records = []
        for line, value in batch:
            if not isinstance(value, dict):
                raise GraftError(f"{path}, line {line} holds {shown(value)}: write one object in braces on each line.")
            records.append(record := {name: as_strings(inner) for name, inner in value.items()})
            for name, inner in record.items():
                if inner is not None and shapes.setdefault(name, type(inner)) is not type(inner):
                    raise GraftError(f"{path}, line {line}: {name!r} is {shown(value[name])}, and rows before have "
                                     f"{SHAPES[shapes[name]]} there: write all rows alike.")  # fmt: skip
        names = dict.fromkeys(name for record in records for name in record)
        try:
            tables.append(pa.table({name: [record.get(name) for record in records] for name in names}))
        except (pa.ArrowException, UnicodeError):
            raise unlike(path, batch) from None
        starts.append(np.array([line for line, _ in batch], dtype=np.int64))
    if not tables:
        raise GraftError(f'{path} is empty: it needs rows such as {{"text": "...", "label": "..."}}.')
    try:
        return pa.concat_tables(tables, promote_options="permissive"), str(path), np.concatenate(starts)
    except pa.ArrowException as error:
        raise GraftError(
            f"{path}: the objects in its rows have unlike fields ({error}): write all rows alike."
        ) from error


def json_objects(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    """Each value with the line on which it begins."""
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("["):
            yield from array_items(path, number, line + "".join(lines))
        elif line.strip():
            with json_errors(path, number):
                value = json.loads(line.rstrip())
            yield number, value


def array_items(path: Path, first_line: int, text: str) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array one after the other: all of them at once would be many times its text."""
    decoder = json.JSONDecoder()
    line, counted, position = first_line, 0, text.index("[")
    while text[position] != "]":
        position = after_space(text, position + 1)
        line, counted = line + text.count("\n", counted, position), position
        if text.startswith("]", position):
            break
        with json_errors(path, first_line):
            value, position = decoder.raw_decode(text, position)
        yield line, value
        position = after_space(text, position)
        if text[position : position + 1] not in (",", "]"):
            raise GraftError(f"{path}, line {line}: the row that begins here is not followed by ',' or ']'.")
    if after_space(text, position + 1) < len(text):
        raise GraftError(f"{path} has text after the array of rows: keep one array.")


def after_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


@contextmanager
def json_errors(path: Path, first_line: int) -> Iterator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        line, reason = first_line + error.lineno - 1, f"{error.msg.lower()}, column {error.colno}"
    except (ValueError, RecursionError) as error:
        line, reason = first_line, str(error)
    else:
        return
    raise GraftError(f"{path}, line {line} is not JSON ({reason}): write one object a line, or an array of objects.")


def as_strings(value: Any) -> Any:
    """A JSON value with its numbers and booleans as strings, the form in which columns are told apart."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return [as_strings(item) for item in value]
    if isinstance(value, dict):
        return {name: as_strings(inner) for name, inner in value.items()}
    return json.dumps(value)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def unlike(path: Path, batch: Sequence[tuple[int, Any]]) -> GraftError:
    """Why a batch could not be made into columns: half a character, or lists of unlike things."""
    for line, value in batch:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeError:
            return GraftError(f"{path}, line {line} holds half of a surrogate pair (\\ud800 to \\udfff): take it out.")
    lines = f"lines {batch[0][0]} to {batch[-1][0]}"
    return GraftError(f"{path}, {lines}: a list or object is not made as in the other rows: write all rows alike.")
