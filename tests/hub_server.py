"""A Hub on two ports of this machine, as far as huggingface-hub's client asks for one: its API, and the storage that
large files are sent to and fetched from (over HTTP as LFS does it; by Xet's own client into a folder)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USER, TOKEN = "me", "hf_not-to-be-seen-anywhere"


@dataclass(frozen=True)
class Large:
    """A file that lies in the storage, by its sha256."""

    oid: str
    size: int


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)  # branches and tags
    commits: dict[str, dict[str, bytes | Large]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes | Large], message: str, branch: str = "main") -> str:
        made = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[made] = {**self.commits.get(self.refs.get(branch, ""), {}), **files}
        self.refs[branch] = made
        self.messages[made] = message
        return made


class Hub:
    """Its state is open: tests look at it, and change it behind the client's back."""

    def __init__(self, xet: Path) -> None:
        self.xet = xet
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut_after: int | None = None  # bytes of a large file, after which the connection breaks, once
        self.dies_then = False
        self.gone = False
        self.api = Server(self, ApiHandler)
        self.storage = Server(self, StorageHandler)
        self.url = self.api.url

    def close(self) -> None:
        for server in (self.api, self.storage):
            server.shutdown()
            server.server_close()
            server.thread.join()

    def repo(self, name: str, **state: Any) -> Repo:
        """A new repository, with the file that the Hub itself puts into each."""
        self.repos[name] = made = Repo(**state)
        made.commit({".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
        return made

    def xet_hash(self, oid: str) -> str | None:
        """What Xet calls a file of this sha256, from the list of files that its client uploads after their content."""
        for shard in self.xet.rglob("shards/*.mdb"):
            listed = shard.read_bytes()
            if struct.pack("<4Q", *(int(oid[i : i + 16], 16) for i in range(0, 64, 16))) in listed:
                return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", listed, 48))
        return None


class Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has hung up is no matter."""


class Refused(Exception):  # noqa: N818
    """What is answered instead."""

    def __init__(self, status: int, code: str | None = None, **body: Any) -> None:
        super().__init__()
        self.status, self.headers, self.body = status, {"X-Error-Code": code} if code else {}, body


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    server: Server
    routes: list[tuple[str, str, Callable[..., None]]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def answer_any(self) -> None:
        if self.hub.gone:
            self.close_connection = True
            return
        path = urlsplit(self.path).path
        self.hub.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            for method, pattern, action in self.routes:
                found = re.fullmatch(pattern, path)
                if found and self.command in method.split():
                    action(self, *map(unquote, found.groups()))
                    return
            raise Refused(404, error=f"nothing answers {self.command} {path}")
        except Refused as refused:
            self.answer(json.dumps(refused.body).encode(), refused.status, **refused.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer_any  # noqa: N815

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: Any, **headers: str) -> None:
        self.answer(json.dumps(value).encode(), **{"Content-Type": "application/json", **headers})

    def answer_range(self, content: bytes) -> None:
        """A file, from the byte that is asked for; or as much of it as comes before the connection breaks."""
        start = int(re.sub(r"\D", "", (self.headers.get("Range") or "0").partition("-")[0]) or 0)
        part = content[start:]
        self.send_response(206 if start else 200)
        about = {"Content-Length": str(len(part)), "Accept-Ranges": "bytes"}
        if start:
            about["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        for name, value in about.items():
            self.send_header(name, value)
        self.end_headers()
        cut, self.hub.cut_after = self.hub.cut_after, None
        self.wfile.write(part[:cut])
        if cut is not None:
            self.close_connection, self.hub.gone = True, self.hub.dies_then


class ApiHandler(Handler):
    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def readable(self, name: str) -> Repo:
        """As the Hub does, what may not be seen is said not to be there."""
        repo = self.hub.repos.get(name)
        if self.headers.get("Authorization") and not self.known:
            raise Refused(401, error="Invalid credentials in Authorization header")
        if repo is None or (repo.private and not self.known):
            raise Refused(404 if self.known else 401, "RepoNotFound", error="Repository not found")
        return repo

    def writable(self, name: str) -> Repo:
        repo = self.readable(name)
        if not self.known or name.split("/")[0] != USER:
            raise Refused(403, error="You may not write here")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> str:
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise Refused(404, "RevisionNotFound", error=f"Invalid rev id: {revision}")
        return commit

    def create(self) -> None:
        asked = json.loads(self.body)
        if not self.known:
            raise Refused(401, error="Invalid username or password.")
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.hub.repos:
            raise Refused(409, error="You already created this model repo", url=url)
        if name.split("/")[0] != USER:
            raise Refused(403, error="You may not create a repository there")
        self.hub.repo(name, private=asked.get("visibility") == "private" or asked.get("private") is True)
        self.answer_json({"url": url, "name": name})

    def validate(self) -> None:
        front = json.loads(self.body)["content"].split("---\n")[1]
        found = yaml.safe_load(front)
        wrong = [] if found.get("library_name") == "taskgraft" else [{"message": "no library"}]
        if wrong:
            raise Refused(400, errors=wrong)
        self.answer_json({"errors": [], "warnings": []})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self.readable(name)
        commit = self.commit_of(repo, revision)
        files = [{"rfilename": path} for path in repo.commits[commit]]
        gated = "manual" if repo.gated else False
        self.answer_json({"id": name, "sha": commit, "private": repo.private, "gated": gated, "siblings": files})

    def tree(self, name: str, revision: str) -> None:
        repo = self.readable(name)
        listed: list[dict[str, Any]] = []
        for path, content in repo.commits[self.commit_of(repo, revision)].items():
            if isinstance(content, Large):
                about = {"oid": content.oid, "size": content.size, "pointerSize": 130}
                entry = {"size": content.size, "oid": "0" * 40, "lfs": about, "xetHash": self.hub.xet_hash(content.oid)}
            else:
                entry = {"size": len(content), "oid": etag_of(content)}
            listed.append({"type": "file", "path": path, **entry})
        self.answer_json(listed)

    def preupload(self, name: str, revision: str) -> None:
        self.writable(name)
        modes = {True: "lfs", False: "regular"}
        files = [
            {"path": file["path"], "uploadMode": modes[file["path"].endswith(".safetensors")], "shouldIgnore": False}
            for file in json.loads(self.body)["files"]
        ]
        self.answer_json({"files": files})

    def batch(self, name: str) -> None:
        self.writable(name)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            url = f"{self.hub.storage.url}/{wanted['oid']}"
            objects.append({**wanted, "actions": {"upload": {"href": url}}})
        offered = json.loads(self.body)["transfers"]
        self.answer_json({"transfer": "xet" if "xet" in offered else "basic", "objects": objects})

    def commit(self, name: str, revision: str) -> None:
        repo, message = self.writable(name), ""
        files: dict[str, bytes | Large] = {}
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                message = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                assert value["oid"] in self.hub.stored or self.hub.xet_hash(value["oid"]), "its content never came"
                files[value["path"]] = Large(value["oid"], value["size"])
            else:
                raise Refused(400, error=f"what is {operation['key']}?")
        made = repo.commit(files, message, revision)
        self.answer_json({"success": True, "commitOid": made, "commitUrl": f"{self.server.url}/{name}/commit/{made}"})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.readable(name)
        if repo.gated:
            raise Refused(403, "GatedRepo", error="Access to this model is restricted")
        commit = self.commit_of(repo, revision)
        if path not in repo.commits[commit]:
            raise Refused(404, "EntryNotFound", error="Entry not found")
        content = repo.commits[commit][path]
        if not isinstance(content, Large):
            self.answer(content, **{"X-Repo-Commit": commit, "ETag": f'"{etag_of(content)}"'})
            return
        about = {"X-Linked-Etag": f'"{content.oid}"', "X-Linked-Size": str(content.size)}
        xet = self.hub.xet_hash(content.oid)
        if xet is not None:
            route = f"{self.server.url}/api/models/{name}/xet-read-token/{commit}"
            about |= {"X-Xet-Hash": xet, "X-Xet-Refresh-Route": route}
        where = f"{self.hub.storage.url}/{content.oid}?signature=short-lived"
        self.answer(b"", 302, **{"X-Repo-Commit": commit, "Location": where, **about})

    def xet_token(self, name: str, kind: str, revision: str) -> None:
        self.writable(name) if kind == "write" else self.readable(name)
        found = {"casUrl": f"local://{self.hub.xet}", "accessToken": "short-lived", "exp": int(time.time()) + 3600}
        headers = {
            "X-Xet-Cas-Url": found["casUrl"],
            "X-Xet-Access-Token": found["accessToken"],
            "X-Xet-Token-Expiration": str(found["exp"]),
        }
        self.answer_json(found, **headers)

    routes = [  # noqa: RUF012
        ("POST", "/api/repos/create", create),
        ("POST", "/api/validate-yaml", validate),
        ("GET", "/api/models/([^/]+/[^/]+)", info),
        ("GET", "/api/models/([^/]+/[^/]+)/revision/([^/]+)", info),
        ("GET", "/api/models/([^/]+/[^/]+)/tree/([^/]+)", tree),
        ("POST", "/api/models/([^/]+/[^/]+)/preupload/([^/]+)", preupload),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", batch),
        ("POST", "/api/models/([^/]+/[^/]+)/commit/([^/]+)", commit),
        ("GET HEAD", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", resolve),
        ("GET", "/api/models/([^/]+/[^/]+)/xet-(read|write)-token/([^/]+)", xet_token),
    ]


class StorageHandler(Handler):
    """Another host: whoever has a link may use it, and no token is ever sent to it."""

    def answer_any(self) -> None:
        assert "Authorization" not in self.headers, "a token was sent to the storage"
        super().answer_any()

    do_GET = do_PUT = answer_any  # noqa: N815

    def put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.stored[oid] = self.body
        self.answer(b"")

    def get(self, oid: str) -> None:
        self.answer_range(self.hub.stored[oid])

    routes = [("PUT", "/([0-9a-f]{64})", put), ("GET", "/([0-9a-f]{64})", get)]  # noqa: RUF012


def etag_of(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
