"""The backbone a command needs, loaded without noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from taskgraft.errors import GraftError

if TYPE_CHECKING:
    from taskgraft.backbones.load import Backbone


def backbone_named(name: str | None) -> Backbone:
    """The backbone of this name or in this folder; None is the embedded default."""
    from taskgraft.backbones.load import load_backbone

    silence()
    return load_backbone(name)


def backbone_for(task: str, made_for: Mapping[str, Any], name: str | None) -> Backbone:
    """The backbone that was named, or the one that a task was made for."""
    from taskgraft.backbones.load import source_of

    own = name or source_of(str(made_for["name"]))
    if name is not None or own is None:
        return backbone_named(own)
    try:
        return backbone_named(own)
    except GraftError as error:
        raise GraftError(f"{error} Task {task!r} was trained on it: say where it is with --backbone.") from error


def config_named(name: str | None) -> Any:
    """A backbone's configuration alone."""
    from transformers import AutoConfig

    from taskgraft.backbones.load import embedded_folder

    silence()
    source = str(embedded_folder()) if name is None else name
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GraftError(f"the configuration of backbone {source!r} could not be loaded: {reason}") from error


def silence() -> None:
    """Keep the bars and notices of Transformers and of the Hub's client out of what commands say."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    disable_progress_bars()
