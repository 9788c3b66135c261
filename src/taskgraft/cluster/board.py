"""What a person sees of a cluster at work: one table on stderr, and nothing where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from taskgraft.cluster.worker import Line, Lines

SHOWN = 20  # lines of the table
ORDER = ("training", "lost", "failed", "done")  # what comes first in it; those that wait are counted


@dataclass
class Row:
    """A run, as the table has it."""

    worker: str = ""
    state: str = "waiting"
    line: Line | None = None
    score: float | None = None


class Board:
    """The runs of a cluster: which worker each is on, how far it is, and its score. Shown live on a terminal."""

    def __init__(self, what: str, names: Sequence[str], live: bool | None) -> None:
        self.what, self.rows = what, {name: Row() for name in names}
        self._live: Any = None
        if sys.stderr.isatty() if live is None else live:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(console=console, get_renderable=self.table, refresh_per_second=4, transient=True)

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    # -- what is told

    def working(self, names: Sequence[str], worker: str, lines: Lines) -> None:
        for name in names:
            self.rows[name] = Row(worker, "training", lines.get(name))

    def lost(self, names: Sequence[str], worker: str) -> None:
        for name in names:
            self.rows[name] = Row(worker, "lost")

    def ended(self, name: str, worker: str, score: float | None, state: str = "done") -> None:
        self.rows[name] = Row(worker, state, score=score)

    # -- what is shown

    def table(self) -> Any:
        from rich.table import Table

        table = Table(box=None, caption=self.footer(), caption_justify="left", pad_edge=False)
        for heading in (self.what, "worker", "state", "score"):
            table.add_column(heading)
        known = [(name, row) for name, row in self.rows.items() if row.state in ORDER]
        for name, row in sorted(known, key=lambda each: ORDER.index(each[1].state))[:SHOWN]:
            best = row.score if row.line is None else row.line.score
            table.add_row(name, row.worker, state_of(row), "-" if best is None else f"{best:.3f}")
        return table

    def footer(self) -> str:
        """All runs in a line: "5 of 12 done, 3 training, 4 waiting"."""
        states = [row.state for row in self.rows.values()]
        parts = [f"{states.count('done')} of {len(states)} done", f"{states.count('training')} training"]
        parts.append(f"{states.count('waiting') + states.count('lost')} waiting")
        parts += [f"{states.count('failed')} failed"] if "failed" in states else []
        return ", ".join(parts)


def state_of(row: Row) -> str:
    if row.state == "lost":
        return "lost, begins again"
    return row.state if row.line is None else f"{row.state}, {row.line.step / row.line.steps:.0%}"
