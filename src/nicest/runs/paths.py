"""Paths as a run folder records them: without the folders that lead to it, which often name a user."""

from __future__ import annotations

import getpass
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nicest.data.download import SETS
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY
from nicest.remote import is_address, place


def recorded(recipe: Recipe, folder: Path, *, private: bool) -> Recipe:
    """Return the recipe as it is written in a run folder; `Recipe.located` is the inverse.

    The path of its data is taken from the folder, or from the user's home where the folder is not in it. Only data on
    another branch of the file system keeps its absolute path. A private run keeps its file name instead, and instead of
    a path on which the user is named.
    """
    name = recipe.data.name
    if name in SETS or name == IN_MEMORY:
        return recipe
    if is_address(name):
        return replace(recipe, data=replace(recipe.data, name=f"./{place(name).name}")) if private else recipe
    path, folder, home = Path(name).expanduser().resolve(), folder.resolve(), user_home().resolve()
    if path.is_relative_to(home) and not folder.is_relative_to(home):
        found = f"~/{path.relative_to(home)}"
    elif os.path.commonpath([path, folder]) == os.sep:
        found = str(path)
    else:
        found = os.path.relpath(path, folder)
        found = found if found.startswith("..") else f"./{found}"
    if private and (Path(found).is_absolute() or user_names() & set(Path(found).parts)):
        found = f"./{path.name}"
    return replace(recipe, data=replace(recipe.data, name=found))


def user_home() -> Path:
    """Return the user's home; the root if there is none, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def user_names() -> set[str]:
    """Return the names of the user on this machine."""
    names = {user_home().name}
    with suppress(KeyError, OSError):  # a user without an entry
        names.add(getpass.getuser())
    return names


def command_line(words: Sequence[str]) -> str:
    """Write a command with paths relative to the working directory or to the user's home."""
    said = []
    for word in words:
        with suppress(OSError):  # a working directory that was removed
            word = word.replace(f"{Path.cwd()}/", "")
        word = word.replace(f"{user_home()}/", "~/")
        # a shell expands ~ only where it is not quoted
        said.append("~/" + shlex.quote(word[2:]) if word.startswith("~/") and word[2:] else shlex.quote(word))
    return " ".join(said)
