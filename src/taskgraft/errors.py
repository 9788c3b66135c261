"""What is raised at the edge: one exception for what a caller can mend, and one for a run that was asked to stop."""


class GraftError(ValueError):
    """A mistake the caller can mend; its text names what was seen and what to do."""


class Diverged(GraftError):  # noqa: N818 - it is the run that has
    """A run's loss is no longer a number."""


class Stopped(GraftError):  # noqa: N818 - nothing was wrong
    """A run was asked to stop, by Ctrl-C or SIGTERM; its text says how to go on."""
