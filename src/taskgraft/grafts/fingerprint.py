"""Which backbone a graft belongs to: hashes of a model's configuration and weights, whatever class loaded it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from taskgraft.backbones.banks import HEADS
from taskgraft.backbones.frozen import base_prefix
from taskgraft.backbones.load import EMBEDDED_NAME, source_of
from taskgraft.errors import GraftError

# Settings that leave the hidden states of the headless model as they are: labels and heads, dropout and initial
# values, what is returned, how attention is computed, where the files came from. So do all that begin with "_".
# fmt: off
VOLATILE = frozenset({
    "architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward", "decoder_bias",
    "deterministic_flash_attn", "dtype", "experts_implementation", "finetuning_task", "gradient_checkpointing",
    "id2label", "label2id", "legacy", "name_or_path", "num_labels", "prefix", "pretraining_tp", "problem_type",
    "reference_compile", "return_dict", "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "use_bfloat16", "use_cache",
})
# fmt: on
VOLATILE_BEGINNINGS = ("_", "output_", "return_", "init", "classifier_", "summary_", "sparse_pred")
VOLATILE_PARTS = ("drop", "token_id")
POSITIONS_FROM_PAD = ("roberta", "xlm-roberta", "mpnet")  # these number their positions from the pad token's id


@dataclass(frozen=True)
class Fingerprint:
    """A backbone's identity. `sha256` is exact; `signs` and `pooler_signs` are the same in every float precision."""

    sha256: str
    signs: str
    dtype: str  # of most of its weights: "float32"
    pooler: str | None  # apart, because many classes have none or a random one; None: no pooler
    pooler_signs: str | None


def fingerprint(model: Any) -> Fingerprint:
    """The fingerprint of the headless model in `model`, the same before and after it is grafted or a graft is trained.

    It is remembered for as long as no weight of the backbone has changed.
    """
    remembered = REMEMBERED.get(model)
    if remembered is not None and remembered.holds(model):
        return remembered.fingerprint
    settings, tensors = settings_of(model.config), backbone_tensors(model)
    body = {name: value for name, value in tensors.items() if not name.startswith("pooler.")}
    pooler = {name: value for name, value in tensors.items() if name.startswith("pooler.")}
    counted: Counter[torch.dtype] = Counter()
    for value in body.values():
        counted[value.dtype] += value.numel()
    dtype = str(counted.most_common(1)[0][0]).removeprefix("torch.")
    pooler_hashes = hashes("", pooler) if pooler else (None, None)
    made = Fingerprint(*hashes(settings, body), dtype, *pooler_hashes)
    REMEMBERED[model] = Remembered.of(model, tensors, made)
    return made


@dataclass(frozen=True, eq=False)
class Remembered:
    """A fingerprint and what it was made from, to be able to tell quickly that nothing of that has changed."""

    fingerprint: Fingerprint
    config: dict[str, Any]
    state: list[Any]

    @classmethod
    def of(cls, model: Any, tensors: Mapping[str, Tensor], made: Fingerprint) -> Remembered:
        return cls(made, copy.deepcopy(vars(model.config)), state_of(tensors))

    def holds(self, model: Any) -> bool:
        return self.config == vars(model.config) and self.state == state_of(backbone_tensors(model))


def state_of(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Where tensors lie, how often each was changed, and a sum of each, since not every change is counted.

    A fused optimiser, and whoever writes to `data`, leave no other trace.
    """
    sums = {
        device: torch.stack([total_of(value) for value in tensors.values() if value.device == device]).tolist()
        for device in {value.device for value in tensors.values()}
    }
    left = {device: iter(values) for device, values in sums.items()}
    return [
        (name, value.dtype, value.shape, value.data_ptr(), changes_of(value), next(left[value.device]))
        for name, value in tensors.items()
    ]


def total_of(tensor: Tensor) -> Tensor:
    """The sum of its bits, eight bytes at a time: a single change shows in it, whichever it is."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


REMEMBERED: WeakKeyDictionary[nn.Module, Remembered] = WeakKeyDictionary()  # by model, for as long as that lives


def settings_of(config: Any) -> str:
    """The settings that change outputs, as JSON: those that differ from the defaults of their class.

    A setting that a later Transformers adds, with a default that keeps old checkpoints as they are, changes nothing.
    """
    defaults = type(config)().to_dict()
    kept = {"model_type": config.model_type}
    for key, value in config.to_diff_dict().items():
        volatile = key in VOLATILE or key.startswith(VOLATILE_BEGINNINGS) or any(part in key for part in VOLATILE_PARTS)
        if key == "pad_token_id":
            volatile = config.model_type not in POSITIONS_FROM_PAD
        if not volatile and value != defaults.get(key):
            kept[key] = value
    return json.dumps(kept, sort_keys=True, default=str)


def backbone_tensors(model: Any) -> dict[str, Tensor]:
    """The headless model's tensors in name order, without heads and without what was grafted onto it."""
    tensors: dict[str, Tensor] = model.base_model.state_dict()
    grafts = getattr(model, "taskgraft", None)
    if grafts is not None:
        prefix = base_prefix(model)
        own = {key.removeprefix(prefix) for key in grafts.backbone.keys}
        tensors = {name: value for name, value in tensors.items() if name in own}
    kept = {name: value for name, value in sorted(tensors.items()) if not name.startswith(("lm_head.", f"{HEADS}."))}
    absent = [name for name, value in kept.items() if value.is_meta]
    if absent:
        raise GraftError(
            f"{absent[0]} of this {type(model).__name__} is not in memory (it is on the meta device), so the backbone "
            "has no fingerprint: load the model without offloading."
        )
    return kept


def changes_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, which an inference tensor does not count."""
    return 0 if tensor.is_inference() else tensor._version


def hashes(settings: str, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """Two sha256: over the exact bits, and over what rounding to another float precision keeps, the sign bits."""
    exact, signs = hashlib.sha256(settings.encode()), hashlib.sha256(settings.encode())
    for name, value in tensors.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # sharded over processes
        raw = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        shape, dtype = list(value.shape), str(value.dtype)
        exact.update(f"\n{name} {shape} {dtype}\n".encode())
        exact.update(raw.data)
        if value.is_floating_point():
            size = value.element_size()
            signs.update(f"\n{name} {shape}\n".encode())
            signs.update(np.packbits(raw[size - 1 :: size] >> 7).data)  # little-endian: the sign is in the last byte
        else:  # quantised weights have no other precision
            signs.update(f"\n{name} {shape} {dtype}\n".encode())
            signs.update(raw.data)
    return exact.hexdigest(), signs.hexdigest()


def backbone_name(model: Any) -> str:
    name = str(getattr(model.config, "_name_or_path", "") or type(model.base_model).__name__)
    return EMBEDDED_NAME if source_of(name) is None else name


def check_backbone(
    model: Any, graft: str, made_for: Mapping[str, Any], reads_pooler: bool, other_precision: bool = False
) -> None:
    """Refuse the graft of this name if it was made for another backbone, or reads a pooler that is not this model's.

    `made_for` holds the fields of the fingerprint of the graft's backbone, and its name.
    """
    here = fingerprint(model)
    exact = made_for["sha256"] == here.sha256
    if not exact and (made_for["signs"] != here.signs or made_for["dtype"] == here.dtype):
        raise GraftError(
            f"graft {graft!r} was made for another backbone ({made_for['name']}, sha256 {made_for['sha256'][:12]}…; "
            f"this one is {backbone_name(model)}, {here.sha256[:12]}…): load that one, or train the task on this one."
        )
    if not exact and not other_precision:
        raise GraftError(
            f"graft {graft!r} was made for this backbone in another precision ({made_for['dtype']}; this one is "
            f"{here.dtype}): pass other_precision=True to use it here, with slightly different outputs."
        )
    pooler, own = ("pooler", here.pooler) if exact else ("pooler_signs", here.pooler_signs)
    if reads_pooler and made_for.get(pooler) != own:
        raise GraftError(
            f"graft {graft!r} reads the pooler of {made_for['name']}, and this model has "
            f"{'no pooler' if own is None else 'another pooler'}: load the class and checkpoint that it was made with."
        )
