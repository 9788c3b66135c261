"""HyperFormer and HyperFormer++: banks whose weights a hypernetwork generates from task embeddings.

Karimi Mahabadi et al., "Parameter-efficient Multi-task Fine-tuning for Transformers via Shared Hypernetworks", ACL
2021. For task z, layer l and position j of a stack:

    HyperFormer      e = projector(z),                    weights = generator[stack, l, j](e)
    in between       e = LN(projector[stack](z, l)),      weights = generator[stack, j](e)
    HyperFormer++    e = LN(projector[stack](z, l, j)),   weights = generator[stack](e)

where the projector is Linear - ReLU - Linear and every generator one linear layer, whose output is all that a place
needs: down, up, their biases, and the scale and shift of the conditional LayerNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskgraft.errors import GraftError
from taskgraft.nn.bank import Bank, Layout, Weight
from taskgraft.nn.bottleneck import Form, bottleneck, take
from taskgraft.nn.rows import Bound, Route, RowIndex

NORM_EPS = 1e-6
GROUPS = ("projector", "generator")

Sites = dict[str, dict[str, Tensor]]  # site -> tensor -> [tasks, ...]


@dataclass(frozen=True)
class Plan:
    """What a hypernetwork generates, and what of it the places share."""

    places: tuple[str, ...]  # sites by name, "encoder.3.attention"
    layout: tuple[tuple[str, tuple[int, ...]], ...]  # what each place needs: tensor and shape
    shared: bool | Literal["layers"]
    task_dim: int
    hidden_dim: int
    projected_dim: int
    has_projector: bool

    @property
    def outputs(self) -> int:
        """Numbers that a place needs: 2db + d + b for the block, 2d for the conditional norm."""
        return sum(torch.Size(shape).numel() for _, shape in self.layout)

    @property
    def inputs(self) -> int:
        """Numbers that the projector reads: the embeddings of the task, of the layer and of the position."""
        return self.task_dim * {False: 1, "layers": 2, True: 3}[self.shared]

    @property
    def features(self) -> int:
        """Numbers that a generator reads."""
        return self.projected_dim if self.has_projector else self.inputs

    @cached_property
    def layers(self) -> list[str]:
        """Each stack's layers: "encoder.3"."""
        return list(dict.fromkeys(place.rpartition(".")[0] for place in self.places))

    @cached_property
    def positions(self) -> list[str]:
        """Each stack's positions: "encoder.attention"."""
        return list(dict.fromkeys(position_of(place) for place in self.places))

    def groups(self, of: str) -> list[list[int]]:
        """The places that share a projector, or a generator."""
        if not self.shared and of == "generator":
            keys = list(self.places)
        elif self.shared == "layers" and of == "generator":
            keys = [position_of(place) for place in self.places]
        else:
            keys = [place.partition(".")[0] if self.shared else "" for place in self.places]
        return [[i for i, key in enumerate(keys) if key == group] for group in dict.fromkeys(keys)]

    def weights(self) -> dict[str, Weight]:
        """Everything that is learned but the task embeddings; none of it decays, as in the paper."""
        t, h, p = self.task_dim, self.hidden_dim, self.features
        projectors, generators = len(self.groups("projector")), len(self.groups("generator"))
        shapes: dict[str, tuple[int, ...]] = {}
        if self.shared:
            shapes["layers"] = (len(self.layers), t)
        if self.shared is True:
            shapes["positions"] = (len(self.positions), t)
        if self.has_projector:
            shapes |= {"project_in": (projectors, self.inputs, h), "project_in_bias": (projectors, h)}
            shapes |= {"project_out": (projectors, h, p), "project_out_bias": (projectors, p)}
        if self.shared:
            shapes |= {"norm_weight": (projectors, p), "norm_bias": (projectors, p)}
        shapes |= {"generator": (generators, p, self.outputs), "generator_bias": (generators, self.outputs)}
        return {name: Weight(shape, "vector") for name, shape in shapes.items()}


def position_of(place: str) -> str:
    stack, _, site = place.split(".")
    return f"{stack}.{site}"


def fresh_hypernet(plan: Plan, std: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Initial weights: linears from a normal of this std, their biases zero, embeddings standard normal."""
    values = {}
    for name, weight in plan.weights().items():
        value = torch.zeros(weight.shape)
        if name in ("layers", "positions"):
            value.normal_(generator=generator)
        elif name in ("project_in", "project_out", "generator"):
            value.normal_(std=std, generator=generator)
        elif name == "norm_weight":
            value.fill_(1.0)
        values[name] = value
    return values


def embedding_layout(task_dim: int) -> Layout:
    return lambda _: {"embedding": Weight((task_dim,), "vector")}


class HypernetBank(Bank):
    """The weights of one hypernetwork: a bank of one slot, 0, which all of its tasks use."""

    projector_places: Tensor
    projector_rows: Tensor
    generator_rows: Tensor
    stack_of: Tensor  # [places] which projector, and which norm
    layer_of: Tensor  # [places]
    position_of: Tensor  # [places]

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(lambda _: plan.weights(), 0, device, dtype, blank=None)
        self.plan = plan
        self.rows: dict[str, list[int]] = {}  # where each place lies in what `_grouped` gives
        for of in GROUPS:
            groups = plan.groups(of)
            longest = max(len(group) for group in groups)
            row = {place: g * longest + k for g, group in enumerate(groups) for k, place in enumerate(group)}
            self.rows[of] = [row[place] for place in range(len(plan.places))]
            # [groups, places of the largest]: a smaller group computes its first place again, and nobody reads it
            self._constant(f"{of}_places", [group + group[:1] * (longest - len(group)) for group in groups], device)
            self._constant(f"{of}_rows", self.rows[of], device)
        self._constant("stack_of", [row // self.projector_places.shape[1] for row in self.rows["projector"]], device)
        self._constant("layer_of", [plan.layers.index(place.rpartition(".")[0]) for place in plan.places], device)
        self._constant("position_of", [plan.positions.index(position_of(place)) for place in plan.places], device)

    def _constant(self, name: str, values: list[Any], device: torch.device) -> None:
        self.register_buffer(name, torch.tensor(values, device=device), persistent=False)

    def generate(self, tasks: Tensor, blank: bool = False) -> Sites:
        """The weights of every place for the tasks whose embeddings [tasks, t] are given, in one batched product.

        `blank` puts a slot of zeros, the bare backbone, before them.
        """
        plan = self.plan
        w = {name: self._value(name) for name in self.weights}
        features = self._features(tasks, w)  # [places, tasks, features]
        made = self._grouped("generator", features, w["generator"], w["generator_bias"])
        if blank:
            made = F.pad(made, (0, 0, 1, 0))
        if self.rows["generator"] != list(range(len(made))):
            made = made[self.generator_rows]
        parts = torch.split(made, [torch.Size(shape).numel() for _, shape in plan.layout], dim=-1)
        # Each tensor of all places in one piece, laid out anew once: sites get views of it, and its gradient one stack.
        stacks = [
            part.contiguous().view(*part.shape[:2], *shape).unbind()
            for part, (_, shape) in zip(parts, plan.layout, strict=True)
        ]
        names = [name for name, _ in plan.layout]
        return {site: dict(zip(names, own, strict=True)) for site, *own in zip(plan.places, *stacks, strict=True)}

    def _value(self, name: str) -> Tensor:
        store = self.store(name)
        return self.trained(name)[0].to(store.dtype) if self.trained_slots else store[0]

    def _features(self, tasks: Tensor, w: Mapping[str, Tensor]) -> Tensor:
        """What the generators read for each place and task: [places, tasks, features]."""
        plan, count = self.plan, len(self.plan.places)
        if not plan.shared:
            e = tasks
            if plan.has_projector:
                e = F.relu(torch.addmm(w["project_in_bias"][0], e, w["project_in"][0]))
                e = torch.addmm(w["project_out_bias"][0], e, w["project_out"][0])
            return e.expand(count, *e.shape)
        parts = [tasks.expand(count, *tasks.shape), self._everywhere(w["layers"], self.layer_of, tasks)]
        if plan.shared is True:
            parts.append(self._everywhere(w["positions"], self.position_of, tasks))
        e = torch.cat(parts, -1)
        if plan.has_projector:
            e = F.relu(self._grouped("projector", e, w["project_in"], w["project_in_bias"]))[self.projector_rows]
            e = self._grouped("projector", e, w["project_out"], w["project_out_bias"])[self.projector_rows]
        e = F.layer_norm(e, e.shape[-1:], eps=NORM_EPS)
        return torch.addcmul(w["norm_bias"][self.stack_of][:, None], e, w["norm_weight"][self.stack_of][:, None])

    @staticmethod
    def _everywhere(embeddings: Tensor, index: Tensor, tasks: Tensor) -> Tensor:
        """Each place's own embedding, for every task: [places, tasks, t]."""
        return embeddings[index][:, None].expand(-1, tasks.shape[0], -1)

    def _grouped(self, of: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A linear layer for each group of places: [places, tasks, in] -> [groups * places of a group, tasks, out]."""
        members: Tensor = getattr(self, f"{of}_places")
        groups, places = members.shape
        grouped = x[members].view(groups, places * x.shape[1], x.shape[2])
        return torch.baddbmm(bias[:, None], grouped, weight).view(groups * places, x.shape[1], -1)


class GeneratedAdapter(nn.Module):
    """A site's bottlenecks of one hypernetwork. It holds no weights: they are there while the model runs."""

    def __init__(self, form: Form, kind: str, site: str, bound: Bound) -> None:
        super().__init__()
        self.form, self.kind, self.site, self.bound = form, kind, site, bound

    def forward(self, x: Tensor, index: RowIndex, route: Route, source: Tensor | None) -> Tensor:
        if self.kind not in self.bound.generated:
            raise GraftError(
                "the weights of these rows are generated when the model is called, and a part of it was called alone: "
                "call the model itself, or write the task out with tg.materialise."
            )
        weights = self.bound.generated[self.kind][self.site]
        sizes = index.sizes if self.form.needs_mask else None
        made = route.generated_rows[self.kind]
        return bottleneck(
            x, made.rows, weights, self.form, source=source, sizes=sizes, segments=made.segments, kernel=route.kernel
        )


def embeddings_of(bank: Bank, tasks: RowIndex) -> Tensor:
    """The embeddings of these tasks, [tasks, t], trained or at rest."""
    stacks, rows = bank.stacked(tasks)
    return take(stacks["embedding"], rows)
