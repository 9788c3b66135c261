"""`make demo`: three bundled tasks, one after the other, by `taskgraft train` with no other flags; then what holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import taskgraft as tg
from taskgraft.errors import GraftError
from taskgraft.reports.tables import bytes_text, count_text, score_text, seconds_text, share_text

TASKS = ("review_sentiment", "tweet_mood", "complaint_routing")
COMPARED = "review_sentiment"
WATCHED = 200  # test texts of each earlier task whose predictions are compared
TRY = {
    "review_sentiment": "The battery died after two days.",
    "tweet_mood": "what a lovely morning!",
    "complaint_routing": "They keep calling me about a debt that is not mine.",
}


def run(store: Path, say: Callable[[object], None]) -> dict[str, Any]:
    """Train, check, compare; the grafts stay in `store`. Returns what the table shows."""
    started = time.perf_counter()
    backbone = tg.load_backbone()
    total = sum(p.numel() for p in backbone.model.parameters())
    say(f"One backbone, frozen: {backbone.name}, {total:,} parameters. Three tasks, one after the other.\n")
    lines: list[dict[str, Any]] = []
    watched: dict[str, tuple[list[str], Any]] = {}
    unchanged = True
    with tempfile.TemporaryDirectory() as folder:
        for name in TASKS:
            data = Path(folder) / f"{name}.csv"
            with as_file(files("taskgraft") / "data" / data.name) as bundled:
                shutil.copy(bundled, data)
            texts = tg.load_task(data, only="test").splits["test"]["text"].to_pylist()[-WATCHED:]
            train(data, store, say)
            data.unlink()  # a later task never sees an earlier one's rows
            graft = tg.load_graft(store / name)
            lines.append(line_of(store, graft))
            for earlier, (seen, before) in watched.items():
                same = tg.predict(backbone, tg.load_graft(store / earlier), seen) == before
                unchanged &= same
                say(f"{len(seen)} predictions of {earlier}, after {name} was trained: {verdict(same)}")
            watched[name] = (texts, tg.predict(backbone, graft, texts))
            say("")
    say(f"The same task by other methods ({COMPARED}):")
    with as_file(files("taskgraft") / "data" / f"{COMPARED}.csv") as bundled:
        task = tg.load_task(bundled)
    for method in (tg.HeadOnly(), tg.FullFineTuning()):
        lines.append(line_of_method(backbone, task, method, total))
        say(f"  {lines[-1]['method']}: {score_text(lines[-1]['score'])} in {seconds_text(lines[-1]['seconds'])}")
    say(table(lines, total))
    seconds = time.perf_counter() - started
    say(f"Everything took {seconds_text(seconds)}. The grafts are in {store}, ready to use:\n")
    for name in TASKS:
        say(f'  taskgraft predict {name} "{TRY[name]}" --store {store}')
    say(f"  taskgraft tasks --store {store}")
    say(f"  taskgraft train your.csv --text COLUMN --label COLUMN --name NAME --store {store}")
    if not unchanged:
        raise GraftError("the predictions of an earlier task have changed: please report this with the output above.")
    return {"store": str(store), "seconds": seconds, "unchanged": unchanged, "lines": lines}


def train(data: Path, store: Path, say: Callable[[object], None]) -> None:
    """`taskgraft train`, as a user types it, in a process of its own."""
    say(f"$ taskgraft train {data.name} --store {store}")
    command = [sys.executable, "-m", "taskgraft.cli", "train", str(data), "--store", str(store)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise GraftError(f"`taskgraft train {data.name}` ended with exit code {done.returncode}: see above.")
    say("\n".join(f"  {line}" for line in done.stdout.splitlines() if line and not line.startswith("Next:")))


def verdict(same: bool) -> str:
    return "the same to the bit." if same else "CHANGED."


def line_of(store: Path, graft: tg.Graft) -> dict[str, Any]:
    entry = next(entry for entry in tg.Store(store).list() if entry.name == graft.name)
    return {
        "task": graft.name,
        "method": f"{graft.method.name} 64",
        "metric": " and ".join(graft.task["metrics"]),
        "score": graft.metrics["score"],
        "trained": graft.parameters,
        "bytes": entry.bytes,
        "seconds": graft.training["seconds"],
    }


def line_of_method(backbone: tg.Backbone, task: tg.Task, method: tg.Method, total: int) -> dict[str, Any]:
    run = tg.fit(backbone, task, method)
    return {
        "task": task.name,
        "method": {"full": "full fine-tuning", "head": "head only"}[method.name],
        "metric": " and ".join(task.metrics),
        "score": run.score,
        "trained": run.trained,
        "bytes": 4 * (run.trained if run.graft else total),  # float32
        "seconds": run.seconds,
    }


def table(lines: list[dict[str, Any]], total: int) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("task", "method", "test score", "trained", f"of {total:,}", "on disk", "trained in"):
        made.add_column(header, justify="left" if header in ("task", "method", "test score") else "right")
    for line in lines:
        made.add_row(
            line["task"],
            line["method"],
            f"{score_text(line['score'])} {line['metric']}",
            count_text(line["trained"]),
            share_text(line["trained"] / total),
            bytes_text(line["bytes"]),
            seconds_text(line["seconds"]),
        )
    return made
