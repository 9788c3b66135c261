"""Grafts between models: what is saved loads elsewhere with equal logits, and only where it belongs."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
)

from taskgraft.backbones import api as tg
from taskgraft.backbones.count import count
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import REMEMBERED, fingerprint, settings_of
from taskgraft.grafts.graft import add_graft, get_graft, load_graft
from taskgraft.grafts.store import Store
from taskgraft.methods import Adapter, FullFineTuning, HeadOnly, Method, NormsOnly
from taskgraft.nn.heads import Head
from taskgraft.training.optim import AdamW

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}


def perturb(model: Any, seed: int, trained_only: bool = False) -> Any:
    """Weights of std 0.1, so that nothing is equal because it is zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad or not trained_only:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def tiny(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return perturb(BertModel(BertConfig(**{**SMALL, **settings})).eval(), seed)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any, name: str) -> Tensor:
    """What the task says of the batch: its head's numbers, or the hidden states where it has no head."""
    with torch.no_grad(), tg.rows(model, name):
        output = model(**batch())
    head = model.taskgraft.tasks[name].head
    if head is None:
        states: Tensor = output.last_hidden_state
        return states
    result: Tensor = output.token_logits if head.per_token else output.logits
    return result[..., : head.width]  # beyond are those of wider heads, at -inf


def trained(model: Any, method: Method | None = None, task: str = "spam", head: Any = ("no", "yes")) -> Any:
    """The model with one task whose weights are far from where they began."""
    tg.graft(model, method or Adapter(size=4), {task: head}, seed=3)
    return perturb(model, 7, trained_only=True).eval()


def save_trained(store: Path, model: Any = None, method: Method | None = None) -> Tensor:
    model = trained(model or tiny(), method)
    get_graft(model, "spam", metrics={"accuracy": 0.5}).save(store / "spam")
    return logits(model, "spam")


# -- the same logits elsewhere


def test_another_process_gives_equal_logits(tmp_path: Path) -> None:
    expected = save_trained(tmp_path / "grafts")
    script = (
        "import sys, torch; from test_graft_files import *; model = tiny();"
        "add_graft(model, sys.argv[1] + '/grafts/spam', 'junk');"
        "torch.save(logits(model, 'junk'), sys.argv[1] + '/logits.pt')"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env={**os.environ, "PYTHONPATH": paths})
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


METHODS = [
    Adapter(size=4),
    Adapter(reduction=8, pooling="pooler", activation="relu", layers=(1,), sites=("feedforward",)),
    Adapter(size=3, norm_inside="batch", norm_before=True, depth=2, norms="layers"),
    Adapter(size=4, norm_after="own", parallel=True, norms="none"),
    NormsOnly(),
    HeadOnly(hidden=5, pooling="cls"),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_comes_back(tmp_path: Path, method: Method) -> None:
    expected = save_trained(tmp_path, method=method)
    graft = load_graft(tmp_path / "spam")
    assert graft.parameters == count(method, tiny().config, labels=2) == Store(tmp_path).list()[0].parameters
    model = tiny()
    add_graft(model, graft)
    assert torch.equal(logits(model, "spam"), expected)
    again = get_graft(model, "spam")
    assert again.method == graft.method and again.head == graft.head and again.backbone == graft.backbone
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in graft.tensors.items())


@pytest.mark.parametrize("head", [Head("regression"), Head("tokens", ("a", "b", "c")), Head("spans"), None], ids=str)
def test_every_head_comes_back(tmp_path: Path, head: Head | None) -> None:
    model = trained(tiny(), head=head)
    get_graft(model, "spam", task_record={"text": "message"}).save(tmp_path / "spam")
    fresh = tiny()
    add_graft(fresh, tmp_path / "spam")
    graft = get_graft(fresh, "spam")
    assert graft.head == head and load_graft(tmp_path / "spam").task == {"text": "message"}
    assert torch.equal(logits(fresh, "spam"), logits(model, "spam"))


@pytest.mark.parametrize("method", [Adapter(size=4, norm_after="shared"), NormsOnly(norms="shared")])
def test_weights_that_were_shared_become_each_grafts_own(tmp_path: Path, method: Method) -> None:
    model = tiny()
    tg.graft(model, method, {"spam": 2, "tone": 3})
    perturb(model, 7, trained_only=True)
    for name in ("spam", "tone"):
        get_graft(model, name).save(tmp_path / name)
    fresh = tiny()
    for name in ("spam", "tone"):
        add_graft(fresh, tmp_path / name)
    for name in ("spam", "tone"):
        assert torch.equal(logits(fresh, name), logits(model, name))
    tg.train_only(fresh, ["spam", "tone"])
    before = logits(fresh, "tone")
    with torch.no_grad():
        for parameter in tg.trainable(fresh).values():
            parameter[0] += 1
    assert torch.equal(logits(fresh, "tone"), before) and not torch.equal(logits(fresh, "spam"), logits(model, "spam"))


def test_under_another_name_beside_others_and_at_rest(tmp_path: Path) -> None:
    expected = save_trained(tmp_path)
    model = trained(tiny(), Adapter(size=9), task="tone", head=3)
    tone = logits(model, "tone")
    trains = set(tg.trainable(model))
    add_graft(model, tmp_path / "spam", "junk mail")
    add_graft(model, load_graft(tmp_path / "spam"))
    assert tg.tasks_of(model) == ["tone", "junk mail", "spam"] and set(tg.trainable(model)) == trains
    for name in ("junk mail", "spam"):
        torch.testing.assert_close(logits(model, name), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(model, "tone"), tone, rtol=1e-5, atol=1e-5)
    with pytest.raises(GraftError, match="already on this model"):
        add_graft(model, tmp_path / "spam")


def test_one_checkpoint_through_two_classes(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "backbone")
    plain = BertModel.from_pretrained(tmp_path / "backbone").eval()
    classifier = BertForSequenceClassification.from_pretrained(tmp_path / "backbone", num_labels=5).eval()
    assert fingerprint(plain) == fingerprint(classifier) == fingerprint(tiny())
    expected = save_trained(tmp_path / "a", plain)
    add_graft(classifier, tmp_path / "a" / "spam", "junk")
    assert torch.equal(logits(classifier, "junk"), expected)
    get_graft(classifier, "junk").save(tmp_path / "b" / "junk")
    back = tiny()
    add_graft(back, tmp_path / "b" / "junk")
    assert torch.equal(logits(back, "junk"), expected)


# -- only where it belongs


def untouched(model: Any, attempt: Any) -> None:
    """A refused graft leaves a bare model bare, to the bit."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        output = model(**batch()).last_hidden_state
    attempt()
    assert not hasattr(model, "taskgraft") and all(p.requires_grad for p in model.parameters())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(**batch()).last_hidden_state, output)


OTHER_BACKBONES: dict[str, Any] = {
    "weights": lambda: tiny(seed=1),
    "activation": lambda: tiny(hidden_act="relu"),
    "heads": lambda: tiny(num_attention_heads=2),
    "width": lambda: tiny(hidden_size=64),
    "depth": lambda: tiny(num_hidden_layers=3),
    "epsilon": lambda: tiny(layer_norm_eps=1e-3),
}


@pytest.mark.parametrize("other", OTHER_BACKBONES)
def test_another_backbone_is_refused(tmp_path: Path, other: str) -> None:
    save_trained(tmp_path)
    model = OTHER_BACKBONES[other]()

    def attempt() -> None:
        for precision in (False, True):
            with pytest.raises(GraftError, match=r"'spam' was made for another backbone \(BertModel, sha256 .*…;"):
                add_graft(model, tmp_path / "spam", other_precision=precision)

    untouched(model, attempt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_precision_only_when_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    for number, pooling in enumerate(("mean", "pooler")):
        store = tmp_path / str(number)
        expected = save_trained(store, method=Adapter(size=4, pooling=pooling))  # type: ignore[arg-type]
        model = tiny().to(dtype)

        def attempt(model: Any = model, store: Path = store) -> None:
            with pytest.raises(GraftError, match=r"another precision .*float32.*other_precision=True"):
                add_graft(model, store / "spam")

        untouched(model, attempt)
        add_graft(model, store / "spam", other_precision=True)
        assert logits(model, "spam").dtype == dtype
        torch.testing.assert_close(logits(model, "spam").float(), expected, rtol=0.1, atol=0.1)
        assert get_graft(model, "spam").backbone["dtype"] == str(dtype).removeprefix("torch.")


def test_only_a_graft_that_reads_the_pooler_minds_which_one_it_is(tmp_path: Path) -> None:
    save_trained(tmp_path / "mean")
    save_trained(tmp_path / "pooler", method=Adapter(size=4, pooling="pooler"))
    other = tiny()
    with torch.no_grad():
        other.pooler.dense.weight.neg_()
    assert fingerprint(other).sha256 == fingerprint(tiny()).sha256
    with pytest.raises(GraftError, match="'spam' reads the pooler of BertModel, and this model has another pooler"):
        add_graft(other, tmp_path / "pooler" / "spam")
    with pytest.raises(GraftError, match="has another pooler"):
        add_graft(copy.deepcopy(other).bfloat16(), tmp_path / "pooler" / "spam", other_precision=True)
    add_graft(other, tmp_path / "mean" / "spam")
    none = BertModel(tiny().config, add_pooling_layer=False)
    none.load_state_dict({k: v for k, v in tiny().state_dict().items() if not k.startswith("pooler.")})
    with pytest.raises(GraftError, match="has no pooler"):
        add_graft(none, tmp_path / "pooler" / "spam")
    add_graft(none, tmp_path / "mean" / "spam")


def test_weights_that_do_not_fit_their_method_are_refused(tmp_path: Path) -> None:
    save_trained(tmp_path)
    path = tmp_path / "spam" / "graft.json"
    path.write_text(path.read_text().replace('"size": 4', '"size": 5'))
    model = tiny()

    def attempt() -> None:
        with pytest.raises(GraftError, match="has shape"):
            add_graft(model, tmp_path / "spam")

    untouched(model, attempt)


def test_full_fine_tuning_has_no_graft() -> None:
    model = tg.graft(tiny(), FullFineTuning(), {"spam": 2})
    with pytest.raises(GraftError, match="changes the backbone itself"):
        get_graft(model, "spam")


def test_things_that_are_no_models_and_no_paths(tmp_path: Path) -> None:
    save_trained(tmp_path)
    with pytest.raises(GraftError, match="not a Transformers model"):
        add_graft(torch.nn.Linear(2, 2), tmp_path / "spam")
    with pytest.raises(GraftError, match="not grafted"):
        get_graft(tiny(), "spam")
    for path in (tmp_path / "none", tmp_path / "none" / "spam", "..", "", "/"):
        with pytest.raises(GraftError):
            add_graft(tiny(), path)


# -- fingerprints


def gpt2(kind: Any = GPT2Model) -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50))
    return perturb(model, 0) if kind is GPT2LMHeadModel else perturb(model, 0).transformer


def t5(kind: Any = T5Model) -> Any:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, vocab_size=50))
    perturb(model, 0)
    if kind is T5ForConditionalGeneration:
        return model
    plain = T5Model(model.config)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"})
    return plain


@pytest.mark.parametrize("build", [tiny, gpt2, t5])
def test_a_fingerprint_stays_the_same_while_grafts_come_train_and_go(build: Any) -> None:
    model = build()
    bare = fingerprint(model)
    tg.graft(model, Adapter(size=4, norms="all"), ["spam", "tone"])
    assert fingerprint(model) == bare
    optimiser = torch.optim.AdamW(tg.trainable(model).values(), lr=0.1)
    inputs = batch() | ({"decoder_input_ids": batch()["input_ids"]} if build is t5 else {})
    for _ in range(2):
        with tg.rows(model, ["spam", "tone", None]):
            model(**inputs).last_hidden_state.square().sum().backward()
        optimiser.step()
    assert fingerprint(model) == bare
    REMEMBERED.pop(model)
    assert fingerprint(model) == bare
    assert fingerprint(tg.ungraft(model)) == bare == fingerprint(build())


@pytest.mark.parametrize(("build", "kind"), [(gpt2, GPT2LMHeadModel), (t5, T5ForConditionalGeneration)])
def test_a_language_models_head_is_not_part_of_it(build: Any, kind: Any) -> None:
    plain, with_head = build(), build(kind)
    assert fingerprint(plain) == fingerprint(with_head)
    assert fingerprint(tg.graft(with_head, Adapter(size=4), ["a"])) == fingerprint(plain)


@pytest.mark.parametrize("grafted", [True, False])
def test_a_fingerprint_is_made_again_when_the_backbone_has_changed(grafted: bool) -> None:
    model = tg.graft(tiny(), Adapter(size=4), ["a"]) if grafted else tiny()
    first = fingerprint(model)
    assert fingerprint(model) is first  # nothing changed: nothing is hashed again
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[3, 3] += 0.5
    changed = fingerprint(model)
    assert changed.sha256 != first.sha256
    model.bfloat16()
    assert fingerprint(model).dtype == "bfloat16" and fingerprint(model).signs == changed.signs
    full = tg.graft(tiny(), FullFineTuning(), {"a": 2})
    before = fingerprint(full)
    perturb(full, 5, trained_only=True)
    assert fingerprint(full) != before


def test_a_fingerprint_is_made_again_when_a_module_was_replaced() -> None:
    model, other = tiny(), tiny()
    first = fingerprint(model)
    with torch.no_grad():
        other.encoder.layer[1].output.dense.weight += 0.5
    model.encoder.layer[1] = other.encoder.layer[1]
    assert fingerprint(model) != first


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW([model.encoder.layer[1].output.dense.weight], 1e-3, fused=True)
    model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state.sum().backward()
    optimizer.step()


def write_to_data(model: Any) -> None:
    model.encoder.layer[1].output.dense.weight.data[3, 3] += 0.5


def swap_layers(model: Any) -> None:
    first, second = model.encoder.layer
    model.encoder.layer[0], model.encoder.layer[1] = second, first


def swap_modules(model: Any) -> None:
    attention = model.encoder.layer[0].attention.self
    attention.query, attention.key = attention.key, attention.query


@pytest.mark.parametrize("change", [fused_step, write_to_data, swap_layers, swap_modules])
def test_a_fingerprint_is_made_again_after_changes_that_nobody_counts(change: Any) -> None:
    model = perturb(tiny().requires_grad_(True), 1)
    first = fingerprint(model)
    change(model)
    assert fingerprint(model).sha256 != first.sha256


def test_a_step_of_full_fine_tuning_changes_the_fingerprint() -> None:
    model = tg.graft(tiny(), FullFineTuning(), {"a": 2})
    first, optimizer = fingerprint(model), AdamW(model, lr=1e-3)
    with tg.rows(model, "a"):
        model(torch.ones(2, 3, dtype=torch.long), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    assert fingerprint(tg.ungraft(model, restore=False)).sha256 != first.sha256


def test_a_fingerprint_outlives_grafts_and_not_its_model() -> None:
    model = tiny()
    first = fingerprint(model)
    tg.graft(model, Adapter(size=4), ["a"])
    assert fingerprint(model) is first and fingerprint(tg.ungraft(model)) is first
    remembered = len(REMEMBERED)
    del model
    gc.collect()
    assert len(REMEMBERED) < remembered


def test_one_bit_of_any_weight_counts() -> None:
    whole = fingerprint(tiny())
    for name in ("embeddings.LayerNorm.bias", "encoder.layer.1.output.dense.weight"):
        model = tiny()
        tensor = model.get_parameter(name).data
        tensor.view(torch.int32).view(-1)[5] ^= 1
        changed = fingerprint(model)
        assert changed.sha256 != whole.sha256 and changed.signs == whole.signs and changed.pooler == whole.pooler
    two = tiny()
    weights = two.encoder.layer[0].attention.self
    weights.query, weights.key = weights.key, weights.query  # the same numbers under other names
    assert fingerprint(two).sha256 != whole.sha256 and fingerprint(two).signs != whole.signs


def test_whole_numbers_are_never_taken_for_signs() -> None:
    """Quantised weights are not floats: another backbone's must not pass as this one in another precision."""
    models = [tiny(), tiny()]
    for model, value in zip(models, (3, 5), strict=True):
        model.register_buffer("quantised", torch.full((4,), value, dtype=torch.uint8))
    assert fingerprint(models[0]).signs != fingerprint(models[1]).signs


@pytest.mark.parametrize(
    "settings",
    [
        {"num_labels": 7},
        {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.3},
        {"use_cache": False, "output_attentions": True, "return_dict": False},
        {"initializer_range": 0.5, "problem_type": "regression", "architectures": ["BertForMaskedLM"]},
        {"eos_token_id": 9, "pad_token_id": 4, "bos_token_id": 1, "task_specific_params": {"a": 1}},
        {"attn_implementation": "eager", "dtype": "bfloat16", "_name_or_path": "/some/where", "num_beams": 4},
        {"gradient_checkpointing": True, "chunk_size_feed_forward": 4, "id2label": {0: "a", 1: "b"}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_change_no_output_do_not_count(settings: dict[str, Any]) -> None:
    assert settings_of(BertConfig(**SMALL, **settings)) == settings_of(BertConfig(**SMALL))


def test_settings_that_change_outputs_count() -> None:
    plain = settings_of(BertConfig(**SMALL))
    for setting in ({"hidden_act": "relu"}, {"layer_norm_eps": 1e-3}, {"num_attention_heads": 8}, {"is_decoder": True}):
        assert settings_of(BertConfig(**{**SMALL, **setting})) != plain
    assert settings_of(RobertaConfig(**SMALL)) != plain
    padded = [RobertaModel(RobertaConfig(**SMALL, pad_token_id=pad)).config for pad in (1, 2)]
    assert settings_of(padded[0]) != settings_of(padded[1])  # positions are counted from it


def test_a_model_that_is_not_in_memory_has_no_fingerprint() -> None:
    with torch.device("meta"):
        model = BertModel(BertConfig(**SMALL))
    with pytest.raises(GraftError, match="not in memory"):
        fingerprint(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graft_and_its_fingerprint_move_between_devices(tmp_path: Path) -> None:
    expected = save_trained(tmp_path)
    model = tiny().cuda()
    assert fingerprint(model) == fingerprint(tiny())
    add_graft(model, tmp_path / "spam")
    with torch.no_grad():
        result = model(**{name: value.cuda() for name, value in batch().items()}).logits
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-3, atol=1e-3)
