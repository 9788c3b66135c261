"""The designs the authors tried, on a real layer: each against BERT written out by hand around its own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import taskgraft as tg
from taskgraft.backbones.count import form_of

from families import SAMPLES, batch, build, perturb, result
from reference import one_row

VARIANTS = [
    tg.Adapter(size=4),
    tg.Adapter(size=4, depth=3, activation="tanh"),
    tg.Adapter(size=4, norm_before=True),
    tg.Adapter(size=4, norm_inside="layer"),
    tg.Adapter(size=4, norm_inside="batch"),
    tg.Adapter(size=4, norm_after="own"),
    tg.Adapter(size=4, multiplicative=True),
    tg.Adapter(size=4, parallel=True, scaling=4.0),
    tg.Adapter(size=4, parallel=True, multiplicative=True),
    tg.Adapter(size=4, sites=("attention",)),
    tg.Adapter(size=4, layers=(1,), norms="none"),
    tg.Adapter(size=4, reads="norm"),
    tg.Adapter(size=4, reads="residual", scaling=4.0),
    tg.Adapter(size=4, reads="norm", keeps="sum", norms="none"),
    tg.Adapter(size=4, reads="norm", keeps="norm"),
    tg.Adapter(size=4, reads="norm", keeps="norm", joined=False),
    tg.Adapter(size=4, keeps="sum", sites=("attention",), joined=False),
    tg.Adapter(size=4, parallel=True, keeps="norm"),
    tg.Adapter(size=4, norm_after="own", norm_sum=True, scaling=2.0),
    tg.Adapter(size=4, joined=False, norms="none"),
]


def bert_by_hand(model: Any, original: Any, inputs: dict[str, Tensor], method: tg.Adapter) -> Tensor:
    """BERT's layers with an adapter after each sub-layer's output projection, before the residual and LayerNorm."""
    w = model.taskgraft.read("a")
    form = form_of(method)

    def norm(path: str, x: Tensor) -> Tensor:
        own = original.get_submodule(path)
        weight = w.get(f"norm.{path}.weight", own.weight)
        bias = w.get(f"norm.{path}.bias", own.bias)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, own.eps)

    def join(site: str, path: str, out: Tensor, x: Tensor) -> Tensor:
        own = {key.removeprefix(f"{site}."): value for key, value in w.items() if key.startswith(f"{site}.")}
        if not own:
            return norm(path, out + x)
        kept = {None: out, "sum": out + x, "norm": norm(path, out + x)}[form.keeps]
        reads = "input" if form.parallel else form.reads or "output"
        read = {"output": out, "input": x, "residual": x, "norm": norm(path, out + x)}[reads]
        out = one_row(kept, own, form, read)
        return norm(path, out + x) if form.joined else out

    embeddings = original.embeddings
    ids = inputs["input_ids"]
    x = embeddings.word_embeddings(ids) + embeddings.token_type_embeddings(torch.zeros_like(ids))
    x = norm("embeddings.LayerNorm", x + embeddings.position_embeddings(torch.arange(ids.shape[1])))
    bias = torch.zeros(ids.shape, dtype=x.dtype).masked_fill(inputs["attention_mask"] == 0, float("-inf"))
    for i, layer in enumerate(original.encoder.layer):
        attention = layer.attention.self
        q, k, v = (
            part(x).unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        scores = q @ k.transpose(-1, -2) / attention.attention_head_size**0.5 + bias[:, None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = layer.attention.output.dense(mixed)
        x = join(f"encoder.{i}.attention", f"encoder.layer.{i}.attention.output.LayerNorm", out, x)
        out = layer.output.dense(layer.intermediate(x))
        x = join(f"encoder.{i}.feedforward", f"encoder.layer.{i}.output.LayerNorm", out, x)
    return x * inputs["attention_mask"][:, :, None]


@pytest.mark.parametrize(
    "method",
    VARIANTS,
    ids=lambda m: str({k: v for k, v in m.to_json().items() if v != tg.Adapter(size=4).to_json()[k]}),
)
@torch.no_grad()
def test_bert_with_a_variant_equals_bert_by_hand(method: tg.Adapter) -> None:
    original = build("bert", torch.float64)
    model = build("bert", torch.float64)
    tg.graft(model, method, ["a"])
    perturb(model, seed=1, only=lambda path: ".bank." in path)
    inputs = batch(model)
    found = model(**inputs).last_hidden_state * inputs["attention_mask"][:, :, None]
    assert torch.allclose(found, bert_by_hand(model, original, inputs, method), atol=1e-10)


@pytest.mark.parametrize("name", list(SAMPLES))
@pytest.mark.parametrize("multiplicative", [False, True])
def test_parallel_adapters_read_the_sub_layers_input(name: str, multiplicative: bool) -> None:
    """Every family: with `up` at zero but for its bias, the branch is that bias; otherwise it must depend on x_in."""
    model = build(name, torch.float64)
    tg.graft(model, tg.Adapter(size=4, parallel=True, norms="none", multiplicative=multiplicative), ["a"])
    perturb(model, seed=1, only=lambda path: ".bank." in path)
    inputs = batch(model)
    seen: dict[str, Tensor] = {}
    handles = []
    for site in model.taskgraft.backbone.sites:
        module = model.get_submodule(f"{site.layer_path}.{site.place.reads}")

        def remember(_: Any, args: Any, kwargs: Any, site: str = site.name) -> None:
            seen[site] = args[0] if args else kwargs["hidden_states"]

        handles.append(module.register_forward_pre_hook(remember, with_kwargs=True))
    outputs: dict[str, tuple[Tensor, Tensor]] = {}
    for site in model.taskgraft.backbone.sites:
        wrapper = model.get_submodule(f"{site.layer_path}.{site.place.module}")
        if "adapt" in dir(wrapper) and len(wrapper.bank):
            bank = next(iter(wrapper.bank.values()))

            def watch(_: Any, args: Any, result: Tensor, site: str = site.name) -> None:
                outputs[site] = (args[0], result)

            handles.append(bank.register_forward_hook(watch))
    with torch.no_grad():
        model(**inputs)
    w = model.taskgraft.read("a")
    assert outputs and not model.taskgraft.bound.inputs, "every remembered input is used up"
    for site, (x, y) in outputs.items():
        own = {key.removeprefix(f"{site}."): value for key, value in w.items() if key.startswith(f"{site}.")}
        form = form_of(tg.Adapter(size=4, parallel=True, multiplicative=multiplicative))
        assert torch.allclose(y, one_row(x, own, form, seen[site]), atol=1e-10), site


def test_adapter_dropout_acts_only_while_training() -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=4, dropout=0.5, init_std=0.1), ["a"])
    inputs = batch(model)
    assert torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    model.train()
    assert not torch.equal(model(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        # A whole normal would give 0.007; cut at two sigma, each of the two matrices has 0.88 of that std.
        (tg.Adapter(reduction=32, init_std=1e-2), 0.9 * 0.0054, 1.1 * 0.0054),
        (tg.Adapter(reduction=32, init_std=1e-2, norm_after="own"), 0.81, 0.99),
    ],
)
@torch.no_grad()
def test_a_norm_after_the_adapter_is_far_from_identity_at_first(method: tg.Adapter, low: float, high: float) -> None:
    """The branch's std on unit input at the T5-base shape, within 10 %: 0.0054 alone, 0.90 with the norm."""
    from taskgraft.nn.bank import fresh_bottleneck
    from taskgraft.nn.bottleneck import bottleneck

    form = form_of(method)
    fresh = fresh_bottleneck(768, method.bottleneck_size(768), form, method.init_std, torch.Generator().manual_seed(0))
    weights = {name: value[None] for name, value in fresh.items()}
    x = torch.randn(8, 64, 768)
    assert low <= float((bottleneck(x, torch.tensor([0]), weights, form) - x).std()) <= high


def test_batch_norm_inside_checkpoints_and_sums_in_single_precision() -> None:
    model = tg.graft(build("bert"), tg.Adapter(size=4, norm_inside="batch", head_dropout=0.0), {"a": 2}).train()
    inputs = batch(model)
    model(**inputs).logits.sum().backward()
    plain = {path: p.grad.clone() for path, p in tg.trainable(model).items()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**inputs).logits.sum().backward()
    for path, p in tg.trainable(model).items():
        assert torch.allclose(p.grad, plain[path], atol=1e-5), path


@torch.no_grad()
def test_an_adapter_does_not_overflow_what_the_backbone_keeps_in_single_precision() -> None:
    """T5 in float16 keeps its feed-forward's output in float32, because it exceeds float16."""
    model = build("t5").half()
    for block in model.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    model.encoder.block[0].layer[1].DenseReluDense.wo.weight *= 3e6
    tg.graft(model, tg.Adapter(size=4), ["a"])
    seen: list[Tensor] = []
    bank = next(iter(model.encoder.block[0].layer[1].dropout.bank.values()))
    bank.register_forward_hook(lambda _, args, result: seen.extend((args[0], result)))
    with tg.rows(model, [None, "a"]):
        model.encoder(input_ids=batch(model, rows=2)["input_ids"])
    x, y = seen
    assert x.dtype == torch.float32 and x.abs().max() > 65504
    assert torch.equal(x[0], y[0]), "the bare row"
    assert y.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "wiring"),
    [
        ("bert", {"reads": "norm"}),
        ("bert", {"reads": "norm", "keeps": "norm", "joined": False}),
        ("t5", {"reads": "residual"}),
        ("distilbert", {"norm_after": "own", "norm_sum": True}),
    ],
)
def test_wirings_compile_to_one_graph_and_can_be_recomputed(name: str, wiring: dict[str, Any]) -> None:
    model = build(name, torch.float64)
    tg.graft(model, tg.Adapter(size=4, norms="none", **wiring), ["a", "b"])
    perturb(model, seed=1, only=lambda path: ".bank." in path)
    inputs, rows = batch(model), ["a", "b", None, "b", "a", None]
    model.taskgraft.backbone.set_dropout(on=False)
    with torch.no_grad(), tg.rows(model, rows):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(result(compiled, inputs), result(model, inputs), atol=1e-10)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with tg.rows(model, rows):
            result(model, inputs).square().sum().backward()
        return [parameter.grad.clone() for parameter in tg.trainable(model).values() if parameter.grad is not None]

    model.train()
    kept = gradients()
    model.gradient_checkpointing_enable()
    assert kept and all(torch.allclose(a, b) for a, b in zip(kept, gradients(), strict=True))
