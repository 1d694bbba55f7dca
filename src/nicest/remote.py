"""Files that are not on this machine, by their address: s3://, gs://, hdfs:// and what else fsspec opens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any, cast

from nicest.errors import NicestError
from nicest.messages import brief

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
OPENERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hdfs": "pyarrow"}  # by the kind of address
BUCKETS = ("s3", "s3a", "gs", "gcs")  # addresses begin with the name of a bucket
LIBRARIES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "s3fs")  # not all of their errors are OSErrors


def place(name: str | Path) -> Path:
    """Return a local path or, for an address such as s3://bucket/key, a `Remote`, which is used like one."""
    if isinstance(name, Remote):
        return cast(Path, name)
    text = str(name)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://").removeprefix("localhost"))
    return cast(Path, Remote(text)) if is_address(text) else Path(name)


def is_address(text: str) -> bool:
    """Return True for the address of a file on another machine."""
    return bool(ADDRESS.match(text)) and not text.startswith("file://")


def looked_from(path: Path) -> str:
    """Return the end of a message that a file was not found: where a local one was looked for."""
    return "" if isinstance(path, Remote) else f"; looked from {Path.cwd()}"


def unreachable(error: BaseException) -> bool:
    """Return True for an error of a library that talks to another machine."""
    return type(error).__module__.partition(".")[0] in LIBRARIES


class Remote:
    """A file at an address, with as much of the interface of `pathlib.Path` as readers and writers of rows need.

    It is no subclass: what it lacks fails, and touches nothing on this machine. Whatever goes wrong is one line.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        self.address, self.scheme = address, address.partition("://")[0].lower()
        try:
            self.fs, self.key = fsspec.core.url_to_fs(address)
        except ImportError as error:
            opener = OPENERS.get(self.scheme)
            advice = f"needs {opener}, which is not installed: pip install {opener}" if opener else brief(error)
            raise NicestError(f"{address}: {advice}") from error
        except Exception as error:
            if self.scheme == "hdfs" and re.search("libjvm|libhdfs", str(error)):
                advice = "needs Java and Hadoop's client library: set JAVA_HOME, and ARROW_LIBHDFS_DIR or HADOOP_HOME"
                raise NicestError(f"{address}: {advice}") from error
            raise NicestError(f"{address}: expected an address such as s3://bucket/file ({brief(error)})") from error

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return f"Remote({self.address!r})"

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.key).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    def with_name(self, name: str) -> Remote:
        return Remote(self.address[: len(self.address) - len(self.name)] + name)

    def expanduser(self) -> Remote:
        return self

    def resolve(self) -> Remote:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_dir(self) -> bool:
        return self._ask(self.fs.isdir, self.key)

    def is_file(self) -> bool:
        return self._ask(self.fs.isfile, self.key)

    def exists(self) -> bool:
        found = self._ask(self.fs.exists, self.key)
        return found or self._require_bucket()

    def samefile(self, other: Any) -> bool:
        return isinstance(other, Remote) and other.fs is self.fs and other.key == self.key

    def stat(self) -> Any:
        return SimpleNamespace(st_size=self._ask(self.fs.size, self.key))

    def open(self, mode: str = "r", **options: Any) -> IO[Any]:
        return cast(IO[Any], self._ask(self.fs.open, self.key, mode, **options))

    def read_bytes(self) -> bytes:
        return cast(bytes, self._ask(self.fs.cat_file, self.key))

    def glob(self, pattern: str) -> list[Remote]:
        """Return the files in this folder whose names match a pattern, sorted."""
        found = self._ask(self.fs.glob, f"{self.key.rstrip('/')}/{pattern}")
        return [Remote(self.fs.unstrip_protocol(key)) for key in sorted(found)]

    def replace(self, target: Remote) -> None:
        self._ask(self.fs.mv, self.key, target.key)

    def unlink(self) -> None:
        self._ask(self.fs.rm_file, self.key)

    def require_writable(self) -> None:
        """Refuse an address that cannot be written, before work whose result goes there; nothing is left behind."""
        self._require_bucket()
        probe = self.with_name(f".{self.name}.probe")
        self._ask(self.fs.pipe_file, probe.key, b"")
        probe.unlink()

    def _require_bucket(self) -> bool:
        bucket = self.key.partition("/")[0]
        if self.scheme in BUCKETS and not self._ask(self.fs.exists, bucket):
            raise NicestError(f"{self}: found no bucket {bucket}; check its name, and whose account you use")
        return False

    def _ask(self, method: Any, *values: Any, **options: Any) -> Any:
        with reached(self):
            return method(*values, **options)


@contextmanager
def reached(path: Any) -> Iterator[None]:
    """Turn the errors of another machine into one line."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or unreachable(error)):
            raise
        raise NicestError(f"{path}: cannot be reached ({brief(error)})") from error
