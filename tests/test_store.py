"""The folder of grafts: whole at every moment, versions that come back, refusals that change nothing."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from taskgraft.errors import GraftError
from taskgraft.grafts.graft import NEEDED, Graft, load_graft
from taskgraft.grafts.store import Store
from taskgraft.methods import Adapter
from taskgraft.nn.heads import Head

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["taskgraft.grafts.store"])
BAD_NAMES = ["", ".", "..", "../x", "/etc/x", "a/b", "a\\b", ".hidden", "a\0b", "a\n", " a", "a ", "a.", "x" * 129]


def a_graft(value: float = 0.0, **changes: Any) -> Graft:
    fields: dict[str, Any] = {
        "name": "spam",
        "method": Adapter(size=4),
        "head": Head("classification", ("no", "yes")),
        "tensors": {"encoder.0.attention.down": torch.full((8, 4), value), "head.bias": torch.full((2,), value)},
        "backbone": {"name": "tiny", "sha256": "a" * 64, "signs": "b" * 64, "dtype": "float32"},
        "metrics": {"value": value},
        "task": {"text": "message"},
        "training": {"steps": 3},
    }
    return Graft(**{**fields, **changes})


def value_of(graft: Graft) -> float:
    """The one number that is in every part of a graft made by `a_graft`, or a failure if the parts differ."""
    value = float(graft.metrics["value"])
    for tensor in graft.tensors.values():
        assert torch.equal(tensor, torch.full_like(tensor, value))
    return value


def tree(folder: Path) -> dict[str, Any]:
    """Everything on disk under a folder: names, links and contents."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = content
    return found


def refused(folder: Path, words: str, action: Callable[[], object]) -> None:
    """The action fails with a sentence that has these words in it, and the disk stays as it was."""
    before = tree(folder)
    with pytest.raises(GraftError, match=words):
        action()
    assert tree(folder) == before


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "grafts")
    for value in (1.0, 2.0, 3.0):
        store.put(a_graft(value))
    return store


def files_of(store: Store, name: str = "spam") -> Path:
    return (store.folder / name).resolve()


# -- what is put comes back


def test_round_trip(tmp_path: Path) -> None:
    made = a_graft(1.5, head=None, created="2020-01-01T00:00:00+00:00")
    made.tensors["norm.weight"] = torch.randn(5, generator=torch.manual_seed(0)).to(torch.bfloat16)
    assert made.save(tmp_path / "new" / "store" / "spam") == 1
    back = load_graft(str(tmp_path / "new" / "store" / "spam"))
    for part in ("name", "method", "head", "backbone", "metrics", "training", "task", "created", "parameters"):
        assert getattr(back, part) == getattr(made, part)
    assert list(back.tensors) and back.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype and torch.equal(back.tensors[name], tensor)


def test_graft_json_says_what_made_it(store: Store) -> None:
    record = json.loads((files_of(store) / "graft.json").read_text())
    assert record["format"] == 1 and record["method"]["method"] == "adapter" and record["method"]["size"] == 4
    assert record["head"]["labels"] == ["no", "yes"] and record["task"] == {"text": "message"}
    assert record["sites"] == ["encoder.0.attention", "head"]
    assert record["packages"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert sorted(os.listdir(files_of(store))) == ["README.md", "graft.json", "graft.safetensors"]


def test_names_are_relative_links_so_that_a_store_can_be_moved(store: Store, tmp_path: Path) -> None:
    store.folder.rename(tmp_path / "moved")
    assert value_of(Store(tmp_path / "moved").get("spam")) == 3.0


def test_unknown_keys_are_tolerated(store: Store) -> None:
    path = files_of(store) / "graft.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": {"x": 1}}))
    assert value_of(store.get("spam")) == 3.0


def test_any_header_that_looks_like_a_pickle_by_chance_is_read(tmp_path: Path) -> None:
    store, looked_like_one = Store(tmp_path), False
    for length in range(256):
        graft = a_graft(1.0, tensors={"x" * (1 + length): torch.ones(1)})
        store.put(graft)
        looked_like_one |= (files_of(store) / "graft.safetensors").read_bytes()[0] == 0x80
        store.get("spam")
        if looked_like_one:
            return
    raise AssertionError("no header began with the byte of a pickle")


# -- versions


def test_versions_and_rollback(store: Store) -> None:
    assert store.versions("spam") == [1, 2, 3]
    assert [value_of(store.get("spam", version)) for version in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert store.rollback("spam") == 2 and value_of(store.get("spam")) == 2.0
    assert store.rollback("spam") == 1 and value_of(store.get("spam")) == 1.0
    refused(store.folder, "no version before", lambda: store.rollback("spam"))
    assert store.rollback("spam", 3) == 3 and value_of(store.get("spam")) == 3.0
    refused(store.folder, "has no version 9: the store has 1, 2, 3", lambda: store.rollback("spam", 9))
    refused(store.folder, "has no version 9", lambda: store.get("spam", 9))
    store.rollback("spam", 1)
    assert store.put(a_graft(4.0)) == 4 and value_of(store.get("spam")) == 4.0


def test_rollback_to_a_damaged_version_is_refused(store: Store) -> None:
    (store.folder / ".versions" / files_of(store).parent.name / "000002" / "graft.safetensors").write_bytes(b"")
    refused(store.folder, "truncated", lambda: store.rollback("spam"))


def test_rename_keeps_versions_and_overwrites_nothing(store: Store) -> None:
    store.put(a_graft(9.0), "tone")
    refused(store.folder, "already", lambda: store.rename("spam", "tone"))
    refused(store.folder, "already", lambda: store.rename("spam", "spam"))
    refused(store.folder, "no graft named 'none'", lambda: store.rename("none", "other"))
    (store.folder / "notes").write_text("a user's file")
    refused(store.folder, "already", lambda: store.rename("spam", "notes"))
    refused(store.folder, "remove it or rename it", lambda: store.put(a_graft(), "notes"))
    store.rename("spam", "junk mail")
    assert store.names() == ["junk mail", "tone"] and store.versions("junk mail") == [1, 2, 3]
    assert store.get("junk mail").name == "junk mail" and "spam" not in store
    assert store.put(a_graft(5.0), "spam") == 1 and value_of(store.get("junk mail")) == 3.0


def test_remove(store: Store) -> None:
    store.put(a_graft(9.0), "tone")
    store.remove("spam")
    assert "spam" not in store and store.names() == ["tone"] and len(store) == 1
    assert len(list((store.folder / ".versions").iterdir())) == 1 and not list((store.folder / ".tmp").iterdir())
    refused(store.folder, "no graft named 'spam'", lambda: store.remove("spam"))
    refused(store.folder, "no graft named 'spam'", lambda: store.get("spam"))
    assert store.put(a_graft(1.0)) == 1


def test_removing_a_name_spares_a_copy_of_its_link(store: Store) -> None:
    shutil.copy(store.folder / "spam", store.folder / "copy", follow_symlinks=False)
    store.rollback("spam")
    assert store.prune(keep=0) == 1
    store.remove("spam")
    assert value_of(store.get("copy")) == 3.0


def test_prune_keeps_the_current_and_the_newest(store: Store) -> None:
    store.put(a_graft(9.0), "tone")
    store.rollback("spam", 1)
    assert store.prune("spam") == 1 and store.versions("spam") == [1, 3]
    assert value_of(store.get("spam")) == 1.0
    store.put(a_graft(4.0))
    assert store.prune(keep=5) == 0 and store.prune(keep=2) == 1 and store.versions("spam") == [3, 4]
    assert store.prune(keep=0) == 1 and store.versions("spam") == [4] and store.versions("tone") == [1]
    refused(store.folder, "negative", lambda: store.prune(keep=-1))
    refused(store.folder, "no graft named 'none'", lambda: store.prune("none"))


def test_prune_clears_what_dead_writers_left(store: Store) -> None:
    shutil.copytree(files_of(store), store.folder / ".tmp" / "half")
    os.symlink(".versions/gone", store.folder / ".tmp" / "link")
    shutil.copytree(files_of(store), store.folder / ".versions" / ("0" * 32) / "000001")  # never got its name
    assert store.names() == ["spam"] and [entry.error for entry in store.list()] == [None]
    assert store.prune(keep=3) == 1
    assert [path for path in tree(store.folder) if "0" * 32 in path or "half" in path or "link" in path] == []
    assert value_of(store.get("spam")) == 3.0 and store.versions("spam") == [1, 2, 3]


# -- listing


def test_listing_reads_no_tensors_and_reports_the_broken(store: Store) -> None:
    for name in ("beta", "no json", "short", "zeta"):
        store.put(a_graft(1.0), name)
    (files_of(store, "no json") / "graft.json").unlink()
    (files_of(store, "short") / "graft.safetensors").write_bytes(b"x")
    os.symlink("nowhere", store.folder / "dangling")
    damaged = files_of(store, "zeta") / "graft.safetensors"
    damaged.write_bytes(bytes(damaged.stat().st_size))  # only reading it would tell
    entries = {entry.name: entry for entry in store.list()}
    assert list(entries) == ["beta", "dangling", "no json", "short", "spam", "zeta"] == store.names()
    assert {name for name, entry in entries.items() if entry.error} == {"dangling", "no json", "short"}
    assert "has no graft.json" in str(entries["no json"].error) and "truncated" in str(entries["short"].error)
    spam = entries["spam"]
    assert (spam.version, spam.method, spam.metrics, spam.parameters) == (3, "adapter", {"value": 3.0}, 34)
    assert spam.bytes == sum(path.stat().st_size for path in files_of(store).iterdir()) and spam.created


def test_a_store_that_is_not_there_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert store.list() == [] and store.names() == [] and len(store) == 0 and "spam" not in store
    assert store.prune() == 0
    for action in (store.get, store.remove, store.versions, store.rollback):
        refused(tmp_path, "no graft named 'spam'", lambda action=action: action("spam"))  # type: ignore[misc]


def test_a_plain_folder_is_a_graft(store: Store) -> None:
    shutil.copytree(files_of(store), store.folder / "plain")
    assert value_of(store.get("plain")) == 3.0 and store.get("plain").name == "plain" and "plain" in store
    assert [(entry.name, entry.version) for entry in store.list()] == [("plain", None), ("spam", 3)]
    assert store.versions("plain") == []
    refused(store.folder, "remove it or rename it first", lambda: store.put(a_graft(), "plain"))
    refused(store.folder, "no version before", lambda: store.rollback("plain"))
    refused(store.folder, "has no version 1", lambda: store.get("plain", 1))
    assert store.prune("plain") == 0
    store.rename("plain", "flat")
    assert store.put(a_graft(7.0), "plain") == 1
    store.remove("flat")
    assert store.names() == ["plain", "spam"]


def test_refusing_a_plain_folder_makes_no_store_of_its_parent(store: Store, tmp_path: Path) -> None:
    shutil.copytree(files_of(store), tmp_path / "users" / "plain")
    refused(tmp_path, "remove it", lambda: a_graft().save(tmp_path / "users" / "plain"))
    assert value_of(load_graft(tmp_path / "users" / "plain")) == 3.0
    Store(tmp_path / "users").remove("plain")
    assert Store(tmp_path / "users").names() == []


# -- damage and refusals


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_everywhere(store: Store, tmp_path: Path, name: str) -> None:
    actions: list[Callable[[], object]] = [
        lambda: store.put(a_graft(), name),
        lambda: store.put(a_graft(name=name)),
        lambda: store.get(name),
        lambda: store.versions(name),
        lambda: store.rollback(name),
        lambda: store.rename(name, "x"),
        lambda: store.rename("spam", name),
        lambda: store.remove(name),
        lambda: store.prune(name),
        lambda: name in store,
    ]
    for action in actions:
        refused(tmp_path, "name", action)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_truncated_tensors(store: Store, size: int) -> None:
    path = files_of(store) / "graft.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(store.folder, "'spam' was truncated or changed", lambda: store.get("spam"))


def test_one_changed_bit(store: Store) -> None:
    path = files_of(store) / "graft.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(store.folder, "'spam' was truncated or changed", lambda: store.get("spam"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format": "1"}', "{}", "\x80", "[" * 100_000])
def test_tampered_json(store: Store, text: str) -> None:
    (files_of(store) / "graft.json").write_bytes(text.encode("latin-1"))
    refused(store.folder, r"graft.json of graft 'spam'", lambda: store.get("spam"))
    assert store.list()[0].error


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in NEEDED for value in ("leave out", None, 2.5) if (key, value) != ("head", None)],
)
def test_json_that_lacks_something(store: Store, key: str, value: object) -> None:
    path = files_of(store) / "graft.json"
    record = json.loads(path.read_text())
    parent, _, child = key.rpartition(".")
    holder = record[parent] if parent else record
    holder[child] = value
    if value == "leave out":
        del holder[child]
    path.write_text(json.dumps(record))
    refused(store.folder, f"no valid '{key}'", lambda: store.get("spam"))


def test_a_method_of_the_future_and_a_newer_format(store: Store) -> None:
    path = files_of(store) / "graft.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "method": {**record["method"], "method": "wizardry"}}))
    refused(store.folder, "method 'wizardry' is unknown", lambda: store.get("spam"))
    path.write_text(json.dumps({"format": 2}))
    refused(store.folder, "format 2 .* update taskgraft", lambda: store.get("spam"))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_a_pickle_is_never_loaded(store: Store, tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "exploded")
    path = files_of(store) / "graft.safetensors"
    for protocol in (2, 5):
        path.write_bytes(pickle.dumps(bomb, protocol))
        refused(store.folder, "never loads pickles", lambda: store.get("spam"))
    torch.save(bomb, path)  # a zip
    refused(store.folder, "never loads pickles", lambda: store.get("spam"))
    path.rename(path.with_name("pytorch_model.bin"))
    refused(store.folder, "pytorch_model.bin, and taskgraft never loads pickles", lambda: store.get("spam"))
    (files_of(store) / "graft.json").unlink()
    refused(store.folder, "never loads pickles", lambda: store.get("spam"))
    assert not bomb.marker.exists()


@pytest.mark.parametrize("file", ["graft.json", "graft.safetensors"])
def test_a_missing_file(store: Store, file: str) -> None:
    (files_of(store) / file).unlink()
    refused(store.folder, f"'spam' has no {file}", lambda: store.get("spam"))
    assert value_of(store.get("spam", 2)) == 2.0 and store.rollback("spam") == 2


def test_not_safetensors_but_as_written(store: Store) -> None:
    folder = files_of(store)
    (folder / "graft.safetensors").write_bytes(b"nonsense")
    record = json.loads((folder / "graft.json").read_text())
    record["tensors"] |= {"bytes": 8, "sha256": hashlib.sha256(b"nonsense").hexdigest()}
    (folder / "graft.json").write_text(json.dumps(record))
    refused(store.folder, "not a safetensors file", lambda: store.get("spam"))


def test_a_record_that_is_no_json_is_refused_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    bad = a_graft(1.0, metrics={"accuracy": torch.ones(1)})
    refused(store.folder, "cannot be written as JSON", lambda: store.put(bad))
    refused(tmp_path, "cannot be written as JSON", lambda: bad.save(tmp_path / "elsewhere" / "spam"))


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    refused(tmp_path, "could not be changed", lambda: Store(tmp_path / "file").put(a_graft()))


def test_a_full_disk_leaves_the_store_as_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(store.folder, "No space left", lambda: store.put(a_graft(4.0)))
    assert store.put(a_graft(4.0)) == 4


# -- many writers, many readers, many grafts


def write_until_killed(folder: str, started: Any, acknowledged: Any) -> None:
    store, value = Store(folder), int(acknowledged.value)
    started.set()
    while True:
        value += 1
        store.put(a_graft(value))
        acknowledged.value = value
        store.put(a_graft(value), f"n{value}")
        store.rename(f"n{value}", f"m{value}")
        store.rollback("spam", store.put(a_graft(value)))
        if value % 3 == 0:
            store.prune()
        if value % 2 == 0:
            store.remove(f"m{value}")


def test_killed_at_any_moment_the_store_is_whole(tmp_path: Path) -> None:
    store, chance = Store(tmp_path), random.Random(0)
    store.put(a_graft(0.0))
    acknowledged = PROCESSES.Value("q", 0)
    for _ in range(20):
        started = PROCESSES.Event()
        writer = PROCESSES.Process(target=write_until_killed, args=(str(tmp_path), started, acknowledged))
        writer.start()
        assert started.wait(60)
        time.sleep(chance.uniform(0.0, 0.15))
        assert writer.pid is not None and writer.is_alive()
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert [entry.error for entry in store.list() if entry.error] == []
        for name in store.names():
            value_of(store.get(name))
        for version in store.versions("spam"):
            value_of(store.get("spam", version))
        assert value_of(store.get("spam")) >= acknowledged.value
    assert acknowledged.value > 5
    store.prune()
    assert len(list(tmp_path.glob(".versions/*"))) == len(store) and not list(tmp_path.glob(".tmp/*"))
    store.put(a_graft(-1.0))
    assert value_of(store.get("spam")) == -1.0


def put_all(folder: str, together: Any, values: list[int]) -> None:
    store = Store(folder)
    together.wait(60)
    for number, value in enumerate(values):
        store.put(a_graft(value))
        store.put(a_graft(value), f"new {number}")


def test_two_processes_that_put_the_same_names_lose_nothing(tmp_path: Path) -> None:
    together = PROCESSES.Barrier(2)
    values = [list(range(1, 16)), list(range(101, 116))]
    writers = [PROCESSES.Process(target=put_all, args=(str(tmp_path), together, mine)) for mine in values]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    store = Store(tmp_path)
    assert store.versions("spam") == list(range(1, 31))
    assert sorted(value_of(store.get("spam", version)) for version in range(1, 31)) == sorted(values[0] + values[1])
    for number in range(15):
        found = {value_of(store.get(f"new {number}", version)) for version in store.versions(f"new {number}")}
        assert found == {values[0][number], values[1][number]}


def test_a_reader_never_sees_a_broken_graft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store, done = Store(tmp_path), threading.Event()
    store.put(a_graft(0.0))
    seen: list[float] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                seen.append(value_of(store.get("spam")))
                assert [entry.error for entry in store.list()] == [None]
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for value in range(1, 201):
        store.put(a_graft(value))
        if value % 2 == 0:
            store.prune(keep=0)
    done.set()
    for reader in readers:
        reader.join()
    assert failures == [] and len(set(seen)) > 5


EVENTS: list[tuple[str, tuple[Any, ...]]] = []
LISTENING = False


def listen(event: str, arguments: tuple[Any, ...]) -> None:
    if LISTENING and (event == "open" or event.startswith(("os.", "shutil.", "pathlib."))):
        EVENTS.append((event, arguments))


def operations(action: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """The filesystem operations of an action, as Python's audit events tell."""
    global LISTENING
    EVENTS.clear()
    LISTENING = True
    try:
        action()
    finally:
        LISTENING = False
    return list(EVENTS)


def test_the_two_thousandth_graft_costs_what_the_first_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    sys.addaudithook(listen)
    store = Store(tmp_path)
    store.put(a_graft(), "first")
    costs = []
    for number in range(2000):
        done = operations(lambda number=number: store.put(a_graft(), f"task {number}"))  # type: ignore[misc]
        costs.append(len(done))
    reading = operations(lambda: store.get("task 1999"))
    listed = [Path(arguments[0]) for event, arguments in done + reading if event in ("os.listdir", "os.scandir")]
    assert max(costs[-100:]) <= max(costs[:100]) and costs[0] > 5
    assert tmp_path not in listed and tmp_path / ".versions" not in listed
    assert len(store) == 2001
