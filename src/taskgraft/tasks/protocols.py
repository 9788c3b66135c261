"""How the papers' sets become train, validation and test: nothing is chosen on the rows that are reported, and no text
is in two splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from taskgraft.errors import GraftError
from taskgraft.tasks.splits import text_keys

Whole = NDArray[np.int64]
Parts = Mapping[str, pa.Table]  # a published set by the names of its files
HELD_OUT = 1_000  # rows of a large training set
SHARE = 0.1  # of a small one; and each of validation and test where nothing is split


def hold_out(table: pa.Table, rows: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """The table without `rows` of its rows, and those: stratified by label, equal texts on the same side.

    Where the groups of equal texts do not add up to `rows`, it is a few less.
    """
    if not 0 < rows < table.num_rows:
        raise GraftError(f"{rows:,} rows cannot be held out of {table.num_rows:,}: more rows are needed.")
    groups = pc.dictionary_encode(text_keys(table)).combine_chunks().indices.to_numpy(zero_copy_only=False)
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    strata = _strata(table)[first]
    # RandomState and not a Generator: its draws are promised never to change, so that the splits never do.
    order = np.random.RandomState(seed).permutation(len(sizes))
    held = np.zeros(len(sizes), dtype=bool)
    for stratum, quota in enumerate(_quotas(np.bincount(strata, weights=sizes), rows)):
        members = order[strata[order] == stratum]
        fits = np.cumsum(sizes[members]) <= quota
        held[members[fits]] = True
        singles = members[~fits & (sizes[members] == 1)]
        held[singles[: quota - sizes[members[fits]].sum()]] = True
    mask = held[groups]
    return table.filter(pa.array(~mask)), table.filter(pa.array(mask))


def _strata(table: pa.Table) -> Whole:
    """A small number per row: its class, or which tenth of the answers its number is in."""
    label = table["label"]
    strata: Whole = np.zeros(table.num_rows, dtype=np.int64)
    if pa.types.is_integer(label.type):
        strata = np.unique(label.to_numpy(), return_inverse=True)[1]
    elif pa.types.is_floating(label.type):
        numbers = label.to_numpy()
        strata = np.digitize(numbers, np.unique(np.quantile(numbers, np.linspace(0.1, 0.9, 9))))
    return strata


def _quotas(counts: NDArray[Any], rows: int) -> Whole:
    """`rows` shared out in proportion to `counts`, the largest remainders rounded up."""
    exact = counts * rows / counts.sum()
    quotas: Whole = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: rows - quotas.sum()]] += 1
    return quotas


def without_repeats(parts: Parts) -> tuple[dict[str, pa.Table], list[str]]:
    """The parts, each without the texts of those that come after it; and what was left out, in words."""
    names, kept, notes = list(parts), dict(parts), []
    for position, name in enumerate(names):
        for later in names[position + 1 :]:
            repeated = pc.is_in(text_keys(kept[name]), value_set=text_keys(parts[later]))
            if count := pc.sum(repeated).as_py() or 0:
                kept[name] = kept[name].filter(pc.invert(repeated))
                notes.append(f"{count:,} rows of {name} whose text is in {later} too were left out.")
    return kept, notes


def _held_out_validation(train: pa.Table, test: pa.Table, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    rows = HELD_OUT if large else round(SHARE * train.num_rows)
    train, validation = hold_out(train, rows, seed)
    return {
        "train": train,
        "validation": validation,
        "test": test,
    }, f"{rows:,} training rows are held out for validation"


def _whole_dev(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    splits, note = _held_out_validation(parts["train"], parts["validation"], large, seed)
    return splits, f"{note}; the published validation rows are the test split."


def _dev(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    """GLUE's test labels are hidden: a small set's published validation rows are halved, a large one's are the test."""
    if large:
        return _whole_dev(parts, large, seed)
    dev = parts["validation"]
    test, validation = hold_out(dev, dev.num_rows // 2, seed)
    splits = {"train": parts["train"], "validation": validation, "test": test}
    return (
        splits,
        f"The published validation rows are halved: {len(validation):,} for validation, {len(test):,} for test.",
    )


def _mnli(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    matched = parts["validation_matched"]
    if (mismatched := parts.get("validation_mismatched")) is not None:
        splits = {"train": parts["train"], "validation": mismatched, "test": matched}
        return splits, "Validation is validation_mismatched, test is validation_matched."
    splits, note = _held_out_validation(parts["train"], matched, large, seed)
    return splits, f"{note}, since validation_mismatched is not there; test is validation_matched."


def _test(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    splits, note = _held_out_validation(parts["train"], parts["test"], large, seed)
    return splits, f"{note}; the published test rows are the test split."


def _published(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    if list(parts) == ["test"]:
        splits, note = _all({"all": parts["test"]}, large, seed)
        return splits, f"Only the published test rows are there. {note}"
    return {name: parts[name] for name in ("train", "validation", "test")}, "The splits are the published ones."


def _all(parts: Parts, large: bool, seed: int) -> tuple[dict[str, pa.Table], str]:
    whole = parts["all"]
    rows = round(SHARE * whole.num_rows)
    rest, test = hold_out(whole, rows, seed)
    train, validation = hold_out(rest, rows, seed)
    return {"train": train, "validation": validation, "test": test}, "The rows are split 80/10/10, stratified by label."


# The files of each protocol, in an order in which the later ones keep their rows; and what makes the splits of them.
PROTOCOLS: Mapping[str, tuple[tuple[str, ...], Callable[[Parts, bool, int], tuple[dict[str, pa.Table], str]]]] = {
    "dev": (("train", "validation"), _dev),
    "whole dev": (("train", "validation"), _whole_dev),
    "mnli": (("train", "validation_mismatched", "validation_matched"), _mnli),
    "test": (("train", "test"), _test),
    "published": (("train", "validation", "test"), _published),
    "all": (("all",), _all),
}
