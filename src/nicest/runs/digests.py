"""SHA-256 digests of the files of a run, kept in its environment.json, by which changed files are detected."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from nicest.errors import NicestError
from nicest.files import to_json, write_text

ENVIRONMENT = "environment.json"


def expect(path: Path, temporary: Path, *appended: Path) -> None:
    """Record the digests of the old and the new file before `temporary` replaces `path`.

    A crash at any moment then leaves a file with a known digest. The same holds for `appended` files of the folder,
    which only grow. A folder without environment.json is no run, and gets no digests.
    """
    if (path.parent / ENVIRONMENT).exists():
        new = {path: temporary} | {each: each for each in appended}
        with _locked(path.parent):
            known = {old: _kept(old) or ([sha256(old)] if old.exists() else []) for old in new}
            _keep(path.parent, {old.name: [*known[old], sha256(each)] for old, each in new.items()})


def settle(path: Path, *appended: Path) -> None:
    """Keep only the latest digest of each file, after the file was replaced."""
    with _locked(path.parent):
        if known := {each.name: _kept(each)[-1:] for each in (path, *appended) if _kept(each)}:
            _keep(path.parent, known)


def begins_as_written(path: Path, lines: Iterable[bytes]) -> bool:
    """Return True if the lines of an appended file begin with what a recorded digest is of, or if none is recorded."""
    known, prefixes = _kept(path), accumulate(lines, initial=b"")
    return not known or any(hashlib.sha256(prefix).hexdigest() in known for prefix in prefixes)


def verify(path: Path, *, strict: bool = True) -> None:
    """Raise a NicestError if the digest of a file is not the recorded one, or, if `strict`, if none is recorded."""
    before: list[str] | None = None
    known = _kept(path)
    if not known and not strict:
        return
    while known != before:  # once, unless training replaces the file at this very moment
        before, found = known, sha256(path)
        known = _kept(path)
        if found in (*before, *known):
            return
    if not known:
        raise NicestError(
            f"{path.parent / ENVIRONMENT} keeps no SHA-256 of {path.name}: the run is older than that, or the file was"
            " moved; do without the check"
        )
    raise NicestError(
        f"{path} has changed since it was written: expected SHA-256 {known[-1]}, got {found}: restore a copy of it,"
        " or train again"
    )


def sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise NicestError(f"cannot read {path}: {error.strerror}") from error


def _kept(path: Path) -> list[str]:
    """Return the digests that the file may have: several after a write that was interrupted."""
    digests = read_environment(path.parent).get("sha256")
    kept = digests.get(path.name) if isinstance(digests, dict) else None
    return [each for each in kept if isinstance(each, str)] if isinstance(kept, list) else []


def _keep(folder: Path, digests: Mapping[str, list[str]]) -> None:
    """Write the digests of files, by name, into environment.json."""
    environment = read_environment(folder)
    before = environment.get("sha256")
    kept = (before if isinstance(before, dict) else {}) | dict(digests)
    write_text(folder / ENVIRONMENT, to_json(environment | {"sha256": kept}))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder while its digests are changed: a run may be scored while it is trained. No lock on Windows."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_environment(folder: Path) -> dict[str, Any]:
    """Parse the environment.json of a run folder; empty if it is missing or damaged."""
    try:
        found = json.loads((folder / ENVIRONMENT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
