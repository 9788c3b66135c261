"""`load_task`: a file, a benchmark's name or a data set on the Hub becomes a Task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.names import check_task_name
from taskgraft.tasks.columns import Columns, check_column, choose_columns
from taskgraft.tasks.examples import decide_kind, encode, find_labels, present, shape, strings, without_gaps
from taskgraft.tasks.files import Rows, data_suffix, read_rows
from taskgraft.tasks.metrics import check_metrics, default_metrics
from taskgraft.tasks.spans import check_spans
from taskgraft.tasks.splits import Numbers, counted, divide, named_splits, split_name
from taskgraft.tasks.task import KINDS, SPLITS, Kind, Task

Held = str | PathLike[str] | float
WITH_LABELS = {"classification": 2, "tokens": 2, "multilabel": 1}  # and how many they need


def load_task(
    source: str | PathLike[str],
    *,
    name: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    kind: str | None = None,
    labels: Sequence[str] | None = None,
    split: str | None = None,
    validation: Held = 0.1,
    test: Held = 0.1,
    only: str | None = None,
    metrics: Sequence[str] | None = None,
    encoding: str | None = None,
    delimiter: str | None = None,
    skip_bad_rows: bool = False,
    data_dir: str | PathLike[str] | None = None,
    seed: int = 0,
) -> Task:
    """A task from a data file (CSV, TSV, JSONL, Parquet), a benchmark's name, or a data set on the Hub.

    Columns, kind, labels and splits are found where they are clear, and `Task.notes` says what was done; `labels`
    fixes the classes and their order. `validation` and `test` are files, or the shares to hold out where the source
    has no such rows; with `only` all rows of a file are that split (of a data set: that split alone).
    """
    if kind is not None and kind not in KINDS:
        raise GraftError(f"kind {kind!r} is unknown: use one of {', '.join(KINDS)}.")
    if name is not None:
        check_task_name(name)
    only = None if only is None else known_split(only)
    files, shares = files_and_shares(validation, test, only)
    path, address = Path(source), str(source)
    from_hub = False
    notes: list[str] = []
    if data_suffix(path) or path.is_file():
        parts = {only or "train": read_rows(path, encoding, delimiter)}
        called = path.name[: -len(data_suffix(path))]
    elif is_benchmark(address):
        named = {"text": text, "pair": pair, "label": label, "kind": kind, "labels": labels, "split": split, **files}
        if refused := [key for key, value in named.items() if value is not None]:
            raise GraftError(
                f"{source} is a benchmark: its columns and splits are fixed; leave out {', '.join(refused)}."
            )
        return from_benchmark(address, name, only, metrics, data_dir, seed)
    else:
        from taskgraft.tasks.hub import read_hub

        parts, notes = read_hub(address, only)
        from_hub = True
        called = address.partition(":")[0].rstrip("/").rpartition("/")[2]
    columns = choose_columns(next(iter(parts.values())), text, pair, label, split, kind)
    columns = replace(columns, split=None if only else split_column(parts, columns, asked=split is not None))
    parts |= {role: read_rows(file, encoding, delimiter) for role, file in files.items()}
    kind, classes = kind_and_classes(parts, columns, kind, labels)
    parts, gaps = whole_rows(parts, columns, kind, skip_bad_rows, from_hub)
    found = classes or find_labels(list(parts.values()), kind)
    check_labels(found, kind, address, columns)
    table = pa.concat_tables([encode(rows, columns, kind, found) for rows in parts.values()])
    given = np.concatenate([given_splits(rows, role, columns, files) for role, rows in parts.items()])
    if only is None:
        given, made = divide(table, given, kind, () if classes else found, shares, seed, address)
        gaps += made
    splits = {role: table.filter(pa.array(given == n)) for n, role in enumerate(SPLITS) if (given == n).any()}
    if metrics is None:
        largest = next(iter(splits.values()))["label"]
        counts = np.bincount(largest, minlength=len(found)).tolist() if kind == "classification" else None
        metrics = default_metrics(kind, found, counts)
    check_metrics(kind, metrics, found)
    return Task(
        name=name or usable_name(called),
        kind=cast(Kind, kind),
        labels=found,
        metrics=tuple(metrics),
        splits=splits,
        source=address,
        columns=columns.named,
        notes=(*notes, *gaps),
    )


def files_and_shares(validation: Held, test: Held, only: str | None) -> tuple[dict[str, Path], dict[str, float]]:
    """What was asked of validation and test: a file each, or a share of the rows."""
    files: dict[str, Path] = {}
    shares: dict[str, float] = {}
    for role, value in (("validation", validation), ("test", test)):
        try:
            shares[role] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            files[role] = Path(cast(str, value))
    if not all(0 <= share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        raise GraftError(f"validation={validation} and test={test} cannot be held out: use shares of the rows such as "
                         "0.1, less than 1 together.")  # fmt: skip
    if only is not None and files:
        raise GraftError(
            f"only={only!r} makes all rows one split, which leaves no use for a file of {', '.join(files)}."
        )
    return files, shares


def known_split(name: str) -> str:
    found = split_name(name)
    if found is None:
        raise GraftError(f"a split named {name!r} is unknown: use {', '.join(SPLITS)}.")
    return found


def usable_name(called: str) -> str:
    """A task's name from a file's or a data set's."""
    allowed = "".join(c if c.isalnum() or c in "_-. " else "-" for c in called)
    return allowed.strip(" .").encode()[:128].decode(errors="ignore").rstrip(" .") or "task"


def is_benchmark(name: str) -> bool:
    from taskgraft.tasks.benchmarks import benchmark_named

    return benchmark_named(name) is not None


def from_benchmark(
    address: str,
    name: str | None,
    only: str | None,
    metrics: Sequence[str] | None,
    data_dir: str | PathLike[str] | None,
    seed: int,
) -> Task:
    from taskgraft.tasks.benchmarks import load_benchmark

    task = load_benchmark(address, data_dir, seed)
    if metrics is not None:
        check_metrics(task.kind, metrics, task.labels)
        task = replace(task, metrics=tuple(metrics))
    if only is not None:
        task = replace(task, splits={only: task.split(only)})
    return replace(task, name=name or task.name)


# -- the steps on the way


def split_column(parts: Mapping[str, Rows], columns: Columns, asked: bool) -> str | None:
    """The column that names splits: the one asked for, or one called so that holds such names, where no others are."""
    if asked or columns.split is None:
        return columns.split
    if len(parts) > 1 or pa.types.is_nested(parts["train"].table.schema.field(columns.split).type):
        return None
    values = pc.unique(strings(parts["train"], columns.split)).drop_null().slice(0, 100).to_pylist()
    return columns.split if any(split_name(value) for value in values) else None


def kind_and_classes(
    parts: Mapping[str, Rows], columns: Columns, kind: str | None, labels: Sequence[str] | None
) -> tuple[str, tuple[str, ...]]:
    """The kind, found if not given, and the classes if given."""
    for rows in parts.values():
        for role, column in columns.named.items():
            check_column(rows, column, role)
    if isinstance(labels, str):
        raise GraftError(f"labels={labels!r} is one string: give a list of label names.")
    classes = tuple(str(label).strip() for label in labels or ())
    if len(set(classes)) < len(classes):
        raise GraftError(f"labels={list(classes)} name a class twice.")
    if kind is None:
        kind = decide_kind(list(parts.values()), columns)
        kind = "classification" if kind == "regression" and classes else kind
    if classes and kind not in WITH_LABELS:
        raise GraftError(
            f"labels={list(classes)} were given for a task of kind {kind!r}, which has none: leave them out."
        )
    if kind == "spans" and columns.pair is None:
        raise GraftError("kind='spans' needs the column of the contexts: name it with pair=... (--pair).")
    if kind == "tokens" and columns.pair is not None:
        raise GraftError(f"a task of kind 'tokens' reads one text: leave the pair ({columns.pair!r}) out.")
    return kind, classes


def whole_rows(
    parts: Mapping[str, Rows], columns: Columns, kind: str, skip: bool, from_hub: bool
) -> tuple[dict[str, Rows], list[str]]:
    """The shaped rows that have text and label, and notes on the others."""
    whole, notes = {}, []
    for (role, rows), raw in zip(parts.items(), shape(list(parts.values()), columns, kind), strict=True):
        if from_hub and role != "train" and len(parts) > 1 and not present(raw.table["label"], kind, "label").any():
            notes.append(f"The {role} rows of the data set have no labels and are left out.")
            continue
        whole[role] = kept = without_gaps(raw, columns, kind, skip)
        left_out = raw.table.num_rows - kept.table.num_rows
        if not kept.table.num_rows:
            raise GraftError(f"{rows.source} has no row with both text and label.")
        if left_out:
            notes.append(f"{counted(left_out, 'row')} of {rows.source} without text or label left out.")
        if kind == "spans":
            check_spans(kept, columns)
    return whole, notes


def check_labels(labels: Sequence[str], kind: str, source: str, columns: Columns) -> None:
    if len(labels) < WITH_LABELS.get(kind, 0):
        only = f"the class {labels[0]!r} alone" if labels else "no classes"
        raise GraftError(f"column {columns.label!r} of {source} has {only}: {kind} needs at least {WITH_LABELS[kind]}.")


def given_splits(rows: Rows, role: str, columns: Columns, files: Mapping[str, Path]) -> Numbers:
    """The split of each row, as its file or its column says."""
    if role != "train" or columns.split is None:
        return np.full(rows.table.num_rows, SPLITS.index(role))
    found = named_splits(rows, columns.split)
    for other in files:
        if (found == SPLITS.index(other)).any():
            raise GraftError(f"{rows.source} has {other} rows in its column {columns.split!r}, and {files[other]} was "
                             f"given for {other} too: leave one of them out.")  # fmt: skip
    return found
