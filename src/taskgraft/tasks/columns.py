"""Which column of a file is what: as the caller says, or by its name where that leaves no doubt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from taskgraft.errors import GraftError
from taskgraft.tasks.files import Rows

# Names without case, spaces and underscores. The first of a list is taken before all others; of the rest, one alone.
TEXTS = ("text", "sentence", "message", "tweet", "review", "comment", "content", "body", "utterance", "document",
         "post", "query", "question", "headline", "title", "description", "abstract", "email", "sms", "complaint",
         "ticket", "feedback", "article", "passage", "paragraph", "phrase", "reviewtext", "reviewbody", "fulltext",
         "input", "inputtext", "prompt", "source", "sourcetext")  # fmt: skip
ANSWERS = ("label", "labels", "class", "category", "categories", "target", "sentiment", "intent", "topic", "topics",
           "score", "rating", "stars", "emotion", "mood", "polarity", "genre", "tag", "tags", "language", "similarity",
           "goldlabel", "labeltext", "labelname", "classname")  # fmt: skip
TARGETS = ("target", "targettext", "output", "outputtext", "answer", "summary", "response", "completion", "translation")
PAIRS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
         ("text1", "text2"), ("sentencea", "sentenceb"), ("texta", "textb"))  # fmt: skip
WORDS, TAGS = ("tokens", "words"), ("tags", "nertags", "labels", "label", "postags", "chunktags")
COUNTERS = ("", "id", "ids", "index", "idx", "unnamed0", "guid", "uid", "uuid", "rowid", "textid", "sentenceid")
CLEARLY_LONGER, LONG = 4, 20  # of two columns without telling names, the text is this many times longer, and this long
NAME_THEM = "name them with text=..., label=... (--text, --label)"


@dataclass(frozen=True)
class Columns:
    """The file's own names of what a task is made of."""

    text: str
    label: str
    pair: str | None = None
    split: str | None = None
    id: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """What a task remembers of them."""
        return {"text": self.text, **({"pair": self.pair} if self.pair else {}), "label": self.label}


def choose_columns(
    rows: Rows,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    split: str | None = None,
    kind: str | None = None,
) -> Columns:
    """The columns the caller named, and the others by their names."""
    names: list[str] = rows.table.column_names
    for role, name in (("text", text), ("pair", pair), ("label", label), ("split", split)):
        if name is not None:
            check_column(rows, name, role)
    by_word = {plain(name): name for name in reversed(names)}
    identity = by_word.get("id")
    if split is None and by_word.get("split") not in (text, pair, label):
        split = by_word.get("split")
    free = [name for name in names if name not in (text, pair, label, split)]
    words = {plain(name): name for name in reversed(free)}

    if text is None and label is None and pair is None:
        spans = {"question", "context", "answers"} <= words.keys()
        if spans and (kind == "spans" or (kind is None and holds_records(rows, words["answers"]))):
            return Columns(words["question"], words["answers"], words["context"], split, identity)
        tokens = first_of(words, WORDS) if kind in (None, "tokens") else None
        tags = first_of(words, TAGS)
        if tokens and tags and (kind == "tokens" or holds_lists(rows, tokens, tags)):
            return Columns(tokens, tags, None, split)
    if text is None and pair is None and "text" not in words:
        text, pair = next(((words[a], words[b]) for a, b in PAIRS if a in words and b in words), (None, None))
    if text is None:
        text = only_of(words, TEXTS, taken=(pair,))
    if label is None:
        label = only_of(words, TARGETS if kind == "text" else ANSWERS, taken=(text, pair))

    left = [name for name in free if name not in (text, pair, label) and plain(name) not in COUNTERS]
    if text is None and label is None and len(left) == 2:
        text, label = longer_first(rows, left)
    elif text is None and label is not None and len(left) == 1:
        text = left[0]
    elif label is None and text is not None and len(left) == 1:
        label = left[0]
    if text is None or label is None:
        missing = " and ".join(role for role, name in (("text", text), ("label", label)) if name is None)
        header = " (its first line must be the header)" if rows.unit == "line" else ""
        raise GraftError(f"{rows.source} has the columns {', '.join(names)}{header}, and it is not clear which is the "
                         f"{missing}: {NAME_THEM}.")  # fmt: skip
    return Columns(text, label, pair, split, identity)


def check_column(rows: Rows, name: str, role: str) -> None:
    """Refuse a column that the file does not have."""
    names = rows.table.column_names
    if name not in names:
        by_case = {known.casefold(): known for known in names}
        close = difflib.get_close_matches(name.casefold(), by_case, n=1)
        meant = f"; did you mean {by_case[close[0]]!r}?" if close else "."
        raise GraftError(f"{rows.source} has no column {name!r} for the {role}, it has {', '.join(names)}{meant}")


def plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def first_of(words: dict[str, str], known: Sequence[str]) -> str | None:
    return next((words[word] for word in known if word in words), None)


def only_of(words: dict[str, str], known: Sequence[str], taken: Sequence[str | None]) -> str | None:
    """The column called `known[0]`, or the only one that has another of these names."""
    found = [words[word] for word in known if word in words and words[word] not in taken]
    return found[0] if len(found) == 1 or (found and plain(found[0]) == known[0]) else None


def holds_lists(rows: Rows, *names: str) -> bool:
    return all(is_list(rows.table.schema.field(name).type) for name in names)


def holds_records(rows: Rows, name: str) -> bool:
    kind = rows.table.schema.field(name).type
    return bool(pa.types.is_struct(kind) or (is_list(kind) and pa.types.is_struct(kind.value_type)))


def longer_first(rows: Rows, names: Sequence[str]) -> tuple[str | None, str | None]:
    """Of two columns of strings the one that is clearly the text, and the other."""
    if not all(pa.types.is_string(rows.table[name].type) for name in names):
        return None, None
    lengths = [(pc.mean(pc.utf8_length(rows.table[name])).as_py() or 0, name) for name in names]
    (short, label), (long, text) = sorted(lengths)
    return (text, label) if long >= max(LONG, CLEARLY_LONGER * short) else (None, None)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
