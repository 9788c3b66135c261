"""The one exception that means: the input was wrong, and this sentence says how to put it right."""


class GraftError(ValueError):
    """A mistake the caller can mend; its text names what was seen and what to do."""
