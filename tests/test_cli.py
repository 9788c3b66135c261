"""The command line and the package from outside: what a shell sees."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.cli import app
from taskgraft.cli.options import Together, Training

import tiny
from families import T5

FAST = ["--epochs", "2", "--learning-rate", "0.01", "--batch-size", "16"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def record(self) -> dict[str, Any]:
        """The one JSON object on the last line of stdout."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def taskgraft(*words: str, stdin: str | bytes = "") -> Done:
    """A command as a shell would run it, in this process."""
    result = CliRunner().invoke(app, list(words), input=stdin)
    return Done(result.exit_code, result.stdout, result.stderr)


def well(*words: str, stdin: str | bytes = "") -> Done:
    done = taskgraft(*words, stdin=stdin)
    assert done.code == 0, done
    return done


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def tweets(path: Path, count: int = 90, seed: int = 0, header: Sequence[str] = ("tweet", "belief")) -> str:
    found, _ = tiny.rows("classification", count, seed)
    return write_csv(path, header, [[row["text"], "yes" if row["label"] else "no"] for row in found])


def contents(folder: Path) -> dict[str, str]:
    """Every file and link under a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture(scope="module")
def trained(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv, test.csv and a store that holds the task `warming`."""
    folder = tmp_path_factory.mktemp("trained")
    data = tweets(folder / "train.csv")
    tweets(folder / "test.csv", count=20, seed=5)
    store = str(folder / "grafts")
    well("train", data, "--text", "tweet", "--label", "belief", "--name", "warming", "--store", store,
         "--backbone", backbone, *FAST)  # fmt: skip
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working folder."""
    folder = tmp_path / "here"
    shutil.copytree(trained, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


# -- the package and the app, from outside


@pytest.mark.parametrize("module", ["torch", "transformers", "typer"])
def test_importing_the_package_does_no_work(module: str) -> None:
    done = run("-c", f"import sys, taskgraft; print({module!r} in sys.modules)")
    assert done.stdout.strip() == "False"


def test_methods_do_not_need_torch() -> None:
    done = run("-c", "import sys, taskgraft as tg; tg.Adapter(size=8); print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_command_line_imports_nothing_that_is_slow() -> None:
    slow = "{'torch', 'transformers', 'pyarrow', 'sklearn', 'scipy', 'numpy', 'matplotlib', 'accelerate', 'datasets'}"
    done = run("-c", f"import sys, taskgraft.cli; print(sorted({slow} & sys.modules.keys()))")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_teaches_and_bad_usage_exits_with_2() -> None:
    done = run("-m", "taskgraft.cli", "--help")
    assert done.returncode == 0
    for command in ("train", "evaluate", "predict", "compare", "tasks", "params", "demo"):
        assert command in done.stdout
        shown = taskgraft(command, "--help")
        assert shown.code == 0 and "--json" in shown.out
        assert command == "demo" or f"   taskgraft {command} " in shown.out
    assert run("-m", "taskgraft.cli", "frobnicate").returncode == 2
    assert taskgraft("--version").out == f"taskgraft {tg.__version__}\n"
    assert taskgraft().code == 2


def test_every_setting_is_an_option() -> None:
    shared = {field.name for group in (Training, Together) for field in dataclasses.fields(group)}
    assert shared | {"seed", "checkpoint_seconds"} == {field.name for field in dataclasses.fields(tg.Settings)}
    assert tg.Settings(**Training().settings(), **Together().settings()) == tg.Settings()


# -- train and evaluate


def test_a_file_in_and_a_graft_out(here: Path, backbone: str) -> None:
    done = well("train", "train.csv", "--text", "tweet", "--label", "belief", "--name", "mine", "--store", "other",
                "--backbone", backbone, *FAST)  # fmt: skip
    assert "72 to train on, 9 to validate, 9 to test; classification, 2 classes (no, yes)" in done.out
    graft = tg.Store("other").get("mine")
    assert f"Score: {graft.metrics['score']:.3f} (accuracy on the test rows)" in done.out
    assert f"Trained: {graft.parameters:,} parameters" in done.out and "of the backbone's 20,640" in done.out
    assert 'Next: taskgraft predict mine "..." --store other' in done.out
    assert done.err == "" and graft.method == tg.Adapter(size=64, pooling="mean")
    assert not (here / "other" / ".runs").exists()


def test_names_columns_and_the_store_have_defaults(here: Path, backbone: str) -> None:
    tweets(here / "my mood.csv", header=("text", "label"))
    done = well("train", "my mood.csv", "--backbone", backbone, "--json", *FAST)
    record = done.record
    assert (record["task"], record["store"], record["version"]) == ("my mood", "grafts", 1)
    assert record["columns"] == {"text": "text", "label": "label"} and record["labels"] == ["no", "yes"]
    assert record["rows"] == {"train": 72, "validation": 9, "test": 9} and record["metrics"] == ["accuracy"]
    graft = tg.Store("grafts").get("my mood")
    assert record["trained"] == graft.parameters and record["score"] == graft.metrics["score"]
    assert record["bytes"] == next(entry.bytes for entry in tg.Store("grafts").list() if entry.name == "my mood")
    assert len(done.out.splitlines()) == 1 and "to train on" in done.err  # people read stderr


def test_settings_reach_the_run(here: Path, backbone: str) -> None:
    done = well("train", "train.csv", "--name", "tuned", "--backbone", backbone, "--method", "norms@0.02", "--epochs",
                "1", "--batch-size", "8", "--accumulation", "2", "--max-length", "6", "--label-smoothing", "0.1",
                "--balance-classes", "--patience", "5", "--precision", "fp32", "--seed", "7", "--average", "0.5",
                "--metric", "macro_f1", "--metric", "accuracy", "--validation", "0.2", "--test", "test.csv",
                "--json")  # fmt: skip
    record, settings = done.record, done.record["settings"]
    assert record["method"]["method"] == "norms" and settings["learning_rate"] == 0.02
    assert (settings["epochs"], settings["batch_size"], settings["accumulation"], settings["max_length"]) == (
        1,
        8,
        2,
        6,
    )
    assert (settings["label_smoothing"], settings["balance_classes"], settings["patience"]) == (0.1, True, 5)
    assert (settings["precision"], settings["seed"], settings["average"]) == ("fp32", 7, 0.5)
    assert record["metrics"] == ["macro_f1", "accuracy"] and record["rows"]["test"] == 20
    assert record["cut"]["train"] > 0
    assert f"Cut at 6 tokens (--max-length): {record['cut']['train']} of {record['rows']['train']} train" in done.err


def test_the_seed_changes_the_weights_and_not_the_splits(here: Path, backbone: str) -> None:
    found = []
    for seed in ("0", "1"):
        well("train", "train.csv", "--name", f"s{seed}", "--seed", seed, "--backbone", backbone, *FAST)
        done = well("predict", f"s{seed}", "it was good")
        found.append((tg.Store("grafts").get(f"s{seed}").task["notes"], done.out))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_training_again_makes_a_version_that_can_be_rolled_back(here: Path, backbone: str) -> None:
    first = well("predict", "warming", "it was good").out
    done = well("train", "train.csv", "--name", "warming", "--seed", "3", "--backbone", backbone, *FAST)
    assert "version 2" in done.out
    assert well("predict", "warming", "it was good").out != first
    assert well("predict", "warming", "it was good", "--version", "1").out == first
    assert well("tasks", "rollback", "warming", "--json").record == {
        "task": "warming",
        "version": 1,
        "versions": [1, 2],
    }
    assert well("predict", "warming", "it was good").out == first
    assert "version 2" in well("tasks", "rollback", "warming", "--version", "2").out
    assert "1 earlier version deleted" in well("tasks", "prune", "--keep", "0").out
    assert tg.Store("grafts").versions("warming") == [2]


def test_a_graft_is_evaluated_on_a_whole_file(here: Path) -> None:
    done = well(
        "evaluate", "warming", "test.csv", "--text", "tweet", "--label", "belief", "--store", "grafts", "--json"
    )
    assert done.record["task"] == "warming" and done.record["rows"] == 20
    assert done.record["score"] == done.record["metrics"]["accuracy"] and "macro_f1" in done.record["metrics"]
    right = [
        answer["label"] == row["belief"]
        for answer, row in zip(
            well("predict", "warming", "--file", "test.csv").lines,
            csv.DictReader((here / "test.csv").open(encoding="utf-8")),
            strict=True,
        )
    ]
    assert done.record["score"] == pytest.approx(sum(right) / 20)
    assert f"accuracy           {done.record['score']:.4f}" in well("evaluate", "warming", "test.csv").out


def test_evaluate_takes_the_columns_of_training_only_where_the_file_has_them(here: Path) -> None:
    tweets(here / "other.csv", count=12, header=("text", "label"))
    assert well("evaluate", "warming", "other.csv", "--json").record["rows"] == 12
    write_csv(here / "wide.csv", ["text", "tweet", "belief"], [["x", "it was good", "yes"], ["y", "it was bad", "no"]])
    alone = write_csv(here / "alone.csv", ["tweet", "belief"], [["it was good", "yes"], ["it was bad", "no"]])
    wide = well("evaluate", "warming", "wide.csv", "--json").record
    assert wide["metrics"] == well("evaluate", "warming", alone, "--json").record["metrics"]


def test_pairs_are_trained_evaluated_and_predicted(tmp_path: Path, backbone: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found, _ = tiny.rows("classification", 60)
    rows = [["it was", row["text"], ["apart", "same"][row["label"]]] for row in found]
    write_csv(tmp_path / "pairs.csv", ["premise", "hypothesis", "relation"], rows)
    done = well("train", "pairs.csv", "--text", "premise", "--pair", "hypothesis", "--label", "relation", "--name",
                "nli", "--store", "grafts", "--backbone", backbone, *FAST)  # fmt: skip
    assert 'taskgraft predict nli "..." --pair "..."' in done.out
    assert well("evaluate", "nli", "pairs.csv", "--json").record["rows"] == 60
    [line] = well("predict", "nli", "it was", "--pair", "good").lines
    assert list(line) == ["text", "pair", "label", "probability", "probabilities"] and line["pair"] == "good"
    from_file = well("predict", "nli", "--file", "pairs.csv").lines
    assert [line["pair"] for line in from_file] == [row[1] for row in rows]
    swapped = well("predict", "nli", "--file", "pairs.csv", "--text", "hypothesis", "--pair", "premise").lines
    assert [line["text"] for line in swapped] == [row[1] for row in rows]
    for words, sentence in (
        (["it was"], "reads pairs of texts"),
        (["it was", "a", "--pair", "b"], "2 texts and 1 second texts were given"),
    ):
        refused = taskgraft("predict", "nli", *words)
        assert refused.code == 2 and sentence in refused.err and refused.out == ""


# -- predict


def test_texts_come_from_the_line_a_file_or_stdin(here: Path) -> None:
    texts = ["it was good", "the film was awful", "é été, 真"]
    given = well("predict", "warming", *texts)
    assert [line["text"] for line in given.lines] == texts
    for line in given.lines:
        assert list(line) == ["text", "label", "probability", "probabilities"]
        assert line["probability"] == max(line["probabilities"].values()) == line["probabilities"][line["label"]]
        assert list(line["probabilities"]) == ["no", "yes"]
    (here / "plain.txt").write_text("\n".join([texts[0], "", *texts[1:]]) + "\n", encoding="utf-8")
    write_csv(here / "rows.csv", ["id", "message"], list(enumerate(texts)))
    objects = [json.dumps({"id": i, "message": text}) + "\n" for i, text in enumerate(texts)]
    (here / "rows.jsonl").write_text("".join(objects), encoding="utf-8")
    write_csv(here / "only.csv", ["whatever"], [[text] for text in texts])
    piped = "\r\n".join(texts).encode()
    assert well("predict", "warming", stdin=piped).out == given.out
    assert well("predict", "warming", "-", stdin=piped).out == given.out
    assert well("predict", "warming", "--file", "-", stdin=piped).out == given.out
    assert well("predict", "warming", "--encoding", "utf-16", stdin="\n".join(texts).encode("utf-16")).out == given.out
    assert well("predict", "warming", "--file", "plain.txt").out == given.out
    assert well("predict", "warming", "--file", "rows.csv", "--text", "message").out == given.out
    assert well("predict", "warming", "--file", "rows.jsonl", "--text", "message").out == given.out
    assert well("predict", "warming", "--file", "only.csv").out == given.out
    ended = well("predict", "warming", *texts, "--json")
    assert ended.lines[:-1] == given.lines
    assert ended.record == {"task": "warming", "kind": "classification", "rows": 3}


def write_kind(path: Path, kind: str) -> None:
    """A JSONL file of a kind of task, in the form its columns are guessed from."""
    found, labels = tiny.rows(kind, 60)
    lines: list[dict[str, Any]] = []
    for row in found:
        if kind == "multilabel":
            lines.append({"text": row["text"], "labels": [labels[i] for i in row["label"]]})
        elif kind == "tokens":
            lines.append({"tokens": row["text"], "tags": [labels[i] for i in row["label"]]})
        elif kind == "spans":
            answers = {"text": [row["label"][0]["text"]], "answer_start": [row["label"][0]["start"]]}
            lines.append({"question": row["text"], "context": row["pair"], "answers": answers})
        else:
            lines.append({"text": row["text"], "target" if kind == "text" else "score": row["label"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "asked", "keys"),
    [
        ("multilabel", ["it was good"], ["text", "labels", "probabilities"]),
        ("regression", ["it was good"], ["text", "value"]),
        ("tokens", ["it was good"], ["text", "tags"]),
        ("spans", ["it was", "--pair", "the film was good"], ["text", "pair", "answer", "start", "end"]),
    ],
)
def test_every_kind_answers_in_its_own_form(
    kind: str, asked: list[str], keys: list[str], tmp_path: Path, backbone: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_kind(tmp_path / "data.jsonl", kind)
    record = well("train", "data.jsonl", "--kind", kind, "--backbone", backbone, "--json", *FAST).record
    assert record["kind"] == kind and f"{kind} " in well("tasks").out
    assert well("evaluate", "data", "data.jsonl", "--json").record["rows"] == 60
    [line] = well("predict", "data", *asked).lines
    assert list(line) == keys
    if kind == "multilabel":
        assert line["labels"] == [label for label, chance in line["probabilities"].items() if chance > 0.5]
    elif kind == "regression":
        assert isinstance(line["value"], float)
    elif kind == "tokens":
        assert line["text"] == ["it", "was", "good"] and len(line["tags"]) == 3
    else:
        assert "the film was good"[line["start"] : line["end"]] == line["answer"]
    assert len(well("predict", "data", "--file", "data.jsonl").lines) == 60


def test_text_comes_out_of_a_model_that_writes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    hf.T5ForConditionalGeneration(hf.T5Config(**T5)).save_pretrained("writer")
    tiny.tokenizer().save_pretrained("writer")
    write_kind(tmp_path / "data.jsonl", "text")
    well("train", "data.jsonl", "--kind", "text", "--backbone", "writer", "--method", "adapter-4", *FAST)
    [line] = well("predict", "data", "it was good").lines
    assert list(line) == ["text", "answer"] and isinstance(line["answer"], str)


# -- a stream of tasks


def test_a_stream_of_tasks_leaves_earlier_answers_as_they_were(tmp_path: Path, backbone: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [row["text"] for row in tiny.rows("classification", 30, seed=77)[0]]
    answers: dict[str, str] = {}
    for name, kind in (("first", "classification"), ("second", "regression"), ("third", "multilabel")):
        write_kind(tmp_path / "data.jsonl", kind)
        words = ["--label", "score"] if kind == "classification" else []
        well("train", "data.jsonl", "--kind", kind, *words, "--name", name, "--backbone", backbone, *FAST)
        (tmp_path / "data.jsonl").unlink()
        answers[name] = well("predict", name, *texts).out
        for earlier, before in answers.items():
            assert well("predict", earlier, *texts).out == before
    assert len(set(answers.values())) == 3 and tg.Store("grafts").names() == ["first", "second", "third"]


def test_a_stopped_run_goes_on_when_it_is_started_again(here: Path, backbone: str, monkeypatch: Any) -> None:
    from taskgraft.training.loop import Loop

    command = ["train", "train.csv", "--name", "long", "--backbone", backbone, *FAST]
    step = Loop._step

    def interrupted(self: Loop, watch: Any) -> None:
        if self.lanes[0].course.steps == 3:
            signal.raise_signal(signal.SIGINT)
        step(self, watch)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_step", interrupted)
        stopped = taskgraft(*command, "--json")
    assert stopped.code == 130 and "stopped at step 4 of 10" in stopped.err
    assert stopped.record["error"] in stopped.err and "long" not in tg.Store("grafts").names()
    again = well(*command)
    assert "Going on from step 4 of 10" in again.out and not (here / "grafts" / ".runs").exists()
    well(*command, "--store", "unbroken")
    assert (
        well("predict", "long", "it was good").out == well("predict", "long", "it was good", "--store", "unbroken").out
    )


def test_logs_of_a_tracker_outlive_the_run(here: Path, backbone: str) -> None:
    pytest.importorskip("tensorboard")
    done = well("train", "train.csv", "--name", "logged", "--track", "tensorboard", "--backbone", backbone, *FAST)
    folder = here / "grafts" / ".runs" / "logged"
    assert f"The logs of tensorboard are in {Path('grafts/.runs/logged')}" in done.out
    assert list(folder.rglob("events.out.tfevents.*")) and not list(folder.glob("state*"))


# -- tasks


def test_the_store_is_listed_shown_renamed_and_emptied(here: Path) -> None:
    listed = well("tasks", "--store", "grafts")
    graft = tg.Store("grafts").get("warming")
    for word in ("warming", "classification", f"{graft.metrics['score']:.3f} accuracy (test)", f"{graft.parameters:,}"):
        assert word in listed.out
    [entry] = well("tasks", "--json").record["tasks"]
    assert (entry["name"], entry["kind"], entry["version"], entry["error"]) == ("warming", "classification", 1, None)
    shown = well("tasks", "show", "warming", "--store", "grafts")
    assert "text: tweet, label: belief" in shown.out and "adapter pooling=mean size=64" in shown.out
    assert well("tasks", "--json", "show", "warming").record["versions"] == [1]
    assert well("tasks", "--store", "grafts", "rename", "warming", "belief", "--json").record["task"] == "belief"
    assert tg.Store("grafts").names() == ["belief"]
    well("tasks", "remove", "belief", "--yes")
    assert "No tasks in grafts yet" in well("tasks").out
    assert well("tasks", "--store", "nowhere", "--json").record == {"store": "nowhere", "tasks": []}
    assert not (here / "nowhere").exists()


def test_a_broken_graft_is_listed_with_its_error(here: Path) -> None:
    (here / "grafts" / "warming" / "graft.safetensors").write_bytes(b"cut")
    listed = well("tasks")
    assert "broken" in listed.out and "was truncated or changed since it was written" in listed.out
    assert "truncated" in well("tasks", "--json").record["tasks"][0]["error"]
    refused = taskgraft("predict", "warming", "x")
    assert refused.code == 2 and "truncated" in refused.err


def test_a_person_is_asked_before_a_task_is_removed(here: Path) -> None:
    """On a terminal, which a pseudo-terminal is."""
    pty = pytest.importorskip("pty")
    for answer, left in (("n\n", ["warming"]), ("y\n", [])):
        leader, follower = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-m", "taskgraft.cli", "tasks", "remove", "warming"],
            stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.write(leader, answer.encode())
        _, err = child.communicate(timeout=120)
        os.close(leader)
        os.close(follower)
        assert child.returncode == 0 and "Delete grafts/warming for good?" in err
        assert tg.Store("grafts").names() == left


# -- params and compare


def test_parameters_are_counted_from_the_configuration(tmp_path: Path, backbone: str) -> None:
    shutil.copy(Path(backbone) / "config.json", tmp_path / "config.json")  # there are no weights to load
    names = ["adapter-8", "norms", "head", "head-16", "top-1", "full"]
    record = well("params", *names, "--backbone", str(tmp_path), "--labels", "3", "--json").record
    config = hf.AutoConfig.from_pretrained(backbone)
    assert record["total"] == 20640 and [line["method"] for line in record["methods"]] == names
    assert record["methods"][0]["trained"] == tg.count(tg.Adapter(size=8), config, labels=3)
    assert record["methods"][-1]["trained"] == 20640 + 3 * 32 + 3
    shown = well("params", "norms", "--backbone", backbone)
    assert "of the backbone's 20,640" in shown.out and "1.87 %" in shown.out


def test_methods_are_compared_and_no_run_repeated(here: Path, backbone: str) -> None:
    command = ["compare", "train.csv", "head", "adapter-4", "--seeds", "2", "--out", "results", "--backbone", backbone,
               "--epochs", "2", "--batch-size", "16"]  # fmt: skip
    done = well(*command, "--json")
    record = done.record
    assert [(line["method"], line["seeds"]) for line in record["methods"]] == [("head", 2), ("adapter-4", 2)]
    assert record["split"] == "test" and record["metrics"] == ["accuracy"]
    assert len(json.loads((here / "results" / "runs.json").read_text())["runs"]) == 4
    table = (here / "results" / "table.md").read_text()
    assert table.startswith("| method") and "| adapter-4 " in table and "±" in table
    assert (here / "results" / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (here / "results" / "tradeoff.svg").read_text()[:600]
    before = (here / "results" / "runs.json").read_bytes()
    again = well(*command, "--seeds", "2")
    assert (here / "results" / "runs.json").read_bytes() == before
    assert "adapter-4" in again.out and "4 of 4" in again.out and "accuracy (test)" in again.out
    other = taskgraft(*command, "--metric", "macro_f1")
    assert other.code == 2 and "holds runs of another task" in other.err
    assert well("compare", "train.csv", "head", "--seeds", "1", "--epochs", "1", "--backbone", backbone)
    assert (here / "comparisons" / "train" / "tradeoff.png").is_file()


# -- bad input: a sentence, exit code 2, and nothing changed

TRAIN = ["train", "train.csv", "--backbone", "BACKBONE"]
BAD: list[tuple[list[str], str]] = [
    (["train", "nothing.csv"], "there is no file nothing.csv"),
    ([*TRAIN, "--text", "twet"], "no column 'twet' for the text"),
    ([*TRAIN, "--label", "beleif"], "did you mean 'belief'?"),
    ([*TRAIN, "--name", "../out"], "cannot be used"),
    ([*TRAIN, "--kind", "poetry"], "kind 'poetry' is unknown"),
    ([*TRAIN, "--metric", "beauty"], "beauty"),
    ([*TRAIN, "--method", "adaptr-64"], "method 'adaptr-64' is unknown"),
    ([*TRAIN, "--method", "full"], "`taskgraft compare SOURCE full`"),
    ([*TRAIN, "--method", "top-2"], "changes the backbone itself"),
    ([*TRAIN, "--epochs", "0"], "epochs=0 must be a whole number of at least 1"),
    ([*TRAIN, "--epochs", "many"], "'--epochs'"),
    ([*TRAIN, "--learning-rate", "-1"], "learning_rate=-1.0 must be above 0"),
    ([*TRAIN, "--label-smoothing", "2"], "label_smoothing=2.0"),
    ([*TRAIN, "--precision", "fp8"], "precision='fp8' is unknown"),
    ([*TRAIN, "--validation", "1.5"], "cannot be held out"),
    ([*TRAIN, "--test", "nothing.csv"], "there is no file nothing.csv"),
    ([*TRAIN, "--store", "train.csv"], "the store train.csv is a file"),
    ([*TRAIN, "--store", "folders", "--name", "plain"], "was not written by a store"),
    ([*TRAIN, "--track", "crystalball", *FAST], "crystalball"),
    (["train", "train.csv", "--backbone", "no/such/model"], "could not be loaded"),
    (["train"], "Missing argument 'SOURCE...'"),
    (["train", "train.csv", "--epoch"], "No such option"),
    (["evaluate", "warming", "nothing.csv"], "there is no file nothing.csv"),
    (["evaluate", "warming", "wrong.csv"], "maybe"),
    (["evaluate", "warming", "test.csv", "--text", "words"], "it has tweet, belief"),
    (["evaluate", "wrming", "test.csv"], "it has warming; did you mean 'warming'?"),
    (["evaluate", "warming", "test.csv", "--store", "empty"], "the store empty is empty"),
    (["evaluate", "warming", "test.csv", "--version", "9"], "has no version 9"),
    (["predict", "cooling", "x"], "there is no task 'cooling' in the store grafts: it has warming"),
    (["predict", "warming"], "the input is empty"),
    (["predict", "warming", "--file", "nothing.csv"], "there is no file nothing.csv"),
    (["predict", "warming", "--file", "blank.txt"], "the input is empty"),
    (["predict", "warming", "--file", "unclear.csv"], "unclear.csv has the columns a, b: name that of the text"),
    (["predict", "warming", "--file", "test.csv", "--text", "words"], "it has tweet, belief"),
    (["predict", "warming", "--file", "gap.jsonl"], "gap.jsonl, line 2 has no tweet"),
    (["predict", "warming", "x", "--file", "test.csv"], "leave one of them out"),
    (["predict", "warming", "--text", "tweet"], "lines of text have none"),
    (["predict", "warming", "x", "--backbone", "OTHER"], "another backbone"),
    (["compare", "train.csv", "head", "adptr"], "method 'adptr' is unknown"),
    (["compare", "train.csv", "head", "--seeds", "0"], "'--seeds'"),
    (["compare", "train.csv", "head", "--backbone", "BACKBONE", "--out", "train.csv"], "could not be made"),
    (["params", "adaptr"], "method 'adaptr' is unknown"),
    (["params", "norms", "--backbone", "no/such/model"], "could not be loaded"),
    (["params", "norms", "--labels", "0"], "'--labels'"),
    (["tasks", "show", "cooling"], "it has warming"),
    (["tasks", "rename", "warming", "a/b"], "cannot be used"),
    (["tasks", "remove", "cooling", "--yes"], "it has warming"),
    (["tasks", "rollback", "warming"], "no version before the current one"),
    (["tasks", "prune", "--keep", "-1"], "must not be negative"),
    (["tasks", "--store", "train.csv"], "is a file"),
    (["tasks", "frobnicate"], "No such command"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence_and_changes_nothing(
    words: list[str], sentence: str, here: Path, backbone: str
) -> None:
    write_csv(here / "wrong.csv", ["tweet", "belief"], [["it was good", "yes"], ["it was bad", "maybe"]])
    (here / "blank.txt").write_text("\n\n", encoding="utf-8")
    (here / "gap.jsonl").write_text('{"tweet": "a"}\n{"other": "b"}\n', encoding="utf-8")
    write_csv(here / "unclear.csv", ["a", "b"], [["x", "y"]])
    (here / "folders" / "plain").mkdir(parents=True)
    if "OTHER" in words:
        hf.BertModel(hf.BertConfig(**tiny.SMALL)).save_pretrained(here / "other")
        tiny.tokenizer().save_pretrained(here / "other")
    before = contents(here)
    folders = sorted(path for path in here.rglob("*") if path.is_dir())
    words = [{"BACKBONE": backbone, "OTHER": "other"}.get(word, word) for word in words]
    done = taskgraft(*words, "--json")
    assert done.code == 2, done
    error = done.record["error"]
    assert sentence in error and "\n" not in error
    assert done.out.count("\n") == 1 and done.err.splitlines()[-1] == f"taskgraft: {error}"
    assert "Traceback" not in done.err
    assert contents(here) == before and sorted(path for path in here.rglob("*") if path.is_dir()) == folders
    plain = taskgraft(*words)
    assert plain.code == 2 and plain.err == f"taskgraft: {error}\n" and error not in plain.out


def test_bytes_that_are_no_text_are_refused_on_stdin(here: Path) -> None:
    done = taskgraft("predict", "warming", stdin=b"it was \xff good\n")
    assert done.code == 2 and "stdin holds byte 0xff" in done.err
    unknown = taskgraft("predict", "warming", "--encoding", "klingon", stdin=b"x")
    assert unknown.code == 2 and "encoding 'klingon' is unknown" in unknown.err


def test_what_was_not_expected_is_reported_in_full(here: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tg.Store, "list", lambda self: 1 / 0)
    done = taskgraft("tasks", "--json")
    assert (
        done.code == 1 and "Traceback" in done.err and done.record == {"error": "ZeroDivisionError: division by zero"}
    )


def test_a_real_process_keeps_stdout_for_programs(here: Path, backbone: str) -> None:
    command = ["train", "train.csv", "--name", "real", "--backbone", backbone, "--method", "head", "--epochs", "1"]
    done = run("-m", "taskgraft.cli", *command, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] == "real" and "Loading weights" not in done.stderr
    bad = run("-m", "taskgraft.cli", "predict", "unreal", "x")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert (
        bad.stderr
        == "taskgraft: there is no task 'unreal' in the store grafts: it has real, warming; did you mean 'real'?\n"
    )
