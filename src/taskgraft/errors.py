"""What is raised at the edge: `GraftError` and its kinds, for those who treat some of them in their own way."""


class GraftError(ValueError):
    """A mistake the caller can mend; its text names what was seen and what to do."""


class UnknownTask(GraftError):  # noqa: N818
    """No task of this name is there."""


class Unreadable(GraftError):  # noqa: N818
    """A task's files are not whole, or do not fit the backbone: that task cannot answer, and the others can."""


class Overloaded(GraftError):  # noqa: N818
    """More is waiting than an engine takes: `retry_after` seconds from now there should be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Expired(GraftError):  # noqa: N818
    """The time that a caller gave for an answer was over before it was there."""


class Failed(GraftError):  # noqa: N818
    """The backbone raised an error on a batch; `id` is what the log calls it."""

    def __init__(self, message: str, id: str) -> None:
        super().__init__(message)
        self.id = id


class Closed(GraftError):  # noqa: N818
    """An engine that is closing takes nothing more."""


class Diverged(GraftError):  # noqa: N818 - it is the run that has
    """A run's loss is no longer a number."""


class Stopped(GraftError):  # noqa: N818 - nothing was wrong
    """A run was asked to stop, by Ctrl-C or SIGTERM; its text says how to go on."""
