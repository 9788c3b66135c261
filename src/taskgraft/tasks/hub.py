"""Data sets of the Hugging Face Hub, or folders that `datasets` reads, as rows for each split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from taskgraft.errors import GraftError
from taskgraft.tasks.files import Rows, check_names, with_class_names
from taskgraft.tasks.splits import split_name


def read_hub(name: str, only: str | None = None) -> tuple[dict[str, Rows], list[str]]:
    """The rows of "owner/name", "name" or "name:config" by split, train first, and a note on splits not used."""
    loaded = load(name)
    if not hasattr(loaded, "keys"):
        loaded = {"train": loaded}
    if len(loaded) == 1 and split_name(next(iter(loaded))) is None:  # all rows in one piece, by whatever name
        loaded = {"train": next(iter(loaded.values()))}
    found: dict[str, Rows] = {}
    for split in sorted(loaded, key=lambda split: split_name(split) != "train"):
        role = split_name(split)
        if role in found:
            raise GraftError(f"data set {name!r} has two splits for {role} ({', '.join(loaded)}): rename one.")
        if role is not None and only in (None, role) and len(loaded[split]):
            found[role] = rows_of(loaded[split], f"{name} ({split})")
    if (only or "train") not in found:
        raise GraftError(
            f"data set {name!r} has no {only or 'train'} rows: its splits are {', '.join(loaded) or 'none'}."
        )
    unused = [split for split in loaded if split_name(split) is None]
    return found, [f"Splits of the data set not used: {', '.join(unused)}."] if unused else []


def load(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise GraftError(f"{name!r} is no file and no benchmark here; to read it from the Hugging Face Hub, "
                         "pip install 'taskgraft[hub]'.") from None  # fmt: skip
    folder = Path(name)
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(name)
        path, _, config = (name, "", "") if folder.is_dir() else name.partition(":")
        return datasets.load_dataset(path, config or None)
    except Exception as error:  # of the network, the Hub, the data set, its files: of any type
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise GraftError(
            f"{name!r} is no file and no benchmark here, and as a data set of the Hugging Face Hub it could not be "
            f"loaded ({reason}): check the name (owner/name or owner/name:config) and the network."
        ) from error


def rows_of(data: Any, source: str) -> Rows:
    """A `datasets.Dataset` as it lies in memory or on disk, with the names of its classes."""
    table = data.with_format("arrow")[:].replace_schema_metadata(data.features.arrow_schema.metadata)
    check_names(source, table.column_names)
    return Rows.counted(with_class_names(table), source)
