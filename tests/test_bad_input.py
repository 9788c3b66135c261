"""Mistakes at the edge: one clear sentence each, and nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import taskgraft as tg

from families import SMALL, T5, batch, build


def tiny() -> Any:
    return tg.graft(build("bert"), tg.Adapter(size=4), {"a": 2, "b": 3})


def is_untouched(model: Any) -> bool:
    fresh = type(model)(model.config)
    same_names = [n for n, _ in model.named_modules()] == [n for n, _ in fresh.named_modules()]
    return same_names and not hasattr(model, "taskgraft") and all(p.requires_grad for p in model.parameters())


GRAFTING = [
    (lambda: hf.ViTModel(hf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)),
     tg.Adapter(), ["a"], "'vit' has no row in the table"),
    (lambda: build("bert"), tg.Adapter(), [""], "name is empty"),
    (lambda: build("bert"), tg.Adapter(), ["../out"], "cannot be used"),
    (lambda: build("bert"), tg.Adapter(), ["/root"], "cannot be used"),
    (lambda: build("bert"), tg.Adapter(), ["a", "a"], "name a task twice"),
    (lambda: build("bert"), tg.Adapter(), "spam", "is one string"),
    (lambda: build("bert"), tg.Adapter(layers=(0, 9)), ["a"], r"layers \[9\] do not exist"),
    (lambda: build("bert"), tg.Adapter(reduction=64), ["a"], "leaves no units"),
    (lambda: build("bert"), tg.Adapter(sites=("cross_attention",)), ["a"], "has no site for"),
    (lambda: build("bert"), tg.TopLayers(k=3), ["a"], "k=3 layers"),
    (lambda: build("bert"), tg.HyperFormer(reduction=64), ["a"], "leaves no units"),
    (lambda: build("bert"), tg.Adapter(), {"a": 1}, "at least 2 labels"),
    (lambda: build("bert"), tg.Adapter(), {"a": ["x", "x"]}, "twice"),
    (lambda: build("bert"), tg.Adapter(), {"a": "xy"}, "one string"),
    (lambda: build("t5"), tg.Adapter(), {"a": 2}, "writes text"),
    (lambda: build("distilbert"), tg.Adapter.paper(8), {"a": 2}, "has no pooler"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "method", "tasks", "sentence"), GRAFTING)
def test_grafting_is_refused_and_the_model_left_as_it_was(make: Any, method: Any, tasks: Any, sentence: str) -> None:
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        tg.graft(model, method, tasks)
    assert "\n" not in str(caught.value)
    assert is_untouched(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_class_without_sites_is_refused() -> None:
    class Headless(hf.BertPreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embeddings = torch.nn.Embedding(9, 4)

        def forward(self, input_ids: Any) -> Any:
            return self.embeddings(input_ids)

    with pytest.raises(tg.GraftError, match="Headless has no layers where this family has its sites"):
        tg.graft(Headless(hf.BertConfig(**SMALL)), tg.Adapter(), ["a"])
    with pytest.raises(tg.GraftError, match="not a Transformers model"):
        tg.graft(torch.nn.Linear(2, 2), tg.Adapter(), ["a"])


def test_grafting_twice_is_refused() -> None:
    model = tiny()
    with pytest.raises(tg.GraftError, match="already grafted"):
        tg.graft(model, tg.Adapter(), ["c"])
    assert tg.tasks_of(model) == ["a", "b"]
    with pytest.raises(tg.GraftError, match="is not grafted"):
        tg.ungraft(build("bert"))


ON_A_MODEL = [
    (lambda m: tg.add_task(m, "a", tg.Adapter()), "already on this model"),
    (lambda m: tg.add_task(m, "..", tg.Adapter()), "cannot be used"),
    (lambda m: tg.add_task(m, "c", tg.FullFineTuning()), "cannot share the backbone"),
    (lambda m: tg.add_task(m, "c", tg.Adapter(backbone_dropout=True)), "cannot be trained together"),
    (lambda m: tg.remove_task(m, "z"), "'z' is not on this model: it carries a, b"),
    (lambda m: tg.train_only(m, ["a", "z"]), "'z' is not on this model"),
    (lambda m: tg.train_only(m, ["a", "a"]), "twice"),
    (lambda m: tg.rows(m, ["a", "z"]), "'z' is not on this model"),
    (lambda m: tg.rows(m, []), "rows are empty"),
    (lambda m: tg.task_ids(m, ["z"]), "'z' is not on this model"),
]


@pytest.mark.parametrize(("act", "sentence"), ON_A_MODEL)
def test_mistakes_on_a_grafted_model_change_nothing(act: Any, sentence: str) -> None:
    model = tiny()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        act(model)
    assert "\n" not in str(caught.value)
    assert tg.tasks_of(model) == ["a", "b"] and model.taskgraft.trained == ["a", "b"]
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_rows_of_the_wrong_length_are_refused() -> None:
    model = tiny()
    for rows in (["a"], ["a", "b", "a"], ["a"] * 12):
        with tg.rows(model, rows), pytest.raises(tg.GraftError, match=f"{len(rows)} rows were named for a batch of 6"):
            model(**batch(model))


def test_only_generate_repeats_rows() -> None:
    model = tg.graft(build("t5"), tg.Adapter(size=4), ["a", "b"])
    inputs = batch(model, rows=4)
    with tg.rows(model, ["a", "b"]), pytest.raises(tg.GraftError, match="2 rows were named for a batch of 4"):
        model(**inputs)
    inputs.pop("decoder_input_ids")
    with tg.rows(model, ["a", "b"]), pytest.raises(tg.GraftError, match="2 rows were named for a batch of 4"):
        model.generate(**inputs, num_beams=3, max_new_tokens=2)


def test_a_random_pooler_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False).save_pretrained(tmp_path)
    model = hf.BertModel.from_pretrained(tmp_path)
    with pytest.raises(tg.GraftError, match="pooler of this BertModel was not in its checkpoint"):
        tg.graft(model, tg.Adapter.paper(4), {"a": 2})
    assert not hasattr(model, "taskgraft")
    tg.graft(model, tg.Adapter(size=4), {"a": 2})
    assert model.taskgraft.tasks["a"].method.pooling == "mean"
    hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(tmp_path / "whole")
    tg.graft(hf.BertModel.from_pretrained(tmp_path / "whole"), tg.Adapter.paper(4), {"a": 2})


def test_backbones_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(tg.GraftError, match="could not be loaded"):
        tg.load_backbone(tmp_path / "nothing")
    hf.BertModel(hf.BertConfig(**SMALL)).save_pretrained(tmp_path / "wordless")
    with pytest.raises(tg.GraftError, match="has a tokenizer without words: put the model's own files beside it"):
        tg.load_backbone(tmp_path / "wordless")
    hf.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(tg.GraftError, match="'vit' has no row"):
        tg.load_backbone(tmp_path)


def test_labels_that_do_not_fit() -> None:
    model = tiny()
    inputs = batch(model, rows=2)
    with tg.rows(model, ["a", "b"]):
        output = model(**inputs)
        with pytest.raises(tg.GraftError, match="3 labels were given for 2 rows"):
            tg.loss(model, output, torch.tensor([0, 1, 1]))
        with pytest.raises(tg.GraftError, match="label 2 is not a class of task 'a'"):
            tg.loss(model, output, torch.tensor([2, 1]))
        with pytest.raises(tg.GraftError, match="reduction='max' is unknown"):
            tg.loss(model, output, torch.tensor([0, 1]), reduction="max")
    encoder = tg.graft(hf.T5EncoderModel(hf.T5Config(**T5)), tg.Adapter(size=4), {"a": 2})
    assert encoder(**batch(build("bert"))).logits.shape == (6, 2)


def test_a_refused_task_leaves_nothing_behind() -> None:
    model = tiny()
    paths = [path for path, _ in model.named_modules()]
    with pytest.raises(tg.GraftError, match="do not fit"):
        model.taskgraft.add("x", tg.Adapter(size=4, activation="relu", parallel=True), tg.Head.of(2), weights={})
    assert [path for path, _ in model.named_modules()] == paths


def test_removing_tasks_gives_back_what_only_they_needed() -> None:
    model = tiny()
    paths = [path for path, _ in model.named_modules()]
    tg.add_task(model, "c", tg.Adapter(size=4, activation="relu", parallel=True, pooling="cls"), 2)
    assert [path for path, _ in model.named_modules()] != paths
    tg.remove_task(model, "c")
    assert [path for path, _ in model.named_modules()] == paths


def test_removing_a_fine_tuned_task_restores_the_backbone() -> None:
    model = build("bert")
    original = {key: value.clone() for key, value in model.state_dict().items()}
    tg.graft(model, tg.FullFineTuning(), {"a": 2})
    with torch.no_grad():
        for parameter in tg.trainable(model).values():
            parameter += 1
    tg.remove_task(model, "a")
    tg.add_task(model, "b", tg.Adapter(size=4), 2)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in original.items())
