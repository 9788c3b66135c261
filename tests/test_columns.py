"""Which column is what: as the caller says, or by its name where that leaves no doubt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from taskgraft.errors import GraftError
from taskgraft.tasks.columns import Columns, choose_columns
from taskgraft.tasks.files import Rows, read_rows

LISTS, SPANS = (
    pa.list_(pa.string()),
    pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))]),
)


def header(names: str, lists: str = "", spans: str = "") -> Rows:
    types = {**dict.fromkeys(lists.split(), LISTS), **dict.fromkeys(spans.split(), SPANS)}
    columns = {name: pa.array([None], types.get(name, pa.string())) for name in names.split()}
    return Rows(pa.table(columns), "data.csv", np.array([2]))


OBVIOUS = [
    (header("text label"), ("text", None, "label")),
    (header("Label Message id"), ("Message", None, "Label")),
    (header("id tweet sentiment date user"), ("tweet", None, "sentiment")),
    (header("title text comment category"), ("text", None, "category")),
    (header("review stars"), ("review", None, "stars")),
    (header("utterance what"), ("utterance", None, "what")),
    (header("what class idx"), ("what", None, "class")),
    (header("Sentence_1 Sentence_2 score"), ("Sentence_1", "Sentence_2", "score")),
    (header("premise hypothesis label genre"), ("premise", "hypothesis", "label")),
    (header("question sentence label"), ("question", "sentence", "label")),
    (header("question1 question2 is_duplicate"), ("question1", "question2", "is_duplicate")),
    (header("id tokens pos_tags ner_tags", lists="tokens pos_tags ner_tags"), ("tokens", None, "ner_tags")),
    (header("text labels", lists="labels"), ("text", None, "labels")),
    (header("id title context question answers", spans="answers"), ("question", "context", "answers")),
]


@pytest.mark.parametrize(("rows", "expected"), OBVIOUS, ids=[" ".join(rows.table.column_names) for rows, _ in OBVIOUS])
def test_obvious_columns(rows: Rows, expected: tuple[str, str | None, str]) -> None:
    columns = choose_columns(rows)
    assert (columns.text, columns.pair, columns.label) == expected


def test_columns_that_are_named_and_the_rest_found() -> None:
    rows = header("text title label stars split")
    assert choose_columns(rows, text="title") == Columns("title", "label", None, "split")
    assert choose_columns(rows, label="stars", pair="title") == Columns("text", "stars", "title", "split")
    assert choose_columns(rows, label="split") == Columns("text", "split")
    assert choose_columns(header("prompt label summary"), kind="text") == Columns("prompt", "summary")


def test_the_text_is_clearly_longer(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("x,y\nb,a long sentence about nothing at all\na,another sentence of this kind\n")
    assert choose_columns(read_rows(path)) == Columns("y", "x")
    path.write_text("x,y\nb,c\na,d\n")
    with pytest.raises(GraftError, match=r"has the columns x, y \(its first line must be the header\).*text and label"):
        choose_columns(read_rows(path))


UNCLEAR = [
    (header("title body label"), {}, "data.csv has the columns title, body, label .*which is the text: .*text=..."),
    (header("text a b"), {}, r"which is the label: name them with text=..., label=... \(--text, --label\)"),
    (header("text category topic"), {}, "which is the label"),
    (header("a b c"), {}, "which is the text and label"),
    (header("Text label"), {"text": "text"}, "no column 'text' for the text, it has Text, label; did you mean 'Text'"),
    (header("text sentiment"), {"label": "sentimet"}, "did you mean 'sentiment'"),
    (header("text label"), {"pair": "zzz"}, "no column 'zzz' for the pair, it has text, label.$"),
    (header("text label"), {"split": "fold"}, "no column 'fold' for the split"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "named", "sentence"), UNCLEAR)
def test_columns_that_are_not_clear(rows: Rows, named: dict[str, str], sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence):
        choose_columns(rows, **named)
