"""What a person sees of a run: a bar on a terminal, and nothing where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Protocol


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


class Interrupts:
    """Ctrl-C and SIGTERM ask the loop to stop after its step; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)
