"""What `adapters` 1.3.0 saved, as tests/interop/peer.py wrote it: tiny backbones, adapters on them, their logits."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

import taskgraft as tg

PACKED = Path(__file__).parent / "interop" / "adapterhub.zip"
WRITERS = {
    "t5": hf.T5ForConditionalGeneration,
    "mt5": hf.MT5ForConditionalGeneration,
    "bart": hf.BartForConditionalGeneration,
}


def unpack(folder: Path) -> Path:
    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(folder)
    return folder


def packed_cases() -> list[str]:
    """FAMILY/CONFIGURATION of every adapter that is packed."""
    with zipfile.ZipFile(PACKED) as packed:
        return sorted(name.rpartition("/")[0] for name in packed.namelist() if name.endswith("/adapter_config.json"))


def backbone_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model_class = WRITERS.get(folder.name, hf.AutoModel)
    return model_class.from_pretrained(folder / "backbone", dtype=dtype).eval()


def expected_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch, and the logits of each adapter on it."""
    found = load_file(folder / "expected.safetensors")
    inputs = {name: found.pop(name) for name in list(found) if name.endswith(("_ids", "_mask"))}
    return inputs, found


@torch.no_grad()
def logits_of(model: Any, rows: list[str | None], inputs: dict[str, Tensor]) -> Tensor:
    """What a model answers, in the shape that `adapters` gives it."""
    with tg.rows(model, rows):
        output = model(**inputs)
    some = output.logits if getattr(output, "logits", None) is not None else output.token_logits
    logits: Tensor = some
    return logits


def difference(found: Tensor, wanted: Tensor, mask: Tensor) -> float:
    """The largest one, where there is a token."""
    gap = (found[..., : wanted.shape[-1]] - wanted).abs()  # beyond are the classes of other tasks
    if gap.dim() == 3 and gap.shape[1] == mask.shape[1]:
        gap = gap[mask.bool()]
    return gap.max().item()
