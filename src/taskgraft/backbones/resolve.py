"""A method for one backbone: all that depends on it made explicit, or the reason why it cannot be used there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from taskgraft.backbones.frozen import FrozenBackbone, top_layer_parameters
from taskgraft.errors import GraftError
from taskgraft.methods import Adapter, HyperFormer, Method, TopLayers
from taskgraft.nn.heads import Head


def resolved(method: Method, head: Head | None, backbone: FrozenBackbone) -> Method:
    """The method as a task with this head has it on the backbone."""
    model, sites = backbone.model, backbone.sites
    if isinstance(method, (Adapter, HyperFormer)):
        method.bottleneck_size(int(model.config.hidden_size))
    if isinstance(method, Adapter):
        depth = max(site.layer for site in sites) + 1
        beyond = [layer for layer in method.layers or () if not 0 <= layer < depth]
        if beyond:
            raise GraftError(f"layers {beyond} do not exist: this backbone has layers 0 to {depth - 1}.")
    if isinstance(method, TopLayers):
        top_layer_parameters(model, backbone.family, method.k)
    if head is None:
        return method
    if model.config.is_encoder_decoder and any(site.name.startswith("decoder") for site in sites):
        raise GraftError(
            f"{type(model).__name__} writes text, so its tasks have no heads: leave the labels out, "
            "or graft the encoder alone (T5EncoderModel)."
        )
    if head.per_token:
        return method
    if method.pooling is None:
        return replace(method, pooling="last" if backbone.family.is_decoder else "mean")
    if method.pooling == "pooler":
        check_pooler(model)
    return method


def check_pooler(model: Any) -> None:
    pooler = getattr(model.base_model, "pooler", None)
    name = type(model.base_model).__name__
    if pooler is None:
        raise GraftError(f"{name} has no pooler: use pooling='cls', 'mean' or 'last'.")
    loaded = [getattr(p, "_is_hf_initialized", False) for p in model.parameters()]
    if any(loaded) and not all(getattr(p, "_is_hf_initialized", False) for p in pooler.parameters()):
        raise GraftError(
            f"the pooler of this {name} was not in its checkpoint, so its weights are random and frozen: "
            "use pooling='cls', 'mean' or 'last'."
        )
