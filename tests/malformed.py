"""Requests that are nearly right: bodies, paths and zip files with something wrong in them, the same for a seed."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

from serve_process import written

BOSS = {"Authorization": "Bearer boss"}
SECRET = "PRIVATEWORD"  # in texts; never in a log
PREDICT, MIXED = "/v1/tasks/mood/predict", "/v1/predict"
A = '{"text":"a"}'

ODD: list[Any] = [None, True, False, 0, -1, 7, 10**5, 2**63, -(10**30), 1e308, 5e-324, 0.5, [], {}, [[]], [None], [1]]
ODD += ["", " ", "\x00", "\ud800", "a\udfff", "\u202etxt", "e\u0301", "\u2028", "\ufeff", "\uffff", "\U0001f3f4\u200d"]
ODD += [
    "x" * 5000,
    "a " * 3000,
    ["a"] * 500,
    ["a", 1],
    {"": ""},
    {"text": "a"},
    {"k" * 5000: 1},
    "../../etc/passwd",
    "%00",
]

RAW = [
    b"",
    b" ",
    b"null",
    b"[]",
    b'"text"',
    b"1",
    b"{",
    b"}",
    b"{}",
    b"[" * 10_000,
    b'{"a":' * 10_000,
    b"\x00",
    b"-",
    b"1e",
]
RAW += [
    b"\xef\xbb\xbf" + A.encode(),
    A.encode("utf-16"),
    A.encode("utf-32"),
    b'{"text":"\xff\xfe"}',
    b'{"text":"\xed\xa0\x80"}',
]
RAW += [
    b'{"text":"a","timeout":%s}' % number for number in (b"NaN", b"Infinity", b"-1e999", b"1e-320", b"9" * 5000, b"0x1")
]
RAW += [
    b'{"text":NaN}',
    b'{"text":"a","text":"b"}',
    b"{'text':'a'}",
    b'{"text":"a",}',
    2 * A.encode(),
    A.encode() + b" x",
]
RAW += [
    b'{"text":"\\ud800"}',
    b'{"text":"\\uD83D\\uD83D"}',
    b'{"\\ud800":1}',
    b'{"text":"\n"}',
    b'{"text":"\\x"}',
    b'"\\u12',
]
RAW += [b"/*c*/{}", A.encode() + b"\x00", b'{"text":' + b"[" * 900 + b"]" * 900 + b"}"]

TYPES = ["", "text/plain", "application/jsonp", "application/json; charset=utf-16", "application/x-www-form-urlencoded"]
TYPES += [
    "multipart/form-data; boundary=x",
    "application/json, text/plain",
    "APPLICATION/JSON",
    "application/zip",
    "*/*",
]
NAMES = [
    "mood",
    "nli",
    "entities",
    "where",
    "none",
    "..",
    ".",
    "",
    "mood/x",
    "/mood",
    "mood/",
    "a\x00b",
    "x" * 200,
    "MOOD",
]
KEYS = ["", "Text", "text ", "x" * 3000, "\x00", "__proto__", "m\u043eod"]
PARTS = [
    "v1",
    "tasks",
    "mood",
    "predict",
    "rollback",
    "healthz",
    "metrics",
    "page",
    "stats",
    "openapi.json",
    ".",
    "..",
    "%2e%2e",
    "%2F",
    "%00",
    "%ff",
    "%F0%9F%99%82",
]
PARTS += ["", "a" * 300, *["page.js", "index.html", "etc", "passwd", "%", "%zz", "*", "~"]]
VALUES = ["0", "1", "-1", "1e3", "9" * 30, "", "%00", "%ff", "mood", "%F0%9F%99%82", "a" * 500, "\x7f", "[]", "1;2"]
METHODS = ["GET"] * 6 + ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "get"]
FILES = ["../graft.json", "/etc/x", "a/b/graft.json", "graft.json/", "con", "README.md", "\x00", "graft.JSON"]


class Mutator:
    """Requests that are nearly right, one after the other; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def valid(self) -> Any:
        draw = self.draw
        text = " ".join(draw.choice(["good", "bad", "film", SECRET]) for _ in range(draw.randint(0, 6)))
        bodies: list[Any] = [
            {"text": text},
            {"text": text, "pair": text, "timeout": 5},
            {"texts": [text] * draw.randint(1, 3)},
            {"texts": [text, text], "pairs": [text, text]},
            {"text": text.split()},
            {"questions": [{"task": draw.choice(NAMES), "text": text} for _ in range(draw.randint(1, 4))]},
            {"questions": [{"task": "nli", "text": text, "pair": text}, {"task": "entities", "text": text.split()}]},
        ]
        return draw.choice(bodies)

    def body(self) -> bytes:
        way = self.draw.random()
        if way < 0.15:
            return self.draw.choice(RAW)
        if way < 0.6:
            return self.written(self.odd(self.valid()))
        return self.flipped(self.written(self.valid()))

    def written(self, value: Any) -> bytes:
        """As JSON, escaped or as it is, and sometimes in another shape of the same."""
        text = json.dumps(value, ensure_ascii=self.draw.random() < 0.5, indent=self.draw.choice([None, None, 1]))
        return text.encode("utf-8", "surrogatepass")

    def odd(self, value: Any) -> Any:
        """The same with something odd in one or two places."""
        value = copy.deepcopy(value)
        for _ in range(self.draw.randint(1, 2)):
            holders = [holder for holder in containers(value) if holder]
            if not holders:
                return self.draw.choice(ODD)
            holder = self.draw.choice(holders)
            key = self.draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            way = self.draw.random()
            if way < 0.2:
                del holder[key]
            elif way < 0.35 and isinstance(holder, dict):
                holder[self.draw.choice(KEYS)] = holder[key]
            else:
                holder[key] = copy.deepcopy(self.draw.choice(ODD))
        return value

    def flipped(self, data: bytes) -> bytes:
        """The same with some bytes changed, taken away or put in."""
        made, draw = bytearray(data), self.draw
        for _ in range(draw.choice([1, 1, 2, 5, 20])):
            at, way = draw.randrange(len(made) + 1), draw.random()
            if way < 0.4 and at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            elif way < 0.6:
                made[at:at] = draw.randbytes(draw.randint(1, 4))
            elif way < 0.8:
                del made[at : at + draw.choice([1, 2, 8, 1000])]
            else:
                first = draw.randrange(len(made) + 1)
                made[at:at] = made[first : first + draw.randint(1, 40)]
        return bytes(made)

    def question(self) -> bytes:
        """A request to a route that reads JSON."""
        path = self.draw.choice([PREDICT, PREDICT, MIXED, MIXED, "/v1/tasks/nli/predict", "/v1/tasks/entities/predict"])
        if self.draw.random() < 0.1:
            path = self.draw.choice(["/v1/tasks/where/predict", "/v1/tasks/mood/rollback", "/v1/tasks/none/predict"])
        kind = "application/json" if self.draw.random() < 0.9 else self.draw.choice(TYPES)
        coding = "gzip" if self.draw.random() < 0.02 else ""
        return written("POST", path, self.body(), Content_Type=kind, Content_Encoding=coding, **BOSS)

    def place(self) -> bytes:
        """A request to a path, by a method, with parameters that are somewhere beside what there is."""
        draw = self.draw
        path = "/" + "/".join(draw.choice(PARTS) for _ in range(draw.randint(0, 5)))
        if draw.random() < 0.4:
            path = draw.choice(["/v1/tasks", "/v1/tasks/mood", "/metrics", "/", "/v1/tasks/" + draw.choice(PARTS)])
        names = ["limit", "after", "prefix", "limit[]", "", "x", "task"]
        query = "&".join(f"{draw.choice(names)}={draw.choice(VALUES)}" for _ in range(draw.randint(0, 3)))
        method = draw.choice(METHODS)
        if method in ("DELETE", "PUT") and "mood" in path:
            method = "GET"
        body = None if draw.random() < 0.8 else self.body()
        return written(method, f"{path}?{query}" if query else path, body, **BOSS)

    def upload(self, graft: bytes) -> bytes:
        """A request with a graft in which something is wrong: the zip file, the record, the tensors, a name."""
        way, draw = self.draw.random(), self.draw
        if way < 0.3:
            body = self.flipped(graft)
        elif way < 0.35:
            body = graft[: draw.randrange(len(graft))]
        else:
            with zipfile.ZipFile(io.BytesIO(graft)) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
            record = json.loads(files["graft.json"])
            if way < 0.75:
                files["graft.json"] = self.written(self.odd(record))
            elif way < 0.9:
                tensors = files["graft.safetensors"] = self.flipped(files["graft.safetensors"])
                record["tensors"] |= {"sha256": hashlib.sha256(tensors).hexdigest(), "bytes": len(tensors)}
                files["graft.json"] = self.written(record)
            else:
                files[draw.choice(FILES)] = b"x"
            body = packed(list(files.items()), draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
        kind = "application/zip" if draw.random() < 0.95 else draw.choice(TYPES)
        return written("PUT", f"/v1/tasks/fuzz{draw.randrange(5)}", body, Content_Type=kind, **BOSS)


def packed(entries: Sequence[tuple[str | zipfile.ZipInfo, bytes]], way: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip file of these, whatever their names."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(buffer, "w", way) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name) if isinstance(name, str) else name, content, way)
    return buffer.getvalue()


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from containers(child)
