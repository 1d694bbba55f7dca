"""Tables on disk (.csv, .parquet, .arrow, .feather): their columns by name, their rows in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nicest.data.arrays import brief
from nicest.errors import NicestError
from nicest.files import replacing

SUFFIXES = (".csv", ".parquet", ".arrow", ".feather")
BATCH = 50_000  # rows that are read at once, or fewer of a wide table
CELLS = 2_000_000  # of a batch, at most


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


class TableFile:
    """A table on disk: its columns by name and type, and its rows in batches, with memory bounded whatever its size."""

    def __init__(self, path: Path) -> None:
        self.path, self.suffix = path, path.suffix.lower()
        if not path.is_file():
            raise NicestError(f"expected a table ({', '.join(SUFFIXES)}), found no {path}; looked from {Path.cwd()}")
        with reading(path):
            self.schema = self._schema()
        names = self.schema.names
        if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
            raise NicestError(f"{path}: expected columns of different names, got {listed(twice)} twice; rename one")
        if not names:
            raise NicestError(f"{path}: expected columns, got an empty table")

    def _schema(self) -> Any:
        if self.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(self.path) as file:
                return file.schema_arrow
        if self.suffix == ".csv":
            with self._csv() as reader:
                return reader.schema
        with self._ipc() as reader:
            return reader.schema

    def _csv(self) -> Any:
        """All cells as text: what a column holds is known when all of it was seen."""
        import pyarrow as pa
        from pyarrow import csv

        with csv.open_csv(self.path, read_options=csv.ReadOptions(block_size=1 << 24)) as reader:
            names = reader.schema.names
        convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
        return csv.open_csv(self.path, read_options=csv.ReadOptions(block_size=1 << 22), convert_options=convert)

    def _ipc(self) -> Any:
        import pyarrow as pa

        source = pa.memory_map(str(self.path))
        try:
            return pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source)

    @property
    def groups(self) -> int:
        """Parts that can be read alone: the row groups of Parquet, else one."""
        if self.suffix != ".parquet":
            return 1
        from pyarrow import parquet

        with reading(self.path), parquet.ParquetFile(self.path) as file:
            return max(1, file.num_row_groups)

    def count(self, group: int | None = None) -> int | None:
        """Rows of the table or of one part, where the file says it."""
        if self.suffix != ".parquet":
            return None
        from pyarrow import parquet

        with reading(self.path), parquet.ParquetFile(self.path) as file:
            if group is None or not file.num_row_groups:
                return int(file.metadata.num_rows)
            return int(file.metadata.row_group(group).num_rows)

    def batches(self, names: Sequence[str], group: int | None = None) -> Iterator[Any]:
        """Record batches of the named columns, of all rows or of one part."""
        rows = max(1, min(BATCH, CELLS // max(1, len(names))))
        with reading(self.path):
            for batch in self._batches(list(names), group):
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)

    def _batches(self, names: list[str], group: int | None) -> Iterator[Any]:
        if self.suffix == ".parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(self.path) as file:
                groups = None if group is None or not file.num_row_groups else [group]
                yield from file.iter_batches(batch_size=BATCH, row_groups=groups, columns=names)
        elif self.suffix == ".csv":
            with self._csv() as reader:
                for batch in reader:
                    yield batch.select(names)
        else:
            with self._ipc() as reader:
                parts = (
                    reader
                    if hasattr(reader, "read_next_batch")
                    else map(reader.get_batch, range(reader.num_record_batches))
                )
                for batch in parts:
                    yield batch.select(names)


class reading:
    """Turns what a reader throws at broken bytes into one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        require_pyarrow()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, NicestError):
            size = self.path.stat().st_size if self.path.exists() else 0
            raise NicestError(
                f"{self.path}: expected a whole {self.path.suffix} table, got {size} bytes that do not parse;"
                f" {brief(error)}"
            ) from error


def require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise NicestError("tables are read by pyarrow, which is not installed: pip install 'nicest[tables]'") from error


def write_table(path: Path, table: Any) -> None:
    """Write an Arrow table as the file's name says."""
    from pyarrow import csv, feather, parquet

    with replacing(path) as temporary:
        if path.suffix.lower() == ".parquet":
            parquet.write_table(table, temporary)
        elif path.suffix.lower() == ".csv":
            csv.write_csv(table, temporary)
        else:
            feather.write_feather(table, str(temporary), compression="uncompressed")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Some names for a message."""
    shown = ", ".join(repr(brief(name, 60)) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
