"""What a task may be called."""

from __future__ import annotations

from taskgraft.errors import GraftError


def check_task_name(name: object) -> None:
    """A task's name is also a folder's name, so it must be one, and must stay inside its store."""
    if not isinstance(name, str) or not name:
        raise GraftError("a task's name is empty: give it one, such as 'spam'.")
    allowed = all(c.isalnum() or c in "_-. " for c in name)
    if not allowed or name[0] in ". " or name[-1] in " ." or len(name.encode()) > 128:
        raise GraftError(
            f"task name {name!r} cannot be used: letters, digits, '_', '-', '.' and inner spaces only, "
            "not beginning with '.', at most 128 bytes."
        )
