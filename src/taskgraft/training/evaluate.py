"""Use a graft: its scores on a task's rows, and its answers to new texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from taskgraft.backbones import api
from taskgraft.backbones.load import Backbone
from taskgraft.errors import GraftError
from taskgraft.grafts.graft import Graft, add_graft
from taskgraft.grafts.joint import JointTask, add_joint
from taskgraft.tasks.metrics import score_of
from taskgraft.tasks.task import LABEL_TYPES, Task, text_type
from taskgraft.tasks.wording import Wording
from taskgraft.training.encode import Encoded, encode
from taskgraft.training.parts import positions
from taskgraft.training.predict import Prediction, evaluated_rows, judged, predictions
from taskgraft.training.session import device_of
from taskgraft.training.settings import TEXT_LENGTH

BATCH = 32  # rows that training would have; `evaluated_rows` says how many more fit here


def evaluate(
    backbone: Backbone, what: Graft | JointTask, task: Task, split: str = "test", *, encoded: Encoded | None = None
) -> dict[str, float]:
    """The metrics of a graft, or of a task of a joint, on a split of a task, and their mean as "score".

    `encoded` are the split's rows by `encoded_for`: for many grafts on the same rows.
    """
    graft = graft_of(what)
    kind, labels = kind_of(graft), labels_of(graft)
    if (task.kind, task.labels) != (kind, labels):
        raise GraftError(
            f"graft {graft.name!r} is of kind {kind} with labels {list(labels)}, and the data are of kind {task.kind} "
            f"with {list(task.labels)}: load them with kind={kind!r} and labels={list(labels)}."
        )
    table = task.split(split)
    metrics = list(graft.task.get("metrics") or task.metrics)
    scores = judged(kind, labels, metrics, table, run(backbone, what, table, encoded))
    return {"score": score_of(metrics, scores), **scores}


def predict(
    backbone: Backbone, what: Graft | JointTask, texts: Sequence[Any], pairs: Sequence[str] | None = None
) -> list[Prediction]:
    """The answer of a graft, or of a task of a joint, to each text.

    Each has an `answer` (a class as its number in `Task.labels`) and, where it has classes, `probabilities` by label.
    Token tasks take lists of words; spans questions, with their contexts as `pairs`.
    """
    graft = graft_of(what)
    kind = kind_of(graft)
    check_texts("texts", texts, words=kind == "tokens")
    if pairs is not None:
        check_texts("pairs", pairs)
    needs = bool(graft.task.get("columns", {}).get("pair")) or kind == "spans"
    if needs and pairs is None:
        raise GraftError(f"graft {graft.name!r} reads pairs of texts: give the second ones too (--pair).")
    if pairs is not None and graft.task and not needs:
        raise GraftError(f"graft {graft.name!r} reads one text, and second ones were given: leave them out.")
    if pairs is not None and len(pairs) != len(texts):
        raise GraftError(f"{len(pairs)} second texts were given for {len(texts)} first ones.")
    if not len(texts):
        return []
    columns: dict[str, Any] = {"text": pa.array(list(texts), text_type(kind))}
    if pairs is not None:
        columns["pair"] = pa.array(list(pairs), pa.string())
    if kind == "spans":
        columns["label"] = pa.array([[] for _ in texts], LABEL_TYPES[kind])
        columns["id"] = pa.array([str(i) for i in range(len(texts))], pa.string())
    return run(backbone, what, pa.table(columns))


def check_texts(name: str, texts: Sequence[Any], words: bool = False) -> None:
    """Refuse what is not a list of texts, or for token tasks not a list of lists of words."""
    if isinstance(texts, str):
        raise GraftError(f"{name}={texts!r} is one string: give a list, [{texts!r}].")
    for number, text in enumerate(texts):
        of_words = isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text)
        if not (of_words if words else isinstance(text, str)):
            wanted = "a list of words" if words else "a string"
            raise GraftError(f"{name}[{number}] is {str(text)[:80]!r}, and {wanted} is needed.")


def graft_of(what: Graft | JointTask) -> Graft:
    if not isinstance(what, (Graft, JointTask)):
        raise GraftError(f"{what!r} is no graft: load one with tg.load_graft, or take a joint's with joint.task(NAME).")
    return what if isinstance(what, Graft) else what.graft


def encoded_for(backbone: Backbone, graft: Graft, table: pa.Table) -> Encoded:
    """Rows as a graft reads them."""
    wording = wording_of(graft)
    limit = min(settings_of(graft).get("max_length") or TEXT_LENGTH, positions(backbone.model.config))
    if wording is None:
        return encode(backbone.tokenizer, kind_of(graft), len(labels_of(graft)), table, limit, with_labels=False)
    return encode(backbone.tokenizer, "text", 0, wording.table(table), limit, with_labels=False)


def run(
    backbone: Backbone, what: Graft | JointTask, table: pa.Table, encoded: Encoded | None = None
) -> list[Prediction]:
    graft = graft_of(what)
    device = device_of()
    encoded = encoded_for(backbone, graft, table) if encoded is None else encoded
    backbone.model.to(device)
    with on_model(backbone.model, what) as name:
        return predictions(
            backbone.model,
            name,
            backbone.tokenizer,
            kind_of(graft),
            labels_of(graft),
            table,
            encoded,
            batch_size=evaluated_rows(BATCH, device),
            device=device,
            wording=wording_of(graft),
            decoding=settings_of(graft).get("decoding", "auto"),
        )


@contextmanager
def on_model(model: Any, what: Graft | JointTask) -> Iterator[str]:
    """The task on the model for a while, beside whatever is there, under a name that is free."""
    bare = getattr(model, "taskgraft", None) is None
    taken = [] if bare else api.tasks_of(model)
    name = what.name
    if isinstance(what, JointTask):
        add_joint(model, what.joint, [name])
    else:
        while name in taken:
            name += "_"
        add_graft(model, what, name)
    try:
        yield name
    finally:
        if bare:
            api.ungraft(model)
        else:
            api.remove_task(model, name)


def settings_of(graft: Graft) -> Mapping[str, Any]:
    """Those it was trained with."""
    found: Mapping[str, Any] = graft.training.get("settings", {})
    return found


def kind_of(graft: Graft) -> str:
    return str(graft.task.get("kind", "text")) if graft.head is None else graft.head.kind


def labels_of(graft: Graft) -> tuple[str, ...]:
    return tuple(graft.task.get("labels", ())) if graft.head is None else graft.head.labels


def wording_of(graft: Graft) -> Wording | None:
    """How texts are put into words for a graft of a model that writes."""
    if graft.head is not None:
        return None
    record = graft.task.get("wording")
    return Wording("text", (), ()) if record is None else Wording.from_json(record)
