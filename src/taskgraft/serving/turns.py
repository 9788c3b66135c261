"""Who may touch a model when: batches run beside one another, and a change to it has it to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """A lock that many share or one has alone. Whoever wants it alone goes before those who come to share it later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = self._wanting = 0
        self._alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._wanting)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[Callable[[], None]]:
        """Gives a function that lets others in beside it: from its call on the turn is a shared one."""
        with self._changed:
            self._wanting += 1
            try:
                self._changed.wait_for(lambda: not self._alone and not self._sharing)
                self._alone = True
            finally:
                self._wanting -= 1
        shares = False

        def share() -> None:
            nonlocal shares
            with self._changed:
                self._alone, shares = False, True
                self._sharing += 1
                self._changed.notify_all()

        try:
            yield share
        finally:
            with self._changed:
                if shares:
                    self._sharing -= 1
                else:
                    self._alone = False
                self._changed.notify_all()
