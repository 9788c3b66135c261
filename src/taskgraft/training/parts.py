"""A task as a run sees it: its rows as token ids, how its answers are scaled or worded, and how it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.fingerprint import POSITIONS_FROM_PAD
from taskgraft.methods import Method
from taskgraft.nn.heads import Head
from taskgraft.tasks.task import Task
from taskgraft.tasks.wording import Wording
from taskgraft.training.encode import Encoded, encode, usable_length
from taskgraft.training.predict import Prediction, cache_features, evaluated_rows, judged, predictions
from taskgraft.training.settings import Settings
from taskgraft.training.targets import Targets
from taskgraft.training.team import ALONE, Team


@dataclass(frozen=True, eq=False)
class Part:
    """One of the tasks of a run. `wording` is there where the backbone reads and writes text."""

    task: Task
    head: Head | None
    wording: Wording | None
    encoded: dict[str, Encoded]
    targets: Targets

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def record(self) -> dict[str, Any]:
        """What a graft remembers of its task."""
        worded = {} if self.wording is None else {"wording": self.wording.to_json()}
        return {**self.task.to_json(), **worded}

    @property
    def cut(self) -> dict[str, int]:
        return {split: part.cut for split, part in self.encoded.items()}

    def with_features(self) -> Part:
        """The same, to hold what a frozen backbone makes of its rows; other runs go on reading tokens."""
        return replace(self, encoded={split: replace(part, features={}) for split, part in self.encoded.items()})

    def make_features(self, model: Any, name: str, batch_size: int, device: torch.device) -> None:
        """Run the backbone over the rows, once, for a head that is on the model."""
        for part in self.encoded.values():
            if not part.features:
                cache_features(model, name, part, batch_size, device)

    def predictions(
        self,
        model: Any,
        tokenizer: Any,
        split: str,
        settings: Settings,
        device: torch.device,
        bf16: bool,
        team: Team = ALONE,
    ) -> list[Prediction]:
        """The answers to a split's rows, by what is on the model now."""
        task = self.task
        return predictions(
            model,
            task.name,
            tokenizer,
            task.kind,
            task.labels,
            task.splits[split],
            self.encoded[split],
            batch_size=evaluated_rows(settings.batch_size, device),
            device=device,
            bf16=bf16,
            wording=self.wording,
            decoding=settings.decoding,
            team=team,
        )

    def judged(self, split: str, found: Sequence[Prediction]) -> dict[str, float]:
        """The metrics of answers to a split's rows."""
        return judged(self.task.kind, self.task.labels, self.task.metrics, self.task.splits[split], found)


def part_of(backbone: Backbone, task: Task, settings: Settings, device: torch.device, prefix: bool) -> Part:
    """A task made ready for a backbone; `prefix` puts its name before texts where nothing else tells tasks apart."""
    head = head_of(task, backbone)
    wording = Wording.of(task, prefix) if head is None else None
    assert settings.max_length is not None
    limit = min(settings.max_length, longest(backbone))
    tables = {split: table for split, table in task.splits.items() if table.num_rows}
    kind = task.kind
    if wording is not None:
        kind, tables = "text", {split: wording.table(table) for split, table in tables.items()}
    encoded = {
        split: encode(backbone.tokenizer, kind, len(task.labels), table, limit) for split, table in tables.items()
    }
    targets = Targets()
    if wording is None:
        targets = Targets.of(task, encoded["train"], settings.balance_classes, device)
    elif settings.balance_classes:
        raise GraftError(f"balance_classes is for tasks with heads, and {backbone.name} writes its answers.")
    return Part(task, head, wording, encoded, targets)


def settled(settings: Settings, backbone: Backbone, method: Method, kind: str, rows: int) -> Settings:
    """Settings with nothing left open for a run on a backbone, and no longer texts than it reads."""
    known = settings.resolved(method, kind, rows, has_heads=not backbone.model.config.is_encoder_decoder)
    assert known.max_length is not None
    return replace(known, max_length=min(known.max_length, longest(backbone)))


def longest(backbone: Backbone) -> int:
    """How many tokens a backbone reads at most."""
    return min(positions(backbone.model.config), usable_length(backbone.tokenizer))


def head_of(task: Task, backbone: Backbone) -> Head | None:
    """What a task needs on top of the backbone: nothing where the backbone writes its answers."""
    if backbone.model.config.is_encoder_decoder:
        if task.kind == "classification" and len(task.labels) < 2:
            raise GraftError(f"task {task.name!r} has the classes {list(task.labels)}: give it two or more.")
        return None
    if task.kind == "text":
        raise GraftError(
            f"task {task.name!r} is text to text and {backbone.name} does not read and write: "
            "use an encoder-decoder such as t5-small, or give the task classes."
        )
    return Head(task.kind, task.labels)


def positions(config: Any) -> int:
    """How many tokens the backbone has positions for."""
    most = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    return most - config.pad_token_id - 1 if config.model_type in POSITIONS_FROM_PAD else most
