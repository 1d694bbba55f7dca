"""The one kind of error a user is meant to read."""


class NicestError(Exception):
    """A request that cannot be met; its message is one line: what was expected, what came, what to do."""


class Resumable(NicestError):
    """The run in `folder` has no model, but resuming its training writes one. The message ends with this advice."""

    def __init__(self, message: str, folder: object) -> None:
        super().__init__(message)
        self.folder = folder
