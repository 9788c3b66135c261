"""Where adapters go in each model family: a table. Adding a family is adding a row, and a line in tests/families.py.

Paths are relative to one layer. A place names the module to wrap; the adapter runs on its output, or on its input
where `first` is set (T5: before the dropout). `reads` is the module whose input is the sub-layer's input, for parallel
adapters; `residual` the module whose input is added to the sub-layer's output, and `norm` the norm of that sum where
the layer has one, for the AdapterHub's wirings. Norms are found by class name; the table only counts them, so that
`tg.count` needs no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from taskgraft.errors import GraftError

Order = Literal["after dropout", "before dropout", "no dropout"]
Config = Any  # transformers.PretrainedConfig, which types its fields loosely


@dataclass(frozen=True)
class Place:
    """One site of a layer, and where its sub-layer's dropout is."""

    module: str
    reads: str
    order: Order
    first: bool = False
    residual: str = ""
    norm: str = ""


@dataclass(frozen=True)
class Stack:
    """A list of layers, found by the end of its path, and the sites of each of them."""

    name: str
    layers: str  # a regular expression that the path of the list ends with
    places: dict[str, Place]
    count: Callable[[Config], int]
    norms: Callable[[Config], int]  # parameters of the norms of all its layers


@dataclass(frozen=True)
class Family:
    """A model family: its stacks, the norms outside their layers, and how its norms scale."""

    stacks: tuple[Stack, ...]
    outer_norms: Callable[[Config], int]
    norm_offset: float = 0.0  # Gemma's norms scale by 1 + w
    fixed_norms: tuple[str, ...] = ()  # norms that never see a row of the batch, so they cannot differ by task
    is_decoder: bool = False
    is_encoder_decoder: bool = False
    joins: tuple[str, ...] = ()  # modules of a layer whose forward is `LayerNorm(dropout(dense(x)) + residual)`


@dataclass(frozen=True)
class FoundSite:
    """A site of an actual model: its name on disk, the layer it is in, and its place."""

    name: str  # "encoder.3.attention"
    layer: int
    layer_path: str
    place: Place = field(repr=False)


def _layers(config: Config) -> int:
    return int(config.num_hidden_layers)


def _per_layer(norms: int, weights: int = 2) -> Callable[[Config], int]:
    return lambda c: norms * weights * int(c.hidden_size) * _layers(c)


def _qk_norms(config: Config) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(head) * _layers(config)


def post_norm(module: str, reads: str, order: Order, norm: str) -> Place:
    """A place in a layer that goes on with `norm(sub-layer's output + sub-layer's input)`."""
    return Place(module, reads, order, residual=reads, norm=norm)


def _encoder(
    attention: Place,
    feedforward: Place,
    layers: str = r"encoder\.layer",
    outer: Callable[[Config], int] | None = None,
    joins: tuple[str, ...] = (),
) -> Family:
    stack = Stack("encoder", layers, {"attention": attention, "feedforward": feedforward}, _layers, _per_layer(2))
    return Family((stack,), outer or (lambda c: 2 * int(c.hidden_size)), joins=joins)


BERT = _encoder(
    post_norm("attention.output.dropout", "attention", "after dropout", "attention.output.LayerNorm"),
    post_norm("output.dropout", "intermediate", "after dropout", "output.LayerNorm"),
    joins=("attention.output", "output"),
)
ELECTRA = _encoder(
    BERT.stacks[0].places["attention"],
    BERT.stacks[0].places["feedforward"],
    outer=lambda c: 2 * int(c.embedding_size),
    joins=BERT.joins,
)
DEBERTA = Family(
    BERT.stacks,
    # The embeddings' norm, and the convolution's where the configuration has one.
    outer_norms=lambda c: 2 * int(c.hidden_size) * (1 + (getattr(c, "conv_kernel_size", 0) > 0)),
    fixed_norms=("encoder.LayerNorm",),  # normalises the relative position embeddings
    joins=BERT.joins,
)
MPNET = _encoder(
    post_norm("attention.dropout", "attention", "after dropout", "attention.LayerNorm"),
    post_norm("output.dropout", "intermediate", "after dropout", "output.LayerNorm"),
    joins=("output",),
)
DISTILBERT = _encoder(
    post_norm("attention.out_lin", "attention", "no dropout", "sa_layer_norm"),
    post_norm("ffn.dropout", "ffn", "after dropout", "output_layer_norm"),
    layers=r"transformer\.layer",
)
ALBERT = Family(
    (
        Stack(
            "encoder",
            r"albert_layer_groups\.\d+\.albert_layers",
            {
                "attention": Place("attention.output_dropout", "attention", "after dropout"),
                "feedforward": Place("ffn_output", "ffn", "no dropout"),
            },
            count=lambda c: int(c.num_hidden_groups * c.inner_group_num),
            norms=lambda c: int(c.num_hidden_groups * c.inner_group_num) * 4 * int(c.hidden_size),
        ),
    ),
    outer_norms=lambda c: 2 * int(c.embedding_size),
)
MODERNBERT = Family(
    (
        Stack(
            "encoder",
            r"layers",
            {
                "attention": Place("attn.out_drop", "attn", "after dropout"),
                "feedforward": Place("mlp", "mlp", "no dropout"),
            },
            _layers,
            # The first layer's attention has no norm of its own: the embeddings' precedes it.
            norms=lambda c: (2 * _layers(c) - 1) * int(c.hidden_size) * (1 + bool(c.norm_bias)),
        ),
    ),
    outer_norms=lambda c: 2 * int(c.hidden_size) * (1 + bool(c.norm_bias)),
)


def _t5_place(layer: int, reads: str) -> Place:
    path = f"layer.{layer}"
    return Place(f"{path}.dropout", f"{path}.{reads}", "before dropout", first=True, residual=path)


T5 = Family(
    (
        Stack(
            "encoder",
            r"encoder\.block",
            {"attention": _t5_place(0, "SelfAttention"), "feedforward": _t5_place(1, "DenseReluDense")},
            _layers,
            _per_layer(2, weights=1),
        ),
        Stack(
            "decoder",
            r"decoder\.block",
            {
                "attention": _t5_place(0, "SelfAttention"),
                "cross_attention": _t5_place(1, "EncDecAttention"),
                "feedforward": _t5_place(2, "DenseReluDense"),
            },
            count=lambda c: int(c.num_decoder_layers),
            norms=lambda c: 3 * int(c.hidden_size) * int(c.num_decoder_layers),
        ),
    ),
    outer_norms=lambda c: 2 * int(c.hidden_size),
    is_encoder_decoder=True,
)
_BART_ENCODER = {
    "attention": post_norm("self_attn.out_proj", "self_attn", "before dropout", "self_attn_layer_norm"),
    "feedforward": post_norm("fc2", "fc1", "before dropout", "final_layer_norm"),
}
_BART_CROSS = post_norm("encoder_attn.out_proj", "encoder_attn", "before dropout", "encoder_attn_layer_norm")
BART = Family(
    (
        Stack(
            "encoder",
            r"encoder\.layers",
            _BART_ENCODER,
            count=lambda c: int(c.encoder_layers),
            norms=lambda c: 4 * int(c.hidden_size) * int(c.encoder_layers),
        ),
        Stack(
            "decoder",
            r"decoder\.layers",
            {**_BART_ENCODER, "cross_attention": _BART_CROSS},
            count=lambda c: int(c.decoder_layers),
            norms=lambda c: 6 * int(c.hidden_size) * int(c.decoder_layers),
        ),
    ),
    outer_norms=lambda c: 4 * int(c.hidden_size),
    is_encoder_decoder=True,
)
GPT2 = Family(
    (
        Stack(
            "decoder",
            r"h",
            {
                "attention": Place("attn.resid_dropout", "attn", "after dropout"),
                "feedforward": Place("mlp.dropout", "mlp", "after dropout"),
            },
            _layers,
            _per_layer(2),
        ),
    ),
    outer_norms=lambda c: 2 * int(c.hidden_size),
    is_decoder=True,
)


def _llama(norms: Callable[[Config], int], norm_offset: float = 0.0) -> Family:
    places = {
        "attention": Place("self_attn.o_proj", "self_attn", "no dropout"),
        "feedforward": Place("mlp", "mlp", "no dropout"),
    }
    stack = Stack("decoder", r"layers", places, _layers, norms)
    return Family((stack,), outer_norms=lambda c: int(c.hidden_size), norm_offset=norm_offset, is_decoder=True)


LLAMA = _llama(_per_layer(2, weights=1))

# By config.model_type.
FAMILIES: dict[str, Family] = {
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "electra": ELECTRA,
    "deberta-v2": DEBERTA,
    "mpnet": MPNET,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "modernbert": MODERNBERT,
    "t5": T5,
    "mt5": T5,
    "bart": BART,
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": _llama(lambda c: _per_layer(2, weights=1)(c) + _qk_norms(c)),
    "gemma": _llama(_per_layer(2, weights=1), norm_offset=1.0),
    "gemma2": _llama(_per_layer(4, weights=1), norm_offset=1.0),
    "gemma3_text": _llama(lambda c: _per_layer(4, weights=1)(c) + _qk_norms(c), norm_offset=1.0),
}


def family_of(config: Config) -> Family:
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise GraftError(
            f"model family {model_type!r} has no row in the table of sites: it has {', '.join(sorted(FAMILIES))}. "
            "A row in taskgraft/backbones/sites.py adds one."
        )
    return FAMILIES[model_type]


def stacks_of(family: Family, config: Config) -> tuple[Stack, ...]:
    """The stacks that a model of this configuration has: an encoder-decoder's encoder may stand alone."""
    if family.is_encoder_decoder and not getattr(config, "is_encoder_decoder", True):
        return family.stacks[:1]
    return family.stacks


def find_sites(model: nn.Module, family: Family) -> list[FoundSite]:
    """Every place of every layer of a model, in the order of the forward pass of each stack."""
    found = []
    for stack in family.stacks:
        pattern = re.compile(rf"(^|\.){stack.layers}$")
        number = 0
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and pattern.search(path):
                for position in range(len(module)):
                    layer_path = f"{path}.{position}"
                    for site, place in stack.places.items():
                        name = f"{stack.name}.{number}.{site}"
                        found.append(FoundSite(name, number, layer_path, place))
                    number += 1
    if not found:
        raise GraftError(
            f"{type(model).__name__} has no layers where this family has its sites, so nothing could be grafted: "
            "use the model class that holds the Transformer layers."
        )
    return found
