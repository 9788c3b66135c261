"""Tasks one after another on one backbone: what all of them weigh, and that no later one changes an earlier one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskgraft.experiments import arms
from taskgraft.experiments.data import CLASSIFICATION, GLUE
from taskgraft.experiments.lab import Lab, say
from taskgraft.experiments.report import Report, about, parameters, points
from taskgraft.grafts.store import Store
from taskgraft.reports.experiments import growth_figure
from taskgraft.reports.tables import count_text, markdown_table
from taskgraft.tasks.task import Task
from taskgraft.training.evaluate import evaluate, predict
from taskgraft.training.fit import fit

TASKS = (*GLUE, *CLASSIFICATION)
ASKED = 200  # test rows of each earlier task, asked again after every later one


@dataclass(frozen=True)
class Promise:
    """What a task answered when it was new."""

    texts: list[str]
    pairs: list[str] | None
    said: str  # sha256 of its probabilities


def run(lab: Lab) -> Report:
    names, total = lab.chosen(TASKS), parameters(lab)
    setup = [names, lab.setup.rows, lab.setup.epochs, lab.setup.pooling]
    measured = lab.once("stream", setup, lambda: trained_in_turn(lab, names))
    lines, later = measured["tasks"], measured["after_all"]
    sizes = [(total + sum(line["trained"] for line in lines[: n + 1])) / total for n in range(len(lines))]
    body = [[line["task"], points(line["score"]), points(later[line["task"]]), f"{size:.2f}x", f"{number}x",
             str(len(line["changed"]))]
            for number, (line, size) in enumerate(zip(lines, sizes, strict=True), start=1)]  # fmt: skip
    header = ["task", "score when it was new", "after all tasks", "parameters in all", "full copies",
              "earlier tasks that changed"]  # fmt: skip
    unchanged = all(later[line["task"]] == line["score"] and not line["changed"] for line in lines)
    sentence = (
        f"After {len(names)} tasks all of them weigh {sizes[-1]:.2f} backbones of {count_text(total)} parameters; full "
        f"copies would weigh {len(names)}. {'Every' if unchanged else 'NOT every'} earlier score is what it was when "
        f"the task was new, and every answer to {ASKED} of its test rows is the same to the last bit after each later "
        "task.\n"
    )
    return Report(
        f"A stream of tasks on {lab.backbone.name}",
        [about(lab, seeds=False), sentence, markdown_table(header, body)],
        {"tasks": lines, "after_all": later, "unchanged": unchanged, "sizes": sizes, "sentence": sentence},
        [{"name": line["task"], "where": measured["where"], **line} for line in lines],
        (),
        {"stream": growth_figure([line["task"] for line in lines], sizes, f"A stream of tasks, {lab.backbone.name}")},
    )


def trained_in_turn(lab: Lab, names: Sequence[str]) -> dict[str, Any]:
    """Train, save and forget one task after the other; after each, ask all that came before it again."""
    lines = []
    promises: dict[str, Promise] = {}
    with tempfile.TemporaryDirectory() as place:
        store = Store(Path(place))
        for number, name in enumerate(names, start=1):
            task, settings = lab.task(name), lab.settings(name, 1e-3, arms.EPOCHS[0], 0)
            trained = fit(lab.backbone, task, arms.adapter(lab), settings=settings, progress=False)
            assert trained.graft is not None
            store.put(trained.graft, name)
            score = evaluate(lab.backbone, store.get(name), task)["score"]
            changed = [earlier for earlier, kept in promises.items() if said(lab, store, earlier, kept) != kept.said]
            promises[name] = promise(lab, store, task)
            lab.forget(name)  # its rows are gone before the next task comes
            lines.append({"task": name, "score": score, "trained": trained.trained, "changed": changed})
            say(f"  {number} of {len(names)}: {name} {score:.4f}, {len(changed)} of {number - 1} earlier ones changed")
        later = {name: evaluate(lab.backbone, store.get(name), lab.task(name))["score"] for name in names}
    return {"tasks": lines, "after_all": later}


def promise(lab: Lab, store: Store, task: Task) -> Promise:
    """A new task's answers to some of its test rows, by the graft as it was saved."""
    rows = task.split("test").slice(0, ASKED)
    pairs = rows["pair"].to_pylist() if task.has_pairs else None
    kept = Promise(rows["text"].to_pylist(), pairs, "")
    return Promise(kept.texts, kept.pairs, said(lab, store, task.name, kept))


def said(lab: Lab, store: Store, name: str, kept: Promise) -> str:
    found: list[Any] = predict(lab.backbone, store.get(name), kept.texts, kept.pairs)
    return hashlib.sha256(repr([(row.answer, row.probabilities) for row in found]).encode()).hexdigest()
