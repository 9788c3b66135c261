"""What a grafted model does around its own forward pass: take the rows out of the batch, and put the heads on.

A model's own `forward` and `generate` are called unchanged; these stand before them on the one instance, as
`accelerate` does it, and `ungraft` takes them away.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from taskgraft.errors import GraftError
from taskgraft.nn.heads import IGNORED, Head, pool, row_losses
from taskgraft.nn.rows import Route, bind, generating

if TYPE_CHECKING:
    from taskgraft.backbones.insert import Grafts


@dataclass
class GraftOutput(ModelOutput):  # type: ignore[misc]
    """Logits of each row's own head, padded with -inf to the widest; `token_logits` where heads read every token."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    token_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def mask(self) -> Tensor | None:
        """Which logits exist: a class of the row's own head."""
        return None if self.logits is None else torch.isfinite(self.logits)


def grafted_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The class's forward, with `task_ids` taken from the batch and the rows' heads on top."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, task_ids: Any = None, **kwargs: Any) -> Any:
        grafts: Grafts = self.taskgraft
        grafts.follow_device()
        if task_ids is not None:
            if grafts.bound.route is not None:
                raise GraftError("the batch carries task_ids while tg.rows names the rows: use one of them.")
            with bind(grafts.bound, grafts.route_of(grafts.names_of(task_ids))):
                return forward(self, *args, **kwargs)
        route = grafts.route()
        if route.generated_rows and not grafts.bound.generated:
            with generated_once(grafts):
                return forward(self, *args, **kwargs)
        if self.training:
            keep_rows_when_checkpointing(grafts)
        if not any(kind in route.kinds for kind in grafts.head_kinds):
            return original(self, *args, **kwargs)
        return forward_with_heads(grafts, original, self, args, kwargs, route)

    parameters = dict(inspect.signature(original).parameters)
    extra = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("labels", "task_ids")
    }
    rest = {name: parameters.pop(name) for name, p in list(parameters.items()) if p.kind is p.VAR_KEYWORD}
    signature = inspect.Signature(
        list({**parameters, **{k: extra[k] for k in extra if k not in parameters}, **rest}.values())
    )
    cast(Any, forward).__signature__ = signature
    return forward


def generated_once(grafts: Grafts) -> generating:
    """Let hypernetworks generate the weights of the rows in force now, for all calls of the model in this block."""
    return generating(grafts.bound, grafts.generated(grafts.route()))


def forward_with_heads(
    grafts: Grafts,
    original: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    route: Route,
) -> GraftOutput:
    labels = kwargs.pop("labels", None)
    if labels is not None and not torch.compiler.is_compiling():
        check_all_have_heads(grafts, route)
    kwargs.pop("num_items_in_batch", None)  # ours is a mean over rows
    asked = kwargs.get("output_hidden_states", model.config.output_hidden_states)
    kwargs["return_dict"] = True
    if not grafts.is_base:  # a class with a head of its own: its base model's output is the last hidden state
        kwargs["output_hidden_states"] = True
        if "logits_to_keep" in grafts.arguments:
            kwargs.setdefault("logits_to_keep", 1)  # the language model's own logits are not wanted
    output = original(model, *args, **kwargs)
    hidden = output.last_hidden_state if grafts.is_base else output.hidden_states[-1]
    place = grafts.arguments.index("attention_mask")
    mask = args[place] if len(args) > place else kwargs.get("attention_mask")
    own = getattr(output, "logits", None) if grafts.own_head is not None else None
    if "start_logits" in output:
        own = torch.stack([output.start_logits, output.end_logits], -1)
    logits, token_logits = apply_heads(grafts, hidden, mask, route, own)
    loss = None
    if labels is not None:
        names = grafts.names_in(route, len(cast(Tensor, token_logits if logits is None else logits)))
        heads = grafts.heads_of(names)
        if not torch.compiler.is_compiling():
            check_labels(labels, heads, names)
        losses, counted = row_losses(logits, token_logits, labels, heads)
        loss = losses.sum() / counted.sum().clamp(min=1)
    return GraftOutput(
        loss=loss,
        logits=logits,
        token_logits=token_logits,
        hidden_states=output.hidden_states if asked else None,
        attentions=getattr(output, "attentions", None),
    )


def check_all_have_heads(grafts: Grafts, route: Route) -> None:
    for name in route.names:
        if name is not None and grafts.tasks[name].head is None:
            raise GraftError(
                f"task {name!r} has no head, so its labels mean something else than those of the other rows: "
                "give it batches of its own."
            )


def apply_heads(
    grafts: Grafts, hidden: Tensor, mask: Tensor | None, route: Route, own: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Every row's logits under its own head. `own` are those of the model's own head, for rows of no task."""
    route = route.for_batch(hidden)
    if route.packing is not None:
        hidden = route.packing.pad(hidden)
        mask = route.packing.pad(torch.ones_like(route.packing.row)[:, None])[..., 0]
    results: dict[bool, Tensor] = {}
    for key, kind in grafts.head_kinds.items():
        index = route.kinds.get(key)
        if index is None:
            continue
        features = hidden if kind.per_token else pooled(grafts, hidden, mask, kind.pooling)
        logits = kind.bank(features, index)
        if kind.per_token and mask is not None:  # a span cannot begin in the padding; other tokens are ignored by label
            logits = logits.masked_fill(mask[:, :, None] == 0, float("-inf")) if kind.spans else logits
        before = results.get(kind.per_token)
        same_shape = grafts.own_head is not None and grafts.own_head.per_token == kind.per_token
        if before is None and own is not None and same_shape:
            before = own.to(logits.dtype)
        if before is not None:
            member = index.member if index.member is not None else torch.ones_like(index.sizes, dtype=torch.bool)
            width = max(before.shape[-1], logits.shape[-1])
            before, logits = widen(before, width), widen(logits, width)
            logits = torch.where(member.view(-1, *(1,) * (logits.dim() - 1)), logits, before)
        results[kind.per_token] = logits
    return results.get(False), results.get(True)


def pooled(grafts: Grafts, hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    if pooling != "pooler":
        return pool(hidden, mask, pooling)
    pooler = grafts.base_model.pooler
    if isinstance(pooler, torch.nn.Linear):  # ALBERT keeps the activation beside it
        result: Tensor = grafts.base_model.pooler_activation(pooler(hidden[:, 0]))
    else:
        result = pooler(hidden)
    return result


def widen(logits: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))


def grafted_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """The class's generate; the decoder's rows are repeated as it repeats the batch for beams and samples."""

    @functools.wraps(original)
    def generate(self: Any, *args: Any, task_ids: Any = None, **kwargs: Any) -> Any:
        grafts: Grafts = self.taskgraft
        grafts.follow_device()
        route = grafts.route() if task_ids is None else grafts.route_of(grafts.names_of(task_ids))
        headed = [name for name in route.names if name is not None and grafts.tasks[name].head is not None]
        if headed:
            raise GraftError(f"task {headed[0]!r} has a head and writes no text: call the model for its logits.")
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        repeats = 1
        for key in ("num_beams", "num_return_sequences"):
            found = (kwargs.get(key), getattr(given, key, None), getattr(self.generation_config, key, None))
            repeats = max(repeats, next((value for value in found if value is not None), 1))
        if repeats > 1 and route.length is not None:
            names = [name for name in route.names for _ in range(repeats)]
            route = grafts.issued(replace(route, expanded=grafts.route_of(names)))
        with bind(grafts.bound, route), torch.no_grad(), generated_once(grafts):
            return original(self, *args, **kwargs)

    return generate


class KeepRows:
    """A checkpointing function whose recomputation, in backward, sees the rows of its own forward."""

    def __init__(self, checkpoint: Callable[..., Any], grafts: Grafts) -> None:
        self.checkpoint, self.grafts = checkpoint, grafts

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        route, generated = self.grafts.route(), self.grafts.bound.generated
        runs = 0

        def with_rows(*inner: Any, **options: Any) -> Any:
            nonlocal runs
            runs += 1
            bound = self.grafts.bound
            with bind(bound, route if runs == 1 else route.again()), generating(bound, generated):
                return function(*inner, **options)

        return self.checkpoint(with_rows, *args, **kwargs)


def keep_rows_when_checkpointing(grafts: Grafts) -> None:
    """Transformers sets a checkpointing function on its layers whenever the user enables it: stand before it."""
    for module in grafts.backbone.checkpointed:
        checkpoint = module.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, KeepRows):
            module.__dict__["_gradient_checkpointing_func"] = KeepRows(checkpoint, grafts)


def check_labels(labels: Tensor, heads: Sequence[Head | None], names: Sequence[str | None]) -> None:
    """Name the first labels that cannot be those of their row's task (on the CPU, where looking costs nothing)."""
    if labels.device.type != "cpu" or labels.shape[0] != len(heads):
        return
    columns = 1 if labels.dim() == 1 else labels.shape[1]
    for row, head, name in zip(labels.view(len(heads), -1).tolist(), heads, names, strict=True):
        if head is None or head.kind == "regression":
            continue
        needed = {"multilabel": head.width, "spans": 2, "tokens": 2}.get(head.kind, 1)
        if columns < needed:
            raise GraftError(
                f"task {name!r} ({head.kind}) needs {needed} columns of labels or more, and got {columns}."
            )
        if head.kind in ("classification", "tokens"):
            for label in row[:1] if head.kind == "classification" else row:
                if label != IGNORED and not 0 <= label < head.width:
                    raise GraftError(
                        f"label {label:g} is not a class of task {name!r}, which has 0 to {head.width - 1}."
                    )


def loss(
    model: Any,
    output: GraftOutput,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    rows: Sequence[str | None] | str | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The loss of each row under its own task's head, averaged over rows (or "sum", or "none": one per row).

    `rows` defaults to those of the `tg.rows` block it is called in. Label smoothing spreads over a row's own classes.
    """
    if reduction not in ("mean", "sum", "none"):
        raise GraftError(f"reduction={reduction!r} is unknown: use mean, sum or none.")
    grafts: Grafts = model.taskgraft
    route = grafts.route() if rows is None else grafts.draft_of(rows)
    some = output.logits if output.logits is not None else output.token_logits
    if some is None:
        raise GraftError("this output has no logits of a task's head, so there is nothing to compute a loss from.")
    names = grafts.names_in(route, some.shape[0])
    heads = grafts.heads_of(names)
    check_labels(labels, heads, names)
    losses, counted = row_losses(output.logits, output.token_logits, labels, heads, label_smoothing)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum().clamp(min=1)
