"""`taskgraft sweep` from a shell: what is said, what is written and stored, what is not repeated, what is refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from typer.testing import CliRunner

import taskgraft as tg
from taskgraft.cli import app
from taskgraft.training.progress import ManyQuiet
from taskgraft.training.settings import MOST_EPOCHS
from test_cli_together import prices

import tiny
from families import SMALL
from test_cli import Done, contents, taskgraft, tweets, well
from test_docs import ROOT, commands_in, write_messages

HEADER = ("text", "label")
FOUR = ["--sizes", "2,4", "--rates", "1e-3,1e-2", "--epochs", "2"]


@pytest.fixture(scope="module")
def swept(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with two files and a sweep of four runs of one of them, and what that said."""
    folder = tmp_path_factory.mktemp("swept")
    tweets(folder / "mood.csv", header=HEADER)
    prices(folder / "price.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = well("sweep", "mood.csv", "--backbone", backbone, *FOUR)
    return folder, done


@pytest.fixture
def here(swept: tuple[Path, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working folder."""
    folder = tmp_path / "here"
    shutil.copytree(swept[0], folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def test_four_runs_a_table_a_picture_and_the_winner_in_the_store(here: Path, swept: tuple[Path, Done]) -> None:
    said = swept[1].out
    assert swept[1].err == "" and "mood, from mood.csv: 72 to train on, 9 to validate, 9 to test" in said
    assert (
        "4 runs: adapter x 2 sizes (2, 4) x 2 rates (1e-3, 1e-2) x epochs 2, 1 seed; as many as fit at a time" in said
    )
    assert said.index("4 runs: ") < said.index("1 of 4: mood.adapter-") < said.index("4 of 4: mood.adapter-")
    out = here / "sweeps" / "mood"
    record = json.loads((out / "runs.json").read_text())
    runs = {run["name"]: run for run in record["runs"]}
    assert set(runs) == {f"mood.adapter-{m}.{r}.2ep.seed0" for m in (2, 4) for r in ("1e-3", "1e-2")}
    best = record["best"]["mood"]
    assert best["validation"] == max(run["validation"] for run in runs.values())
    table = (out / "table.md").read_text()
    assert table.startswith("## mood: accuracy") and table.count(f"**{best['method']}**") == 1
    assert len(re.findall(r"^\| .*adapter", table, re.MULTILINE)) == 4
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (out / "sweep.svg").read_text()[:600]
    first = next(line for line in said.splitlines() if line.split()[:1] == ["*"])
    assert best["method"] in first and f"{best['validation']:.3f}" in first
    assert f"Best for mood, by validation: {best['method']}, rate " in said and f"test {best['test']:.3f}" in said
    assert f"Saved: grafts/mood, version 1: the run {best['kept']}" in said
    assert "Written: sweeps/mood/runs.json, sweeps/mood/table.md, sweeps/mood/sweep.png, sweeps/mood/sweep.svg" in said
    graft = tg.Store("grafts").get("mood")
    assert graft.metrics["score"] == runs[best["kept"]]["test"] and graft.parameters == best["trained"]
    assert graft.training["sweep"]["runs"] == 4 and graft.training["sweep"]["chosen_by"] == "validation"
    [line] = well(*shlex.split(said[said.index("Next: taskgraft ") :])[2:]).lines
    assert line["label"] in ("no", "yes")


def test_the_same_command_repeats_nothing(here: Path, backbone: str) -> None:
    before = {path: content for path, content in contents(here).items() if not path.endswith(".svg")}  # it has a date
    again = well("sweep", "mood.csv", "--backbone", backbone, *FOUR, "--json")
    after = {path: content for path, content in contents(here).items() if not path.endswith(".svg")}
    assert after == before, "the runs, the table, the picture and the store are as they were"
    assert tg.Store("grafts").versions("mood") == [1]
    assert len(again.out.splitlines()) == 1 and "4 of 4: mood.adapter-4" in again.err, "people read stderr"
    record, best = again.record, again.record["tasks"]["mood"]
    assert (record["runs"], record["failed"], record["store"]) == (4, 0, "grafts") and best["version"] == 1
    assert record["files"]["png"] == "sweeps/mood/sweep.png" and record["metrics"] == {"mood": ["accuracy"]}
    more = well("sweep", "mood.csv", "--backbone", backbone, *FOUR, "--seeds", "2", "--json").record
    assert more["runs"] == 8 and more["tasks"]["mood"]["seeds"] == [0, 1]
    kept = json.loads((here / "sweeps" / "mood" / "runs.json").read_text())["runs"]
    assert len(kept) == 8 and tg.Store("grafts").versions("mood") == [1, 2]


def test_a_stopped_sweep_goes_on_with_the_same_command(here: Path, backbone: str) -> None:
    command = ["sweep", "mood.csv", "--backbone", backbone, *FOUR, "--lanes", "1", "--store", "other", "--out", "new"]
    steps: list[str] = []

    def stepped(self: ManyQuiet, name: str, *told: Any) -> None:
        steps.append(name)
        if len(steps) == 13:  # of 10 steps a run
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManyQuiet, "lane", stepped)
        stopped = taskgraft(*command, "--json")
        assert stopped.code == 130, stopped
        assert "stopped with 1 of 4 runs in new/runs.json: the same command does" in stopped.record["error"]
        assert not (here / "other").exists() and len(set(steps)) == 2
        again = well(*command, "--json")
    assert again.record["runs"] == 4 and len(steps) == 4 * 10, "no step was done twice"
    unbroken = json.loads((here / "sweeps" / "mood" / "runs.json").read_text())["runs"]
    broken = json.loads((here / "new" / "runs.json").read_text())["runs"]
    scores = [{run["name"]: (run["validation"], run["test"]) for run in runs} for runs in (unbroken, broken)]
    assert scores[0] == scores[1]


def test_several_tasks_are_swept_side_by_side(here: Path, backbone: str) -> None:
    done = well("sweep", "mood.csv", "price.csv", "--backbone", backbone, "--method", "adapter-2, norms", "--rates",
                "1e-2", "--epochs", "1", "--lanes", "3", "--store", "my store", "--seeds", "2", "--json")  # fmt: skip
    assert "8 runs: 2 tasks x 2 methods (adapter-2, norms) x rate 1e-2 x epochs 1, 2 seeds; 3 at a time" in done.err
    assert list(done.record["tasks"]) == ["mood", "price"] and done.record["runs"] == 8
    assert tg.Store("my store").names() == ["mood", "price"]
    assert "Next: taskgraft predict mood \"...\" --store 'my store'" in done.err
    out = here / "sweeps" / "mood and 1 more"
    assert "## price: pearson" in (out / "table.md").read_text() and (out / "sweep.png").is_file()
    value = well("predict", "price", "it was good", "--store", "my store").lines[0]["value"]
    assert abs(value - 500) < 60


def test_what_differs_from_task_to_task_is_said_for_each(here: Path, backbone: str) -> None:
    tweets(here / "long.csv", count=400, header=HEADER)
    done = taskgraft("sweep", "mood.csv", "long.csv", "--backbone", backbone, "--out", "mood.csv")
    assert done.code == 2 and "fit at a time:\n  mood: adapter-64 x rate 2e-3 x epochs 18, 1 seed\n  long: " in done.out


def test_the_papers_plan_is_said_first(here: Path, backbone: str) -> None:
    done = taskgraft("sweep", "mood.csv", "--backbone", backbone, "--paper", "--out", "mood.csv")
    sizes, rates = "3 sizes (8, 64, 256)", "3 rates (3e-5, 3e-4, 3e-3)"
    assert f"90 runs: paper x {sizes} x {rates} x 2 epochs (3, 20), 5 seeds" in done.out
    fewer = taskgraft("sweep", "mood.csv", "--backbone", backbone, "--paper", "--seeds", "1", "--out", "mood.csv")
    assert "18 runs: paper x" in fewer.out and done.code == fewer.code == 2


def test_the_paper_in_few_runs_and_without_a_store(here: Path, backbone: str) -> None:
    before = contents(here / "grafts")
    done = well("sweep", "mood.csv", "--paper", "--sizes", "2", "--rates", "3e-3", "--epochs", "1", "--seeds", "2",
                "--backbone", backbone, "--out", "results", "--no-store", "--json")  # fmt: skip
    best = done.record["tasks"]["mood"]
    assert best["method"] == "paper-2" and best["version"] is None and done.record["store"] is None
    assert best["error"] is not None and "±" in (here / "results" / "table.md").read_text()
    assert contents(here / "grafts") == before and "Saved:" not in done.err and "Next:" not in done.err
    settings = json.loads((here / "results" / "runs.json").read_text())["settings"]
    assert settings["batch_size"] == 32


WILD = ["--sizes", "2", "--epochs", "1", "--clip-norm", "1e30", "--out", "wild", "--json"]


def test_runs_that_diverge_are_shown_and_do_not_end_the_sweep(here: Path, backbone: str) -> None:
    done = well("sweep", "mood.csv", "--backbone", backbone, "--rates", "1e-3,1e30", *WILD)
    assert done.record["failed"] == 1 and done.record["tasks"]["mood"]["rate"] == 1e-3
    assert "Failed: mood.adapter-2.1e30.1ep.seed0: " in done.err and "## Failed" in (here / "wild/table.md").read_text()
    lost = taskgraft("sweep", "mood.csv", "--backbone", backbone, "--rates", "1e29,1e30", *WILD)
    assert lost.code == 2 and "none of the 2 runs of the sweep ended; the first: " in lost.record["error"]


def test_help_teaches() -> None:
    shown = CliRunner().invoke(app, ["sweep", "--help"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0 and "   taskgraft sweep glue/rte --data-dir data --paper" in shown.stdout
    for option in ("--sizes", "--rates", "--seeds", "--paper", "--lanes", "--no-store", "--batch-size", "--json"):
        assert option in shown.stdout
    assert "--learning-rate" not in shown.stdout
    assert "sweep" in CliRunner().invoke(app, ["--help"]).stdout


# -- bad input: a sentence, exit code 2, and nothing changed

ONE = ["sweep", "mood.csv", "--backbone", "BACKBONE"]
TWO = ["sweep", "mood.csv", "price.csv", "--backbone", "BACKBONE"]
BAD: list[tuple[list[str], str]] = [
    (["sweep"], "Missing argument 'SOURCE...'"),
    (["sweep", "nothing.csv"], "there is no file nothing.csv"),
    ([*ONE, "--sizes", "8,x"], "--sizes 8,x has 'x', which is not a whole number: write 8,64,256."),
    ([*ONE, "--sizes", "8,"], "--sizes 8, has '', which is not a whole number"),
    ([*ONE, "--sizes", "1.5"], "has '1.5', which is not a whole number"),
    ([*ONE, "--sizes", "0"], "size=0 must be a whole number of at least 1"),
    ([*ONE, "--rates", "fast"], "--rates fast has 'fast', which is not a number: write 3e-4,1e-3."),
    ([*ONE, "--rates", "nan"], "learning_rate=nan must be above 0"),
    ([*ONE, "--rates", "0"], "learning_rate=0.0 must be above 0"),
    ([*ONE, "--epochs", "3,0"], "epochs=0 must be a whole number"),
    ([*ONE, "--epochs", "many"], "--epochs many has 'many'"),
    ([*ONE, "--seeds", "0"], "'--seeds'"),
    ([*ONE, "--lanes", "0"], "'--lanes'"),
    ([*ONE, "--learning-rate", "1e-3"], "No such option"),
    ([*ONE, "--method", "adptr"], "method 'adptr' is unknown"),
    ([*ONE, "--method", "full"], "'full' changes the backbone that the runs of a sweep share"),
    ([*ONE, "--method", "hyperformer++"], "has weights that several tasks share"),
    ([*ONE, "--method", "adapter-8", "--sizes", "8"], "has a size of its own"),
    ([*ONE, "--method", "norms", "--sizes", "8"], "no method is one"),
    ([*ONE, "--validation", "0"], "no validation rows to choose by: hold some out with validation=0.1"),
    ([*ONE, "--batch-size", "0"], "batch_size=0 must be a whole number"),
    ([*ONE, "--precision", "fp8"], "precision='fp8' is unknown"),
    ([*ONE, "--out", "mood.csv"], "could not be made"),
    ([*ONE, "--store", "mood.csv"], "the store mood.csv is a file"),
    ([*ONE, "--store", "folders", "--name", "plain"], "was not written by a store"),
    ([*ONE, "--name", "a/b"], "cannot be used"),
    ([*ONE, "--batch-size", "8", "--epochs", "1"], "holds runs of other settings"),
    ([*TWO, "--name", "both"], "--name both would be every task's"),
    ([*TWO, "--test", "price.csv"], "--test price.csv would be every task's"),
    (["sweep", "mood.csv", "--backbone", "bare", "--out", "new/deep", "--method", "paper-2"], "pooler"),
    (["sweep", "mood.csv", "mood.csv", "--backbone", "BACKBONE"], "two tasks are called 'mood'"),
    (["sweep", "mood.csv", "--backbone", "no/such/model"], "could not be loaded"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence_and_changes_nothing(
    words: list[str], sentence: str, here: Path, backbone: str
) -> None:
    (here / "folders" / "plain").mkdir(parents=True)
    if "bare" in words:
        hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False).save_pretrained(here / "bare")
        tiny.tokenizer().save_pretrained(here / "bare")
    before, folders = contents(here), sorted(path for path in here.rglob("*") if path.is_dir())
    done = taskgraft(*[{"BACKBONE": backbone}.get(word, word) for word in words], "--json")
    assert done.code == 2, done
    error = done.record["error"]
    assert sentence in error and "\n" not in error and "Traceback" not in done.err
    assert done.out.count("\n") == 1 and done.err.splitlines()[-1] == f"taskgraft: {error}"
    assert contents(here) == before and sorted(path for path in here.rglob("*") if path.is_dir()) == folders


# -- the guide


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MOST_EPOCHS, "adapter", 1)  # here it is the words that must run
    monkeypatch.setattr("taskgraft.training.settings.FEWEST_EPOCHS", 1)
    for name in ("reviews.csv", "tweets.csv"):
        write_messages(tmp_path / name, "text", "label")
    commands = commands_in("docs/sweeps.md")
    assert [command[1] for command in commands] == ["sweep", "sweep", "predict"]
    for command in commands:
        done = CliRunner().invoke(app, command[1:])
        assert done.exit_code == 0, done.output
    guide = (ROOT / "docs/sweeps.md").read_text()
    scope: dict[str, object] = {"__name__": "guide"}
    for snippet in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(compile(snippet, "sweeps.md", "exec"), scope)
    assert "'epoch': 1" in capsys.readouterr().out
    for command in re.findall(r"`(taskgraft sweep [^`]*)`", guide):
        words = set(re.findall(r"--[a-z-]+", command))
        assert words <= set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["sweep", "--help"]).stdout))
