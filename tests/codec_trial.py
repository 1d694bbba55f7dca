"""Compress and decompress random files, and compare them bit for bit: python tests/codec_trial.py --files 100000.

File i depends on i alone. The numbers of the files that came back are kept in --state, so that a trial that was stopped
goes on where it was; the first file that does not come back ends it.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import nicest
from nicest.data import load
from nicest.flows import (
    MLP,
    Affine,
    AffineSpline,
    Chain,
    Coupling,
    DiagonalScaling,
    Flow,
    Logistic,
    Logit,
    Units,
    odd_even,
)
from nicest.inference.codec import Codec
from nicest.inference.packed import Packed, joined
from nicest.inference.packed import pack as pack_rows
from nicest.runs.run import Run
from nicest.tasks.compress import compress, decompress

WORDS = [
    "",
    "0",
    "-0",
    "nan",
    "NA",
    "?",
    "inf",
    "1e400",
    "-1",
    "0x10",
    "1_0",
    " 1",
    '"1"',
    "\u00e9",
    "a,b",
    '"',
    "9" * 30,
]
ODD_FLOATS = [np.nan, np.inf, -np.inf, -0.0, 5e-324, 1.7e308, 0.1 + 0.2, 1 / 3, -1e-300]


def flows() -> list[Codec]:
    """Small models of grey levels, of all kinds of steps on the grid."""
    torch.manual_seed(0)
    made = []
    for dim, levels, law, logit in [
        (4, 2, Affine(), True),
        (6, 5, AffineSpline(bins=4), True),
        (5, 256, Affine(), False),
        (3, 65536, Affine(), True),
    ]:
        partition, layers = odd_even(dim), [Logit()] if logit else []
        for _ in range(3):
            layers.append(Coupling(partition, law, MLP(len(partition.i1), len(partition.i2) * law.size, hidden=[8])))
            partition = partition.swap()
        flow = Flow(Units.pixels(dim, levels), Chain(*layers, DiagonalScaling(dim)), Logistic(dim)).double()
        with torch.no_grad():
            for each in flow.parameters():
                each.add_(0.2 * torch.randn_like(each))
        made.append(Codec(flow))
    return made


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder, self.codecs = folder, flows()
        self.digits, self.wine = Run("digits-conv"), Run("wine")
        self.images = load("digits").test.reshape(-1, 8, 8)
        self.table = self._wine()
        self.kinds: list[tuple[float, Callable[[np.random.Generator], str]]] = [
            (0.001, self.image_file),
            (0.005, self.csv_file),
            (0.004, self.arrow_file),
            (0.99, self.rows),
        ]

    def _wine(self):
        import pyarrow as pa
        from sklearn.datasets import load_wine

        data = load_wine()
        cells = [
            pa.array(column.astype(int) if name in ("magnesium", "proline") else column)
            for name, column in zip(data.feature_names, data.data.T, strict=True)
        ]
        names = list(self.wine.columns[-1].values)
        cells.append(pa.array([names[k] for k in data.target]))
        return pa.table(cells, names=[column.name for column in self.wine.columns])

    def run(self, i: int) -> str:
        rng = np.random.default_rng([19, i])
        shares = np.cumsum([share for share, _ in self.kinds])
        return self.kinds[int(np.searchsorted(shares, rng.random() * shares[-1]))][1](rng)

    def rows(self, rng: np.random.Generator) -> str:
        """Rows of grey levels: random, constant, alike, none."""
        codec = self.codecs[rng.integers(len(self.codecs))]
        count, kind = int(rng.choice([0, 1, 1, 2, 3, 8])), rng.integers(4)
        rows = rng.integers(0, codec.levels, (count, codec.dim))
        rows = [rows, rows * 0, rows * 0 + codec.levels - 1, rows[:1].repeat(count, 0)][kind].astype(codec.dtype)
        path = self.folder / "rows.nicest"
        with path.open("wb") as file:
            pack_rows(codec, rows, file, block=int(rng.integers(1, 30)))
        packed = Packed(path.read_bytes(), codec)
        back = joined(packed, codec, [block.rows for block in packed.blocks()])
        packed.require_all()
        assert back.dtype == codec.dtype.newbyteorder("=")
        assert np.array_equal(back, rows)
        return "rows"

    def image_file(self, rng: np.random.Generator) -> str:
        images = self.images[rng.integers(0, len(self.images), rng.integers(1, 4))]
        if rng.random() < 0.5:
            images = rng.integers(0, 17, images.shape).astype(np.uint8)
        np.save(self.folder / "images.npy", images)
        compress(self.digits, [self.folder / "images.npy"], out=self.folder / "images.nicest")
        decompress(self.folder / "images.nicest", out=self.folder / "back.npy")
        assert (self.folder / "back.npy").read_bytes() == (self.folder / "images.npy").read_bytes()
        return "images"

    def csv_file(self, rng: np.random.Generator) -> str:
        """Lines of the wines, some cells and lines of which were changed."""
        some = self.table.take(rng.integers(0, len(self.table), rng.choice([0, 1, 3, 12]))).to_pylist()
        lines = [[str(value) for value in row.values()] for row in some]
        for line in lines:
            for d in range(len(line)):
                if rng.random() < 0.03:
                    line[d] = random.Random(int(rng.integers(1 << 30))).choice(WORDS)
        end = rng.choice(["\n", "\r\n"])
        text = [",".join(line) for line in lines]
        if text and rng.random() < 0.2:
            text.insert(int(rng.integers(len(text))), str(rng.choice(["", ",", '"open', "one cell", "," * 20])))
        data = end.join(
            [",".join(f'"{name}"' if rng.random() < 0.2 else name for name in self.table.column_names), *text]
        )
        data = (data + end * int(rng.integers(3))).encode()
        if rng.random() < 0.05:
            data += b"\n" + bytes(rng.integers(0, 256, 20).astype(np.uint8))
        return self._table_file("csv", data)

    def arrow_file(self, rng: np.random.Generator) -> str:
        """The wines with other cells, missing ones and other types, as Parquet or Arrow."""
        import pyarrow as pa
        from pyarrow import parquet

        some, arrays = self.table.take(rng.integers(0, len(self.table), rng.choice([0, 1, 3, 12]))), []
        for field, column in zip(some.schema, some.columns, strict=True):
            cells, kind = column.to_pylist(), field.type
            if pa.types.is_floating(kind):
                cells = [float(rng.choice(ODD_FLOATS)) if rng.random() < 0.02 else cell for cell in cells]
                if rng.random() < 0.1:
                    cells = [cell * (1 + 1e-9 * rng.normal()) for cell in cells]
                kind = pa.float32() if rng.random() < 0.1 else kind
            elif pa.types.is_integer(kind):
                cells = [
                    int(rng.choice([0, -1, 1 << 40, (1 << 62) + 1])) if rng.random() < 0.02 else cell for cell in cells
                ]
            else:
                cells = ["never seen" if rng.random() < 0.05 else cell for cell in cells]
                kind = pa.dictionary(pa.int32(), pa.string()) if rng.random() < 0.2 else kind
            cells = [None if rng.random() < 0.03 else cell for cell in cells]
            arrays.append(
                pa.array(cells, pa.string()).dictionary_encode()
                if pa.types.is_dictionary(kind)
                else pa.array(np.array(cells, dtype=object), kind, from_pandas=False)
            )
        table = pa.table(arrays, names=some.column_names)
        sink = pa.BufferOutputStream()
        if rng.random() < 0.5:
            parquet.write_table(table, sink)
            return self._table_file("parquet", sink.getvalue().to_pybytes())
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return self._table_file("arrow", sink.getvalue().to_pybytes())

    def _table_file(self, suffix: str, data: bytes) -> str:
        file, packed, back = (self.folder / f"{name}.{suffix}" for name in ("table", "packed", "back"))
        packed = packed.with_suffix(".nicest")
        file.write_bytes(data)
        for old in (packed, back):
            old.unlink(missing_ok=True)
        compress(self.wine, [file], out=packed)
        decompress(packed, out=back, run="wine")
        assert back.read_bytes() == data if suffix == "csv" else plain(back) == plain(file)
        return suffix


def plain(path: Path) -> tuple:
    """The cells of a table to the bit, with their types: floats as their bytes."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    table = parquet.read_table(path) if path.suffix == ".parquet" else ipc.open_file(path).read_all()
    columns = []
    for column in table.columns:
        cells = column.to_pylist()
        code = np.float32 if column.type == pa.float32() else np.float64
        floats = pa.types.is_floating(column.type)
        columns.append([code(cell).tobytes() if floats and cell is not None else cell for cell in cells])
    return table.schema, columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--state", type=Path, default=Path("codec-trial.txt"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    first = int(asked.state.read_text().split()[0]) if asked.state.exists() else 0
    torch.set_num_threads(1)
    counts, start = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        for i in range(first, asked.files):
            try:
                counts[trial.run(i)] += 1
            except Exception as error:
                raise SystemExit(f"file {i} did not come back: {error!r}") from error
            if i % 100 == 99 or i + 1 == asked.files or time.monotonic() - start > asked.seconds:
                asked.state.write_text(f"{i + 1} files came back\n")
            if time.monotonic() - start > asked.seconds:
                break
    print(f"{asked.state.read_text().strip()}; this time {dict(counts)}, nicest {nicest.__version__}")


if __name__ == "__main__":
    main()
