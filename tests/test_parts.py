"""Tasks in words, end to end on a model that writes: trained, saved, judged, and the same answers everywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import taskgraft as tg
from taskgraft.tasks.task import schema_of
from taskgraft.training.parts import part_of
from taskgraft.training.predict import Prediction, judged

import tiny

FAST: dict[str, Any] = {"epochs": 2, "learning_rate": 1e-2, "max_length": 16, "progress": False, "patience": 99}
TEXTS = ["the film was good", "awful", "we saw a very lovely phone today and it was good again"]


def writer(talkative: bool = False) -> tg.Backbone:
    """The tiny T5, with words for what these tasks read and write, and an end that its tokenizer knows."""
    backbone = tiny.writer()
    with torch.no_grad():
        for path, parameter in backbone.model.named_parameters():
            if talkative and ("EncDecAttention" in path or "shared" in path):
                parameter *= 5  # what it writes depends on what it reads, though it has learned nothing
    backbone.tokenizer.add_tokens(["480", "520", "sentence", "premise", "claim", ":"])
    end = backbone.tokenizer.sep_token_id
    backbone.model.config.eos_token_id = backbone.model.generation_config.eos_token_id = end
    return backbone


def pairs_task() -> tg.Task:
    rows, labels = tiny.rows("classification", 24)
    table = pa.Table.from_pylist([{**row, "pair": "it was"} for row in rows], schema_of("classification", True))
    columns = {"text": "premise", "pair": "claim", "label": "label"}
    return tg.Task("pairs", "classification", labels, ("accuracy",), {"train": table, "test": table}, columns=columns)


def rows_right(task: tg.Task, found: list[Prediction]) -> float:
    answers = task.splits["test"]["label"].to_pylist()
    return sum(int(row.answer == answer) for row, answer in zip(found, answers, strict=True)) / len(answers)


# -- a class, as the likeliest of the labels


@pytest.mark.parametrize("method", [tg.Adapter(size=8), tg.HyperFormer(shared=True, size=8)], ids=lambda m: m.name)
def test_a_class_is_answered_alike_after_it_was_saved(method: tg.Method, tmp_path: Path) -> None:
    task = tiny.task("classification", 60)
    run = tg.fit(writer(), task, method, **FAST)
    assert run.graft is not None and run.graft.head is None
    assert run.graft.task["wording"]["columns"] == ["sentence"] and run.graft.task["wording"]["prefix"] == ""
    run.graft.save(tmp_path / "mood")
    graft, texts = tg.load_graft(tmp_path / "mood"), task.splits["test"]["text"].to_pylist()
    assert tg.evaluate(writer(), graft, task) == tg.evaluate(writer(), run.graft, task)
    assert tg.evaluate(writer(), graft, task)["score"] == pytest.approx(run.score)
    found = tg.predict(writer(), graft, texts)
    assert found == tg.predict(writer(), run.graft, texts) and rows_right(task, found) == pytest.approx(run.score)
    for row in found:
        assert row.probabilities is not None and list(row.probabilities) == ["bad", "good"]
        assert sum(row.probabilities.values()) == pytest.approx(1)
        assert row.answer == max((0, 1), key=lambda place: list(row.probabilities.values())[place])  # type: ignore
    assert len({row.probabilities["good"] for row in found if row.probabilities}) > 5, "texts are told apart"


def test_probabilities_are_those_of_writing_the_number_of_each_class() -> None:
    backbone, task = writer(), tiny.task("classification", 24)
    graft = tg.train(backbone, task, tg.Adapter(size=8), **FAST)
    found = tg.predict(backbone, graft, TEXTS)
    tg.add_graft(backbone.model, graft)
    for text, row in zip(TEXTS, found, strict=True):
        chances = []
        for number in ("0", "1"):
            inputs = backbone.tokenizer(f"sentence: {text}", return_tensors="pt")
            labels = backbone.tokenizer(number, return_tensors="pt")["input_ids"]
            with tg.rows(backbone.model, "mood"), torch.no_grad():
                logits = backbone.model(**inputs, labels=labels).logits[0].log_softmax(-1)
            chances.append(logits[torch.arange(labels.shape[1]), labels[0]].sum().exp())
        assert row.probabilities is not None
        assert row.probabilities["good"] == pytest.approx(float(chances[1] / (chances[0] + chances[1])), rel=1e-4)


def test_classes_and_numbers_are_learned_by_a_model_that_writes() -> None:
    options = {**FAST, "epochs": 8, "learning_rate": 3e-3}
    for kind in ("classification", "regression"):
        run = tg.fit(writer(), tiny.task(kind, 200), tg.FullFineTuning(), **options)
        assert run.score is not None and run.score > 0.8, run.history


# -- a class, as it was written


def test_greedy_answers_are_remembered_by_the_graft() -> None:
    task = tiny.task("classification", 120)
    run = tg.fit(writer(), task, tg.Adapter(size=8), **{**FAST, "epochs": 4}, decoding="greedy")
    assert run.graft is not None and run.graft.training["settings"]["decoding"] == "greedy"
    found = tg.predict(writer(), run.graft, task.splits["test"]["text"].to_pylist())
    assert all(row.probabilities is None and row.answer in (0, 1, None) for row in found)
    assert any(row.answer is not None for row in found), "it has learned to write classes"
    assert rows_right(task, found) == pytest.approx(run.test["accuracy"])
    assert tg.evaluate(writer(), run.graft, task)["accuracy"] == pytest.approx(run.test["accuracy"])


def test_what_is_no_class_is_wrong() -> None:
    """A model that has learned nothing writes anything but a class; the likeliest label is right now and then."""
    task, nothing = tiny.task("classification", 24), {**FAST, "epochs": 1, "learning_rate": 1e-12}
    run = tg.fit(writer(), task, tg.Adapter(size=8), **nothing, decoding="greedy")
    assert run.graft is not None and [row.answer for row in tg.predict(writer(), run.graft, TEXTS)] == [None] * 3
    assert run.test["accuracy"] == run.score == 0.0
    likeliest = tg.fit(writer(), task, tg.Adapter(size=8), **nothing)
    assert likeliest.score is not None and likeliest.score > 0


@pytest.mark.parametrize("labels", [("a", "b"), ("a", "b", "c")])
def test_no_answer_counts_as_a_wrong_one_for_every_metric(labels: tuple[str, ...]) -> None:
    answers = [0, 1, 1, 0]
    table = pa.table({"text": ["x"] * 4, "label": pa.array(answers, pa.int64())})
    metrics = ("accuracy", "macro_f1")
    none = judged("classification", labels, metrics, table, [Prediction(None)] * 4)
    assert none["accuracy"] == none["macro_f1"] == 0.0
    half = judged(
        "classification", labels, metrics, table, [Prediction(None if i < 2 else answers[i]) for i in range(4)]
    )
    assert half["accuracy"] == 0.5


# -- numbers, texts and pairs


def test_numbers_are_written_and_read_back(tmp_path: Path) -> None:
    task = tiny.task("regression", 60)
    graft = tg.train(writer(), task, tg.Adapter(size=8), **FAST)
    graft.save(tmp_path / "price")
    loaded = tg.load_graft(tmp_path / "price")
    assert loaded.task["wording"]["step"] == 2.0 and "pearson" in loaded.metrics["test"]
    mean = float(task.splits["train"]["label"].to_numpy().mean())
    found = tg.predict(writer(), loaded, TEXTS)
    assert found == tg.predict(writer(), graft, TEXTS)
    assert all(isinstance(row.answer, float) and row.probabilities is None for row in found)
    assert all(row.answer in (480.0, 520.0, mean) for row in found), "what is no number counts as the mean"


def test_a_graft_from_before_there_were_wordings_reads_texts_as_they_are() -> None:
    backbone = writer(talkative=True)
    graft = tg.train(backbone, tiny.task("text", 24), tg.Adapter(size=8), **{**FAST, "learning_rate": 1e-12})
    graft = dataclasses.replace(graft, tensors={name: 0.3 * torch.randn_like(t) for name, t in graft.tensors.items()})
    older = dataclasses.replace(graft, task={key: v for key, v in graft.task.items() if key != "wording"})
    found = tg.predict(backbone, older, TEXTS)
    assert found == tg.predict(backbone, graft, TEXTS) and len({row.answer for row in found}) > 1


def test_both_texts_of_a_pair_are_read_after_their_columns() -> None:
    backbone, task = writer(), pairs_task()
    settings = tg.Settings(max_length=32).resolved(tg.Adapter(), task.kind, 24)
    part = part_of(backbone, task, settings, torch.device("cpu"), prefix=False)
    ids = part.encoded["train"].inputs["input_ids"][0].tolist()
    text = task.splits["train"]["text"][0].as_py()
    assert backbone.tokenizer.decode(ids, skip_special_tokens=True).split() == [
        *["premise", ":", *text.split()],
        *["claim", ":", "it", "was"],
    ]
    graft = tg.train(backbone, task, tg.Adapter(size=8), **{**FAST, "max_length": 32})
    one, other = (tg.predict(backbone, graft, TEXTS, [pair] * 3) for pair in ("it was", "again a phone"))
    assert one[0].probabilities != other[0].probabilities
    with pytest.raises(tg.GraftError, match="reads pairs of texts"):
        tg.predict(backbone, graft, TEXTS)


def test_texts_that_are_cut_are_counted() -> None:
    task, settings = tiny.task("classification", 24), tg.Settings(max_length=6)
    part = part_of(writer(), task, settings.resolved(tg.Adapter(), task.kind, 24), torch.device("cpu"), prefix=True)
    words = [text.split() for text in task.splits["train"]["text"].to_pylist()]
    assert part.cut["train"] == sum(len(["mood", "sentence", ":", *each]) + 2 > 6 for each in words) > 0
    assert part.record["wording"]["prefix"] == "mood"


@pytest.mark.parametrize("kind", ["multilabel", "tokens", "spans"])
def test_what_cannot_be_put_into_words_is_refused(kind: str) -> None:
    backbone = writer()
    with pytest.raises(tg.GraftError, match=f"a task of kind '{kind}' cannot be put into words"):
        tg.fit(backbone, tiny.task(kind, 12), tg.Adapter(size=4), **FAST)
    assert not hasattr(backbone.model, "taskgraft")


def test_settings_of_a_run_ask_for_no_more_tokens_than_the_backbone_reads() -> None:
    backbone = tiny.backbone()
    most = min(backbone.model.config.max_position_embeddings, backbone.tokenizer.model_max_length)
    run = tg.fit(backbone, tiny.task("classification", 24), tg.Adapter(size=8), **{**FAST, "max_length": 100_000})
    assert run.settings.max_length == most < 100_000
    backbone.tokenizer.model_max_length = 7
    try:
        run = tg.fit(backbone, tiny.task("classification", 24), tg.Adapter(size=8), **{**FAST, "max_length": 100_000})
    finally:
        backbone.tokenizer.model_max_length = most
    assert run.settings.max_length == 7 and run.cut["train"] > 0
