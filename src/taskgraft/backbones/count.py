"""How many parameters a method trains, in closed form, from the configuration alone."""

from __future__ import annotations

from collections.abc import Sequence

from taskgraft.backbones.sites import Config, Family, family_of, stacks_of
from taskgraft.errors import GraftError
from taskgraft.methods import Adapter, FullFineTuning, HeadOnly, HyperFormer, Method, TopLayers
from taskgraft.nn.bank import Weight, bottleneck_layout
from taskgraft.nn.bottleneck import Form
from taskgraft.nn.heads import head_layout
from taskgraft.nn.hypernet import Plan


def form_of(method: Adapter | HyperFormer) -> Form:
    """The part of an adapter that decides which bank it shares."""
    method = method.adapter if isinstance(method, HyperFormer) else method
    return Form(
        activation=method.activation,
        depth=method.depth,
        norm_before=method.norm_before,
        norm_inside=method.norm_inside,
        norm_after=method.norm_after,
        parallel=method.parallel,
        scaling=method.scaling,
        multiplicative=method.multiplicative,
        dropout=method.dropout,
        reads=method.reads,
        keeps=method.keeps,
        norm_sum=method.norm_sum,
        joined=method.joined,
    )


def hidden_of(method: Method) -> int | None:
    """How many hidden units the method's head has, if it has a hidden layer."""
    if isinstance(method, Adapter):
        return method.head_hidden
    return method.hidden if isinstance(method, HeadOnly) else None


def hypernet_plan(method: HyperFormer, d: int, places: Sequence[str]) -> Plan:
    """The hypernetwork of a method for these sites of a backbone of width d."""
    weights = bottleneck_layout(d, form_of(method))(method.bottleneck_size(d))
    return Plan(
        places=tuple(places),
        layout=tuple((name, weight.shape) for name, weight in weights.items()),
        shared=method.shared,
        task_dim=method.task_dim,
        hidden_dim=method.hidden_dim,
        projected_dim=method.projected_dim,
        has_projector=method.projector,
    )


def size_of(weights: dict[str, Weight], shared: bool) -> int:
    """Trained parameters of one slot, of the weights that tasks share or of those they do not."""
    total = 0
    for weight in weights.values():
        if weight.role != "state" and weight.shared == shared:
            numel = 1
            for n in weight.shape:
                numel *= n
            total += numel
    return total


def count(method: Method, config: Config, tasks: int = 1, labels: int | None = None) -> int:
    """Parameters that `method` trains for `tasks` tasks together, with `labels` classes each (None: no own head)."""
    if tasks < 1:
        raise GraftError(f"tasks={tasks} must be at least 1.")
    family = family_of(config)
    d = int(config.hidden_size)
    hidden = hidden_of(method)
    per_task = 0 if labels is None else size_of(head_layout(d, hidden)(labels), shared=False)
    shared = 0
    if method.trains_backbone:
        shared += _backbone(method, config)
    if isinstance(method, Adapter):
        weights = bottleneck_layout(d, form_of(method))(method.bottleneck_size(d))
        places = len(_places(method, family, config))
        per_task += places * size_of(weights, shared=False)
        shared += places * size_of(weights, shared=True)
    if isinstance(method, HyperFormer):
        per_task += method.task_dim
        shared += size_of(hypernet_plan(method, d, _places(method, family, config)).weights(), shared=False)
    norms = _norms(method, family, config)
    if method.trained_norms == "shared":
        shared += norms
    else:
        per_task += norms
    return tasks * per_task + shared


def _places(method: Adapter | HyperFormer, family: Family, config: Config) -> list[str]:
    """The sites of a method, by name, in the order of the layers."""
    only = method.layers if isinstance(method, Adapter) else None
    return [
        f"{stack.name}.{layer}.{site}"
        for stack in stacks_of(family, config)
        for layer in range(stack.count(config))
        if only is None or layer in only
        for site in stack.places
        if site in method.sites
    ]


def _norms(method: Method, family: Family, config: Config) -> int:
    if method.trained_norms == "none":
        return 0
    stacks = stacks_of(family, config)
    inside = sum(stack.norms(config) for stack in stacks)
    if method.trained_norms == "layers":
        return inside
    outer = family.outer_norms(config)
    return inside + (outer if len(stacks) == len(family.stacks) else outer // 2)


def _backbone(method: Method, config: Config) -> int:
    """Full and variable fine-tuning train the backbone's own weights, which are counted on a model without storage."""
    import torch
    from transformers import AutoModel, AutoModelForSeq2SeqLM

    from taskgraft.backbones.frozen import top_layer_parameters

    with torch.device("meta"):
        if getattr(config, "is_encoder_decoder", False):
            model = AutoModelForSeq2SeqLM.from_config(config)
        else:
            model = AutoModel.from_config(config)
    if isinstance(method, FullFineTuning):
        return sum(p.numel() for p in model.parameters())
    assert isinstance(method, TopLayers)
    return sum(p.numel() for p in top_layer_parameters(model, family_of(config), method.k).values())
