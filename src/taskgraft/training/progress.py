"""What a person sees of a run: a bar on a terminal, and nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

ECHO_S = 2.0  # in which a signal that comes again is the same one


class Progress(Protocol):
    """What the loop tells of itself. Anything with these methods may listen."""

    def begin(self, name: str, steps: int, done: int) -> None: ...
    def step(self, done: int, epoch: float, loss: float, rows: int) -> None: ...
    def epoch(self, epoch: int, metric: str, score: float) -> None: ...
    def end(self) -> None: ...


class Quiet:
    """Says nothing."""

    def begin(self, name: str, steps: int, done: int) -> None:
        pass

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        pass

    def epoch(self, epoch: int, metric: str, score: float) -> None:
        pass

    def end(self) -> None:
        pass


class Bar:
    """A bar with the loss, the validation score, rows a second and the time left, on stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]}  {task.fields[score]}"),
            TextColumn("{task.fields[rate]} rows/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: Any = None
        self._score = ""
        self._rows, self._since = 0, 0.0

    def begin(self, name: str, steps: int, done: int) -> None:
        self._task = self._bar.add_task(
            name, total=steps, completed=done, epoch="0.0", loss="-", score=self._score, rate="-"
        )
        self._rows, self._since = 0, time.perf_counter()
        self._bar.start()

    def step(self, done: int, epoch: float, loss: float, rows: int) -> None:
        self._rows += rows
        rate = self._rows / max(time.perf_counter() - self._since, 1e-9)
        self._bar.update(
            self._task, completed=done, epoch=f"{epoch:.1f}", loss=f"{loss:.3f}", score=self._score, rate=f"{rate:.0f}"
        )

    def epoch(self, epoch: int, metric: str, score: float) -> None:
        self._score = f"{metric} {score:.3f}"

    def end(self) -> None:
        self._bar.stop()


def progress_for(wish: Progress | bool | None) -> Progress:
    """The listener that a caller asked for: its own, a bar (True), none (False), or a bar on a terminal (None)."""
    if wish is None:
        wish = sys.stderr.isatty()
    if isinstance(wish, bool):
        return Bar() if wish else Quiet()
    return wish


# -- many runs at once


class ManyProgress(Protocol):
    """What many runs tell of themselves, by name. `score` is the best on validation rows so far, if there is one."""

    def begin(self, names: Sequence[str], done: Sequence[str]) -> None: ...
    def lane(
        self, name: str, step: int, steps: int, epoch: float, loss: float, score: float | None, rows: int
    ) -> None: ...
    def run(self, name: str, score: float | None) -> None: ...
    def end(self) -> None: ...


class ManyQuiet:
    """Says nothing."""

    def begin(self, names: Sequence[str], done: Sequence[str]) -> None:
        pass

    def lane(self, name: str, step: int, steps: int, epoch: float, loss: float, score: float | None, rows: int) -> None:
        pass

    def run(self, name: str, score: float | None) -> None:
        pass

    def end(self) -> None:
        pass


class RunsTable:
    """A live table on stderr: a line for each run under way, and how far all of them are."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._lines: dict[str, tuple[int, int, float, float, float | None]] = {}
        self._all, self._ended, self._before = 0, 0, 0
        self._rows, self._since = 0, 0.0
        self._live = Live(
            console=Console(stderr=True), get_renderable=self._table, refresh_per_second=8, transient=True
        )

    def begin(self, names: Sequence[str], done: Sequence[str]) -> None:
        self._all, self._ended, self._before = len(names), len(done), len(done)
        self._lines, self._rows, self._since = {}, 0, time.perf_counter()
        self._live.start()

    def lane(self, name: str, step: int, steps: int, epoch: float, loss: float, score: float | None, rows: int) -> None:
        self._lines[name] = (step, steps, epoch, loss, score)
        self._rows += rows

    def run(self, name: str, score: float | None) -> None:
        self._lines.pop(name, None)
        self._ended += 1

    def end(self) -> None:
        self._live.stop()

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, caption=self.footer(), caption_justify="left", pad_edge=False)
        for heading in ("run", "epoch", "loss", "best", ""):
            table.add_column(heading, justify="right" if heading in ("epoch", "loss", "best") else "left")
        for name, (step, steps, epoch, loss, score) in list(self._lines.items()):
            best = "-" if score is None else f"{score:.3f}"
            table.add_row(name, f"{epoch:.1f}", f"{loss:.3f}", best, ProgressBar(steps, step, width=24))
        return table

    def footer(self) -> str:
        """All runs in a line: "12 of 48 done, 3 waiting, 410 rows/s, 0:12:30 left"."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        under_way = sum(step / steps for step, steps, *_ in list(self._lines.values()))
        waiting = self._all - self._ended - len(self._lines)
        parts = [f"{self._ended} of {self._all} done", f"{waiting} waiting", f"{self._rows / seconds:.0f} rows/s"]
        progressed = self._ended - self._before + under_way
        if progressed > 0:
            left = seconds * (self._all - self._ended - under_way) / progressed
            parts.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(parts)


def many_progress_for(wish: ManyProgress | bool | None) -> ManyProgress:
    """The listener that a caller of many runs asked for: its own, a table (True), none, or a table on a terminal."""
    if wish is None:
        wish = sys.stderr.isatty()
    if isinstance(wish, bool):
        return RunsTable() if wish else ManyQuiet()
    return wish


class Interrupts:
    """Ctrl-C and SIGTERM ask the loop to stop after its step; a second one stops at once.

    A process that was `launched` with others gets one and the same Ctrl-C from the terminal and from the launcher.
    """

    def __init__(self, launched: bool = False) -> None:
        self.asked = False
        self._echo_s = ECHO_S if launched else 0.0
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
        elif time.monotonic() - self._asked_at >= self._echo_s:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)
