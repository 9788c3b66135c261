"""What an experiment leaves: results.json with every run, table.md, figures, answers.json.gz, environment.json."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taskgraft import __version__
from taskgraft.experiments.lab import Lab, Record
from taskgraft.experiments.study import Differences, Study
from taskgraft.reports.bootstrap import Interval
from taskgraft.reports.tables import count_text, markdown_table
from taskgraft.reports.tradeoff import DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART = ("answers", "where")  # of a record: kept in files of their own


@dataclass(frozen=True, eq=False)
class Report:
    """An experiment's result. `sections` are Markdown, one after the other; `answered` are runs whose answers count."""

    title: str
    sections: Sequence[str]
    found: Mapping[str, Any]
    runs: Sequence[Record]
    answered: Sequence[Record] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)


def of_study(
    found: Study,
    title: str,
    sections: Sequence[str],
    figures: Mapping[str, Figure],
    against: Differences | None = None,
    **more: Any,
) -> Report:
    """The report of a study: its cells, its differences if there are some, and all runs."""
    record: dict[str, Any] = {"cells": [cell.to_json() for cell in found.cells.values()], **more}
    if against is not None:
        record["differences"] = {
            arm: {task: gap.to_json() for task, gap in row.items()} for arm, row in against.items()
        }
    chosen = [run for cell in found.cells.values() for run in cell.runs]
    named = f"{title} on {found.lab.backbone.name}"
    return Report(named, [about(found.lab), *sections], record, found.records, chosen, figures)


def write(report: Report, lab: Lab, names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Write everything; gives the files by what they are. `names` are those of all tasks of the experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = lab.chosen(names)
    record = {"title": report.title, **report.found, "runs": [without_answers(run) for run in report.runs]}
    contents = {
        "results.json": json.dumps(record, indent=1).encode(),
        "table.md": "\n".join(
            [f"# {report.title}\n", *report.sections, data_section(lab, tasks, lab.missing(names))]
        ).encode(),
        "environment.json": json.dumps(environment(lab, tasks, report.runs), indent=1).encode(),
    }
    if report.answered:
        answers = json.dumps({run["name"]: run["answers"] for run in report.answered}).encode()
        contents["answers.json.gz"] = gzip.compress(answers, mtime=0)
    files = {name: folder / name for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    for name, figure in report.figures.items():
        files[name] = folder / f"{name}.png"
        figure.savefig(files[name], dpi=DPI)
    return files


def without_answers(run: Record) -> Record:
    """A run's record for reading; of a run of several tasks, each one's too."""
    kept = {key: value for key, value in run.items() if key not in APART}
    if isinstance(kept.get("tasks"), dict):
        kept["tasks"] = {name: without_answers(own) for name, own in kept["tasks"].items()}
    return kept


# -- words


def points(score: float | None, error: float | None = None) -> str:
    """A score of 0 to 1 in points of 100."""
    if score is None:
        return "-"
    return f"{100 * score:.1f}" if error is None else f"{100 * score:.1f} ± {100 * error:.1f}"


def mean_and_deviation(scores: Sequence[float]) -> tuple[float, float]:
    """Over seeds; of one seed there is no deviation."""
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0


def signed(interval: Interval) -> str:
    """A difference in points, with its 95 % interval."""
    return f"{100 * interval.mean:+.2f} ({100 * interval.low:+.2f} to {100 * interval.high:+.2f})"


def share(trained: float | None, total: int) -> str:
    return "-" if trained is None else f"{100 * trained / total:.2f} %"


def copies(trained: float | None, tasks: int, total: int, whole: bool) -> str:
    """Parameters of all tasks as multiples of one backbone's; what is frozen counts once, and `whole` has none."""
    if trained is None:
        return "-"
    return f"{(0 if whole else 1) + trained * tasks / total:.2f}x"


def about(lab: Lab, seeds: bool = True) -> str:
    """The sentence that every table has: on what, with how much, chosen how."""
    setup = lab.setup
    rows = "all training rows" if setup.rows is None else f"at most {setup.rows:,} training rows of each task"
    drawn = "" if not seeds else "; one seed" if setup.seeds == 1 else f"; mean of {setup.seeds} seeds"
    return (
        f"Backbone {lab.backbone.name} ({count_text(parameters(lab))} parameters), {rows}{drawn}. Settings chosen on "
        "rows held out of train; scores on rows that chose nothing, in points of 100. Not the paper's models or data: "
        f"not its figures.{'' if setup.note is None else f' {setup.note}'}\n"
    )


def parameters(lab: Lab) -> int:
    return sum(weight.numel() for weight in lab.backbone.model.parameters())


def data_section(lab: Lab, tasks: Sequence[str], missing: Sequence[str]) -> str:
    """The rows of each task, what was done to them, and which tasks are left out."""
    header = ["task", "metric", "train", "validation", "test"]
    body, notes = [], []
    for name in tasks:
        task = lab.task(name)
        sizes = [f"{task.splits[split].num_rows:,}" for split in ("train", "validation", "test")]
        body.append([name, " and ".join(task.metrics), *sizes])
        notes += [f"- {name}: {' '.join(task.notes)}\n"] if task.notes else []
    absent = f"\nLeft out, since their rows were not at hand: {', '.join(missing)}.\n" if missing else ""
    return f"## The data\n\n{markdown_table(header, body)}\n{''.join(notes)}{absent}"


# -- where it ran


def environment(lab: Lab, tasks: Sequence[str], runs: Sequence[Record]) -> dict[str, Any]:
    setup = lab.setup
    places = {json.dumps(run["where"]): run["where"] for run in runs}
    return {
        "taskgraft": __version__,
        "where": list(places.values()),  # the runs were done; most often one place
        "backbone": {"name": lab.backbone.name, "sha256": lab.fingerprint, "parameters": parameters(lab)},
        "setup": {
            "rows": setup.rows, "seeds": setup.seeds, "epochs": setup.epochs, "trials": setup.trials,
            "full": setup.full, "pooling": setup.pooling, "steps": setup.steps,
        },
        "tasks": {name: lab.task(name).to_json() for name in tasks},
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
