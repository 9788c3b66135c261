"""Methods: their JSON form and the golden parameter counts."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

import taskgraft as tg
from taskgraft.backbones.describe import trained_parameters
from taskgraft.methods import METHODS, method_from_json

BERT_BASE = hf.BertConfig()
BERT_LARGE = hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
T5_SMALL = hf.T5Config(d_model=512, num_layers=6, num_heads=8, d_ff=2048, d_kv=64)
T5_BASE = hf.T5Config(d_model=768, num_layers=12, num_heads=12, d_ff=3072, d_kv=64)

HOULSBY = [  # 2L(2md + d + m) + (2L + 1)2d + C(d + 1), C = 2
    (BERT_BASE, 8, 353_474),
    (BERT_BASE, 64, 2_419_202),
    (BERT_BASE, 256, 9_501_698),
    (BERT_LARGE, 8, 938_370),
    (BERT_LARGE, 64, 6_446_082),
    (BERT_LARGE, 256, 25_329_666),
]
ONE_TASK = tg.Adapter(reduction=32, norm_after="own")
DAGGER = tg.Adapter(reduction=32, norm_after="shared")
HYPERFORMER, PLUS = tg.HyperFormer(), tg.HyperFormer(shared=True)
HYPERFORMER_TABLE: list[tuple[Any, tg.Method, int, int]] = [
    (T5_SMALL, ONE_TASK, 1, 446_848),
    (T5_BASE, ONE_TASK, 1, 1_928_832),
    (T5_SMALL, DAGGER, 8, 3_288_064),
    (T5_BASE, DAGGER, 8, 14_581_248),
    (T5_SMALL, HYPERFORMER, 8, 28_013_632),
    (T5_BASE, HYPERFORMER, 8, 122_343_744),
    (T5_SMALL, PLUS, 8, 2_415_776),
    (T5_BASE, PLUS, 8, 5_211_056),
]


def on_meta(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


@pytest.mark.parametrize(("config", "size", "golden"), HOULSBY)
def test_houlsby_counts(config: Any, size: int, golden: int) -> None:
    assert tg.count(tg.Adapter(size=size), config, labels=2) == golden
    assert tg.count(tg.Adapter.paper(size), config, labels=2) == golden
    model = tg.graft(on_meta(hf.BertModel, config), tg.Adapter.paper(size), {"a": 2})
    assert sum(p.numel() for p in tg.trainable(model).values()) == golden
    assert trained_parameters(model.taskgraft, "a") == golden


@pytest.mark.parametrize(("config", "method", "tasks", "golden"), HYPERFORMER_TABLE)
def test_hyperformers_counts(config: Any, method: tg.Method, tasks: int, golden: int) -> None:
    assert tg.count(method, config, tasks=tasks) == golden
    names = [f"task{i}" for i in range(tasks)]
    model = tg.graft(on_meta(hf.T5ForConditionalGeneration, config), method, names)
    assert sum(p.numel() for p in tg.trainable(model).values()) == golden
    backbone = 60_506_624 if config is T5_SMALL else 222_903_552
    share = f"{golden:,} parameters train, {100 * golden / backbone:.2f} % of the backbone's {backbone:,}"
    assert share in tg.describe(model)


@pytest.mark.parametrize("shared", [False, "layers", True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"blocks": False},
        {"conditional_norm": False},
        {"projector": False},
        {"norms": "none"},
        {"norms": "none", "conditional_norm": False},
        {"size": 7, "task_dim": 5, "hidden_dim": 11, "projected_dim": 3},
    ],
    ids=str,
)
def test_hyperformers_variants_are_counted_by_their_formulas(shared: Any, changes: dict[str, Any]) -> None:
    method, tasks, labels = tg.HyperFormer(shared=shared, **changes), 3, 4
    t, h = method.task_dim, method.hidden_dim
    for config, stacks, layers, d, norms, head in (
        (T5_SMALL, 2, 6, 512, (5 * 6 + 2) * 512, 0),
        (BERT_BASE, 1, 12, 768, (2 * 12 + 1) * 2 * 768, labels * 769),
    ):
        b = method.size or d // 32
        place = (2 * d * b + d + b if method.blocks else 0) + (2 * d if method.conditional_norm else 0)
        inputs = t * {False: 1, "layers": 2, True: 3}[method.shared]
        p = method.projected_dim if method.projector else inputs
        projector = inputs * h + h + h * p + p if method.projector else 0
        expected = {
            False: 2 * stacks * layers * (p + 1) * place + projector,
            "layers": stacks * (2 * (p + 1) * place + projector + 2 * p + layers * t),
            True: stacks * ((p + 1) * place + projector + 2 * p + layers * t + 2 * t),
        }[method.shared]
        expected += tasks * (t + head) + (norms if method.norms == "shared" else 0)
        assert tg.count(method, config, tasks=tasks, labels=labels if head else None) == expected


@pytest.mark.parametrize(
    ("cls", "config", "total"),
    [
        (hf.BertModel, BERT_BASE, 109_482_240),
        (hf.BertModel, BERT_LARGE, 335_141_888),
        (hf.T5ForConditionalGeneration, T5_SMALL, 60_506_624),
        (hf.T5ForConditionalGeneration, T5_BASE, 222_903_552),
    ],
)
def test_full_fine_tuning_counts_the_backbone(cls: Any, config: Any, total: int) -> None:
    assert tg.count(tg.FullFineTuning(), config) == total
    assert "of the backbone's" in tg.describe(tg.graft(on_meta(cls, config), tg.NormsOnly(), ["a"]))


def test_the_other_methods_counts() -> None:
    d, layers = 768, 12
    assert tg.count(tg.NormsOnly(), BERT_BASE) == (2 * layers + 1) * 2 * d
    assert tg.count(tg.NormsOnly(norms="layers"), BERT_BASE) == 2 * layers * 2 * d
    assert tg.count(tg.HeadOnly(), BERT_BASE, labels=3) == 3 * (d + 1)
    assert tg.count(tg.HeadOnly(hidden=10), BERT_BASE, labels=3) == 10 * (d + 1) + 3 * 11
    assert tg.count(tg.TopLayers(k=2), BERT_BASE, labels=2) == 2 * 7_087_872 + 2 * (d + 1)
    assert tg.count(tg.Adapter(size=8, norms="none", sites=("attention",)), BERT_BASE) == layers * (2 * 8 * d + d + 8)
    assert tg.count(tg.Adapter(size=8, norms="none", layers=(10, 11)), BERT_BASE) == 4 * (2 * 8 * d + d + 8)
    deep = tg.Adapter(size=8, norms="none", depth=3, norm_before=True, norm_inside="batch", norm_after="own")
    assert tg.count(deep, BERT_BASE) == 24 * (2 * 8 * d + d + 8 + 2 * (8 * 8 + 8) + 2 * d + 2 * 8 + 2 * d)


METHOD_SAMPLES = [
    tg.Adapter(),
    tg.Adapter.paper(256),
    tg.Adapter(reduction=16, layers=(3, 1), sites=("feedforward",), depth=2, parallel=True, norm_inside="batch"),
    tg.Adapter(norm_after="own", depth=0),
    HYPERFORMER,
    PLUS,
    tg.HyperFormer(shared="layers", size=8, sites=("attention",), projector=False, conditional_norm=False),
    tg.HyperFormer(blocks=False, norms="none", task_dim=8, hidden_dim=9, projected_dim=10, pooling="cls"),
    tg.FullFineTuning(),
    tg.TopLayers(k=3),
    tg.NormsOnly(norms="shared"),
    tg.HeadOnly(hidden=100, pooling="cls"),
]


@pytest.mark.parametrize("method", METHOD_SAMPLES)
def test_json_round_trip(method: tg.Method) -> None:
    assert method_from_json(json.loads(json.dumps(method.to_json()))) == method


def test_every_method_is_sampled() -> None:
    assert {type(method) for method in METHOD_SAMPLES} == set(METHODS.values())


def test_unknown_keys_of_a_later_format_are_named_and_left_out() -> None:
    record = {**tg.Adapter(size=8).to_json(), "format": 2, "rotation": 7}
    with pytest.warns(UserWarning, match="rotation"):
        assert method_from_json(record) == tg.Adapter(size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method_from_json(tg.Adapter(size=8).to_json())


def test_keys_that_are_missing_take_their_defaults() -> None:
    assert method_from_json({"format": 1, "method": "adapter", "size": 8}) == tg.Adapter(size=8)


def test_the_papers_recipe() -> None:
    paper = tg.Adapter.paper()
    assert (paper.size, paper.init_std, paper.pooling, paper.activation) == (64, 1e-2, "pooler", "gelu_new")
    assert paper.trained_norms == "all" and paper.backbone_dropout and paper.head_dropout == 0.1
    assert tg.Adapter.paper(8, pooling="mean").pooling == "mean"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: tg.Adapter(size=0), "size=0 must be"),
        (lambda: tg.Adapter(size=-3), "size=-3 must be"),
        (lambda: tg.Adapter(size=2.5), "size=2.5 must be"),  # type: ignore[arg-type]
        (lambda: tg.Adapter(size=8, reduction=2), "not both"),
        (lambda: tg.Adapter(depth=0), "depth=0 leaves no branch"),
        (lambda: tg.Adapter(depth=-1), "depth=-1 must be"),
        (lambda: tg.Adapter(depth=0, norm_after="own", norm_inside="layer"), "depth=0 has no hidden units"),
        (lambda: tg.Adapter(activation="swosh"), "'swosh' is unknown: use one of"),  # type: ignore[arg-type]
        (lambda: tg.Adapter(sites=()), "nothing to adapt"),
        (lambda: tg.Adapter(sites=("head",)), "'head' is unknown"),  # type: ignore[arg-type]
        (lambda: tg.Adapter(layers=()), "leaves no layer"),
        (lambda: tg.Adapter(pooling="max"), "'max' is unknown"),  # type: ignore[arg-type]
        (lambda: tg.Adapter(dropout=1.0), "below 1"),
        (lambda: tg.Adapter(init_std=-1), "not be negative"),
        (lambda: tg.HyperFormer(shared="everything"), "shared='everything' is unknown"),  # type: ignore[arg-type]
        (lambda: tg.HyperFormer(shared=1), "shared=1 is unknown"),  # type: ignore[arg-type]
        (lambda: tg.Adapter(depth=None), "depth=None must be"),  # type: ignore[arg-type]
        (lambda: tg.HyperFormer(size=8, reduction=2), "not both"),
        (lambda: tg.HyperFormer(size=0), "size=0 must be"),
        (lambda: tg.HyperFormer(task_dim=0), "task_dim=0 must be"),
        (lambda: tg.HyperFormer(hidden_dim=1.5), "hidden_dim=1.5 must be"),  # type: ignore[arg-type]
        (lambda: tg.HyperFormer(projected_dim=None), "projected_dim=None must be"),  # type: ignore[arg-type]
        (lambda: tg.HyperFormer(blocks=False, conditional_norm=False), "leave nothing to generate"),
        (lambda: tg.HyperFormer(norms="some"), "'some' is unknown"),  # type: ignore[arg-type]
        (lambda: tg.HyperFormer(sites=()), "nothing to adapt"),
        (lambda: tg.HyperFormer(init_std=-1), "not be negative"),
        (lambda: tg.count(tg.HyperFormer(reduction=1000), T5_SMALL), "leaves no units"),
        (lambda: tg.TopLayers(k=0), "k=0 must be"),
        (lambda: tg.NormsOnly(norms="none"), "use HeadOnly"),
        (lambda: tg.HeadOnly(hidden=0), "hidden=0 must be"),
        (lambda: tg.count(tg.Adapter(reduction=1000), BERT_BASE), "leaves no units"),
        (lambda: tg.count(tg.Adapter(), BERT_BASE, tasks=0), "tasks=0"),
        (lambda: tg.count(tg.Adapter(), hf.ViTConfig()), "'vit' has no row"),
        (lambda: method_from_json({"method": "lora"}), "'lora' is unknown"),
        (lambda: method_from_json({}), "unknown to this version"),
    ],
)
def test_bad_methods_are_refused_in_one_sentence(build: Any, sentence: str) -> None:
    with pytest.raises(tg.GraftError, match=sentence) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_hypernetwork_writes_the_adapter_of_its_form() -> None:
    assert tg.HyperFormer().adapter == tg.Adapter(reduction=32, norm_after="own", norms="all")
    assert tg.HyperFormer(size=8, conditional_norm=False, norms="none").adapter == tg.Adapter(size=8, norms="none")
    assert tg.HyperFormer(blocks=False).adapter == tg.Adapter(reduction=32, norm_after="own", norms="all", depth=0)
    recipe: dict[str, Any] = {"activation": "relu", "sites": ("attention",), "pooling": "cls", "head_dropout": 0.2}
    expected = tg.Adapter(size=8, norm_after="own", norms="all", backbone_dropout=True, **recipe)
    assert tg.HyperFormer(size=8, shared=True, backbone_dropout=True, **recipe).adapter == expected


def test_methods_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tg.Adapter().size = 3  # type: ignore[misc]
