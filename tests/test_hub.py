"""Grafts on the Hub, against a Hub on this machine: there and back to the bit, and refused in a sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.cli import app

import hub_files
import tiny
from hub_server import TOKEN, Hub, Large
from serving import grafted, together

ROOT = Path(__file__).parent.parent
HYPERFORMER = tg.HyperFormer(size=4, task_dim=6, hidden_dim=10, projected_dim=5, shared=True)


def spam(seed: int = 0) -> tg.Graft:
    about = {"kind": "classification", "source": "/home/someone/secret/sms.csv", "metrics": ["accuracy"]}
    about["notes"] = ["2 rows of /home/someone/secret/sms.csv without text or label left out."]
    head = tg.Head("classification", ("ham", "spam"))
    return grafted(tiny.backbone(), "spam", tg.Adapter(size=4), head, seed=seed, task=about)


def house() -> tg.Joint:
    heads = {"mood": tg.Head("classification", ("bad", "good")), "stars": tg.Head("regression")}
    records = {
        name: {"task": {"kind": head.kind, "source": f"/home/someone/{name}.csv", "metrics": ["accuracy"]},
               "metrics": {"score": 0.5, "split": "test"}}
        for name, head in heads.items()
    }  # fmt: skip
    return together(tiny.backbone(), HYPERFORMER, heads, records, seed=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that tests read and never write."""
    folder = tmp_path_factory.mktemp("saved")
    spam().save(folder / "spam")
    house().save(folder / "house")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub for the client of this process, which has a token for it."""
    (tmp_path / "xet").mkdir()
    made = Hub(tmp_path / "xet")
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for module in (_http, file_download):  # what waits before it tries again waits for nothing here
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None, time=lambda: 0.0))
    yield made
    huggingface_hub.close_session()
    made.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(sentence: str, action: Callable[[], object], store: Path | None = None) -> str:
    """It fails with one sentence, and the store is what it was."""
    before = contents(store) if store and store.exists() else None
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        action()
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".") and TOKEN not in said
    if store is not None:
        assert (contents(store) if store.exists() else None) == before
    return said


# -- there and back


def test_a_graft_comes_back_to_the_bit(hub: Hub, saved: Path, tmp_path: Path) -> None:
    pushed = tg.push(saved / "spam", "me/spam", message="the first one")
    repo = hub.repos["me/spam"]
    assert len(repo.commits) == 2 and repo.refs["main"] == pushed.commit and not repo.private, "made, and one commit"
    assert pushed.repo == "me/spam" and pushed.url == f"{hub.url}/me/spam/commit/{pushed.commit}"
    assert repo.messages[pushed.commit] == "the first one"
    assert set(repo.commits[pushed.commit]) == {".gitattributes", "graft.json", "graft.safetensors", "README.md"}

    pulled = tg.pull("me/spam", tmp_path / "grafts")
    assert (pulled.name, pulled.version, pulled.repo, pulled.commit) == ("spam", 1, "me/spam", pushed.commit)
    here, there = tg.load_graft(saved / "spam"), tg.load_graft(tmp_path / "grafts" / "spam")
    assert there.tensors.keys() == here.tensors.keys()
    assert all(torch.equal(value, there.tensors[name]) for name, value in here.tensors.items())
    tensors = "graft.safetensors"
    assert (tmp_path / "grafts/spam" / tensors).read_bytes() == (saved / "spam" / tensors).read_bytes()
    assert there.origin == {"hub": "me/spam", "commit": pushed.commit} and here.origin == {}
    for field in ("method", "head", "backbone", "metrics", "training", "created", "packages"):
        assert getattr(there, field) == getattr(here, field), field
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert fetched == {"graft.json", tensors}, "nothing else of the repository is downloaded"


def test_tasks_that_were_trained_together_come_back_to_the_bit(hub: Hub, saved: Path, tmp_path: Path) -> None:
    pushed = tg.push(saved / "house", "me/house")
    assert tg.pull("me/house", tmp_path / "grafts", name="home").version == 1
    here, there = tg.load_joint(saved / "house"), tg.load_joint(tmp_path / "grafts" / "home")
    assert there.tensors.keys() == here.tensors.keys()
    assert all(torch.equal(value, there.tensors[name]) for name, value in here.tensors.items())
    assert there.origin == {"hub": "me/house", "commit": pushed.commit} and list(there.tasks) == ["mood", "stars"]


def test_what_is_published_names_no_folder_of_this_machine(hub: Hub, saved: Path) -> None:
    for name, record, file in (("spam", "graft.json", b"sms.csv"), ("house", "joint.json", b"mood.csv")):
        commit = tg.push(saved / name, f"me/{name}").commit
        files = hub.repos[f"me/{name}"].commits[commit].values()
        public = b"".join(content for content in files if isinstance(content, bytes))
        assert b"someone" in (saved / name / record).read_bytes()
        assert b"someone" not in public and file in public


def test_the_card_tells_the_hub_and_the_reader_what_it_is(hub: Hub, saved: Path) -> None:
    cards = {}
    for name in ("spam", "house"):
        commit = tg.push(saved / name, f"me/{name}").commit
        files = hub.repos[f"me/{name}"].commits[commit]
        cards[name] = bytes(files["README.md"]).decode()  # type: ignore[arg-type]
    front = yaml.safe_load(cards["spam"].split("---\n")[1])
    assert front["library_name"] == "taskgraft" and "adapter" in front["tags"] and front["metrics"] == ["accuracy"]
    assert 'tg.pull("me/spam", "grafts")\nbackbone =' in cards["spam"]
    assert "taskgraft pull me/spam --store grafts\ntaskgraft predict spam" in cards["spam"]
    tables = re.sub(" +", " ", cards["house"])
    assert "| mood | one label | bad, good | mood.csv |" in tables and "| stars | 0.500 | accuracy | test |" in tables
    assert 'tg.load_joint("grafts/house").task("mood")' in cards["house"]


def test_a_pulled_card_says_where_it_came_from(hub: Hub, saved: Path, tmp_path: Path) -> None:
    commit = tg.push(saved / "spam", "me/spam").commit
    tg.pull("me/spam", tmp_path / "grafts")
    assert f"Pulled from me/spam at commit {commit}." in (tmp_path / "grafts/spam/README.md").read_text()
    shown = CliRunner().invoke(app, ["tasks", "show", "spam", "--store", str(tmp_path / "grafts")])
    assert f"pulled      me/spam at {commit}" in shown.output


def test_revisions(hub: Hub, saved: Path, tmp_path: Path) -> None:
    first = tg.push(saved / "spam", "me/spam")
    hub.repos["me/spam"].refs["v1"] = first.commit
    spam(seed=9).save(tmp_path / "newer" / "spam")
    second = tg.push(tmp_path / "newer" / "spam", "me/spam")
    store = tmp_path / "grafts"
    pulled = {
        wanted: tg.pull("me/spam", store, revision=wanted).commit for wanted in (None, first.commit, "v1", "main")
    }
    assert pulled == {None: second.commit, first.commit: first.commit, "v1": first.commit, "main": second.commit}
    assert tg.Store(store).versions("spam") == [1, 2, 3, 4]
    old, new = tg.Store(store).get("spam", 2), tg.Store(store).get("spam", 4)
    assert torch.equal(old.tensors["head.weight"], tg.load_graft(saved / "spam").tensors["head.weight"])
    assert not torch.equal(old.tensors["head.weight"], new.tensors["head.weight"])


def test_offline_from_the_cache(hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = tg.push(saved / "spam", "me/spam").commit
    tg.pull("me/spam", tmp_path / "first")
    hub.gone, asked = True, len(hub.asked)
    assert tg.pull("me/spam", tmp_path / "second", local_files_only=True).commit == commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert tg.pull("me/spam", tmp_path / "second", revision=commit).version == 2
    assert len(hub.asked) == asked
    advice = "is not in the cache, and the Hub is not to be asked: pull it once with the network"
    refused(f"'me/tone' {advice}", lambda: tg.pull("me/tone", tmp_path / "second"), tmp_path / "second")
    refused(f"'me/spam' at 'v2' {advice}", lambda: tg.pull("me/spam", tmp_path / "second", revision="v2"))
    refused("HF_HUB_OFFLINE is set, so nothing can be pushed", lambda: tg.push(saved / "spam", "me/spam"))


def test_a_hub_that_does_not_answer_is_not_replaced_by_the_cache(hub: Hub, saved: Path, tmp_path: Path) -> None:
    """The client would give the commit that it knew last, and nobody would learn of it."""
    tg.push(saved / "spam", "me/spam")
    store = tmp_path / "grafts"
    tg.pull("me/spam", store)
    hub.gone = True
    said = refused(
        r"the Hub could not be used for repository 'me/spam' \(.+\)", lambda: tg.pull("me/spam", store), store
    )
    assert said.endswith("try again, or from the cache with HF_HUB_OFFLINE=1.")


def test_a_hub_lost_after_its_first_answer_is_not_replaced_either(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "grafts"
    tg.push(saved / "spam", "me/spam")
    tg.pull("me/spam", store)
    spam(seed=9).save(tmp_path / "newer" / "spam")
    tg.push(tmp_path / "newer" / "spam", "me/spam")
    ask = huggingface_hub.HfApi.model_info

    def answered_once(*asked: Any, **options: Any) -> Any:
        found = ask(*asked, **options)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # to the client, the network is gone
        return found

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answered_once)
    refused("'me/spam' changed, or the Hub was lost, while it was pulled", lambda: tg.pull("me/spam", store), store)


def test_a_broken_connection_is_taken_up_where_it_broke(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    tg.push(saved / "spam", "me/spam")
    hub.cut_after = 500
    assert tg.pull("me/spam", tmp_path / "grafts").version == 1
    assert any(asked.endswith("bytes=500-") for asked in hub.asked)


# -- who may


def test_a_private_repository_needs_a_token(
    hub: Hub, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capfd: Any
) -> None:
    store = tmp_path / "grafts"
    tg.push(saved / "spam", "me/spam", private=True)
    assert hub.repos["me/spam"].private
    monkeypatch.delenv("HF_TOKEN")
    private = "there is no repository 'me/spam' on the Hub, or it is private: check its name, or set HF_TOKEN"
    refused(private, lambda: tg.pull("me/spam", store), store)
    refused(r"refuses access to repository 'me/spam' \(.*401", lambda: tg.pull("me/spam", store, token="wrong"), store)
    refused(r"refuses access to repository 'me/new' \(.*401", lambda: tg.push(saved / "spam", "me/new"))
    assert tg.pull("me/spam", store, token=TOKEN).version == 1
    tg.push(saved / "spam", "me/spam", private=True, token=TOKEN)
    said = caplog.text + "".join(capfd.readouterr())
    written = b"".join([*contents(store).values(), *contents(tmp_path / "cache").values()])
    assert TOKEN not in said and TOKEN.encode() not in written


def test_a_gated_repository(hub: Hub, saved: Path, tmp_path: Path) -> None:
    tg.push(saved / "spam", "me/spam")
    hub.repos["me/spam"].gated = True
    store = tmp_path / "grafts"
    refused(
        "'me/spam' is gated: ask for access on its page, then set HF_TOKEN", lambda: tg.pull("me/spam", store), store
    )


def test_where_a_graft_is_not_pushed(hub: Hub, saved: Path) -> None:
    hub.repo("me/bert").commit({"config.json": b"{}", "README.md": b"by hand"}, "a model")
    refused("'me/bert' holds other files than graft.json", lambda: tg.push(saved / "spam", "me/bert"))
    assert hub.repos["me/bert"].commits[hub.repos["me/bert"].refs["main"]]["README.md"] == b"by hand"
    hub.repo("me/by-hand").commit({"README.md": b"soon", "LICENSE": b"free"}, "made on the page")
    tg.push(saved / "house", "me/by-hand")
    refused("'me/by-hand' holds other files than graft.json", lambda: tg.push(saved / "spam", "me/by-hand"))
    refused("'me/by-hand' is public already", lambda: tg.push(saved / "house", "me/by-hand", private=True))
    refused(r"access to repository 'you/spam' \(.*403", lambda: tg.push(saved / "spam", "you/spam"))
    refused("'a b' is no name of a repository: use OWNER/NAME", lambda: tg.push(saved / "spam", "a b"))
    refused("no graft named 'none' is in the store", lambda: tg.push(saved / "none", "me/none"))
    assert "me/none" not in hub.repos


# -- what is not stored


def test_what_cannot_be_pulled(hub: Hub, saved: Path, tmp_path: Path) -> None:
    store = tmp_path / "grafts"
    tg.push(saved / "spam", "me/spam")
    hub.repo("me/bert").commit({"config.json": b"{}", "pytorch_model.bin": b"\x80\x04"}, "a model")
    cases = {
        "there is no repository 'me/none' on the Hub": lambda: tg.pull("me/none", store),
        "'a/b/c' is no name of a repository": lambda: tg.pull("a/b/c", store),
        "'me/spam' has no revision 'v9': name one of its branches": lambda: tg.pull("me/spam", store, revision="v9"),
        "'me/bert' has no graft.json and no joint.json": lambda: tg.pull("me/bert", store),
        "task name '../x' cannot be used": lambda: tg.pull("me/spam", store, name="../x"),
    }
    for sentence, action in cases.items():
        refused(re.escape(sentence), action, store)
    assert "pytorch_model.bin" not in {path.name for path in (tmp_path / "cache").rglob("*")}
    house().save(store / "spam")
    refused("'spam' is tasks that were trained together in the store", lambda: tg.pull("me/spam", store), store)


def changed(hub: Hub, name: str, file: str, change: Callable[[bytes], bytes]) -> None:
    """Behind everybody's back, in the last commit."""
    repo = hub.repos[name]
    files = repo.commits[repo.refs["main"]]
    found = files[file]
    if isinstance(found, Large):
        hub.stored[found.oid] = change(hub.stored[found.oid])
    else:
        files[file] = change(found)


def edited(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps({**json.loads(raw), **changes}).encode()


def flipped(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


TAMPERED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a bit": ("graft.safetensors", flipped, "graft.safetensors of graft 'me/spam' was truncated or changed"),
    "not JSON": ("graft.json", lambda raw: raw[:-2], "graft.json of graft 'me/spam' is not JSON"),
    "a later format": ("graft.json", edited(format=2), "'me/spam' is in format 2 and this version reads 1"),
    "a head": ("graft.json", edited(head={"kind": "x", "labels": []}), "a head of kind 'x' is unknown"),
    "a method": ("graft.json", edited(method={"method": "os.system"}), "'os.system'"),
    "an origin": ("graft.json", edited(origin=5), "graft.json of graft 'me/spam' does not hold a graft's record"),
    "a way out": ("graft.json", edited(name="../../etc"), "task name '../../etc' cannot be used"),
    "no name": ("graft.json", edited(name=None), "a task's name is empty: give it one"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_what_was_changed_since_it_was_pushed_is_not_stored(hub: Hub, saved: Path, tmp_path: Path, case: str) -> None:
    file, change, sentence = TAMPERED[case]
    store = tmp_path / "grafts"
    spam(seed=5).save(store / "spam")
    tg.push(saved / "spam", "me/spam")
    changed(hub, "me/spam", file, change)
    refused(re.escape(sentence), lambda: tg.pull("me/spam", store), store)


def test_a_damaged_cache_says_what_to_delete(hub: Hub, saved: Path, tmp_path: Path) -> None:
    tg.push(saved / "spam", "me/spam")
    tg.pull("me/spam", tmp_path / "grafts")
    damaged = next((tmp_path / "cache").rglob("snapshots/*/graft.safetensors")).resolve()
    damaged.write_bytes(flipped(damaged.read_bytes()))
    said = refused("nothing was stored", lambda: tg.pull("me/spam", tmp_path / "grafts"), tmp_path / "grafts")
    folder = re.search("delete (.*) first", said)
    assert folder and Path(folder[1]).name == "models--me--spam" and Path(folder[1]).is_dir()


def test_a_hub_that_dies_in_the_middle_leaves_the_store_as_it_was(hub: Hub, saved: Path, tmp_path: Path) -> None:
    store = tmp_path / "grafts"
    tg.push(saved / "spam", "me/spam")
    hub.cut_after, hub.dies_then = 500, True
    refused("the Hub could not be used for repository 'me/spam'", lambda: tg.pull("me/spam", store), store)
    assert hub.gone and not store.exists()
    hub.gone = False
    assert tg.pull("me/spam", store).version == 1


def test_only_for_the_backbone_it_was_made_for(hub: Hub, saved: Path, tmp_path: Path) -> None:
    store = tmp_path / "grafts"
    other = tiny.backbone()
    with torch.no_grad():
        other.model.embeddings.word_embeddings.weight[0] += 1
    own = tiny.backbone()
    for name in ("spam", "house"):
        tg.push(saved / name, f"me/{name}")
        refused("made for another backbone", lambda name=name: tg.pull(f"me/{name}", store, backbone=other), store)
        assert tg.pull(f"me/{name}", store, backbone=own).version == 1
    assert not hasattr(own.model, "taskgraft") and not hasattr(other.model, "taskgraft")
    changed(hub, "me/spam", "graft.json", lambda raw: raw.replace(b'"size": 4', b'"size": 5'))
    hub.repos["me/spam"].refs["main"] = hub.repos["me/spam"].commit({}, "another")
    refused("has shape", lambda: tg.pull("me/spam", store, backbone=own), store)
    tg.add_graft(own.model, store / "spam")
    refused("carries tasks: give one without", lambda: tg.pull("me/spam", store, backbone=own), store)


# -- from a shell


def test_a_shell_with_the_clients_own_settings(hub: Hub, saved: Path, tmp_path: Path) -> None:
    """Another process each, with the environment that users set, and large files by Xet."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_HUB_DISABLE_XET", "HF_XET_CACHE"):
        environment.pop(name, None)
    store, said = str(tmp_path / "grafts"), ""

    def run(*words: str, **more: str) -> dict[str, Any]:
        nonlocal said
        command = [sys.executable, "-m", "taskgraft.cli", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env={**environment, **more}, check=False)
        said += done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode == 0) == ("error" not in found), done
        return found

    pushed = run("push", "spam", "me/spam", "--store", str(saved), "--private")
    assert pushed["task"] == "spam" and pushed["repo"] == "me/spam" and pushed["url"].endswith(pushed["commit"])
    assert not hub.stored and any("xet-write-token" in asked for asked in hub.asked)
    pulled = run("pull", "me/spam", "--store", store, "--revision", pushed["commit"])
    assert pulled == {"task": "spam", "name": "spam", "version": 1, "repo": "me/spam", "commit": pushed["commit"]}
    assert any("xet-read-token" in asked for asked in hub.asked)
    tensors = [Path(place, "spam", "graft.safetensors").read_bytes() for place in (saved, store)]
    assert tensors[0] == tensors[1]
    hub.gone = True
    pinned = ("--revision", pushed["commit"], "--name", "again")
    offline = run("pull", "me/spam", "--store", store, *pinned, HF_HUB_OFFLINE="1")
    assert (offline["task"], offline["version"], offline["commit"]) == ("again", 1, pushed["commit"])
    assert TOKEN not in said and TOKEN.encode() not in b"".join(contents(tmp_path).values())


def test_the_guide_runs(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    spam().save("grafts/spam")
    text = (ROOT / "docs/hub.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert [command.split()[1] for command in commands] == ["push", "pull", "pull"]
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert done.exit_code == 0, done.output
    scope: dict[str, object] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(snippet, "hub.md", "exec"), scope)
    assert tg.Store("elsewhere").names() == ["junk", "spam"] and "spam 2" in capsys.readouterr().out


def test_an_adapter_is_taken_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    files = hub_files.unpack(tmp_path / "files")
    folder = files / "bert" / "seq_bn"
    content: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir()}
    first = hub.repo("ukp/reviews").commit({**content, "evil.py": b"raise SystemExit", "README.md": b"hello"}, "one")
    hub.repo("ukp/other").commit({"README.md": b"nothing"}, "none")
    model = hub_files.backbone_of(files / "bert")
    assert tg.import_adapterhub(model, "ukp/reviews", revision=first) == "seq_bn"
    inputs, expected = hub_files.expected_of(files / "bert")
    found = hub_files.logits_of(model, ["seq_bn"] * 3, inputs)
    assert hub_files.difference(found, expected["seq_bn"], inputs["attention_mask"]) < 1e-5
    assert not list((tmp_path / "cache").rglob("evil.py"))
    with pytest.raises(tg.GraftError, match=r"'ukp/other' has no adapter_config\.json"):
        tg.import_adapterhub(model, "ukp/other")
    with pytest.raises(tg.GraftError, match="there is no repository 'ukp/none'"):
        tg.import_adapterhub(model, "ukp/none")


def test_wrong_arguments_are_sentences_before_the_hub_is_asked(saved: Path, tmp_path: Path) -> None:
    for given, said in (
        (lambda: tg.push(saved / "spam", None), "no name of a repository"),
        (lambda: tg.push(None, "me/spam"), "no saved graft"),
        (lambda: tg.pull("", tmp_path), "no name of a repository"),
        (lambda: tg.pull("me/spam", tmp_path, revision=5), "no branch, tag or commit"),
        (lambda: tg.pull("me/spam", tmp_path, revision=""), "no branch, tag or commit"),
        (lambda: tg.pull("me/spam", tmp_path, name="../x"), "cannot be used"),
        (lambda: tg.pull("me/spam", None), "no store"),
    ):
        with pytest.raises(tg.GraftError, match=said):
            given()  # type: ignore[no-untyped-call]
