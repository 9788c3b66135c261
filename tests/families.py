"""One tiny random model of every family in the table of sites, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCABULARY = 99
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Sample:
    """A family as the tests see it: how to build one, and whether it writes text."""

    model_class: Any
    config: Callable[[], Any]
    writes: bool = False
    checkpoints: bool = True  # stock Transformers can checkpoint its gradients


SAMPLES: dict[str, Sample] = {
    "bert": Sample(hf.BertModel, lambda: hf.BertConfig(**SMALL)),
    "roberta": Sample(hf.RobertaModel, lambda: hf.RobertaConfig(**SMALL)),
    "xlm-roberta": Sample(hf.XLMRobertaModel, lambda: hf.XLMRobertaConfig(**SMALL)),
    "electra": Sample(hf.ElectraModel, lambda: hf.ElectraConfig(**SMALL, embedding_size=16)),
    "deberta-v2": Sample(
        hf.DebertaV2Model,
        lambda: hf.DebertaV2Config(
            **SMALL, relative_attention=True, norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], conv_kernel_size=3
        ),
    ),
    "mpnet": Sample(hf.MPNetModel, lambda: hf.MPNetConfig(**SMALL), checkpoints=False),
    "distilbert": Sample(
        hf.DistilBertModel,
        lambda: hf.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40
        ),
    ),
    "albert": Sample(
        hf.AlbertModel,
        lambda: hf.AlbertConfig(**SMALL, embedding_size=16, hidden_dropout_prob=0.1),
        checkpoints=False,
    ),
    "modernbert": Sample(
        hf.ModernBertModel,
        lambda: hf.ModernBertConfig(
            **SMALL, attention_dropout=0.1, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        ),
    ),
    "t5": Sample(hf.T5ForConditionalGeneration, lambda: hf.T5Config(**T5), writes=True),
    "t5-v1.1": Sample(
        hf.T5ForConditionalGeneration,
        lambda: hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        writes=True,
    ),
    "mt5": Sample(
        hf.MT5ForConditionalGeneration, lambda: hf.MT5Config(**T5, feed_forward_proj="gated-gelu"), writes=True
    ),
    "bart": Sample(
        hf.BartForConditionalGeneration,
        lambda: hf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=40,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        ),
        writes=True,
    ),
    "gpt2": Sample(
        hf.GPT2LMHeadModel,
        lambda: hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=40,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        writes=True,
    ),
    "llama": Sample(hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**DECODER), writes=True),
    "mistral": Sample(hf.MistralForCausalLM, lambda: hf.MistralConfig(**DECODER), writes=True),
    "qwen2": Sample(hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**DECODER), writes=True),
    "qwen3": Sample(hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**DECODER), writes=True),
    "gemma": Sample(hf.GemmaForCausalLM, lambda: hf.GemmaConfig(**DECODER), writes=True),
    "gemma2": Sample(hf.Gemma2ForCausalLM, lambda: hf.Gemma2Config(**DECODER), writes=True),
    "gemma3_text": Sample(hf.Gemma3ForCausalLM, lambda: hf.Gemma3TextConfig(**DECODER), writes=True),
}
FAMILY_NAMES = list(SAMPLES)
WRITERS = [name for name, sample in SAMPLES.items() if sample.writes]


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny model in evaluation mode, every weight moved by a normal of std 0.1."""
    torch.manual_seed(seed)
    model = SAMPLES[name].model_class(SAMPLES[name].config())
    return perturb(model, seed).to(dtype).eval()


def perturb(model: Any, seed: int = 0, std: float = 0.1, only: Callable[[str], bool] = lambda _: True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if only(path):
                parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def batch(model: Any, rows: int = 6, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Random ids with ragged lengths; decoder inputs where the model has a decoder of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(3, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (rows, 5), generator=generator)
    return inputs


def result(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The tensor that tests compare: the logits, or the last hidden state, padding left out."""
    output = model(**inputs, use_cache=False) if model.config.is_encoder_decoder else model(**inputs)
    values: Tensor = output.logits if "logits" in output else output.last_hidden_state
    if values.dim() == 3 and not model.config.is_encoder_decoder:
        values = values * inputs["attention_mask"][:, :, None].to(values.dtype)
    return values
