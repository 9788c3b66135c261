"""A published set: where it is, what its columns mean, and its rows from Parquet files or from the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from taskgraft.errors import GraftError
from taskgraft.tasks.protocols import PROTOCOLS
from taskgraft.tasks.task import ANSWER, LABEL_TYPES, Kind, schema_of


@dataclass(frozen=True)
class Hub:
    """Where a set is on the Hub, and what differs there from its files."""

    id: str
    config: str | None = None
    columns: tuple[str, ...] = ()  # text, (pair,) label, where they have other names
    classes: tuple[str, ...] = ()  # the names of the labels there, in our order
    left_out: tuple[str, ...] = ()  # classes that are no part of the task
    note: str = ""


@dataclass(frozen=True)
class Benchmark:
    """A row of the table: where a task's rows are, what their columns mean, how the splits are made."""

    name: str  # GROUP/NAME
    folder: str  # in a folder of data: FOLDER/PART.parquet
    hub: Hub | None
    columns: tuple[str, ...]  # text, (pair,) label
    labels: tuple[str, ...] = ()
    kind: Kind = "classification"
    metrics: tuple[str, ...] = ("accuracy",)
    protocol: str = "all"  # of PROTOCOLS
    may_lack: tuple[str, ...] = ()  # files of the protocol that it can do without
    published: Mapping[str, int] = field(default_factory=dict)  # rows of each file as published
    notes: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    @property
    def files(self) -> tuple[str, ...]:
        return PROTOCOLS[self.protocol][0]

    @property
    def has_pairs(self) -> bool:
        return len(self.columns) == 3

    def path(self, folder: Path, part: str) -> Path:
        """Of one of its files in a folder of data."""
        return folder / self.folder / f"{part}.parquet"

    def is_at_hand(self, folder: Path | None) -> bool:
        """Are its files in a folder of data; or, without one, is a copy of it known on the Hub?"""
        if folder is None:
            return self.hub is not None
        return all(self.path(folder, part).is_file() for part in self.files if part not in self.may_lack)


def read_files(benchmark: Benchmark, folder: Path) -> tuple[dict[str, pa.Table], list[str]]:
    """The set's files, and what the folder's MANIFEST.json, if there is one, says of them."""
    parts: dict[str, pa.Table] = {}
    for part in benchmark.files:
        path = benchmark.path(folder, part)
        if not path.is_file():
            if part in benchmark.may_lack:
                continue
            raise GraftError(f"benchmark {benchmark.name!r} needs the file {path}, and it is not there.")
        try:
            table = pq.read_table(path, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise GraftError(f"{path} could not be read as Parquet: {str(error).splitlines()[0]}") from error
        parts[part] = _converted(benchmark, table, benchmark.columns, benchmark.labels, str(path))
    manifest = folder / "MANIFEST.json"
    try:
        known = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        said = [str(known.get(f"{benchmark.folder}/{part}.parquet", {}).get("deviations", "none")) for part in parts]
    except (ValueError, AttributeError) as error:
        raise GraftError(f"{manifest} is not a JSON object of files: mend it or remove it.") from error
    return parts, [f"Of the files: {note}." for note in dict.fromkeys(said) if not note.startswith("none")]


def read_hub(benchmark: Benchmark) -> tuple[dict[str, pa.Table], list[str]]:
    hub = benchmark.hub
    if hub is None:
        file = f"{benchmark.folder}/{benchmark.files[0]}.parquet"
        raise GraftError(f"benchmark {benchmark.name!r} has no known copy on the Hub: give a data_dir with {file}.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise GraftError("data sets from the Hub need one more package: `pip install 'taskgraft[hub]'`.") from error
    parts, notes = {}, [hub.note] if hub.note else []
    for part in benchmark.files:
        where = f"{hub.id} ({hub.config or 'default'}, {part})"
        try:
            dataset = load_dataset(hub.id, hub.config, split="train" if part == "all" else part)
        except Exception as error:  # whatever the network, the Hub or the library has to say
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise GraftError(f"{where} could not be loaded from the Hub: {reason}") from error
        columns, classes = hub.columns or benchmark.columns, hub.classes or benchmark.labels
        table = dataset.with_format("arrow")[:]
        if benchmark.labels:
            names = getattr(dataset.features.get(columns[-1]), "names", None)
            table = _with_class_names(table, columns[-1], names, where)
        if hub.left_out and columns[-1] in table.column_names:
            stays = pc.invert(pc.is_in(table[columns[-1]], value_set=pa.array(hub.left_out, pa.string())))
            if dropped := table.num_rows - (table := table.filter(stays)).num_rows:
                notes.append(f"{dropped:,} rows of {', '.join(map(repr, hub.left_out))} were left out.")
        parts[part] = _converted(benchmark, table, columns, classes, where)
    return parts, notes


def _with_class_names(table: pa.Table, column: str, names: list[str] | None, where: str) -> pa.Table:
    """Class names instead of their numbers: the Hub's order of classes is its own."""
    if column not in table.column_names:
        return table  # and refused with the other columns
    place = table.column_names.index(column)
    if pa.types.is_string(table[column].type) or pa.types.is_large_string(table[column].type):
        return table.set_column(place, column, table[column].cast(pa.string()))
    if not names:
        raise GraftError(f"column {column!r} of {where} no longer names its classes: give a data_dir of files instead.")
    numbers = table[column].combine_chunks()
    hidden = pc.less(numbers, 0)  # -1 is no class: the answer is withheld
    given = pc.take(pa.array(names, pa.string()), pc.if_else(hidden, None, numbers))
    return table.set_column(place, column, given)


def _converted(
    benchmark: Benchmark, table: pa.Table, columns: tuple[str, ...], classes: tuple[str, ...], where: str
) -> pa.Table:
    """The table in the columns and types that a task of this kind has."""
    needed = (*columns, "id") if benchmark.kind == "spans" else columns
    if missing := [name for name in needed if name not in table.column_names]:
        raise GraftError(f"{where} has no column {missing[0]!r}: its columns are {', '.join(table.column_names)}.")
    *texts, label = (table[name] for name in columns)
    if benchmark.kind == "spans":
        label = _answers(label.combine_chunks())
    elif classes:
        label = _class_numbers(label, classes, where)
    else:
        label = label.cast(LABEL_TYPES[benchmark.kind])
    arrays = [text.cast(pa.string()) for text in texts] + [label]
    if benchmark.kind == "spans":
        arrays.append(table["id"].cast(pa.string()))
    converted = pa.table(arrays, schema=schema_of(benchmark.kind, benchmark.has_pairs))
    if empty := next((name for name in converted.column_names if converted[name].null_count), None):
        raise GraftError(f"{where} has rows without a {empty}: fill them or remove them.")
    return converted


def _class_numbers(label: pa.ChunkedArray, classes: tuple[str, ...], where: str) -> pa.ChunkedArray:
    if pa.types.is_integer(label.type):
        numbers = label.cast(pa.int64())
        wrong = numbers.filter(pc.or_(pc.less(numbers, 0), pc.greater_equal(numbers, len(classes))))
    else:
        names = label.cast(pa.string())
        numbers = pc.index_in(names, value_set=pa.array(classes)).cast(pa.int64())
        wrong = names.filter(pc.and_(numbers.is_null(), names.is_valid()))
    if len(wrong):
        raise GraftError(f"label {wrong[0].as_py()!r} in {where} is no class of the task: it has {', '.join(classes)}.")
    return numbers


def _answers(answers: pa.StructArray) -> pa.ListArray:
    """SQuAD's struct of two lists as a list of accepted answers."""
    texts, starts = answers.field("text"), answers.field("answer_start")
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(texts).to_numpy(zero_copy_only=False))])
    each = pa.StructArray.from_arrays(
        [starts.flatten().cast(pa.int64()), texts.flatten().cast(pa.string())], fields=list(ANSWER)
    )
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), each, type=LABEL_TYPES["spans"])
