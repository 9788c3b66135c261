"""Tasks put into words: HyperFormer's inputs and targets, and answers read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.tasks.benchmarks import BENCHMARKS
from taskgraft.tasks.task import Task, schema_of
from taskgraft.tasks.wording import Wording, nice

GLUE = {
    "cola": "sentence: A",
    "sst2": "sentence: A",
    "mrpc": "sentence1: A sentence2: B",
    "stsb": "sentence1: A sentence2: B",
    "rte": "sentence1: A sentence2: B",
    "qqp": "question1: A question2: B",
    "qnli": "question: A sentence: B",
    "mnli": "premise: A hypothesis: B",
}


def made(
    kind: str, rows: Sequence[Mapping[str, Any]], labels: tuple[str, ...] = (), columns: Mapping[str, str] | None = None
) -> Task:
    table = pa.Table.from_pylist(list(rows), schema_of(kind, "pair" in rows[0]))
    return Task("mine", kind, labels, ("accuracy",), {"train": table}, columns=columns or {})  # type: ignore[arg-type]


def numbers(values: Sequence[float]) -> Task:
    return made("regression", [{"text": "", "label": value} for value in values])


def written(values: Sequence[float], low: float = 0.0, high: float = 5.0) -> list[str]:
    """Numbers as a task whose training labels go from `low` to `high` writes them."""
    found: list[str] = Wording.of(numbers([low, high])).table(numbers(values).splits["train"])["label"].to_pylist()
    return found


@pytest.mark.parametrize("name", GLUE)
def test_glue_reads_as_in_hyperformer(name: str) -> None:
    benchmark = BENCHMARKS[f"glue/{name}"]
    roles = ("text", "pair", "label") if benchmark.has_pairs else ("text", "label")
    row = dict(zip(roles, ("A", "B", 1) if benchmark.has_pairs else ("A", 1), strict=True))
    columns = dict(zip(roles, benchmark.columns, strict=True))
    task = replace(made(benchmark.kind, [row], benchmark.labels, columns), name=name)
    assert Wording.of(task).table(task.splits["train"])["text"].to_pylist() == [GLUE[name]]
    assert Wording.of(task, prefix=True).table(task.splits["train"])["text"].to_pylist() == [f"{name} {GLUE[name]}"]
    assert Wording.of(task).candidates == {"stsb": (), "mnli": ("0", "1", "2")}.get(name, ("0", "1"))


def test_a_task_without_column_names_has_sentences() -> None:
    one = made("classification", [{"text": " a: b\n", "label": 2}, {"text": "", "label": 0}], ("x", "y", "z"))
    worded = Wording.of(one).table(one.splits["train"])
    assert worded.to_pylist() == [{"text": "sentence:  a: b\n", "label": "2"}, {"text": "sentence: ", "label": "0"}]
    assert worded.schema.equals(schema_of("text", False))
    two = made("classification", [{"text": "a", "pair": "", "label": 1}], ("x", "y"))
    assert Wording.of(two).table(two.splits["train"])["text"].to_pylist() == ["sentence1: a sentence2: "]


def test_rows_without_answers_and_no_rows_at_all() -> None:
    for kind, labels in (("classification", ("x", "y")), ("regression", ()), ("text", ())):
        task = made(kind, [{"text": "a", "label": "1" if kind == "text" else 1}], labels)
        rows = task.splits["train"]
        assert Wording.of(task).table(rows.drop_columns("label")).column_names == ["text"]
        for empty in (rows.slice(0, 0), rows.schema.empty_table()):
            assert Wording.of(task).table(empty).equals(schema_of("text", False).empty_table())


def test_text_to_text_stays_as_it_is() -> None:
    task = made("text", [{"text": " a ", "label": " B "}], columns={"text": "source"})
    assert Wording.of(task).table(task.splits["train"]).equals(task.splits["train"])
    assert Wording.of(task, prefix=True).table(task.splits["train"])["text"].to_pylist() == ["mine  a "]
    pairs = made("text", [{"text": "a", "pair": "b", "label": "c"}], columns={"text": "source", "pair": "hint"})
    worded = Wording.of(pairs).table(pairs.splits["train"])
    assert worded.to_pylist() == [{"text": "source: a hint: b", "label": "c"}]
    assert Wording.of(task).candidates == () and Wording.of(task).answer(" B \n") == "B"


def test_numbers_are_rounded_to_fifths_as_for_stsb() -> None:
    assert Wording.of(numbers([0.0, 5.0, 1.0])) == Wording("regression", (), ("sentence",), step=0.2, default=2.0)
    assert written([3.25, 3.2, 5.0, 0.0, -0.05, 4.91, 2.599]) == ["3.2", "3.2", "5.0", "0.0", "0.0", "5.0", "2.6"]
    halves = [n / 10 for n in range(1, 50, 2)]
    to_even = [f"{round(n / 2) / 5:.1f}" for n in range(1, 50, 2)]  # T5's tf.round(5 x) / 5
    assert written(halves) == to_even
    assert written(np.array(halves, np.float32).astype(float).tolist()) == to_even
    assert set(written(np.linspace(0, 5, 1001).tolist())) == {f"{n / 5:.1f}" for n in range(26)}


@pytest.mark.parametrize(
    ("low", "high", "value", "text"),
    [
        (0, 1, 0.52, "0.50"),
        (1, 5, 3.3, "3.2"),
        (0, 10, 7.3, "7.5"),
        (0, 100, 52, "50"),
        (0, 24, 7.4, "7"),
        (-400, 600, -333, "-350"),
        (500_000, 1_000_000, 724_999, "720000"),
        (1e-5, 2e-5, 1.23e-5, "0.0000125"),
        (7, 7, 7, "7.0"),
        (0, 0, 0.3, "0"),
    ],
)
def test_steps_follow_the_range_of_the_training_labels(low: float, high: float, value: float, text: str) -> None:
    assert written([value], low, high) == [text]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_a_number_comes_back_within_half_a_step(low: float, width: float, places: list[float]) -> None:
    wording = Wording.of(numbers([low, low + width]))
    assert 10 < width / wording.step < 50
    values = [low + place * width for place in places]
    texts = wording.table(numbers(values).splits["train"])["label"].to_pylist()
    for value, text in zip(values, texts, strict=True):
        assert abs(wording.answer(text) - value) <= wording.step * 0.501
        assert len(text) <= 14 and "e" not in text


@given(st.floats(1e-9, 1e9))
def test_nice_numbers_are_the_nearest_in_proportion(value: float) -> None:
    step = nice(value)
    assert f"{step:e}".split("e")[0] in ("1.000000", "2.000000", "5.000000")
    assert 1 / math.sqrt(2.51) < step / value < math.sqrt(2.51) and nice(step) == step


def test_answers_are_read_back() -> None:
    classes = Wording("classification", ("x",) * 11, ("text",))
    assert [classes.answer(text) for text in ("0", " 1\n", "10")] == [0, 1, 10]
    assert [classes.answer(text) for text in ("11", "-1", "", "01", "1.0", "x", "1 0", "²")] == [None] * 8
    number = Wording("regression", (), ("text",), step=0.2, default=2.7)
    assert [number.answer(text) for text in ("3.2", " -1 ", "4.9", "2e1")] == [3.2, -1, 4.9, 20]
    assert [number.answer(text) for text in ("", "three", "nan", "inf", "1e999", "3.2 3.2")] == [2.7] * 6


@pytest.mark.parametrize("kind", ["multilabel", "tokens", "spans"])
def test_other_kinds_need_an_encoder(kind: str) -> None:
    task = Task("mine", kind, ("O", "B-x"), (), {"train": schema_of(kind, False).empty_table()})  # type: ignore[arg-type]
    with pytest.raises(GraftError, match=f"{kind}.*use an encoder backbone"):
        Wording.of(task)


def test_mistakes_are_named() -> None:
    with pytest.raises(GraftError, match="finite"):
        Wording.of(numbers([0.0, float("nan")]))
    one, two = Wording("text", (), ()), Wording("text", (), ("a", "b"))
    pair = pa.table({"text": ["a"], "pair": ["b"]})
    with pytest.raises(GraftError, match="needs one text"):
        one.table(pair)
    with pytest.raises(GraftError, match="needs a text and a pair"):
        two.table(pair.drop_columns("pair"))
    assert two.table(pair)["text"].to_pylist() == ["a: a b: b"]


def test_a_wording_survives_json() -> None:
    for wording in (
        Wording.of(numbers([0.0, 5.0]), prefix=True),
        Wording("classification", ("no", "yes"), ("question", "passage")),
        Wording("text", (), ()),
    ):
        record = json.loads(json.dumps(wording.to_json()))
        assert Wording.from_json({**record, "later": 1}) == wording


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "tokens"},
        {"kind": None},
        {"labels": "no"},
        {"labels": [1, 2]},
        {"columns": ["a", "b", "c"]},
        {"columns": []},
        {"prefix": None},
        {"step": "0.2"},
        {"step": 0},
        {"step": 0.3},
        {"step": float("nan")},
        {"default": float("inf")},
        {"kind": "classification"},
    ],
)
def test_records_that_cannot_be_used_are_refused(change: dict[str, Any]) -> None:
    record = Wording("regression", (), ("text",), step=0.2).to_json()
    with pytest.raises(GraftError):
        Wording.from_json({**record, **change})
    key = next(iter(change))
    with pytest.raises(GraftError, match=f"object with.*{key}"):
        Wording.from_json({name: value for name, value in record.items() if name != key})
    with pytest.raises(GraftError, match="cannot be read"):
        Wording.from_json([record])
