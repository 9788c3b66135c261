"""`taskgraft predict`: a task's answers to texts, a JSON object a line."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskgraft.cli.app import Output, app, print_json
from taskgraft.cli.backbone import backbone_for
from taskgraft.cli.options import Json, OwnBackbone, StoreFolder, TaskName
from taskgraft.cli.tasks import task_named
from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.backbones.load import Backbone
    from taskgraft.grafts.graft import Graft
    from taskgraft.grafts.joint import JointTask
    from taskgraft.serving.answers import Answer
    from taskgraft.tasks.files import Rows

STDIN, AT_ONCE = "-", 4096
PLAIN = (".txt", ".txt.gz")


@app.command(
    epilog="""Examples:
  taskgraft predict warming "it is getting hotter" "it is not"
  taskgraft predict nli "A man sleeps." --pair "Somebody is awake."
  taskgraft predict warming --file tweets.csv --text tweet > answers.jsonl
  cat tweets.txt | taskgraft predict warming

A line is {"text": ..., "label": ..., "probability": ..., "probabilities": ...}.
Instead of a label, numbers have a "value", texts with several labels "labels",
words "tags", and spans and written texts an "answer".
With --json, the last line is one more object, which tells how many there were."""
)
def predict(
    name: TaskName,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; - is stdin, a text a line.", show_default="stdin")
    ] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="The second text, once for each text; with --file, its column.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="A data file (CSV, TSV, JSONL, Parquet), or a .txt file with a text a line.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the text in --file.", show_default="as in training")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="Of the file or of stdin.", show_default="utf-8")] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="What separates the fields of a CSV.", show_default="found")
    ] = None,
    store: StoreFolder = Path("grafts"),
    version: Annotated[int | None, typer.Option(help="An earlier version.", show_default="the current one")] = None,
    backbone: OwnBackbone = None,
    json: Json = False,
) -> None:
    """Let a task answer texts: given here, from a file, or from stdin. JSON lines come out."""
    from taskgraft.tasks.files import read_rows
    from taskgraft.tasks.lines import text_lines
    from taskgraft.training import evaluate as training

    output = Output(json)
    asked_of = task_named(store, name, version)
    graft = training.graft_of(asked_of)
    kind = training.kind_of(graft)
    if texts == [STDIN] and file is None:
        texts, file = None, STDIN
    if texts and file is not None:
        raise GraftError(f"texts and --file {file} were given: leave one of them out.")
    if texts:
        questions = Questions(texts, pair or None)
    elif file is not None and file != STDIN and not file.lower().endswith(PLAIN):
        questions = from_table(read_rows(Path(file), encoding, delimiter), graft, text, pair or [])
    elif text is not None:
        raise GraftError(f"--text {text} names a column, and lines of text have none: leave it out.")
    else:
        lines = stdin_lines(file, encoding) if file in (None, STDIN) else text_lines(Path(str(file)), encoding)
        questions = Questions([line.rstrip("\r\n") for line in lines if line.strip()], pair or None)
    if not questions.texts:
        raise GraftError("there are no texts to answer: the input is empty.")
    if kind == "tokens":
        words = [text.split() if isinstance(text, str) else text for text in questions.texts]
        questions = Questions(words, questions.pairs)
    loaded = backbone_for(name, graft.backbone, backbone)
    for row, answer in enumerate(answers(loaded, asked_of, store, name, version, questions)):
        asked = {"text": questions.texts[row]} | ({} if questions.pairs is None else {"pair": questions.pairs[row]})
        print_json({**asked, **answer.result})
    output.finish({"task": name, "kind": kind, "rows": len(questions.texts)})


def answers(
    backbone: Backbone, what: Graft | JointTask, store: Path, name: str, version: int | None, questions: Questions
) -> Iterator[Answer]:
    """Answers in order, by the engine; a task that changed the backbone itself has it to itself."""
    from taskgraft.serving.answers import Answer
    from taskgraft.serving.engine import Engine
    from taskgraft.training.evaluate import graft_of, kind_of, labels_of, predict

    graft = graft_of(what)
    if graft.method.trains_backbone:
        for part in questions.parts():
            for found in predict(backbone, what, part.texts, part.pairs):
                yield Answer.of(name, version, kind_of(graft), labels_of(graft), found)
        return
    with Engine(backbone, store) as engine:
        for part in questions.parts():
            pairs: Sequence[str | None] = part.pairs or [None] * len(part.texts)
            yield from engine.predict(zip(repeat(name), part.texts, pairs, strict=False), version=version)


@dataclass(frozen=True)
class Questions:
    """Texts to answer, and the second texts of tasks that read pairs."""

    texts: Sequence[Any]
    pairs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.pairs is not None and len(self.pairs) != len(self.texts):
            raise GraftError(
                f"{len(self.texts)} texts and {len(self.pairs)} second texts were given: give a --pair with each "
                "text, or a file with a column for each (--file, --text, --pair)."
            )

    def parts(self) -> Iterator[Questions]:
        """As many at a time as are worth waiting for."""
        for at in range(0, len(self.texts), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            yield Questions(self.texts[some], None if self.pairs is None else self.pairs[some])


def stdin_lines(file: str | None, encoding: str | None) -> Iterator[str]:
    """The lines of stdin; a person at a terminal who has not asked for that is told what to give."""
    if file is None and sys.stdin.isatty():
        raise GraftError('there are no texts to answer: give some ("..."), name a --file, or pipe lines in.')
    encoding = encoding or "utf-8-sig"
    try:
        yield from io.TextIOWrapper(sys.stdin.buffer, encoding)
    except UnicodeDecodeError as error:
        seen = error.object[error.start]
        raise GraftError(f"stdin holds byte 0x{seen:02x}, which is not {encoding}: say its --encoding.") from error
    except LookupError as error:
        raise GraftError(f"encoding {encoding!r} is unknown: use one such as utf-8 or cp1252.") from error


def from_table(rows: Rows, graft: Graft, text: str | None, pair: Sequence[str]) -> Questions:
    """The columns of a data file that were named, or that are called as in the file the task was trained on."""
    own = graft.task.get("columns") or {}
    names = rows.table.column_names
    if len(pair) > 1:
        raise GraftError(f"--pair was given {len(pair)} times: with --file it names one column.")
    if text is None:
        known = [name for name in names if name in (own.get("text"), "text")]
        if not known and len(names) > 1:
            raise GraftError(f"{rows.source} has the columns {', '.join(names)}: name that of the text with --text.")
        text = known[0] if known else names[0]
    second = pair[0] if pair else own.get("pair")
    return Questions(column(rows, text, "text"), None if second is None else column(rows, second, "pair"))


def column(rows: Rows, name: str, role: str) -> list[Any]:
    """A column's texts (or lists of words), none of them missing."""
    from taskgraft.tasks.columns import check_column

    check_column(rows, name, role)
    values = rows.table[name].to_pylist()
    if None in values:
        raise GraftError(f"{rows.where(values.index(None))} has no {name}: give it one, or take the row out.")
    return [value if isinstance(value, str | list) else str(value) for value in values]
