"""Data sets of the Hub: what `datasets` gives goes the way of every file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from taskgraft.errors import GraftError
from taskgraft.tasks.load import load_task

datasets = pytest.importorskip("datasets")


def data(first: int, rows: int, **more: Any) -> Any:
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"]))
    columns = {"text": [f"t{i}" for i in range(first, first + rows)], "label": [i % 2 for i in range(rows)], **more}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None], Any]:
    """A Hub that holds what a test puts in."""
    held: dict[tuple[str, str | None], Any] = {}

    def load_dataset(path: str, name: str | None = None) -> Any:
        if (path, name) not in held:
            raise FileNotFoundError(f"Couldn't find {path!r}.\nSecond line.")
        return held[path, name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return held


def sizes(task: Any) -> dict[str, int]:
    return {split: table.num_rows for split, table in task.splits.items()}


def test_splits_and_class_names(hub: Any) -> None:
    hub["owner/mood", None] = datasets.DatasetDict(
        test=data(90, 10), train=data(0, 80), dev=data(80, 10), extra=data(200, 5)
    )
    task = load_task("owner/mood")
    assert (task.name, task.kind, task.labels, task.source) == ("mood", "classification", ("neg", "pos"), "owner/mood")
    assert sizes(task) == {"train": 80, "validation": 10, "test": 10}
    assert task.splits["test"]["label"].to_pylist() == [0, 1] * 5
    assert task.notes == ("Splits of the data set not used: extra.",)
    assert sizes(load_task("owner/mood", only="test")) == {"test": 10}


def test_a_configuration_and_one_piece(hub: Any) -> None:
    hub["glue-like", "small"] = datasets.DatasetDict(everything=data(0, 100))
    task = load_task("glue-like:small", name="g")
    assert (task.name, sizes(task)) == ("g", {"train": 80, "validation": 10, "test": 10})
    shuffled = data(0, 100).shuffle(seed=0).select(range(50))
    hub["one", None] = shuffled
    assert load_task("one", only="train").splits["train"]["text"].to_pylist() == shuffled["text"][:]


def test_a_test_split_without_labels_is_left_out(hub: Any) -> None:
    hub["o/n", None] = datasets.DatasetDict(train=data(0, 100), test=data(100, 9, label=[-1] * 9))
    task = load_task("o/n")
    assert sizes(task) == {"train": 80, "validation": 10, "test": 10}
    assert task.notes[0] == "The test rows of the data set have no labels and are left out."
    hub["o/n", None] = datasets.DatasetDict(train=data(0, 100), test=data(100, 2, label=[0, -1]))
    with pytest.raises(GraftError, match=r"o/n \(test\), row 2 has no label \(column 'label'\)"):
        load_task("o/n")


def test_tokens_with_named_tags(hub: Any) -> None:
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features(tokens=datasets.Sequence(datasets.Value("string")), ner_tags=tags)
    rows = {"tokens": [["Ada", f"n{i}"] for i in range(30)], "ner_tags": [[1, 0]] * 30}
    hub["conll", None] = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features=features))
    task = load_task("conll")
    assert (task.kind, task.labels) == ("tokens", ("B-PER", "O"))
    assert task.splits["train"].to_pylist()[0]["label"] == [0, 1]


def test_what_cannot_be_loaded(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        GraftError, match=r"'o/x' is no file and no benchmark here, .*could not be loaded \(Couldn't find 'o/x'\)"
    ) as caught:
        load_task("o/x")
    assert "\n" not in str(caught.value)
    hub["o/only", None] = datasets.DatasetDict(test=data(0, 9), validation=data(9, 9))
    with pytest.raises(GraftError, match="'o/only' has no train rows: its splits are test, validation"):
        load_task("o/only")
    hub["o/two", None] = datasets.DatasetDict(train=data(0, 9), dev=data(9, 9), validation=data(20, 9))
    with pytest.raises(GraftError, match="two splits for validation"):
        load_task("o/two")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(GraftError, match=r"pip install 'taskgraft\[hub\]'"):
        load_task("o/x")


def test_parquet_that_datasets_wrote_has_its_class_names(tmp_path: Path) -> None:
    data(0, 20).to_parquet(tmp_path / "mood.parquet")
    task = load_task(tmp_path / "mood.parquet", only="test")
    assert task.labels == ("neg", "pos") and task.splits["test"]["label"].to_pylist() == [0, 1] * 10


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "reviews"
    folder.mkdir()
    for split, first, rows in (("train", 0, 80), ("test", 80, 20)):
        lines = "".join(f"t{i},{'ab'[i % 2]}\n" for i in range(first, first + rows))
        (folder / f"{split}.csv").write_text("text,label\n" + lines)
    task = load_task(folder)
    assert (task.name, task.labels, sizes(task)) == ("reviews", ("a", "b"), {"train": 72, "validation": 8, "test": 20})
    datasets.DatasetDict(train=data(0, 40), validation=data(40, 4), test=data(44, 4)).save_to_disk(tmp_path / "saved")
    assert sizes(load_task(tmp_path / "saved")) == {"train": 40, "validation": 4, "test": 4}
