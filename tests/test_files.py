"""Data files read back exactly as they were written, and each that is broken refused with its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskgraft.errors import GraftError
from taskgraft.tasks import lines
from taskgraft.tasks.files import read_rows

ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
TRICKY = st.sampled_from(
    ['"', '""', ",", "a,b", "\n", "\r\n", "\r", '"\n"', "\ufeff", "ü", "漢字", "🙂", "  x ", "\t", "1.0"]
)
CELLS = st.lists(st.tuples(ANY | TRICKY, ANY | TRICKY), min_size=1, max_size=20)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32"]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@FEW
@given(
    CELLS,
    st.sampled_from(ENCODINGS),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([".csv", ".tsv", ".csv.gz"]),
)
def test_tables_come_back_as_they_were_written(
    tmp_path: Path, cells: list[tuple[str, str]], encoding: str, end: str, suffix: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",", lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *cells])
    data = text.getvalue().encode(encoding)
    rows = read_rows(write(tmp_path / f"t{suffix}", gzip.compress(data) if suffix.endswith(".gz") else data))
    assert list(zip(*rows.table.to_pydict().values(), strict=True)) == cells
    assert rows.table.schema == pa.schema([("a", pa.string()), ("b", pa.string())])
    assert rows.numbers[0] == 2


@FEW
@given(CELLS, st.sampled_from(ENCODINGS), st.booleans())
def test_json_comes_back_as_it_was_written(
    tmp_path: Path, cells: list[tuple[str, str]], encoding: str, array: bool
) -> None:
    objects = [{"a": a, "b": [b, a]} for a, b in cells]
    written = [json.dumps(value, ensure_ascii=False) for value in objects]
    text = "[\n" + ",\n".join(written) + "\n]\n" if array else "\n".join(written)
    rows = read_rows(write(tmp_path / ("t.json" if array else "t.jsonl"), text.encode(encoding)))
    assert rows.table.to_pylist() == objects
    first = 2 if array else 1
    assert rows.numbers.tolist() == list(range(first, first + len(cells)))


def test_rows_are_numbered_by_the_line_they_begin_on(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "t.csv", 'a,b\n1,x\n\n"2\n\n2",y\n3,"z\n"\n4,w\n'))
    assert rows.table["a"].to_pylist() == ["1", "2\n\n2", "3", "4"]
    assert [rows.where(row) for row in range(4)] == [f"{tmp_path}/t.csv, line {line}" for line in (2, 4, 7, 9)]


def test_rows_beyond_one_batch(tmp_path: Path) -> None:
    many = lines.BATCH * 2 + 3
    rows = read_rows(write(tmp_path / "t.csv", "a,b\n" + "".join(f"{i},x\n" for i in range(many))))
    assert rows.table["a"].to_pylist() == [str(i) for i in range(many)]
    assert rows.numbers.tolist() == list(range(2, many + 2))
    late = [{"a": i} for i in range(many)] + [{"a": 1.5, "b": ["x"]}]
    rows = read_rows(write(tmp_path / "t.jsonl", "\n".join(json.dumps(value) for value in late)))
    assert rows.table["b"].to_pylist() == [None] * many + [["x"]] and rows.table["a"][many].as_py() == "1.5"


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_delimiter_is_the_one_of_the_header(tmp_path: Path, mark: str) -> None:
    rows = read_rows(
        write(tmp_path / "t.csv", f"a{mark}b\nx{mark}y;|\n".replace("y;|", "y" if mark in ";|" else "y;|"))
    )
    assert rows.table.column_names == ["a", "b"]


def test_a_delimiter_that_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,b#c\n1,2#3\n")
    assert read_rows(path, delimiter="#").table.to_pydict() == {"a,b": ["1,2"], "c": ["3"]}
    assert read_rows(write(tmp_path / "tab.csv", "a,b\tc\n1\t2\n"), delimiter="\\t").table["c"].to_pylist() == ["2"]
    with pytest.raises(GraftError, match="delimiter '##' cannot be used"):
        read_rows(path, delimiter="##")


def test_an_encoding_that_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "text,label\ncaf\u00e9 \u201cbon\u201d,1\n".encode("cp1252"))
    assert read_rows(path, encoding="cp1252").table["text"].to_pylist() == ["caf\u00e9 \u201cbon\u201d"]
    with pytest.raises(GraftError, match="encoding 'klingon' is unknown"):
        read_rows(path, encoding="klingon")


def test_fields_may_be_long(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    assert read_rows(write(tmp_path / "t.csv", f"a,b\n{long},y\n")).table["a"].to_pylist() == [long]


def test_json_scalars_are_strings_and_missing_ones_null(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "t.jsonl", '{"a": 1, "b": true}\n\n{"a": "x", "c": {"d": [2]}}\n{"a": null}\n'))
    assert rows.table.to_pydict() == {"a": ["1", "x", None], "b": ["true", None, None], "c": [None, {"d": ["2"]}, None]}
    assert rows.numbers.tolist() == [1, 3, 4]


def test_parquet_and_the_class_names_of_hugging_face(tmp_path: Path) -> None:
    names = {"names": ["no", "yes"], "_type": "ClassLabel"}
    features = {
        "label": names,
        "tags": {"feature": names, "_type": "List"},
        "text": {"dtype": "string", "_type": "Value"},
    }
    table = pa.table({"text": ["a", "b", "c"], "label": [1, 0, -1], "tags": [[0, 1], None, []]})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "t.parquet")
    rows = read_rows(tmp_path / "t.parquet")
    assert rows.table["label"].to_pylist() == ["yes", "no", None]
    assert rows.table["tags"].to_pylist() == [["no", "yes"], None, []]
    assert rows.where(1) == f"{tmp_path}/t.parquet, row 2"


BROKEN: list[tuple[str, str | bytes, str]] = [
    ("empty.csv", "", "empty.csv is empty"),
    ("blank.csv", "\n  \n\n", "blank.csv is empty"),
    ("header.csv", "text,label\n", "has a header and no rows: its columns are text, label"),
    ("twice.csv", "text,label,text\na,b,c\n", "has 2 columns called 'text'"),
    ("ragged.csv", "text,label\na,b\nc, and d,e\n", "line 3 has 3 fields where the header has 2.*double quotes"),
    ("short.csv", 'text,label\n"a\nb",b\nc\n', "line 4 has 1 field where the header has 2"),
    ("open.csv", 'text,label\na,b\n"c,d\ne,f\n', "line 3: the row that begins here has a quote that is not closed"),
    ("after.csv", 'text,label\na,b\n"c"d,e\n', "line 3: the row .* text after a closed one"),
    ("nul.csv", "text,label\na,b\nc\0,d\n", "line 3 holds a NUL byte.*utf-16-le"),
    ("latin.csv", "text,label\na,b\ncafé,d\n".encode("latin-1"), "line 3 has byte 0xe9, which is not utf-8.*cp1252"),
    ("mac.csv", b"text,label\ra,b\r\xe9,d\r", "line 3 has byte 0xe9"),
    ("far.csv", b"text,label\r\n" + b"abc,d\r\n" * 30_000 + b"\xff,d\r\n", "line 30002 has byte 0xff"),
    ("cut.csv", "text,label\na,b\n".encode("utf-16")[:-1], "the end of the file inside a character"),
    ("cut.csv.gz", gzip.compress(b"text,label\na,b\n")[:-9], "could not be read"),
    ("not.csv.gz", b"text,label\n", "could not be read.*[Nn]ot a gzipped"),
    ("empty.jsonl", "\n\n", "empty.jsonl is empty"),
    ("bad.jsonl", '{"a": 1}\n{"a": }\n', "line 2 is not JSON .*column 7"),
    ("cut.jsonl", '{"a": 1}\n{"a":\n{"a": 2}\n', "line 2 is not JSON"),
    ("rest.jsonl", '{"a": 1}\n{"a": 2} x\n', "line 2 is not JSON"),
    ("list.jsonl", '{"a": 1}\n3\n', "line 2 holds 3: write one object"),
    ("mixed.jsonl", '{"a": "x"}\n{"a": ["x"]}\n', r"line 2: 'a' is \[\"x\"\], and rows before have text"),
    ("nested.jsonl", '{"a": ["x"]}\n{"a": [{"b": 1}]}\n', "lines 1 to 2: a list or object is not made as in"),
    ("half.jsonl", '{"a": "x"}\n{"a": "\\ud83d"}\n', "line 2 holds half of a surrogate pair"),
    ("bad.json", '[{"a": 1},\n\n {"a": 2}\n {"a": 3}]', "line 3: the row that begins here is not followed by"),
    ("worse.json", '[{"a": 1},\n{"a": 2', "line 2 is not JSON"),
    ("rest.json", '[{"a": 1}]\n[{"a": 1}]', "text after the array"),
    ("one.json", '{\n "data": []\n}', "line 1 is not JSON"),
    ("none.json", "[]", "none.json is empty"),
    ("bad.parquet", b"PAR1 no", "could not be read as Parquet"),
    ("data.xlsx", b"PK", r"data.xlsx is not of a known format: name it .csv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "sentence"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: Any, sentence: str) -> None:
    with pytest.raises(GraftError, match=sentence) as caught:
        read_rows(write(tmp_path / name, content))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraftError, match=r"there is no file .*gone.csv: check the path"):
        read_rows(tmp_path / "gone.csv")


def test_parquet_without_rows_or_with_a_name_twice(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(GraftError, match="has no rows: its columns are a"):
        read_rows(tmp_path / "none.parquet")
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(GraftError, match="2 columns called 'a'"):
        read_rows(tmp_path / "twice.parquet")
