"""The one kind of error a user is meant to read."""


class NicestError(Exception):
    """A request that cannot be met; its message is one line: what was expected, what came, what to do."""
