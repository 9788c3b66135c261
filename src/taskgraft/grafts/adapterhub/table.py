"""What the files of the AdapterHub are called and where they keep what, by model family."""

from __future__ import annotations

from typing import Any

from taskgraft.backbones.sites import FoundSite, family_of, find_sites
from taskgraft.errors import GraftError
from taskgraft.methods import Activation

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin"
HEAD_CONFIG, HEAD_TENSORS, HEAD_PICKLE = "head_config.json", "model_head.safetensors", "pytorch_model_head.bin"

# Where the AdapterHub keeps the adapters of a layer, by model type, stack and site.
_BERT = {"encoder.attention": "encoder.layer.{}.attention.output", "encoder.feedforward": "encoder.layer.{}.output"}
_DISTILBERT = {
    "encoder.attention": "transformer.layer.{}.attention_adapters",
    "encoder.feedforward": "transformer.layer.{}.output_adapters",
}
_T5 = {
    "encoder.attention": "encoder.block.{}.layer.0",
    "encoder.feedforward": "encoder.block.{}.layer.1",
    "decoder.attention": "decoder.block.{}.layer.0",
    "decoder.cross_attention": "decoder.block.{}.layer.1",
    "decoder.feedforward": "decoder.block.{}.layer.2",
}
_BART = {
    "encoder.attention": "encoder.layers.{}.attention_adapters",
    "encoder.feedforward": "encoder.layers.{}.output_adapters",
    "decoder.attention": "decoder.layers.{}.attention_adapters",
    "decoder.cross_attention": "decoder.layers.{}.cross_attention_adapters",
    "decoder.feedforward": "decoder.layers.{}.output_adapters",
}
PATHS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "deberta-v2": _BERT,
    "distilbert": _DISTILBERT,
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
}
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "electra": "Electra",
    "deberta-v2": "DebertaV2",
    "distilbert": "DistilBert",
    "t5": "T5",
    "mt5": "MT5",
    "bart": "Bart",
}
LOCATIONS = {"attention": "mh_adapter", "cross_attention": "cross_adapter", "feedforward": "output_adapter"}

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "leakyrelu": "leaky_relu",
    "linear": "identity",
}

HEADS = {
    "classification": "classification",
    "multilabel_classification": "multilabel",
    "tagging": "tokens",
    "question_answering": "spans",
}


def check_family(model: Any) -> str:
    """The model's type, once it is known that the AdapterHub's files for it are."""
    if not hasattr(model, "config"):
        raise GraftError(f"a {type(model).__name__} is no model: give the model itself (`backbone.model`).")
    model_type: str = model.config.model_type
    if model_type not in PATHS:
        raise GraftError(f"AdapterHub files for model family {model_type!r} are not known: {', '.join(PATHS)} are.")
    return model_type


def sites_of(model: Any) -> list[FoundSite]:
    return find_sites(model, family_of(model.config))
