"""Comparisons: short names of methods, runs that are not repeated, and what they hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import taskgraft as tg
from taskgraft.methods import method_named
from taskgraft.reports.tables import summarise

import tiny

FAST: dict[str, Any] = {"epochs": 1, "batch_size": 32}


@pytest.mark.parametrize(
    ("name", "method", "rate"),
    [
        ("adapter", tg.Adapter(), None),
        ("adapter-8", tg.Adapter(size=8), None),
        ("paper-8", tg.Adapter.paper(8), None),
        ("full@3e-5", tg.FullFineTuning(), 3e-5),
        ("top-2", tg.TopLayers(k=2), None),
        ("norms@0.01", tg.NormsOnly(), 0.01),
        ("head-16", tg.HeadOnly(hidden=16), None),
    ],
)
def test_methods_have_short_names(name: str, method: tg.Method, rate: float | None) -> None:
    assert method_named(name) == (method, rate)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lora", "'lora' is unknown: use adapter-64"),
        ("top", "has no number"),
        ("full-3", "has a number too many"),
        ("adapter-0", "at least 1"),
        ("full@fast", "is unknown"),
        ("full@1.2.3", "is unknown"),
        ("full@0", "learning rate of 0"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(tg.GraftError, match=sentence):
        method_named(name)


def test_a_comparison_is_not_repeated_and_holds_what_a_table_needs(tmp_path: Path) -> None:
    backbone, task = tiny.backbone(), tiny.task(count=48)
    seen: list[str] = []

    def compare(methods: list[str], **options: Any) -> list[dict[str, Any]]:
        return tg.compare(
            backbone,
            task,
            methods,
            seeds=[0, 1],
            results=tmp_path / "runs.json",
            on_run=lambda run: seen.append(f"{run['method']} {run['seed']} {run['seconds']}"),
            **{**FAST, **options},
        )

    first = compare(["head", "adapter-4"])
    again = compare(["head", "adapter-4", "full@1e-3"])
    assert again[:4] == first and len(again) == 6
    assert seen[:4] == seen[4:8], "the same runs, not new ones: even their seconds are the same"
    assert [run["trained"] for run in again[::2]] == [
        tg.count(method_named(run["method"])[0], backbone.model.config, labels=2) for run in again[::2]
    ]
    assert again[0]["bytes"] > 0 and again[4]["bytes"] is None, "full fine-tuning has no graft"
    assert [line.method for line in summarise(again)] == ["head", "adapter-4", "full@1e-3"]
    with pytest.raises(tg.GraftError, match="holds runs of another settings"):
        compare(["head"], epochs=2)
    other = tiny.task(count=48, seed=1)
    with pytest.raises(tg.GraftError, match="holds runs of another task"):
        tg.compare(backbone, other, ["head"], results=tmp_path / "runs.json", **FAST)
    (tmp_path / "runs.json").write_text(json.dumps([1]))
    with pytest.raises(tg.GraftError, match="does not hold the runs of a comparison"):
        compare(["head"])


def test_automl_is_a_method_of_a_comparison() -> None:
    (run,) = tg.compare(tiny.backbone(), tiny.task(count=60), ["automl"], seeds=[0])
    assert run["family"] == "automl" and run["score"] > 0.8 and run["trained"] is None


def test_what_cannot_be_compared_is_refused_before_anything_is_trained() -> None:
    seen: list[Any] = []
    with pytest.raises(tg.GraftError, match="no models for tasks of kind tokens"):
        tg.compare(tiny.backbone(), tiny.task("tokens"), ["head", "automl"], on_run=seen.append)
    bare = dataclasses.replace(tiny.task(), splits={"train": tiny.task().splits["train"]})
    with pytest.raises(tg.GraftError, match="has no rows to compare on"):
        tg.compare(tiny.backbone(), bare, ["head"], on_run=seen.append)
    assert not seen
