"""The errors of this package."""


class WireError(ValueError):
    """A payload that another worker sent is not what was expected."""


class DataError(ValueError):
    """A sample that cannot be read, when it is its turn."""


class ReplicaError(RuntimeError):
    """Ranks that must agree do not: their set-up or their parameters differ."""
