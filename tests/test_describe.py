"""`tg.describe`: the facts a reader needs are in it, and they are true."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as hf

import taskgraft as tg

from families import FAMILY_NAMES, SAMPLES, build


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_it_says_where_the_adapters_are_and_what_trains(name: str) -> None:
    model = build(name)
    backbone = sum(p.numel() for p in model.parameters())
    tg.graft(model, tg.Adapter(size=8), {"a": None if SAMPLES[name].writes else 2})
    tg.add_task(model, "b", tg.NormsOnly(backbone_dropout=False), train=False)
    text = tg.describe(model)
    trained = sum(p.numel() for p in tg.trainable(model).values())
    assert f"{backbone:,} parameters, frozen" in text
    assert f"{trained:,} parameters train, {100 * trained / backbone:.2f} % of the backbone's {backbone:,}" in text
    assert re.search(r"^a +adapter +8 .*training$", text, re.MULTILINE)
    assert re.search(r"^b +norms .*at rest$", text, re.MULTILINE)
    order = model.taskgraft.backbone.sites[0].place.order
    assert re.search(rf"(en|de)coder attention +\d+ +{order} +eager", text)
    assert "backbone dropout is off while training" in text


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        (tg.Adapter(size=64), 0.0, 1e-3),
        (tg.Adapter.paper(64), 3e-3, 3e-2),
        (tg.Adapter(reduction=32, norm_after="own", init_std=1e-2), 0.8, 1.0),
    ],
)
def test_it_says_how_far_from_the_identity_a_fresh_graft_is(method: tg.Adapter, low: float, high: float) -> None:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(hidden_size=768, num_hidden_layers=1, vocab_size=9, intermediate_size=8))
    text = tg.describe(tg.graft(model, method, {"a": 2}))
    found = re.search(r"([\d.e-]+) of x", text)
    assert found is not None and low <= float(found[1]) <= high


def test_a_model_without_tasks_is_described_too() -> None:
    assert tg.describe(tg.graft(build("bert"), tg.Adapter(), [])).endswith("no tasks")
