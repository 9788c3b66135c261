"""A graft that was sent as a zip file: nothing in it is trusted, neither its names nor its sizes."""

from __future__ import annotations

import stat
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from taskgraft.errors import GraftError
from taskgraft.grafts.graft import CARD, RECORD, TENSORS, Graft, read_graft
from taskgraft.serving.library import Version
from taskgraft.tasks.task import KINDS

NEEDED, ALLOWED = (RECORD, TENSORS), (RECORD, TENSORS, CARD)
RECORD_BYTES = 16 << 20
CHUNK = 1 << 20
END, END_BYTES, ZIP64 = b"PK\x05\x06", 22, b"PK\x06\x07"
DIRECTORY_BYTES = 1 << 16  # of a zip file's list of what is in it; three files need a few hundred
AGAIN = f"zip {RECORD} and {TENSORS} again, by themselves or in one folder"


def graft_in(file: IO[bytes], name: str, limit: int) -> Graft:
    """The graft in a zip file, under a name of ours, once all of it is known to be whole."""
    check_directory(file)
    try:
        with zipfile.ZipFile(file) as archive, tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            for target, entry in entries(archive.infolist(), limit).items():
                unpack(archive, entry, folder / target)
            return whole(name, folder)
    except GraftError:
        raise
    except Exception as error:  # of the many that zipfile has for files that are broken
        raise GraftError(f"the zip file cannot be read ({error}): {AGAIN}.") from error


def check_directory(file: IO[bytes]) -> None:
    """Refuse what is no zip file, and a list of contents so long that reading it alone would take all memory."""
    size = file.seek(0, 2)
    file.seek(max(0, size - END_BYTES - 0xFFFF - len(ZIP64) - 16))
    tail = file.read()
    plain = tail[-END_BYTES:]
    at = len(tail) - END_BYTES if plain.startswith(END) and plain.endswith(b"\0\0") else tail.rfind(END)
    if at < 0 or len(tail) - at < END_BYTES:
        raise GraftError(f"the body is no zip file: {AGAIN}.")
    if tail[at - 20 : at].startswith(ZIP64) or int.from_bytes(tail[at + 12 : at + 16], "little") > DIRECTORY_BYTES:
        raise GraftError(f"the zip file lists far more than a graft's files: {AGAIN}.")
    file.seek(0)


def entries(listed: Sequence[zipfile.ZipInfo], limit: int) -> dict[str, zipfile.ZipInfo]:
    """The files to unpack, by the names that we give them."""
    found: dict[str, zipfile.ZipInfo] = {}
    folders = set()
    for entry in listed:
        folder, slash, file = entry.filename.rpartition("/")
        if slash and (not folder or "/" in folder or folder in (".", "..")):
            file = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if slash and not file and not entry.file_size and kind in (0, stat.S_IFDIR):
            folders.add(folder)
            continue
        if file not in ALLOWED:
            raise GraftError(f"the zip file holds {entry.filename[:80]!r}, which is no part of a graft: {AGAIN}.")
        if kind not in (0, stat.S_IFREG):
            raise GraftError(f"{file} in the zip file is a link, or no file at all: {AGAIN}.")
        if entry.flag_bits & 0x1:
            raise GraftError(f"{file} in the zip file is encrypted: zip it without a password.")
        if file in found:
            raise GraftError(f"{file} is in the zip file twice: {AGAIN}.")
        folders.add(folder)
        found[file] = entry
    if len(folders) > 1:
        raise GraftError(f"the zip file holds {len(folders)} folders: {AGAIN}.")
    for file in NEEDED:
        if file not in found:
            raise GraftError(f"the zip file holds no {file}: {AGAIN}.")
    sizes = {file: entry.file_size for file, entry in found.items()}
    if sum(sizes.values()) > limit or sizes[RECORD] > RECORD_BYTES:
        raise GraftError(f"what is in the zip file takes {sum(sizes.values()):,} bytes, and {limit:,} is the most.")
    return {file: found[file] for file in NEEDED}  # the card is written anew


def unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    """As many bytes as were stated; if there are more or others, the checksum does not fit."""
    with archive.open(entry) as source, target.open("wb") as sink:
        while chunk := source.read(CHUNK):
            sink.write(chunk)


def whole(name: str, folder: Path) -> Graft:
    """The graft of a folder, once its record is known to say what serving it asks of it."""
    try:
        graft = read_graft(name, folder)
        version = Version(name, None, folder, (), {}, graft)
        words = [*version.labels, *graft.metrics, *graft.task]
        if version.kind not in KINDS or not all(isinstance(word, str) for word in words):
            raise GraftError(f"{RECORD} names the kind {version.kind!r}, or labels that are no words: {AGAIN}.")
    except GraftError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraftError(f"{RECORD} does not hold a graft's record ({error}): {AGAIN}.") from error
    return graft
