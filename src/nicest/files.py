"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from nicest.errors import NicestError
from nicest.messages import brief
from nicest.remote import Remote, unreachable


@contextmanager
def writing(path: Path | str, hint: str = "") -> Iterator[None]:
    """Turn errors of writing a file into one line that ends with the hint."""
    try:
        yield
    except OSError as error:
        raise NicestError(f"cannot write {path}: {error.strerror or error}{hint}") from error
    except Exception as error:
        if not unreachable(error):
            raise
        raise NicestError(f"cannot write {path}: {brief(error)}{hint}") from error


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed; OSError if another process holds the lock. Not supported on Windows."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when all is written, and is removed when something fails.

    On an object store, which cannot rename, the result is whole or absent, too.
    """
    if isinstance(path, Remote):
        with _replacing_remote(path) as beside:
            yield beside
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path, "; what was there before is untouched"):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            flush(temporary)
            temporary.replace(path)
            flush(path.parent)  # else a power cut may undo the replacing
    finally:
        with suppress(OSError):  # a disk that turned read-only has nothing of ours to remove
            temporary.unlink()


@contextmanager
def _replacing_remote(path: Any) -> Iterator[Any]:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with writing(path, "; what was there before is untouched"):
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(NicestError):  # it took its place, or was never there
            temporary.unlink()


def require_writable(path: Path) -> None:
    """Refuse, before work whose result goes there, a file that cannot be written; nothing is left behind."""
    if isinstance(path, Remote):
        path.require_writable()
        return
    with writing(path, "; choose another place"):
        if path.exists() and not path.is_file():
            raise NicestError(f"cannot write {path}: it is a {'folder' if path.is_dir() else 'pipe or a device'}")
        folder = next(each for each in path.absolute().parents if each.exists())
        probe = folder / f".{path.name}.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Return strict JSON: NaN and infinity become null, and paths become text."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    write_bytes(path, text.encode())
