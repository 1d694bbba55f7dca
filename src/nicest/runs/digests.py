"""The SHA-256 of a run's weights and state, kept in its environment.json, so that a changed file can be told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nicest.errors import NicestError
from nicest.files import to_json, write_text

ENVIRONMENT = "environment.json"


def expect(path: Path, temporary: Path) -> None:
    """Before a file is replaced: keep the digests of both, so that a crash at any moment leaves a file that is known.

    In a folder without environment.json, which is no run, nothing is kept.
    """
    if (path.parent / ENVIRONMENT).exists():
        known = _kept(path) or ([sha256(path)] if path.exists() else [])
        _keep(path, [*known, sha256(temporary)])


def settle(path: Path) -> None:
    """After a file was replaced: keep the digest of the new one alone."""
    if known := _kept(path):
        _keep(path, known[-1:])


def verify(path: Path, *, strict: bool = True) -> None:
    """Refuse a file that is not the one that was written, by its SHA-256; strictly, also one of which none is kept."""
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
    """The digests that the file may have: one, or those of the old and the new file where a write was cut off."""
    digests = read_environment(path.parent).get("sha256")
    kept = digests.get(path.name) if isinstance(digests, dict) else None
    return [each for each in kept if isinstance(each, str)] if isinstance(kept, list) else []


def _keep(path: Path, digests: list[str]) -> None:
    environment = read_environment(path.parent)
    before = environment.get("sha256")
    kept = (before if isinstance(before, dict) else {}) | {path.name: digests}
    write_text(path.parent / ENVIRONMENT, to_json(environment | {"sha256": kept}))


def read_environment(folder: Path) -> dict[str, Any]:
    """What a run folder says of itself; nothing where it does not, or cannot be understood."""
    try:
        found = json.loads((folder / ENVIRONMENT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
