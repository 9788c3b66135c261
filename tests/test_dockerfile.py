"""The image's recipe, line by line: who it runs as, what it says of its health, and what must not get into it."""

from __future__ import annotations

import fnmatch
import inspect
import json
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from taskgraft.cli.serve import serve

ROOT = Path(__file__).parent.parent


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, comments left out and lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def last(instruction: str) -> str:
    return [rest for word, rest in steps() if word == instruction][-1]


def test_it_serves_the_volume_on_the_port_it_exposes() -> None:
    command = json.loads(last("ENTRYPOINT"))
    assert command[:2] == ["taskgraft", "serve"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options == {"--host": "0.0.0.0", "--port": last("EXPOSE"), "--store": last("VOLUME")}
    assert {option.removeprefix("--") for option in options} <= set(inspect.signature(serve).parameters)
    assert "CMD" not in dict(steps()), "further options of `docker run` are added, not replaced"


def test_it_does_not_run_as_root_and_may_write_its_store() -> None:
    user = last("USER")
    assert user.isdigit() and int(user) > 0
    order = [word for word, _ in steps()]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word in ("RUN", "COPY"))
    made = [rest for word, rest in steps() if word == "RUN"][-1]
    assert f"--uid {user}" in made and f"-o taskgraft -g taskgraft {last('VOLUME')}" in made


def test_no_secret_and_no_host_of_a_registry_is_named() -> None:
    text = "\n".join(f"{word} {rest}" for word, rest in steps())
    assert not re.search(r"(?i)(token|password|secret|api_?key)", text), "they come when it runs"
    assert [rest.split()[0] for word, rest in steps() if word == "FROM"] == ["python:3.12-slim"] * 2
    assert set(re.findall(r"https?://[^/'\"]+", text)) == {"http://127.0.0.1:8000"}


def test_only_what_the_build_needs_is_sent_to_it() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = [shlex.split(rest) for word, rest in steps() if word == "COPY" and not rest.startswith("--from")]
    assert sent == {source for words in copied for source in words[:-1]}
    assert all((ROOT / name).exists() for name in sent)
    assert any(fnmatch.fnmatch("a/__pycache__", line) for line in lines)


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check_asks_the_server(status: int | None, healthy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(status or 0) if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    python, option, code = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    assert (python, option) == ("python", "-c")
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        if status is None:
            server.shutdown()
            server.server_close()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for asking oneself
        asked = subprocess.run([sys.executable, "-c", code.replace(":8000/", f":{port}/")], stderr=subprocess.DEVNULL)
        server.shutdown()
    assert (asked.returncode == 0) is healthy
