"""Text files as lines, in UTF-8 or what their first bytes or the caller say, packed or not; bad bytes by their line."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from taskgraft.errors import GraftError

BATCH = 8192
Item = TypeVar("Item")
# The longer marks first: UTF-32's begins as UTF-16's does.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def text_lines(path: Path, encoding: str | None) -> Iterator[str]:
    """The lines of a text file with their ends as they are: UTF-8, or what its first bytes or the caller say."""
    try:
        if encoding is None:
            with opened(path) as raw:
                start = raw.read(4)
            encoding = next((name for mark, name in MARKS.items() if start.startswith(mark)), "utf-8")
        "".encode(encoding)
        with opened(path) as raw, io.TextIOWrapper(raw, encoding, newline="") as text:
            for number, line in enumerate(text, 1):
                if "\0" in line:
                    raise GraftError(f"{path}, line {number} holds a NUL byte: if the file is UTF-16, say "
                                     "encoding='utf-16-le' (--encoding), otherwise take the byte out.")  # fmt: skip
                yield line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError:
        raise undecodable(path, str(encoding)) from None
    except LookupError:
        raise GraftError(f"encoding {encoding!r} is unknown: use one such as 'utf-8', 'cp1252' or 'utf-16'.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise GraftError(f"{path} could not be read: {error}.") from error


def undecodable(path: Path, encoding: str) -> GraftError:
    """The sentence about bytes that are no text, with the line, which only a second reading knows."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    line, seen = 1, "the end of the file inside a character"
    with opened(path) as raw:
        while chunk := raw.read(1 << 16):
            try:
                line += decoder.decode(chunk).count("\n")
            except UnicodeDecodeError as error:
                good = error.object[: error.start].decode(error.encoding, "replace")
                line += len(re.findall(r"\r\n?|\n", good))
                seen = f"byte 0x{error.object[error.start]:02x}"
                break
    return GraftError(f"{path}, line {line} has {seen}, which is not {encoding}: say which encoding the file is in, "
                      "such as encoding='cp1252' or 'latin-1' (--encoding).")  # fmt: skip


def batched(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Lists of as many items as may be Python objects at one time."""
    while batch := list(itertools.islice(items, BATCH)):
        yield batch
