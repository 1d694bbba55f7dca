"""Values, names and errors as they appear in messages: on one line, printable, and not too long."""

import difflib
from collections.abc import Iterable, Sequence


def printable(text: object) -> str:
    """Return text on one line; characters that cannot be printed are escaped."""
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(error: object) -> str:
    """Return the text of an error on one line, with single spaces; its type if it has no text."""
    return printable(" ".join(str(error).split())[:300]) or type(error).__name__


def brief(error: object, most: int = 200) -> str:
    """Return the first sentence of an error, on one line."""
    return one_line(error).split(". ")[0][:most]


def shown(value: object, most: int = 80) -> str:
    """Return a value as Python writes it, shortened to `most` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or lists nested too deeply
        text = f"an oversized {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def listed(names: Sequence[object], most: int = 5) -> str:
    """Return the first names of a sequence, and how many more there are."""
    text = ", ".join(map(shown, names[:most]))
    return (text or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" to append to an error, or nothing if no known name is similar."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
