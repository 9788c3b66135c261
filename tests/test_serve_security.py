"""What the server refuses: wrong tokens, other sites, bodies that are too large, zip files that are full of tricks."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import stat
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.cli import app as command_line
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import RECORD, TENSORS, encode
from taskgraft.serving import uploads
from taskgraft.serving.app import create_app
from taskgraft.serving.bodies import Limits
from taskgraft.serving.engine import Engine
from taskgraft.serving.guard import Tokens, read_tokens

from over_http import PREDICT, call, error_of, zipped
from serving import World, engine_on, grafted, reader, small
from test_store import tree

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ASK, BOSS, STRANGER = ({"Authorization": f"Bearer {token}"} for token in ("asking", "boss", "stranger"))
OPEN = {"/", "/healthz", "/readyz", "/page/{file}"}
BODY = {"json": {"text": "a"}}
ZIP = {"Content-Type": "application/zip"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("store"), reader())
    made.put(small(made.alone, 1, name="mood"))
    return made


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Engine]:
    with engine_on(world.folder) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(engine: Engine) -> Any:
    return create_app(engine, tokens=Tokens.of(["other", "asking"], ["boss", "chief"]))


# -- tokens


def routes_of(app: Any) -> list[tuple[str, str]]:
    found = [(method, route) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]
    assert len(found) > 10
    return [(method, route.path_format) for method, route in found]


def test_every_route_needs_its_token(guarded: Any) -> None:
    for method, template in routes_of(guarded):
        path = template.replace("{task}", "no-such").replace("{file}", "none")
        changes = method in ("PUT", "DELETE") or template.endswith("/rollback")
        for headers in ({}, STRANGER, {"Authorization": "asking"}, {"Authorization": "Basic asking"}):
            response = call(guarded, method, path, headers=headers)
            if template in OPEN:
                assert response.status_code not in (401, 403), (method, path)
                continue
            assert error_of(response) == (401, "unauthorized"), (method, path, headers)
            assert response.headers["www-authenticate"] == "Bearer"
        asked = call(guarded, method, path, headers=ASK)
        assert (asked.status_code == 403) is changes, (method, path)
        assert call(guarded, method, path, headers=BOSS).status_code not in (401, 403), (method, path)
    assert call(guarded, "GET", "/no/such/path").status_code == 401


def test_no_way_of_writing_a_path_gets_around_the_token(guarded: Any, world: World) -> None:
    before = tree(world.folder)
    for method, path in (("POST", "/v1/tasks/mood/rollback"), ("DELETE", "/v1/tasks/mood"), ("PUT", "/v1/tasks/mood")):
        for odd in ("%0A", "%0D", "%00", "/", "//", "?", "%20", "%2f", ";x", "%E2%80%A8"):
            body = {"json": {"version": 1}} if method == "POST" else {}
            response = call(guarded, method, path + odd, headers=ASK, **body)
            assert response.status_code in (403, 404, 405), (method, odd, response.text)
    assert tree(world.folder) == before


@pytest.mark.parametrize("header", ["Bearer asking", "bearer other", "BEARER   asking", "Bearer boss", "Bearer chief"])
def test_every_known_token_may_ask(guarded: Any, header: str) -> None:
    assert call(guarded, "POST", PREDICT, headers={"Authorization": header}, **BODY).status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer askin", "Bearer asking2", "Bearer asking boss"])
def test_no_other_token_may(guarded: Any, header: str) -> None:
    assert call(guarded, "POST", PREDICT, headers={"Authorization": header}, **BODY).status_code == 401


def test_two_tokens_at_once_are_none(guarded: Any) -> None:
    both = [("Authorization", "Bearer asking"), ("Authorization", "Bearer boss")]
    assert call(guarded, "POST", PREDICT, headers=both, **BODY).status_code == 401


def test_without_tokens_anyone_asks_and_nobody_changes(engine: Engine) -> None:
    app = create_app(engine)
    assert call(app, "POST", PREDICT, **BODY).status_code == 200
    for headers in ({}, BOSS):
        response = call(app, "DELETE", "/v1/tasks/mood", headers=headers)
        assert error_of(response) == (403, "forbidden") and "TASKGRAFT_ADMIN_TOKEN" in response.text
    only_asking = create_app(engine, tokens=Tokens.of(["asking"]))
    response = call(only_asking, "DELETE", "/v1/tasks/mood", headers=ASK)
    assert error_of(response) == (403, "forbidden") and "TASKGRAFT_ADMIN_TOKEN" in response.text
    only_admin = create_app(engine, tokens=Tokens.of(admin=["boss"]))
    assert call(only_admin, "POST", PREDICT, **BODY).status_code == 200
    assert call(only_admin, "DELETE", "/v1/tasks/mood").status_code == 401
    assert call(only_admin, "POST", "/v1/tasks/mood/rollback", json={}, headers=BOSS).status_code == 409
    assert "mood" in engine.library.names()


def test_the_description_says_who_needs_a_token(guarded: Any, engine: Engine) -> None:
    paths = call(guarded, "GET", "/openapi.json").json()["paths"]
    assert all(paths[path]["get"].get("security") for path in ("/v1/tasks", "/metrics"))
    assert "security" not in paths["/healthz"]["get"]
    paths = call(create_app(engine), "GET", "/openapi.json").json()["paths"]
    assert not any("security" in operation for operations in paths.values() for operation in operations.values())


def test_files_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# for the page\nfirst-token\n\n  second-token  \n# third\n")
    assert read_tokens(file) == ["first-token", "second-token"]
    file.write_text("# none yet\n")
    with pytest.raises(GraftError, match="holds none"):
        read_tokens(file)
    with pytest.raises(GraftError, match="could not be read"):
        read_tokens(tmp_path / "nope")
    with pytest.raises(GraftError, match="not ASCII"):
        Tokens.of(["with space"])
    assert b"first" not in b"".join(Tokens.of(["first-token"]).predict)  # digests alone are kept


# -- other sites


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000", "api.me:1"]
)
def test_names_that_the_server_goes_by(engine: Engine, host: str) -> None:
    app = create_app(engine, hosts=("localhost", "127.0.0.1", "[::1]", "Api.me"))
    assert call(app, "GET", "/healthz", headers={"Host": host}).status_code == 200


BAD_HOSTS = [
    "evil.example",
    "localhost.evil.example",
    "localhost@evil",
    "127.0.0.1.evil:80",
    "",
    "::1",
    "localhost:x",
    "a b",
]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_names_that_were_made_to_lead_here_are_refused(engine: Engine, host: str) -> None:
    app = create_app(engine)
    for path in ("/healthz", "/", "/v1/tasks", "/metrics"):
        response = call(app, "GET", path, headers={"Host": host})
        assert error_of(response) == (403, "forbidden") and "--allow-host" in response.text
    assert call(create_app(engine, hosts=None), "GET", "/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("localhost", "http://localhost", True),
        ("localhost:80", "http://localhost", True),
        ("localhost", "https://localhost:443", True),
        ("LocalHost:8000", "http://localhost:8000", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("localhost:8000", "https://evil.example", False),
        ("localhost:8000", "http://localhost:8000.evil.example", False),
        ("localhost:8000", "http://localhost:8000@evil.example", False),
        ("localhost", "null", False),
        ("localhost", "", False),
        ("localhost", "file://localhost", False),
        ("localhost", "http://[", False),
    ],
)
def test_requests_that_another_site_s_page_sends_are_refused(
    guarded: Any, host: str, origin: str, passes: bool
) -> None:
    response = call(guarded, "POST", PREDICT, headers=BOSS | {"Host": host, "Origin": origin}, **BODY)
    assert response.status_code == 200 if passes else error_of(response) == (403, "forbidden")
    assert not any(name.startswith("access-control") for name in response.headers)


def test_what_a_browser_says_of_the_site_counts(guarded: Any) -> None:
    for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
        for path in ("/v1/tasks", "/metrics", "/v1/stats"):
            assert call(guarded, "GET", path, headers=ASK | {"Sec-Fetch-Site": site}).status_code == status
    assert call(guarded, "GET", "/healthz", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert call(guarded, "OPTIONS", PREDICT, headers=asks).status_code == 403


# -- sizes


async def parts(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


def test_bodies_over_the_limit_are_refused_by_what_they_state_and_by_what_they_are(engine: Engine) -> None:
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]), limits=Limits(body=1000, upload=3000))
    fits = json.dumps({"text": "a"}).encode().ljust(1000)
    json_type = {"Content-Type": "application/json"}
    assert call(app, "POST", PREDICT, content=fits, headers=json_type).status_code == 200
    assert error_of(call(app, "POST", PREDICT, content=fits + b" ", headers=json_type)) == (413, "too_large")
    response = call(app, "POST", PREDICT, content=parts(50, 100), headers=json_type)
    assert error_of(response) == (413, "too_large") and response.headers["connection"] == "close"
    upload = BOSS | ZIP
    assert error_of(call(app, "PUT", "/v1/tasks/x", content=b" " * 3001, headers=upload)) == (413, "too_large")
    assert error_of(call(app, "PUT", "/v1/tasks/x", content=parts(50, 100), headers=upload)) == (413, "too_large")
    assert error_of(call(app, "PUT", "/v1/tasks/x", content=b" " * 2000, headers=upload)) == (409, "conflict")
    for length in ("9" * 17, "9" * 30, "-1", "many"):
        stated = json_type | {"Content-Length": length}
        assert error_of(call(app, "POST", PREDICT, content=b"", headers=stated)) == (413, "too_large")


# -- zip files


def archive_of(files: dict[str, bytes], change: Callable[[zipfile.ZipFile], None] | None = None) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if change is not None:
            change(archive)
    return made.getvalue()


def a_link(archive: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo(RECORD)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(entry, "/etc/passwd")


def record_with(files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    return {**files, RECORD: json.dumps({**json.loads(files[RECORD]), **changes}).encode()}


def declared_smaller(data: bytes, name: str, size: int) -> bytes:
    """The same archive, in which a file says that it unpacks to fewer bytes than it does."""
    made = bytearray(data)
    for mark, sizes, names in ((b"PK\x03\x04", 22, 30), (b"PK\x01\x02", 24, 46)):
        at = -1
        while (at := made.find(mark, at + 1)) >= 0:
            if made[at + names : at + names + len(name)] == name.encode():
                made[at + sizes : at + sizes + 4] = size.to_bytes(4, "little")
    return bytes(made)


def encrypted(data: bytes) -> bytes:
    made = bytearray(data)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := made.find(mark, at + 1)) >= 0:
            made[at + flags] |= 1
    return bytes(made)


def tricks(files: dict[str, bytes]) -> dict[str, tuple[bytes, str]]:
    """Bodies that are no graft, and a word of why."""
    record, tensors = files[RECORD], files[TENSORS]
    pair, method = {RECORD: record, TENSORS: tensors}, json.loads(record)["method"]
    big = archive_of({RECORD: record, TENSORS: b"\0" * 3_000_000})
    broken = bytearray(archive_of(pair))
    broken[60] ^= 255
    again = {**json.loads(record)["tensors"], "sha256": hashlib.sha256(b"\x80\x04.").hexdigest(), "bytes": 3}
    return {
        "nothing": (b"", "no zip file"),
        "no zip": (b"PK" * 100, "no zip file"),
        "a cut end": (archive_of(pair)[:-30], "no zip file"),
        "a changed byte": (bytes(broken), "zip"),
        "one file": (archive_of({RECORD: record}), "holds no graft.safetensors"),
        "a way out": (archive_of({f"../{RECORD}": record, f"../{TENSORS}": tensors}), "no part of a graft"),
        "a deep way out": (archive_of({f"a/../../{RECORD}": record, **pair}), "no part of a graft"),
        "an absolute name": (archive_of({f"/{RECORD}": record, **pair}), "no part of a graft"),
        "a drive": (archive_of({f"C:\\{RECORD}": record, **pair}), "no part of a graft"),
        "deep folders": (archive_of({f"a/b/{RECORD}": record, f"a/b/{TENSORS}": tensors}), "no part of a graft"),
        "two folders": (archive_of({f"a/{RECORD}": record, f"b/{TENSORS}": tensors}), "2 folders"),
        "more files": (archive_of({**pair, "evil.py": b"1"}), "no part of a graft"),
        "a pickle": (archive_of({**pair, "graft.pkl": b"\x80\x04."}), "no part of a graft"),
        "a link": (archive_of({TENSORS: tensors}, a_link), "a link"),
        "a password": (encrypted(archive_of(pair)), "encrypted"),
        "a name twice": (archive_of(pair, lambda archive: archive.writestr(RECORD, record)), "twice"),
        "twice by folder": (archive_of({**pair, f"a/{RECORD}": record}), "twice"),
        "a stated bomb": (big, "is the most"),
        "a hidden bomb": (declared_smaller(big, TENSORS, 100), "zip"),
        "a record too long": (archive_of({RECORD: b" " * 1_500_000, TENSORS: tensors}), "is the most"),
        "many files": (archive_of({f"{number}": b"" for number in range(2000)}), "far more"),
        "no JSON": (archive_of({**pair, RECORD: b"{"}), "not JSON"),
        "deep JSON": (archive_of({**pair, RECORD: b"[" * 100_000}), "not JSON"),
        "no record": (archive_of({**pair, RECORD: b"{}"}), "format"),
        "another format": (archive_of(record_with(files, format=99)), "format 99"),
        "a strange method": (archive_of(record_with(files, method={"method": "rm -rf"})), ""),
        "a deep method": (archive_of(record_with(files, method={**method, "depth": 10**9})), "depth=1000000000"),
        "layers that are words": (archive_of(record_with(files, method={**method, "layers": ["a"]})), ""),
        "a strange kind": (archive_of(record_with(files, head=None, task={"kind": "what"})), ""),
        "strange columns": (archive_of(record_with(files, task={"columns": ["a"]})), ""),
        "strange labels": (archive_of(record_with(files, head={"kind": "classification", "labels": list("abcd")})), ""),
        "strange settings": (archive_of(record_with(files, training={"settings": {"max_length": "9"}})), "max_length"),
        "no settings": (archive_of(record_with(files, training={"settings": [1]})), ""),
        "other tensors": (archive_of({**pair, TENSORS: b"\0" * 100}), "changed since"),
        "tensors that are a pickle": (
            archive_of({**record_with(files, tensors=again), TENSORS: b"\x80\x04."}),
            "pickle",
        ),
    }


TRICKS = [
    "nothing", "no zip", "a cut end", "a changed byte", "one file", "a way out", "a deep way out", "an absolute name",
    "a drive", "deep folders", "two folders", "more files", "a pickle", "a link", "a password", "a name twice",
    "twice by folder", "a stated bomb", "a hidden bomb", "a record too long", "many files", "no JSON", "deep JSON",
    "no record", "another format", "a strange method", "a deep method",
    "layers that are words", "a strange kind", "strange columns", "strange labels",
    "strange settings", "no settings", "other tensors", "tensors that are a pickle",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("trick", TRICKS)
def test_a_zip_file_with_a_trick_in_it_changes_nothing(
    engine: Engine, world: World, trick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = tricks(encode(small(world.alone, 2)))
    assert list(made) == TRICKS
    content, words = made[trick]
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]), limits=Limits(upload=1_000_000))
    before = tree(world.folder)
    response = call(app, "PUT", "/v1/tasks/mood", content=content, headers=BOSS | ZIP)
    assert error_of(response) == (409, "conflict"), response.text
    assert words in response.text and str(tmp_path) not in response.text
    assert tree(world.folder) == before and not list(tmp_path.iterdir())
    assert call(app, "POST", PREDICT, **BODY).json()["version"] == 1


def test_a_graft_for_another_backbone_is_a_conflict(engine: Engine, world: World) -> None:
    app = create_app(engine, tokens=Tokens.of(admin=["boss"]))
    other = dataclasses.replace(small(world.alone, 2), backbone={**small(world.alone, 2).backbone, "sha256": "0" * 64})
    wide = grafted(world.alone, "wide", tg.Adapter(size=4), tg.Head("classification", ("a", "b")))
    wrong = dataclasses.replace(
        wide, tensors={name: value[..., :-1].contiguous() for name, value in wide.tensors.items()}
    )
    before = tree(world.folder)
    for graft in (other, wrong):
        response = call(app, "PUT", "/v1/tasks/mood", content=zipped(graft), headers=BOSS | ZIP)
        assert error_of(response) == (409, "conflict")
    assert tree(world.folder) == before
    assert call(app, "POST", PREDICT, **BODY).status_code == 200


def test_a_zip_file_as_other_programs_write_it(world: World) -> None:
    files = encode(small(world.alone, 2))
    data = archive_of(
        {f"spam/{name}": content for name, content in files.items()}, lambda archive: archive.mkdir("spam")
    )
    graft = uploads.graft_in(io.BytesIO(data), "spam", 1 << 20)
    assert graft.name == "spam" and graft.head is not None and graft.head.labels == ("2-a", "2-b", "2-c")


# -- the command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "TASKGRAFT_TOKEN"),
        (["--host", "192.168.0.7"], "TASKGRAFT_TOKEN"),
        (["--host", "::"], "TASKGRAFT_TOKEN"),
        (["--memory", "much"], "500MB"),
        (["--memory", "0"], "500MB"),
        (["--dtype", "int8"], "float32, bfloat16, float16"),
        (["--token-file", "nope"], "could not be read"),
        (["--admin-token-file", "empty"], "holds none"),
        (["--store", "empty"], "is a file"),
        (["--port", "70000"], "65535"),
    ],
)
def test_the_command_refuses_what_is_not_safe(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TASKGRAFT_TOKEN", "TASKGRAFT_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").write_text("\n")
    result = CliRunner().invoke(command_line, ["serve", *words])
    assert result.exit_code == 2 and says in result.stderr


def test_the_command_names_the_packages_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(command_line, ["serve"])
    assert result.exit_code == 2 and "pip install 'taskgraft[serve]'" in result.stderr
