"""What kind of task a file makes, its labels, and its rows; those that cannot be are refused with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.tasks.columns import Columns
from taskgraft.tasks.examples import encode, find_labels, shape
from taskgraft.tasks.files import Rows
from taskgraft.tasks.load import load_task
from taskgraft.tasks.task import LABEL_TYPES, Task


def whole(path: Path, rows: list[dict[str, Any]], **options: Any) -> Task:
    """All rows of a JSONL file as one split."""
    path = path / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_task(path, only="test", **options)


def table(path: Path, text: str, **options: Any) -> Task:
    path = path / "data.csv"
    path.write_text(text)
    return load_task(path, **{"only": "test", **options})


KINDS = [
    (["a", "b", " a "], "classification", ("a", "b"), [0, 1, 0]),
    (["10", "9", "9 "], "classification", ("9", "10"), [1, 0, 0]),
    ([1, 0, 1], "classification", ("0", "1"), [1, 0, 1]),
    (["1.0", "-2.0", "1.0"], "classification", ("-2.0", "1.0"), [1, 0, 1]),
    ([True, False, True], "classification", ("false", "true"), [1, 0, 1]),
    (["1", "2", "x"], "classification", ("1", "2", "x"), [0, 1, 2]),
    ([1, 2.5, 1], "regression", (), [1.0, 2.5, 1.0]),
    (["+1e1", " .5", "-3."], "regression", (), [10.0, 0.5, -3.0]),
    (list(range(20)), "classification", tuple(map(str, range(20))), list(range(20))),
    (list(range(21)), "regression", (), list(map(float, range(21)))),
    ([["b", "a"], [], ["a", " a"]], "multilabel", ("a", "b"), [[0, 1], [], [0]]),
]


@pytest.mark.parametrize(
    ("form", "values", "kind", "labels", "answers"),
    [
        (form, *case)
        for case in KINDS
        for form in ("jsonl", "parquet", "csv")
        if form != "csv" or case[1] != "multilabel"
    ],
)
def test_kinds_and_labels(tmp_path: Path, form: str, values: list[Any], kind: str, labels: Any, answers: Any) -> None:
    texts = [f"text {i}" for i in range(len(values))]
    if form == "jsonl":
        task = whole(tmp_path, [{"text": text, "label": value} for text, value in zip(texts, values, strict=True)])
    elif form == "parquet":
        pq.write_table(pa.table({"text": texts, "label": values}), tmp_path / "data.parquet")
        task = load_task(tmp_path / "data.parquet", only="test")
    else:
        cells = [json.dumps(value) if isinstance(value, bool) else value for value in values]
        task = table(tmp_path, "text,label\n" + "".join(f"{t},{v}\n" for t, v in zip(texts, cells, strict=True)))
    assert (task.kind, task.labels) == (kind, labels)
    assert task.split("test")["label"].to_pylist() == answers
    assert task.split("test")["text"].to_pylist() == texts


@pytest.mark.parametrize("mark", ["|", ";", ","])
def test_labels_separated_in_a_string(tmp_path: Path, mark: str) -> None:
    text = (
        f'text,label\none,"b{mark} a"\ntwo,\nthree,a{mark}\n'
        if mark == ","
        else f"text,label\none,b{mark} a\ntwo,\nthree,a\n"
    )
    task = table(tmp_path, text.replace("three,a,", 'three,"a,"'), kind="multilabel")
    assert task.labels == ("a", "b")
    assert task.split("test")["label"].to_pylist() == [[0, 1], [], [0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcde")), min_size=1), st.booleans())
def test_lists_of_labels_are_sets_and_tags_are_not(lists: list[list[str]], tokens: bool) -> None:
    kind = "tokens" if tokens else "multilabel"
    raw = pa.table(
        {"text": pa.array(lists if tokens else ["t"] * len(lists)), "label": pa.array(lists, pa.list_(pa.string()))}
    )
    columns = Columns("text", "label")
    (rows,) = shape([Rows.counted(raw, "x")], columns, kind)
    labels = find_labels([rows], kind)
    assert labels == tuple(sorted({value for values in lists for value in values}))
    names = [[labels[i] for i in found] for found in encode(rows, columns, kind, labels)["label"].to_pylist()]
    assert names == (lists if tokens else [sorted(set(values)) for values in lists])


def test_tokens(tmp_path: Path) -> None:
    rows = [{"tokens": ["Ada", "slept"], "ner_tags": ["B-PER", "O"]}, {"tokens": ["Go"], "ner_tags": ["O"]}]
    task = whole(tmp_path, rows)
    assert (task.kind, task.labels, task.metrics) == ("tokens", ("B-PER", "O"), ("entity_f1",))
    assert task.split("test").to_pylist() == [
        {"text": ["Ada", "slept"], "label": [0, 1]},
        {"text": ["Go"], "label": [1]},
    ]
    spaced = table(tmp_path, "text,label\nAda slept,B-PER O\nGo,O\n", kind="tokens")
    assert spaced.split("test").equals(task.split("test"))
    with pytest.raises(GraftError, match=r"data.jsonl, line 2 has 1 words \(column 'tokens'\) and 2 tags"):
        whole(tmp_path, [rows[0], {"tokens": ["Go"], "ner_tags": ["O", "O"]}])
    with pytest.raises(GraftError, match=r"data.jsonl, line 2 has a word that is null \(column 'tokens'\)"):
        whole(tmp_path, [rows[0], {"tokens": [None], "ner_tags": ["O"]}])
    with pytest.raises(GraftError, match=r"line 2 has no text \(column 'tokens'\)"):
        whole(tmp_path, [rows[0], {"tokens": [], "ner_tags": []}])


SPAN_ROWS: list[dict[str, Any]] = [
    {
        "id": "q1",
        "question": "who?",
        "context": "It was Ada.",
        "answers": {"text": ["Ada", "was Ada"], "answer_start": [7, 3]},
    },
    {"id": "q2", "question": "what?", "context": "🙂 yes", "answers": {"text": ["yes"], "answer_start": [2]}},
]


def test_spans(tmp_path: Path) -> None:
    task = whole(tmp_path, SPAN_ROWS)
    assert (task.kind, task.labels, task.columns["pair"]) == ("spans", (), "context")
    answers = [{"start": 7, "text": "Ada"}, {"start": 3, "text": "was Ada"}]
    assert task.split("test").to_pylist()[0] == {"text": "who?", "pair": "It was Ada.", "label": answers, "id": "q1"}
    pairs = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in SPAN_ROWS]
    listed = [{**row, "answers": [{"text": text, "start": start} for text, start in found]}
              for row, found in zip(SPAN_ROWS, pairs, strict=True)]  # fmt: skip
    assert whole(tmp_path, listed).split("test").equals(task.split("test"))
    pq.write_table(pa.Table.from_pylist(SPAN_ROWS).drop_columns("id"), tmp_path / "d.parquet")
    numbered = load_task(tmp_path / "d.parquet", only="test").split("test")
    assert numbered["id"].to_pylist() == ["1", "2"] and numbered["label"].equals(task.split("test")["label"])


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (
            {"text": ["Ada"], "answer_start": [6]},
            "line 2 has the answer 'Ada' at character 6, where column 'context'",
        ),
        ({"text": ["Ada"], "answer_start": [-4]}, "at character -4"),
        ({"text": ["Ada"], "answer_start": []}, "line 2 has 1 answer texts and 0 starts"),
        ({"text": ["Ada"], "answer_start": ["x"]}, "start is no whole number"),
        ({"text": [], "answer_start": []}, r"line 2 has no label \(column 'answers'\)"),
    ],
)
def test_spans_that_are_not_there(tmp_path: Path, answers: Any, sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence):
        whole(tmp_path, [SPAN_ROWS[1], {**SPAN_ROWS[0], "answers": answers}])


def test_answers_of_another_form(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"column 'answers' of .* holds string, and answers are needed"):
        whole(tmp_path, [{"question": "a", "context": "b", "answers": "b"}], kind="spans")
    with pytest.raises(GraftError, match=r"kind='spans' needs the column of the contexts: name it with pair="):
        whole(tmp_path, SPAN_ROWS, text="question", label="answers")


def test_text_to_text(tmp_path: Path) -> None:
    task = table(tmp_path, "source,summary\nlong one, short \nother,x\n", kind="text", label="summary")
    assert (task.kind, task.labels) == ("text", ())
    assert task.split("test")["label"].to_pylist() == [" short ", "x"]


def test_pairs(tmp_path: Path) -> None:
    task = table(tmp_path, "premise,hypothesis,label\na,b,yes\nc,d,no\n")
    assert task.has_pairs and task.split("test")["pair"].to_pylist() == ["b", "d"]
    assert task.columns == {"text": "premise", "pair": "hypothesis", "label": "label"}


REFUSED = [
    ("text,label\na,x\nb,\n ,y\n", {}, r"line 3 has no label \(column 'label'\), and so do 1 others: .*skip_bad"),
    ("text,label\na,x\n\u00a0\t,y\n", {}, r"line 3 has no text \(column 'text'\): fill it in, or leave such rows out"),
    ("text1,text2,label\na,b,x\nc,,y\n", {}, r"line 3 has no pair \(column 'text2'\)"),
    ("text,label\na,x\nb,x\n", {}, "column 'label' of .* has the class 'x' alone: classification needs at"),
    ("text,label\na,\nb,x\n", {"skip_bad_rows": True}, "the class 'x' alone"),
    ("text,label\na,\n,x\n", {"skip_bad_rows": True}, "has no row with both text and label"),
    ("text,label\na,|\nb,\n", {"kind": "multilabel"}, "has no classes: multilabel needs at least 1"),
    ('text,label\na,1.5\nb,"2,5"\n', {"kind": "regression"}, "line 3 has '2,5' in column 'label', which is no finite"),
    ("text,label\na,1.5\nb,inf\n", {"kind": "regression"}, "line 3 has 'inf'"),
    ("text,label\na,nan\nb,1\n", {"kind": "regression"}, "line 2 has 'nan'"),
    ("text,label\na,1\nb,1e999\n", {"kind": "regression"}, "line 3 has '1e999'"),
    ("text,label\na,x\nb,z\n", {"labels": ["y", "x"]}, "line 3 has the label 'z' in .*the known labels are y, x"),
    ("text,label\na,x\nb,x|q\n", {"labels": ["y", "x"], "kind": "multilabel"}, "line 3 has the label 'q'"),
    ("text,label\na,1.5\n", {"labels": ["y"], "kind": "regression"}, "which has none: leave them out"),
    ("text,label\na,x\n", {"labels": ["x", "x"]}, "name a class twice"),
    ("text,label\na,x\n", {"labels": "xy"}, "is one string"),
    ("text,label\na,x\nb,y\n", {"kind": "ranking"}, "kind 'ranking' is unknown"),
    ("text,label\na,x\nb,y\n", {"only": "all"}, "a split named 'all' is unknown"),
    ("text,label\na,x\nb,y\n", {"metrics": ["bleu"]}, "metric 'bleu' is unknown"),
    ("text,label\na,x\nb,y\n", {"name": "../x"}, "cannot be used"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "sentence"), REFUSED)
def test_rows_that_are_refused(tmp_path: Path, text: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence) as caught:
        table(tmp_path, text, **options)
    assert "\n" not in str(caught.value)


def test_lists_where_a_class_is_needed(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"column 'label' of .* holds list<.*>, and strings or numbers are needed"):
        whole(tmp_path, [{"text": "a", "label": ["x"]}], kind="classification")
    with pytest.raises(GraftError, match=r"column 'text' of .* holds list<.*>"):
        whole(tmp_path, [{"text": ["a"], "label": "x"}])


def test_bad_rows_left_out_and_counted(tmp_path: Path) -> None:
    task = table(tmp_path, "text,label\na,x\n,x\nb,\nc,y\n", skip_bad_rows=True)
    assert task.split("test").to_pylist() == [{"text": "a", "label": 0}, {"text": "c", "label": 1}]
    assert task.notes == (f"2 rows of {tmp_path}/data.csv without text or label left out.",)


def test_missing_values_of_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "c"], "label": [1.5, float("nan"), None]}), tmp_path / "d.parquet")
    with pytest.raises(GraftError, match=r"row 2 has no label .*and so do 1 others"):
        load_task(tmp_path / "d.parquet", only="test")
    dictionary = pa.array(["x", "y", "x"]).dictionary_encode()
    pq.write_table(
        pa.table({"text": pa.array(["a", "b", "c"], pa.large_string()), "label": dictionary}), tmp_path / "d.parquet"
    )
    task = load_task(tmp_path / "d.parquet", only="test")
    assert task.labels == ("x", "y") and task.split("test").schema.field("label").type == LABEL_TYPES["classification"]


def test_classes_that_are_given_keep_their_order(tmp_path: Path) -> None:
    task = table(tmp_path, "text,label\na,1\nb,0\n", labels=["2", "1", "0"])
    assert (task.kind, task.labels) == ("classification", ("2", "1", "0"))
    assert task.split("test")["label"].to_pylist() == [1, 2]
    numbers = table(tmp_path, "text,label\na,1.5\nb,0.5\n", labels=["0.5", "1.5"])
    assert numbers.kind == "classification"
