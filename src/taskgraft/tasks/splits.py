"""Splits: the ones that are given, kept apart, and the ones that are made, by class, with no text in two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.tasks.files import Rows
from taskgraft.tasks.task import SPLITS

Numbers = npt.NDArray[np.int64]
TRAIN, VALIDATION, TEST, NONE = 0, 1, 2, -1  # positions in SPLITS; NONE is left out
ALIASES = {"training": "train", "dev": "validation", "valid": "validation", "val": "validation", "eval": "validation",
           "testing": "test"}  # fmt: skip


def split_name(name: str) -> str | None:
    """One of SPLITS, from what people call them."""
    word = name.strip().lower()
    word = ALIASES.get(word, word)
    return word if word in SPLITS else None


def named_splits(rows: Rows, column: str) -> Numbers:
    """Each row's split, from the rows' `split` column; `column` is what the file calls it."""
    encoded = rows.table["split"].combine_chunks().dictionary_encode()
    known = [split_name(value) for value in encoded.dictionary.to_pylist()]
    numbers = np.array([NONE if name is None else SPLITS.index(name) for name in known] + [NONE])
    found: Numbers = numbers[encoded.indices.fill_null(-1).to_numpy()]
    if (found == NONE).any():
        first = int((found == NONE).argmax())
        value = rows.table["split"][first].as_py()
        raise GraftError(f"{rows.where(first)} has {value!r} in column {column!r}, which names no split: use "
                         f"{', '.join(SPLITS)}.")  # fmt: skip
    return found


def text_keys(table: pa.Table) -> pa.ChunkedArray:
    """A string a row, equal where the texts are but for white space and case; a pair is the same in either order."""
    text = plain(table["text"])
    if "pair" not in table.column_names:
        return text
    pair, between = plain(table["pair"]), pa.scalar("\x1f")
    ordered = pc.less(text, pair)
    return pc.binary_join_element_wise(pc.if_else(ordered, text, pair), pc.if_else(ordered, pair, text), between)


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Lower case and single spaces; part by part, so that what lies between is never there for all rows at once."""

    def of(part: pa.Array) -> pa.Array:
        words = pc.binary_join(part, " ") if pa.types.is_list(part.type) else part
        return pc.utf8_trim_whitespace(pc.replace_substring_regex(pc.utf8_lower(words), r"\s+", " "))

    return pa.chunked_array([of(part) for part in column.chunks], pa.string())


def text_numbers(table: pa.Table) -> Numbers:
    """A number for each row, the same for rows with the same text (and pair), whatever order the rows are in.

    Sorting needs a number a row; a dictionary of the texts would hold all of them a second time, and an index.
    """
    found: Numbers = pc.rank(text_keys(table), tiebreaker="dense").to_numpy().astype(np.int64)
    return found


def divide(
    table: pa.Table,
    given: Numbers,
    kind: str,
    labels: Sequence[str],
    shares: Mapping[str, float],
    seed: int,
    source: str,
) -> tuple[Numbers, list[str]]:
    """The split of each row of a task's table, and notes: given splits kept apart, and those that are missing made.

    `labels` are the classes that train must hold if another split does.
    """
    texts = text_numbers(table)
    splits = keep_apart(texts, given)
    notes = [f"{counted(lost, f'{name} row')} left out: the text is also in {others}."
             for name, others, number in (("train", "validation or test", TRAIN), ("validation", "test", VALIDATION))
             if (lost := int(((given == number) & (splits == NONE)).sum()))]  # fmt: skip
    train = splits == TRAIN
    if not train.any():
        raise GraftError(f"{source} has no train rows whose text is in no other split: add some, or load it with "
                         "only='test' (--only test) to evaluate on all of it.")  # fmt: skip
    classes = table["label"].to_numpy() if kind == "classification" else None
    missing = {name: share for name, share in shares.items() if share and not (given == SPLITS.index(name)).any()}
    if missing:
        splits[train] = hold_out(texts[train], None if classes is None else classes[train], missing, seed, source)
        made = [
            f"{name} ({counted(int((splits == SPLITS.index(name)).sum()), 'row')})"
            for name in SPLITS
            if name in missing
        ]
        notes.append(f"Held out of train, seed {seed}: {' and '.join(made)}.")
    if kind in ("classification", "regression"):
        differing = texts_with_several(texts, table["label"].to_numpy())
        if differing:
            notes.append(f"{counted(differing, 'text')} with different labels.")
    if labels:
        notes += check_classes(table["label"], splits, labels, kind, source)
    return splits, notes


def check_classes(column: pa.ChunkedArray, splits: Numbers, labels: Sequence[str], kind: str, source: str) -> list[str]:
    """Refuse a class that is never trained on; where rows have many labels, only say so."""

    def occurring(mask: npt.NDArray[np.bool_]) -> Numbers:
        chosen = column.filter(pa.array(mask))
        return np.unique((pc.list_flatten(chosen) if pa.types.is_list(chosen.type) else chosen).to_numpy())

    trained = occurring(splits == TRAIN)
    absent = {name: [labels[i] for i in np.setdiff1d(occurring(splits == SPLITS.index(name)), trained)]
              for name in SPLITS[1:]}  # fmt: skip
    if kind == "classification":
        for name, classes in absent.items():
            if classes:
                raise GraftError(f"{source} has the class {classes[0]!r} in {name} and not in train, so it cannot be "
                                 "learnt: add rows of it to train, or take it out.")  # fmt: skip
    return [
        f"Labels of {name} that are not in train: {', '.join(classes)}." for name, classes in absent.items() if classes
    ]


def texts_with_several(texts: Numbers, labels: npt.NDArray[np.float64]) -> int:
    """How many texts stand with more than one label."""
    known, codes = np.unique(labels, return_inverse=True)
    return int((np.bincount(np.unique(texts * len(known) + codes) // len(known)) > 1).sum())


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def keep_apart(texts: Numbers, splits: Numbers) -> Numbers:
    """The splits without the rows of train whose text is in another, and those of validation whose text is in test."""
    kept = splits.copy()
    kept[(splits == VALIDATION) & np.isin(texts, texts[splits == TEST])] = NONE
    kept[(splits == TRAIN) & np.isin(texts, texts[splits != TRAIN])] = NONE
    return kept


def hold_out(texts: Numbers, classes: Numbers | None, shares: Mapping[str, float], seed: int, source: str) -> Numbers:
    """A split for each row: `shares` of the different texts, drawn class by class, go to validation and test.

    All rows of a text go together, and of each class at least one row stays in train.
    """
    group = np.unique(texts, return_inverse=True)[1]
    kind = np.zeros(group.max() + 1, np.int64) if classes is None else rarest_class(group, classes)
    counts = np.bincount(kind)
    order = np.lexsort((np.random.default_rng(seed).random(len(kind)), kind))  # by class, within it by chance
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)

    drawn = np.full(len(kind), TRAIN)
    used = np.zeros_like(counts)
    for number in (TEST, VALIDATION):
        share = shares.get(SPLITS[number], 0)
        taken = allot(counts, share, (counts - 1 - used).clip(0)) if share else np.zeros_like(counts)
        drawn[(rank >= used[kind]) & (rank < (used + taken)[kind])] = number
        used = used + taken
    if classes is not None:  # a class whose texts all stand with other labels too
        for absent in np.setdiff1d(classes, classes[drawn[group] == TRAIN]):
            drawn[group[np.argmax(classes == absent)]] = TRAIN
    for number in (TEST, VALIDATION):
        if shares.get(SPLITS[number], 0) and not (drawn == number).any():
            name = SPLITS[number]
            of = "" if classes is None else f" in {len(np.unique(classes))} classes"
            raise GraftError(
                f"{source} has {counted(len(kind), 'different text')}{of} to train on, too few to hold some out for "
                f"{name}: add rows, give {name}=FILE, or use {name}=0 (--{name} 0)."
            )
    return drawn[group]


def rarest_class(group: Numbers, classes: Numbers) -> Numbers:
    """The class of each group of rows: of several the rarest, so that it is the one kept in train."""
    found = np.empty(group.max() + 1, np.int64)
    rarest_last = np.argsort(-np.bincount(classes)[classes], kind="stable")
    found[group[rarest_last]] = classes[rarest_last]
    return found


def allot(counts: Numbers, share: float, room: Numbers) -> Numbers:
    """How many texts of each class to hold out: the share of all, by largest remainders, where there is room.

    A class whose share is half a text or more gets one.
    """
    exact = np.round(counts * share, 9)
    taken = np.minimum(np.floor(exact).astype(np.int64), room)
    short = max(1, round(share * counts.sum())) - int(taken.sum())
    by_remainder = np.lexsort((taken - exact, taken >= room))
    taken[by_remainder[: max(short, 0)]] += 1
    taken = np.maximum(taken, exact >= 0.5)
    return np.minimum(taken, room)
