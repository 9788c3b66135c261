"""The state of runs in a store, while they have not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from taskgraft.cli.app import process_number
from taskgraft.errors import GraftError
from taskgraft.training.progress import Progress

if TYPE_CHECKING:
    from taskgraft.grafts.store import Store

RUNS = ".runs"


def check_place(store: Store, name: str, together: bool = False) -> None:
    """Refuse, before anything is trained, what could not be stored afterwards."""
    if store.folder.exists() and not store.folder.is_dir():
        raise GraftError(f"the store {store.folder} is a file: name a folder with --store.")
    store.check_place(name, together)


@contextmanager
def state_of_run(folder: Path) -> Iterator[Path]:
    """The folder of a run's state while there is a use for it: none once the run has ended, or has never begun.

    A tracker's logs in it stay, and folders that were there before this command. Of several processes one tidies.
    """
    from taskgraft.training.state import LOCK, RunFolder

    if process_number():
        yield folder
        return
    made = [parent for parent in (folder, folder.parent, folder.parent.parent) if not parent.exists()]
    ended = False
    try:
        yield folder
        ended = True
    finally:
        with suppress(GraftError, OSError):
            seeds = [lock.parent for lock in folder.glob(f"*/{LOCK}")]  # runs of several seeds have a folder each
            for place in (*seeds, folder):
                RunFolder(place).tidy(ended)
            for place in dict.fromkeys([*seeds, folder, folder.parent, *made]):
                place.rmdir()  # if it is empty: logs stay, and so does a state


class Announced:
    """A bar that says so when a run goes on where an earlier one ended."""

    def __init__(self, bar: Progress, say: Callable[[str], None]) -> None:
        self._bar, self._say = bar, say
        self.step, self.epoch, self.end = bar.step, bar.epoch, bar.end

    def begin(self, name: str, steps: int, done: int) -> None:
        if done:
            self._say(f"Going on from step {done:,} of {steps:,}, where an earlier run of this command ended.")
        self._bar.begin(name, steps, done)
