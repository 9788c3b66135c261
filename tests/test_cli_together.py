"""Several tasks and few examples from the command line: what is said, what is stored, and what is refused."""

from __future__ import annotations

import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

import taskgraft as tg
from taskgraft.training.loop import Loop

import tiny
from families import SMALL, T5
from test_cli import contents, taskgraft, tweets, well, write_csv

FAST = ["--epochs", "2", "--learning-rate", "0.01", "--batch-size", "16", "--batches", "mixed"]
HEADER = ("text", "label")
TEXTS = ["it was good", "the film was awful"]


def prices(path: Path, count: int = 70, seed: int = 1) -> str:
    """A file of numbers, in too many different ones to be classes."""
    found, _ = tiny.rows("regression", count, seed)
    return write_csv(path, HEADER, [[row["text"], row["label"] + i / 7] for i, row in enumerate(found)])


@pytest.fixture(scope="module")
def trained(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with three files and a store, in which two of them were trained together, and what that said."""
    folder = tmp_path_factory.mktemp("trained")
    tweets(folder / "mood.csv", header=HEADER)
    prices(folder / "price.csv")
    tweets(folder / "new.csv", count=60, seed=3, header=HEADER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = well("train", "mood.csv", "price.csv", "--name", "house", "--backbone", backbone, *FAST)
    assert done.err == ""
    return folder, done.out


@pytest.fixture
def here(trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working folder."""
    folder = tmp_path / "here"
    shutil.copytree(trained[0], folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


# -- several tasks


def test_several_files_in_and_a_graft_each_out_beside_all_of_them_together(
    here: Path, trained: tuple[Path, str]
) -> None:
    store, said = tg.Store("grafts"), trained[1]
    joint = store.get_joint("house")
    assert store.names() == ["house", "mood", "price"] and list(joint.tasks) == ["mood", "price"]
    assert not (here / "grafts" / ".runs").exists()
    assert "mood, from mood.csv: 72 to train on, 9 to validate, 9 to test; classification, 2 classes (no, yes)" in said
    assert "price, from price.csv: 56 to train on, 7 to validate, 7 to test; regression." in said
    for name, metric in (("mood", "accuracy"), ("price", "pearson")):
        score = joint.tasks[name].metrics["score"]
        assert any(line.split()[:3] == [name, f"{score:.3f}", metric] for line in said.splitlines())
        assert store.get(name).metrics == joint.tasks[name].metrics
    assert f"Mean of all metrics: {joint.metrics['score']:.3f}" in said
    assert joint.metrics["score"] == pytest.approx(sum(m.metrics["score"] for m in joint.tasks.values()) / 2)
    config = tiny.backbone().model.config
    trained_numbers = tg.count(tg.HyperFormer(shared=True, size=64), config, tasks=2) + 3 * 33
    assert joint.parameters == trained_numbers
    assert f"Trained: {trained_numbers:,} parameters for 2 tasks" in said and "of the backbone's 20,640" in said
    assert "Saved: grafts/house (version 1: all tasks with what they share); as grafts: mood, price" in said
    assert 'Next: taskgraft predict mood "..."' in said
    assert "A new task from few examples: taskgraft train NEW.csv --from grafts/house --few-shot 16" in said


def test_one_json_object_tells_what_came_of_it(here: Path, backbone: str) -> None:
    done = well("train", "mood.csv", "price.csv", "--backbone", backbone, "--store", "my store", "--method",
                "hyperformer-4@0.02", "--temperature", "3", "--batches", "single", "--weighting", "loss", "--seed", "5",
                "--epochs", "1", "--label-smoothing", "0.1", "--json")  # fmt: skip
    record, settings = done.record, done.record["settings"]
    assert len(done.out.splitlines()) == 1 and "to train on" in done.err, "people read stderr"
    assert "train NEW.csv --from 'my store/together' --few-shot 16 --store 'my store'" in done.err
    assert (record["name"], record["version"], record["store"]) == ("together", 1, "my store")
    assert record["grafts"] == list(record["tasks"]) == ["mood", "price"]
    assert tg.method_from_json(record["method"]) == tg.HyperFormer(size=4) and settings["learning_rate"] == 0.02
    assert (settings["temperature"], settings["batches"], settings["weighting"]) == (3.0, "single", "loss")
    assert (settings["seed"], settings["epochs"], settings["label_smoothing"]) == (5, 1, 0.1)
    joint = tg.Store("my store").get_joint("together")
    assert record["trained"] == joint.parameters and record["total"] == 20640
    assert record["score"] == joint.metrics["score"] and record["epochs"] == 1 and record["steps"] == 8
    for name, about in record["tasks"].items():
        assert about["score"] == joint.tasks[name].metrics["score"] == about["test"][about["metrics"][0]]
        assert about["split"] == "test" and about["rows"]["train"] > 50


def test_what_was_trained_together_is_listed_and_shown(here: Path) -> None:
    joint = tg.Store("grafts").get_joint("house")
    listed = well("tasks").out
    for words in ("2 tasks together", f"{joint.metrics['score']:.3f} mean of all metrics", f"{joint.parameters:,}"):
        assert words in listed
    entries = {entry["name"]: entry for entry in well("tasks", "--json").record["tasks"]}
    assert list(entries) == ["house", "mood", "price"] and entries["house"]["together"] == ["mood", "price"]
    assert [entries[name]["kind"] for name in ("mood", "price")] == ["classification", "regression"]
    shown = well("tasks", "show", "house").out
    assert "house: 2 tasks that were trained together" in shown and "hyperformer pooling=mean shared=True" in shown
    assert f"{joint.tasks['mood'].metrics['score']:.3f} accuracy (test)" in shown
    record = well("tasks", "show", "house", "--json").record
    assert list(record["tasks"]) == ["mood", "price"] and record["versions"] == [1]
    assert record["parameters"] == joint.parameters and record["backbone"] == joint.backbone
    assert "adapter" in well("tasks", "show", "mood").out, "a graft of its own, which needs no hypernetwork"
    well("tasks", "rename", "house", "home")
    well("tasks", "remove", "price", "--yes")
    assert tg.Store("grafts").names() == ["home", "mood"]


def test_each_task_answers_alone(here: Path) -> None:
    well("tasks", "remove", "house", "--yes")
    found = {name: well("predict", name, *TEXTS).lines for name in ("mood", "price")}
    assert all(list(line) == ["text", "label", "probability", "probabilities"] for line in found["mood"])
    assert all(list(line) == ["text", "value"] and isinstance(line["value"], float) for line in found["price"])
    assert abs(found["price"][0]["value"] - 500) < 60, "in its own units"
    assert well("evaluate", "mood", "new.csv", "--json").record["rows"] == 60


def test_training_again_makes_versions_of_all(here: Path, backbone: str) -> None:
    before = well("predict", "mood", *TEXTS).out
    again = well("train", "mood.csv", "price.csv", "--name", "house", "--seed", "1", "--backbone", backbone, *FAST)
    assert "version 2: all tasks" in again.out
    assert all(tg.Store("grafts").versions(name) == [1, 2] for name in ("house", "mood", "price"))
    assert well("predict", "mood", *TEXTS).out != before == well("predict", "mood", *TEXTS, "--version", "1").out
    assert well("tasks", "rollback", "house", "--json").record["version"] == 1


def test_a_fine_tuned_backbone_is_kept_as_one_entry_alone(here: Path, backbone: str) -> None:
    done = well("train", "mood.csv", "price.csv", "--method", "full@0.001", "--name", "tuned", "--store", "whole",
                "--backbone", backbone, "--epochs", "1", "--json")  # fmt: skip
    assert done.record["grafts"] == [] and tg.Store("whole").names() == ["tuned"]
    assert "none of them alone, since the backbone itself was trained" in done.err
    assert "Next: taskgraft predict tuned/mood" in done.err
    [line] = well("predict", "tuned/mood", "it was good", "--store", "whole").lines
    assert line["label"] in ("no", "yes")
    judged = well("evaluate", "tuned/mood", "mood.csv", "--store", "whole", "--json").record
    assert judged["task"] == "tuned/mood" and 0 <= judged["score"] <= 1
    before = contents(here)
    few = well("train", "new.csv", "--from", "whole/tuned", "--store", "elsewhere", "--few-shot", "8", "--epochs", "2",
               "--json")  # fmt: skip
    assert few.record["version"] == 1 and few.record["like"] == [None] and few.record["losses"] == [{}]
    assert few.record["trained"] == 20640 + 2 * 33 and 0 <= few.record["score"] <= 1
    assert "Started from: the fine-tuned backbone in whole/tuned" in few.err
    assert before.items() <= contents(here).items() and list(tg.Store("elsewhere").get_joint("new").tasks)[-1] == "new"
    assert well("predict", "new/new", "it was good", "--store", "elsewhere").lines[0]["label"] in ("no", "yes")


# -- a new task from few examples


def test_a_new_task_from_few_examples(here: Path) -> None:
    kept = contents(here / "grafts")
    done = well("train", "new.csv", "--from", "grafts/house", "--few-shot", "8", "--seeds", "3", "--seed", "4",
                "--epochs", "3", "--json")  # fmt: skip
    record = done.record
    assert len(done.out.splitlines()) == 1 and (record["task"], record["rows"], record["tune"]) == ("new", 8, "all")
    assert record["seeds"] == [4, 5, 6] and record["score"] == pytest.approx(statistics.mean(record["scores"]))
    assert record["deviation"] == pytest.approx(statistics.stdev(record["scores"]))
    assert [min(each, key=each.__getitem__) for each in record["losses"]] == record["like"]
    assert record["drift"].keys() == {"mood", "price"} and record["drift"]["mood"]["largest"] > 0
    store = tg.Store("grafts")
    assert store.names() == ["house", "mood", "new", "price"] and record["version"] == 1
    graft = store.get("new")
    assert graft.training["settings"]["seed"] == 4 and graft.metrics["score"] == record["scores"][0]
    assert graft.task["rows"]["train"] == 8
    assert not (here / "grafts" / ".runs").exists(), "the states of its seeds have no use any more"
    assert kept.items() <= contents(here / "grafts").items(), "the trained tasks are as they were"
    nearest = sorted(record["losses"][0].items(), key=lambda pair: pair[1])
    assert f"(seed 4): {nearest[0][0]} {nearest[0][1]:.3f}, {nearest[1][0]}" in done.err
    assert f"Started from: {', '.join(dict.fromkeys(record['like']))} in grafts/house" in done.err
    assert f"Score: {record['score']:.3f} ± {record['deviation']:.3f} (standard deviation), accuracy" in done.err
    assert "8 examples, 3 seeds" in done.err and f"Tuned: {record['trained']:,} parameters (all)" in done.err
    assert "their answers to these examples would change: " in done.err
    assert "Saved: grafts/new, version 1 (the first seed's)" in done.err
    [line] = well("predict", "new", "it was good").lines
    assert line["label"] in ("no", "yes")


def test_its_own_weights_alone_from_a_named_task(here: Path) -> None:
    done = well("train", "new.csv", "--from", "grafts/house", "--like", "price", "--tune", "own", "--name", "newer",
                "--epochs", "2", "--store", "other")  # fmt: skip
    assert "The other tasks' outputs are the same to the bit before and after." in done.out and done.err == ""
    assert "Started from: price in grafts/house" in done.out and "Loss of the trained tasks" not in done.out
    assert f"Tuned: {64 + 2 * 33} parameters (own)" in done.out and "47 examples, 1 seed\n" in done.out
    assert 'Next: taskgraft predict newer "..." --store other' in done.out
    assert tg.Store("other").names() == ["newer"] and not (here / "other" / ".runs").exists()


# -- going on


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, run: int = 1) -> None:
    """Let Ctrl-C come in a step of the first run of a command, or of a later one."""
    step, begun = Loop._step, []

    def stepped(self: Loop, watch: Any) -> None:
        course = self.lanes[0].course
        begun.extend([] if course.steps else [course.settings.seed])
        if len(begun) == run and course.steps == at:
            signal.raise_signal(signal.SIGINT)
        step(self, watch)

    monkeypatch.setattr(Loop, "_step", stepped)


def test_a_stopped_run_goes_on_when_it_is_started_again(here: Path, backbone: str) -> None:
    command = ["train", "mood.csv", "price.csv", "--name", "long", "--store", "broken", "--backbone", backbone, *FAST]
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, at=5)
        stopped = taskgraft(*command, "--json")
    assert stopped.code == 130 and "training of 'mood, price' was stopped at step 6 of 16" in stopped.record["error"]
    assert tg.Store("broken").names() == [] and list((here / "broken" / ".runs" / "long").glob("state*"))
    again = well(*command)
    assert "Going on from step 6 of 16" in again.out and not (here / "broken" / ".runs").exists()
    well(*command, "--store", "unbroken")
    for name in ("mood", "price"):
        assert len({well("predict", name, *TEXTS, "--store", store).out for store in ("broken", "unbroken")}) == 1


def test_stopped_seeds_go_on_when_they_are_started_again(here: Path) -> None:
    command = ["train", "new.csv", "--from", "grafts/house", "--few-shot", "8", "--seeds", "2", "--epochs", "5"]
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, at=2, run=2)
        stopped = taskgraft(*command, "--store", "broken")
    assert stopped.code == 130 and "was stopped at step 3 of 5; the same command goes on from step 3" in stopped.err
    again = well(*command, "--store", "broken", "--json")
    assert "Going on from step 3 of 5" in again.err and not (here / "broken" / ".runs").exists()
    whole = well(*command, "--store", "unbroken", "--json")
    assert {**again.record, "store": ""} == {**whole.record, "store": ""}
    assert len({well("predict", "new", *TEXTS, "--store", store).out for store in ("broken", "unbroken")}) == 1


# -- a model that writes


@pytest.fixture
def writer(tmp_path: Path) -> str:
    folder = tmp_path / "writer"
    hf.T5ForConditionalGeneration(hf.T5Config(**T5)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def test_tasks_of_a_model_that_writes(here: Path, writer: str) -> None:
    well("train", "mood.csv", "price.csv", "--name", "words", "--store", "t5", "--backbone", writer, *FAST)
    [line] = well("predict", "mood", "it was good", "--store", "t5").lines
    assert line["label"] in ("no", "yes") and sum(line["probabilities"].values()) == pytest.approx(1)
    [line] = well("predict", "price", "it was good", "--store", "t5").lines
    assert list(line) == ["text", "value"] and isinstance(line["value"], float)
    few = well("train", "new.csv", "--from", "t5/words", "--store", "t5", "--epochs", "2", "--json").record
    assert few["like"] == ["mood"], "the task that writes classes too"
    assert tg.Store("t5").names() == ["mood", "new", "price", "words"]


def test_a_class_that_was_written_is_shown_by_its_label(here: Path, writer: str) -> None:
    well("train", "mood.csv", "--store", "t5", "--backbone", writer, *FAST, "--decoding", "greedy")
    [line] = well("predict", "mood", "it was good", "--store", "t5").lines
    assert list(line) == ["text", "label"] and line["label"] in ("no", "yes", None)


# -- bad input: a sentence, exit code 2, and nothing changed

TWO = ["train", "mood.csv", "price.csv", "--backbone", "BACKBONE"]
FEW = ["train", "new.csv", "--from", "grafts/house"]
BAD: list[tuple[list[str], str]] = [
    ([*TWO, "--temperature", "0"], "temperature=0.0 must be above 0: 1 draws tasks by their size, inf all alike"),
    ([*TWO, "--temperature", "nan"], "temperature=nan must be above 0"),
    ([*TWO, "--batches", "some"], "batches='some' is unknown: use mixed, single"),
    ([*TWO, "--test", "new.csv"], "--test new.csv would be every task's"),
    (["train", "mood.csv", "--temperature", "2"], "--temperature is for several tasks"),
    (["train", "mood.csv", "--epoch-steps", "2"], "--epoch-steps is for several tasks"),
    ([*TWO, "--epoch-steps", "0"], "epoch_steps=0 must be a whole number of at least 1"),
    (["train", "mood.csv", "--name", "house"], "'house' is tasks that were trained together in the store"),
    ([*TWO, "--name", "mood"], "'mood' is the name of one of the tasks"),
    (["predict", "house/nothing", "x"], "task 'nothing' is not among those trained together"),
    ([*TWO, "--weighting", "some"], "weighting='some' is unknown: use sampling, loss"),
    ([*TWO, "--decoding", "some"], "decoding='some' is unknown: use auto, labels, greedy"),
    ([*TWO, "--seed", "-1"], "seed=-1 must be a whole number of at least 0"),
    ([*TWO, "--method", "head"], "tasks with a head alone share nothing"),
    ([*TWO, "--method", "hyper"], "method 'hyper' is unknown"),
    ([*TWO, "--name", "price"], "'price' is the name of one of the tasks: give all of them together another"),
    ([*TWO, "--name", "a/b"], "cannot be used"),
    ([*TWO, "--store", "mood.csv"], "the store mood.csv is a file"),
    ([*TWO, "--learning-rate", "1e30", "--clip-norm", "1e30"], "the loss of 'mood, price' became"),
    (["train", "mood.csv", "mood.csv", "--backbone", "BACKBONE"], "two tasks are called 'mood'"),
    (["train", "mood.csv", "nothing.csv", "--backbone", "BACKBONE"], "there is no file nothing.csv"),
    (["train", "mood.csv", "--seed", "-1", "--backbone", "BACKBONE"], "seed=-1 must be a whole number"),
    (["train", "mood.csv", "--few-shot", "8"], "need tasks to start from: name them with --from STORE/NAME"),
    (["train", "mood.csv", "--seeds", "3"], "need tasks to start from: name them with --from STORE/NAME"),
    (["train", "mood.csv", "price.csv", "--from", "grafts/house"], "--from starts one new task"),
    ([*FEW, "--method", "dagger"], "--from starts one new task"),
    ([*FEW, "--name", "mood"], "a task named 'mood' is already among mood, price: choose another name"),
    ([*FEW, "--few-shot", "0"], "0 examples are too few to learn from"),
    ([*FEW, "--seeds", "0"], "--seeds 0 leaves nothing to run: give 1 or more"),
    ([*FEW, "--like", "tone"], "task 'tone' is not among those trained together: mood, price are"),
    ([*FEW, "--tune", "some"], "tune='some' is unknown: use all or own"),
    ([*FEW, "--backbone", "OTHER"], "another backbone"),
    ([*FEW, "--learning-rate", "1e30", "--clip-norm", "1e30", "--batch-size", "2"], "the loss of 'new' became"),
    (["train", "new.csv", "--from", "grafts/mood"], "grafts/mood is one graft: --from takes tasks"),
    (["train", "new.csv", "--from", "grafts/nothing"], "trained together are at grafts/nothing: give STORE/NAME"),
    (["train", "new.csv", "--from", "grafts"], "trained together are at grafts: give STORE/NAME"),
    (["predict", "house", "x"], "'house' is not one graft but tasks that were trained together"),
    (["evaluate", "house", "mood.csv"], "'house' is not one graft but tasks that were trained together"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_sentence_and_changes_nothing(
    words: list[str], sentence: str, here: Path, backbone: str
) -> None:
    if "OTHER" in words:
        hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(here / "other")
        tiny.tokenizer().save_pretrained(here / "other")
    before, folders = contents(here), sorted(path for path in here.rglob("*") if path.is_dir())
    done = taskgraft(*[{"BACKBONE": backbone, "OTHER": "other"}.get(word, word) for word in words], "--json")
    assert done.code == 2, done
    error = done.record["error"]
    assert sentence in error and "\n" not in error and "Traceback" not in done.err
    assert done.out.count("\n") == 1 and done.err.splitlines()[-1] == f"taskgraft: {error}"
    assert contents(here) == before and sorted(path for path in here.rglob("*") if path.is_dir()) == folders
