"""Checks that every reader makes: the file is a file, its bytes are sound, and memory stays in proportion."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nicest.errors import NicestError
from nicest.messages import brief
from nicest.remote import unreachable


def require_file(path: Path) -> int:
    """Return the size of a file; refuse pipes and devices, which may never begin or end, before they are opened."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise NicestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or a socket"
        raise NicestError(f"{path}: expected a file, got {kind}; save the data as a file first")
    return size


@contextmanager
def reading(path: Path, expected: str, advice: str = "") -> Iterator[None]:
    """Turn the errors of a reader at broken bytes, of every kind, into one line."""
    size = require_file(path)
    try:
        yield
    except NicestError:
        raise
    except Exception as error:
        if unreachable(error):
            raise NicestError(f"{path}: cannot be read ({brief(error)})") from error
        if "invalid UTF8" in str(error):
            raise NicestError(
                f"{path}: expected text in UTF-8, got another encoding; save it as CSV in UTF-8"
            ) from error
        got = f"got {size} bytes that do not parse; {brief(error)}"
        raise NicestError(f"{path}: expected {expected}, {got}{advice and '; '}{advice}") from error


def read_bytes(path: Path) -> bytes:
    """Read a whole file."""
    size = require_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise NicestError(f"{path}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise NicestError(f"{path}: its {size} bytes do not fit in memory") from error


def most_unpacked(size: int) -> int:
    """Return the most bytes that a file of this size may unpack to, more than any data does (dSprites: 115 times)."""
    return (1 << 26) + 200 * size


def require_modest(path: Path, unpacked: int, instead: str, most: int | None = None) -> None:
    """Refuse a file that would unpack to far more than its size, or to more than `most` bytes."""
    size = path.stat().st_size
    most = min(most_unpacked(size), most or unpacked)
    if unpacked > most:
        raise NicestError(f"{path}: expected at most {most} bytes from a file of {size}, got {unpacked}; {instead}")
