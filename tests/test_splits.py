"""Splits: disjoint in their texts, of the asked sizes, by class, the same again for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.tasks.load import load_task
from taskgraft.tasks.splits import NONE, TEST, TRAIN, VALIDATION, hold_out, keep_apart, text_numbers
from taskgraft.tasks.task import Task

SHARES = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.4])
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(path: Path, rows: list[Any], header: str = "text,label", **options: Any) -> Task:
    path = path / "data.csv"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return load_task(path, **options)


def texts(task: Task, split: str) -> list[str]:
    return list(task.splits[split]["text"].to_pylist()) if split in task.splits else []


def sizes(task: Task) -> dict[str, int]:
    return {split: table.num_rows for split, table in task.splits.items()}


# Many rows of few texts, so that texts repeat within and across classes.
REPEATING = st.lists(st.tuples(st.integers(0, 60), st.sampled_from("abc")), min_size=40, max_size=150)


@QUICK
@given(REPEATING, SHARES, SHARES, st.integers(0, 5))
def test_made_splits_share_no_text_and_lose_no_row(
    tmp_path: Path, rows: list[tuple[int, str]], validation: float, test: float, seed: int
) -> None:
    rows += [(100 + i, label) for i, label in enumerate("aaaabbbbcccc")]
    task = load(tmp_path, [(f"t{i}", label) for i, label in rows], validation=validation, test=test, seed=seed)
    seen = {split: set(texts(task, split)) for split in task.splits}
    assert sum(len(found) for found in seen.values()) == len({i for i, _ in rows})
    assert Counter(text for split in task.splits for text in texts(task, split)) == Counter(f"t{i}" for i, _ in rows)
    assert set(task.splits) == {"train"} | ({"validation"} if validation else set()) | ({"test"} if test else set())
    assert set(task.splits["train"]["label"].to_pylist()) == {0, 1, 2}
    again = load(tmp_path, [(f"t{i}", label) for i, label in rows], validation=validation, test=test, seed=seed)
    assert all(table.equals(again.splits[split]) for split, table in task.splits.items())


@QUICK
@given(st.lists(st.integers(1, 120), min_size=2, max_size=6), SHARES, SHARES, st.integers(0, 99))
def test_each_class_gives_its_share(counts: list[int], validation: float, test: float, seed: int) -> None:
    counts = [*counts, 30]
    classes = np.repeat(np.arange(len(counts)), counts)
    shares = {"validation": validation, "test": test}
    drawn = hold_out(np.arange(len(classes)), classes, shares, seed, "x.csv")
    for number, share in ((VALIDATION, validation), (TEST, test)):
        held = np.bincount(classes[drawn == number], minlength=len(counts))
        exact, has_room = np.array(counts) * share, np.array(counts) >= 5  # of fewer, one stays in train and two share
        assert (np.abs(held - exact)[has_room] < 1.0 + 1e-6).all()
        assert (held[(exact >= 0.5) & has_room] > 0).all()
        assert abs(held.sum() - exact.sum()) <= len(counts)
    assert set(classes[drawn == TRAIN]) == set(range(len(counts)))


def test_sizes_of_an_easy_case(tmp_path: Path) -> None:
    task = load(tmp_path, [(f"t{i}", "ab"[i % 2]) for i in range(100)])
    assert sizes(task) == {"train": 80, "validation": 10, "test": 10}
    assert Counter(task.splits["test"]["label"].to_pylist()) == {0: 5, 1: 5}
    assert task.notes == ("Held out of train, seed 0: validation (10 rows) and test (10 rows).",)
    other = load(tmp_path, [(f"t{i}", "ab"[i % 2]) for i in range(100)], seed=1)
    assert set(texts(other, "test")) != set(texts(task, "test"))
    none = load(tmp_path, [(f"t{i}", "ab"[i % 2]) for i in range(100)], validation=0, test=0)
    assert sizes(none) == {"train": 100} and none.notes == ()
    assert texts(none, "train") == [f"t{i}" for i in range(100)]


def test_many_small_classes_still_give_a_share(tmp_path: Path) -> None:
    task = load(tmp_path, [(f"t{i}", f"c{i % 50}") for i in range(200)])
    assert sizes(task) == {"train": 160, "validation": 20, "test": 20}


@pytest.mark.parametrize("kind", ["regression", "text"])
def test_other_kinds_are_drawn_without_classes(tmp_path: Path, kind: str) -> None:
    task = load(tmp_path, [(f"t{i // 2}", i + 0.5) for i in range(200)], kind=kind)
    assert sizes(task) == {"train": 160, "validation": 20, "test": 20}
    assert not set(texts(task, "train")) & set(texts(task, "test"))


def test_made_splits_do_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [(f"t{i}", "abc"[i % 3]) for i in range(90)]
    task, turned = load(tmp_path, rows), load(tmp_path, rows[::-1])
    assert all(set(texts(task, split)) == set(texts(turned, split)) for split in task.splits)


def test_pairs_are_kept_together_by_both_texts(tmp_path: Path) -> None:
    rows = [(f"p{i % 10}", f"h{i % 30}", "ab"[i % 2]) for i in range(120)]
    task = load(tmp_path, rows, "premise,hypothesis,label")
    pairs = {
        split: set(zip(texts(task, split), table["pair"].to_pylist(), strict=True))
        for split, table in task.splits.items()
    }
    assert sum(map(len, pairs.values())) == 30 == len(set.union(*pairs.values()))
    assert set(texts(task, "train")) & set(texts(task, "test"))  # one of the two may be in both


GIVEN = [
    ("a", "x", "train"),
    ("b", "y", "Training"),
    ("c", "x", "train"),
    ("d", "y", "train"),
    ("e", "x", "dev"),
    ("f", "y", "test"),
]


def test_a_column_that_names_the_splits(tmp_path: Path) -> None:
    task = load(tmp_path, GIVEN, "text,label,split")
    assert {split: texts(task, split) for split in task.splits} == {
        "train": [*"abcd"],
        "validation": ["e"],
        "test": ["f"],
    }
    named = load(tmp_path, GIVEN, "text,label,fold", split="fold")
    assert sizes(named) == sizes(task) and task.notes == ()
    assert sizes(load(tmp_path, GIVEN, "text,label,split", only="test")) == {"test": 6}


def test_a_column_called_split_with_other_values_is_not_used(tmp_path: Path) -> None:
    task = load(tmp_path, [(f"t{i}", "ab"[i % 2], "left") for i in range(40)], "text,label,split")
    assert sizes(task) == {"train": 32, "validation": 4, "test": 4}


def test_a_column_of_categories_names_the_splits(tmp_path: Path) -> None:
    columns = dict(zip(("text", "label", "split"), map(list, zip(*GIVEN, strict=True)), strict=True))
    pq.write_table(
        pa.table({**columns, "split": pa.array(columns["split"]).dictionary_encode()}), tmp_path / "d.parquet"
    )
    assert sizes(load_task(tmp_path / "d.parquet")) == {"train": 4, "validation": 1, "test": 1}


def test_splits_that_are_missing_are_made_from_train(tmp_path: Path) -> None:
    rows = [(f"t{i}", "ab"[i % 2], "train" if i < 80 else "test") for i in range(100)]
    task = load(tmp_path, rows, "text,label,split")
    assert sizes(task) == {"train": 72, "validation": 8, "test": 20}
    assert texts(task, "test") == [f"t{i}" for i in range(80, 100)]
    assert sizes(load(tmp_path, rows, "text,label,split", validation=0)) == {"train": 80, "test": 20}
    only_train = load(tmp_path, [(*row[:2], "train") for row in rows], "text,label,split")
    assert sizes(only_train) == {"train": 80, "validation": 10, "test": 10}


def test_files_for_the_splits(tmp_path: Path) -> None:
    for name, first in (("dev", 40), ("final", 60)):
        (tmp_path / f"{name}.csv").write_text(
            "text,label\n" + "".join(f"t{i},{'ab'[i % 2]}\n" for i in range(first, first + 20))
        )
    rows = [(f"t{i}", "ab"[i % 2]) for i in range(40)]
    task = load(tmp_path, rows, validation=tmp_path / "dev.csv", test=str(tmp_path / "final.csv"))
    assert sizes(task) == {"train": 40, "validation": 20, "test": 20} and task.notes == ()
    assert sizes(load(tmp_path, rows, validation=tmp_path / "dev.csv", test="0.2")) == {
        "train": 32,
        "validation": 20,
        "test": 8,
    }


def test_a_text_in_two_given_splits_leaves_the_one_that_is_not_judged(tmp_path: Path) -> None:
    rows = [("a", "x", "train"), ("b", "y", "train"), ("b", "y", "train"), ("c", "x", "train"), ("d", "y", "train"),
            ("b", "y", "val"), ("e", "x", "val"), ("e", "x", "test"), ("c", "x", "test")]  # fmt: skip
    task = load(tmp_path, rows, "text,label,split")
    assert {split: texts(task, split) for split in task.splits} == {
        "train": ["a", "d"],
        "validation": ["b"],
        "test": ["e", "c"],
    }
    assert task.notes == (
        "3 train rows left out: the text is also in validation or test.",
        "1 validation row left out: the text is also in test.",
    )


@QUICK
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([TRAIN, VALIDATION, TEST]))))
def test_given_splits_are_kept_apart(rows: list[tuple[int, int]]) -> None:
    codes, given_ = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    kept = keep_apart(codes, given_)
    found = [set(codes[kept == number]) for number in (TRAIN, VALIDATION, TEST)]
    assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    assert (kept[given_ == TEST] == TEST).all()
    assert set(codes[kept != NONE]) == set(codes)  # no text is lost


def test_texts_with_different_labels_are_counted(tmp_path: Path) -> None:
    rows = [(f"t{i}", "ab"[i % 2]) for i in range(40)] + [("t0", "b"), ("t1", "a"), ("t2", "a")]
    assert load(tmp_path, rows).notes[-1] == "2 texts with different labels."


def test_a_class_that_shares_all_its_texts_stays_in_train(tmp_path: Path) -> None:
    rows = [(f"t{i}", "a") for i in range(10)] + [("t3", "b")]
    for seed in range(20):
        task = load(tmp_path, rows, seed=seed)
        assert set(task.splits["train"]["label"].to_pylist()) == {0, 1}


def test_labels_of_test_that_are_never_trained_on_are_noted_where_rows_have_several(tmp_path: Path) -> None:
    rows = [("a", "x|y", "train"), ("b", "x", "dev"), ("c", "z", "test")]
    task = load(tmp_path, rows, "text,label,split", kind="multilabel")
    assert task.labels == ("x", "y", "z") and task.notes == ("Labels of test that are not in train: z.",)


REFUSED = [
    ([("a", "x", "train"), ("b", "y", "train"), ("c", "z", "test"), ("d", "x", "dev")], {}, "'z' in test and not in"),
    ([("a", "x", "train"), ("b", "y", "dev"), ("b", "y", "train"), ("c", "x", "test")], {}, "'y' in validation"),
    ([("a", "x", "test"), ("b", "y", "test")], {}, "has no train rows whose text is in no other split.*only='test'"),
    ([("a", "x", "train"), ("b", "y", "hold")], {}, "line 3 has 'hold' in column 'split', which names no split"),
    ([("a", "x", "train"), ("b", "y", "")], {}, "line 3 has None in column 'split'"),
    ([("a", "x", ""), ("b", "y", "")], {"split": "split"}, "line 2 has None in column 'split'"),
    ([("a", "x", ""), ("b", "y", "")], {}, r"2 different texts in 2 classes to train on, too few .* test: .*test=0"),
    ([("a", "x", ""), ("b", "y", ""), ("c", "x", "")], {}, "too few to hold some out for validation"),
    ([("a", "x", ""), ("b", "y", "")], {"validation": 0.5, "test": 0.5}, "cannot be held out"),
    ([("a", "x", ""), ("b", "y", "")], {"validation": -0.5}, "validation=-0.5 and test=0.1 cannot be held out"),
    ([("a", "x", ""), ("b", "y", "")], {"test": "gone.csv"}, "there is no file gone.csv"),
    ([("a", "x", ""), ("b", "y", "")], {"test": "gone.csv", "only": "test"}, "leaves no use for a file of test"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "sentence"), REFUSED)
def test_splits_that_cannot_be(tmp_path: Path, rows: list[Any], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence) as caught:
        load(tmp_path, rows, "text,label,split", **options)
    assert "\n" not in str(caught.value)


def test_a_split_by_column_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "final.csv").write_text("text,label\nz,x\n")
    with pytest.raises(
        GraftError, match=r"has test rows in its column 'split', and .*final.csv was given for test too"
    ):
        load(tmp_path, GIVEN, "text,label,split", test=tmp_path / "final.csv")
    (tmp_path / "final.csv").write_text("text,tag\nz,x\n")
    with pytest.raises(GraftError, match=r"final.csv has no column 'label' for the label, it has text, tag"):
        load(tmp_path, GIVEN[:5], "text,label,split", test=tmp_path / "final.csv")
    (tmp_path / "final.csv").write_text("text,label\nz,x\nq,\n")
    with pytest.raises(GraftError, match=r"final.csv, line 3 has no label"):
        load(tmp_path, GIVEN[:5], "text,label,split", test=tmp_path / "final.csv")


def test_four_texts_of_two_classes_can_be_split(tmp_path: Path) -> None:
    task = load(tmp_path, [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")])
    assert sizes(task) == {"train": 2, "validation": 1, "test": 1}


def test_texts_that_differ_in_case_and_spaces_alone_stand_together() -> None:
    texts = [f"word {i}" for i in range(40)]
    again = [f" Word  {i} " for i in range(40)]
    table = pa.table({"text": texts + again, "label": [0, 1] * 40})
    numbers = text_numbers(table)
    assert numbers[:40].tolist() == numbers[40:].tolist() and len(set(numbers.tolist())) == 40
    pairs = pa.table({"text": ["a", "b"], "pair": ["B", "A "]})
    assert len(set(text_numbers(pairs).tolist())) == 1
