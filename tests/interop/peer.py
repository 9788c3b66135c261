"""Runs where `adapters` 1.3.0 is installed, and nothing of taskgraft: writes what it saves, reads what we export.

python peer.py save FOLDER [--few]   tiny backbones, adapters of every configuration on them, and their logits
python peer.py check FOLDER          the largest difference between its logits and ours, for each exported adapter
"""

import argparse
import json
from pathlib import Path

import adapters
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
BART = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 24, "pad_token_id": 0, "eos_token_id": 1}
BART |= {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 24))}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "bos_token_id": 2, "decoder_start_token_id": 1}
DISTILBERT = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}

# The plain class whose weights are saved, and the class that takes adapters.
FAMILIES = {
    "bert": (hf.BertModel, hf.BertConfig(**SMALL), adapters.BertAdapterModel),
    "roberta": (hf.RobertaModel, hf.RobertaConfig(**SMALL), adapters.RobertaAdapterModel),
    "distilbert": (
        hf.DistilBertModel,
        hf.DistilBertConfig(**DISTILBERT, max_position_embeddings=24),
        adapters.DistilBertAdapterModel,
    ),
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**T5), hf.T5ForConditionalGeneration),
    "xlm-roberta": (hf.XLMRobertaModel, hf.XLMRobertaConfig(**SMALL), adapters.XLMRobertaAdapterModel),
    "electra": (hf.ElectraModel, hf.ElectraConfig(**SMALL, embedding_size=16), adapters.ElectraAdapterModel),
    "deberta-v2": (
        hf.DebertaV2Model,
        hf.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        adapters.DebertaV2AdapterModel,
    ),
    "mt5": (hf.MT5ForConditionalGeneration, hf.MT5Config(**T5), hf.MT5ForConditionalGeneration),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**BART), hf.BartForConditionalGeneration),
}

DOUBLE = {"mh_adapter": True, "output_adapter": True, "non_linearity": "swish", "reduction_factor": 4}
SINGLE = {**DOUBLE, "mh_adapter": False, "non_linearity": "relu", "original_ln_before": True}
PARALLEL = {**DOUBLE, "mh_adapter": False, "non_linearity": "relu", "is_parallel": True, "scaling": 4.0}
CONFIGS = {
    "double_seq_bn": DOUBLE,
    "seq_bn": SINGLE,
    "par_bn": PARALLEL,
    "par_bn_both": {**PARALLEL, "mh_adapter": True, "ln_before": True, "ln_after": True},
    "par_bn_end": {**PARALLEL, "original_ln_after": False},
    "gelu": {**DOUBLE, "non_linearity": "gelu"},
    "gelu_new": {**SINGLE, "non_linearity": "gelu_new"},
    "leakyrelu": {**DOUBLE, "non_linearity": "leakyrelu"},
    "leave_out": {**SINGLE, "mh_adapter": True, "leave_out": [0, 2]},
    "leave_out_one": {**DOUBLE, "leave_out": [1]},
    "per_layer": {**DOUBLE, "reduction_factor": {"0": 2, "default": 8}},
    "uneven": {**DOUBLE, "reduction_factor": 3},
    "ln_before": {**DOUBLE, "ln_before": True},
    "ln_after": {**DOUBLE, "ln_after": True, "scaling": 3.0},
    "ln_after_sum": {**DOUBLE, "ln_before": True, "ln_after": True, "adapter_residual_before_ln": True},
    "post_add": {**SINGLE, "mh_adapter": True, "residual_before_ln": "post_add"},
    "residual_after": {**SINGLE, "mh_adapter": True, "residual_before_ln": False, "scaling": 0.5},
    "adapter_plus": {
        **SINGLE,
        "mh_adapter": True,
        "original_ln_after": False,
        "residual_before_ln": False,
        "scaling": "channel",
        "non_linearity": "gelu",
    },
    "end": {**SINGLE, "mh_adapter": True, "original_ln_after": False},
    "end_sum": {**SINGLE, "original_ln_after": False, "residual_before_ln": "post_add", "scaling": "learned"},
    "end_bare": {**DOUBLE, "original_ln_after": False},
    "cross": {**DOUBLE, "cross_adapter": True},
    "cross_seq": {**SINGLE, "cross_adapter": True, "mh_adapter": True},
}
# What is committed: every configuration for BERT and T5, and these for two more.
FEW = ("double_seq_bn", "seq_bn", "par_bn", "ln_after_sum", "adapter_plus")
FEW_FAMILIES = ("bert", "t5", "roberta", "distilbert")
WRITERS = ("t5", "mt5", "bart")
HEADS = [
    ("classification", {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}),
    ("classification", {"num_labels": 2, "layers": 1, "use_pooler": True}),
    ("classification", {"num_labels": 3, "layers": 1, "multilabel": True}),
    ("tagging", {"num_labels": 4}),
    ("qa", {}),
    ("classification", {"num_labels": 1, "layers": 1}),
]


@torch.no_grad()
def perturb(module, names=lambda name: True, std=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if names(name):
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))


def batch(family):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    ids[1, 6:] = 0
    if family not in WRITERS:
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.randint(3, 40, (3, 5))}


def with_adapters(folder, family):
    model = FAMILIES[family][2].from_pretrained(folder)
    if family in WRITERS:
        adapters.init(model)
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs):
    output = model(**inputs)
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


def is_possible(family, case):
    if case.startswith("cross"):
        return family in WRITERS
    # Without a norm after the residual, "post_add" leaves a variable of adapters 1.3.0 unset.
    return CONFIGS[case].get("residual_before_ln") != "post_add" or family not in ("t5", "mt5")


def save(folder, few):
    for family, (plain, config, _) in FAMILIES.items():
        if few and family not in FEW_FAMILIES:
            continue
        home = folder / family
        torch.manual_seed(0)
        backbone = plain(config).eval()
        perturb(backbone, std=0.1)
        backbone.save_pretrained(home / "backbone")
        torch.manual_seed(2)
        inputs = batch(family)
        expected = dict(inputs)
        whole = not few or family in ("bert", "t5")
        for number, case in enumerate(CONFIGS):
            if not is_possible(family, case) or (not whole and case not in FEW):
                continue
            model = with_adapters(home / "backbone", family)
            model.add_adapter(case, config=adapters.BnConfig.from_dict(CONFIGS[case]))
            if family not in WRITERS:
                kind, options = HEADS[number % len(HEADS)]
                if options.get("use_pooler") and family in ("distilbert", "electra", "deberta-v2"):
                    options = {**options, "use_pooler": False}
                getattr(model, f"add_{kind}_head")(case, **options)
                model.active_head = case
            model.set_active_adapters(case)
            perturb(model, lambda name, case=case: f".{case}." in name, seed=number)
            expected[case] = logits_of(model, inputs).contiguous()
            # Every third as a pickle, as older files are; and where a tensor has two names, which safetensors refuses.
            safe = number % 3 > 0 and not CONFIGS[case].get("ln_before")
            model.save_adapter(str(home / case), case, with_head=family not in WRITERS, use_safetensors=safe)
        save_file(expected, home / "expected.safetensors")


def check(folder):
    found = {}
    for home in sorted(folder.iterdir()):
        expected = load_file(home / "expected.safetensors")
        inputs = {name: expected.pop(name) for name in list(expected) if name.endswith(("_ids", "_mask"))}
        for case, logits in expected.items():
            model = with_adapters(home / "backbone", home.name)
            name = model.load_adapter(str(home / case), use_safetensors=True, set_active=True)
            if home.name not in WRITERS:
                model.active_head = name
            found[f"{home.name}/{case}"] = (logits_of(model, inputs) - logits).abs().max().item()
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["save", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--few", action="store_true")
    asked = parser.parse_args()
    hf.logging.set_verbosity_error()
    if asked.action == "save":
        save(asked.folder, asked.few)
    else:
        check(asked.folder)


if __name__ == "__main__":
    main()
