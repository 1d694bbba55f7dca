"""Compress and decompress random files, and compare them bit for bit: python tests/codec_trial.py --files 100000.

File i depends on i alone. The counts of the files that came back are kept in --state, so that a trial that was stopped
goes on where it was; the first file that does not come back ends it. Models are opened once: small files take
milliseconds, and those of `digits-conv` and `wine`, which go through all that the commands do, a second.
"""

import argparse
import copy
import io
import json
import math
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import nicest
from nicest.codec import tables
from nicest.codec.cells import Quantizer, TableCells
from nicest.codec.codec import Codec
from nicest.codec.container import CompressedFile, write_rows
from nicest.codec.files import compress_files, decompress_file
from nicest.data import load
from nicest.flows import (
    MLP,
    Additive,
    Affine,
    AffineSpline,
    Chain,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Flow,
    Logistic,
    Logit,
    Squeeze,
    Units,
    channels,
    checkerboard,
    odd_even,
)
from nicest.recipes import load_recipe
from nicest.runs.run import Run
from nicest.train.fit import train

WORDS = [
    *("", "0", "-0", "-0.0", "+1", "007", "1.", ".5", "1.50", "1e5", "1E5", "1e400", "-1", "0x10", "1_0", " 1", "1 "),
    *(
        "nan",
        "NaN",
        "NA",
        "?",
        "null",
        "inf",
        "-inf",
        "Infinity",
        "true",
        "True",
        "FALSE",
        "0.1",
        "0.30000000000000004",
    ),
    *(
        '"1"',
        '"a,b"',
        '""',
        '"a""b"',
        "a,b",
        '"',
        "'",
        "\u00e9",
        "e\u0301",
        "\U0001f377",
        "\ufeff",
        "\t",
        "red ",
        "Red",
    ),
    *("9" * 30, "x" * 300, "4.9e-324", "1.7976931348623157e308", "9007199254740993", "-9223372036854775808"),
]
ODD_FLOATS = [np.nan, np.inf, -np.inf, -0.0, 0.0, 5e-324, 1.7e308, 0.1 + 0.2, 1 / 3, -1e-300, 1e15, 2.0**53, -7.25]
ODD_INTEGERS = [0, -1, 127, 1 << 40, (1 << 53) + 1, (1 << 62) + 1, -(1 << 63), (1 << 63) - 1]
ODD_TEXTS = ["never seen", "", "NA", "red ", "\u00e9", "e\u0301", "\U0001f377", "a\nb", "\x00", "x" * 300]
MEMORY_DISK = Path("/dev/shm")


def flows() -> list[Codec]:
    """Small models of grey levels, of all kinds of steps on the grid."""
    torch.manual_seed(0)
    made = []
    for dim, levels, law, logit in [
        (4, 2, Affine(), True),
        (6, 5, AffineSpline(bins=4), True),
        (5, 256, Affine(), False),
        (3, 65536, Affine(), True),
        (8, 256, Additive(), False),
    ]:
        partition, layers = odd_even(dim), [Logit()] if logit else []
        for _ in range(2):
            layers.append(Coupling(partition, law, MLP(len(partition.i1), len(partition.i2) * law.size, hidden=[8])))
            partition = partition.swap()
        made.append(Flow(Units.pixels(dim, levels), Chain(*layers, DiagonalScaling(dim)), Logistic(dim)))
    law, halves = AffineSpline(bins=4), channels(4, 2, 2)
    made.append(
        Flow(
            Units.pixels(16, 17),
            Chain(
                Logit(),
                Coupling(checkerboard(4, 4), law, ConvNet((1, 4, 2), 1, law.size, width=4, blocks=1)),
                Squeeze((1, 4, 4)),
                Coupling(halves, law, ConvNet((2, 2, 2), 2, law.size, width=4, blocks=1)),
            ),
            Logistic(16),
        )
    )
    for flow in made:
        flow.double()
        with torch.no_grad():
            for each in flow.parameters():
                each.add_(0.2 * torch.randn_like(each))
    return [Codec(flow) for flow in made]


class Quick:
    """Makes codecs as `Codec` does, but of each flow only once; the columns of a table may have other quantizers."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Flow, Codec]] = {}

    def __call__(self, flow: Flow, quantizers: Sequence[Quantizer] = ()) -> Codec:
        if id(flow) not in self.made:
            self.made[id(flow)] = flow, Codec(flow, quantizers)
        found = copy.copy(self.made[id(flow)][1])
        if quantizers:
            found.cells = TableCells(found.flow.units, quantizers)
        return found


def small_digits(folder: Path) -> Run:
    """A small model of the digits."""
    settings = ["model.couplings=3", "model.hidden_layers=1", "model.width=8", "train.epochs=1"]
    train(load_recipe("digits"), folder / "digits", overrides=settings, device="cpu")
    return Run(folder / "digits", dtype=torch.float64)


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder, self.codecs, self.quick = folder, flows(), Quick()
        self.digits, self.wine = Run("digits-conv"), Run("wine")
        self.images = load("digits").test.reshape(-1, 8, 8)
        self.wines, (self.small, self.rows_of_small) = self._wines(), self.things(folder)
        self.kinds: list[tuple[float, Callable[[np.random.Generator], str]]] = [
            (0.0005, self.image_file),
            (0.0005, lambda rng: self.table_file(rng, self.wine, self.wines)),
            (0.1, lambda rng: self.table_file(rng, self.small, self.rows_of_small)),
            (0.899, self.rows),
        ]

    def _wines(self):
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

    @staticmethod
    def things(folder: Path):
        """A table with columns of all kinds, and a small model of it."""
        import pyarrow as pa
        from pyarrow import parquet

        rng, n = np.random.default_rng(0), 300
        x = rng.normal(size=n)
        table = pa.table(
            {
                "price": np.round(20 + 5 * x, 2),
                "x": x + 0.3 * rng.normal(size=n),
                "count": rng.poisson(3 + np.abs(x)),
                "kind": rng.choice(["red", "green", "light blue"], n),
                "flag": x > 0,
                "rain": np.where(rng.random(n) < 0.6, 0.0, np.round(rng.exponential(size=n), 1)),
            }
        )
        parquet.write_table(table, folder / "things.parquet")
        settings = ["preprocess=triangular", "couplings=2", "law=affine", "hidden_layers=1", "width=8"]
        overrides = [f"data.name={folder / 'things.parquet'}", *(f"model.{each}" for each in settings)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*coupling layer")  # two are enough here
            train(load_recipe("table"), folder / "run", overrides=[*overrides, "train.epochs=3"], device="cpu")
            return Run(folder / "run", dtype=torch.float64), table

    def run(self, i: int) -> str:
        rng = np.random.default_rng([19, i])
        shares = np.cumsum([share for share, _ in self.kinds])
        return self.kinds[int(np.searchsorted(shares, rng.random() * shares[-1]))][1](rng)

    def rows(self, rng: np.random.Generator) -> str:
        """Rows of grey levels, in one or two dimensions: random, constant, alike, of the model, none; in blocks."""
        codec = self.codecs[rng.integers(len(self.codecs))]
        count, kind = int(rng.choice([0, 1, 2, 4, 8, 16], p=[0.08, 0.22, 0.15, 0.3, 0.15, 0.1])), rng.integers(5)
        if kind == 4:
            torch.manual_seed(int(rng.integers(1 << 30)))
            rows = codec.flow.sample(count).long().numpy().astype(codec.dtype)
        else:
            rows = rng.integers(0, codec.levels, (count, codec.dim))
            rows = [rows, rows * 0, rows * 0 + codec.levels - 1, rows[:1].repeat(count, 0)][kind].astype(codec.dtype)
        if codec.dim % 2 == 0 and rng.random() < 0.5:
            rows = rows.reshape(count, 2, codec.dim // 2)
        file = io.BytesIO()
        write_rows(file, codec, rows, block=int(rng.integers(1, 30)))
        packed = CompressedFile(file.getvalue())
        back = packed.joined(codec, list(packed.blocks(codec)))
        assert back.dtype == codec.dtype.newbyteorder("=")
        assert back.shape == rows.shape
        assert np.array_equal(back, rows)
        return "rows"

    def image_file(self, rng: np.random.Generator) -> str:
        images = self.images[rng.integers(0, len(self.images), rng.integers(1, 4))]
        if rng.random() < 0.5:
            images = rng.integers(0, 17, images.shape).astype(np.uint8)
        other = rng.random() < 0.1
        np.save(self.folder / "images.npy", images[:, 1:] if other else images)
        try:
            compress_files(self.digits, [self.folder / "images.npy"], out=self.folder / "images.nicest")
        except nicest.NicestError as error:
            if other and "expected shape" in str(error):
                return "images of another shape, refused"
            raise
        assert not other
        decompress_file(self.folder / "images.nicest", out=self.folder / "back.npy")
        assert (self.folder / "back.npy").read_bytes() == (self.folder / "images.npy").read_bytes()
        return "images"

    def table_file(self, rng: np.random.Generator, run: Run, table) -> str:
        count = int(rng.choice([0, 1, 2, 5, 40], p=[0.1, 0.4, 0.3, 0.17, 0.03]))
        table = table.take(rng.integers(0, len(table), count))
        if rng.random() < 0.2:
            table = table.select(rng.permutation(table.column_names).tolist())
        odd = rng.choice([0.0, 0.02, 0.3])  # share of cells that are changed
        if rng.random() < 0.5:
            return self._there_and_back(run, "csv", self._csv(rng, table, odd))
        return self._there_and_back(run, *self._arrow(rng, table, odd))

    def _csv(self, rng: np.random.Generator, table, odd: float) -> bytes:
        """Lines, some cells and lines of which were changed."""
        lines = [[str(value) for value in row.values()] for row in table.to_pylist()]
        for line in lines:
            for d in range(len(line)):
                if rng.random() < odd:
                    line[d] = WORDS[rng.integers(len(WORDS))]
        end = str(rng.choice(["\n", "\r\n"]))
        text = [",".join(line) for line in lines]
        if text and rng.random() < 0.2:
            text.insert(int(rng.integers(len(text))), str(rng.choice(["", ",", '"open', "one cell", "," * 20])))
        head = ",".join(f'"{name}"' if rng.random() < 0.2 else name for name in table.column_names)
        data = (end.join([head, *text]) + end * int(rng.integers(3))).encode()
        if rng.random() < 0.05:
            data += b"\n" + bytes(rng.integers(0, 256, 20).astype(np.uint8))
        return data

    def _arrow(self, rng: np.random.Generator, table, odd: float) -> tuple[str, bytes]:
        """Other cells, missing ones and other types, as Parquet or Arrow."""
        import pyarrow as pa
        from pyarrow import parquet

        def changed(cells: list, others: list) -> list:
            return [others[rng.integers(len(others))] if rng.random() < odd else cell for cell in cells]

        arrays = []
        for field, column in zip(table.schema, table.columns, strict=True):
            cells, kind = column.to_pylist(), field.type
            if pa.types.is_floating(kind):
                cells = changed(cells, ODD_FLOATS)
                if rng.random() < 0.1:
                    cells = [cell * (1 + 1e-9 * rng.normal()) for cell in cells]
                kind = pa.float32() if rng.random() < 0.1 else kind
            elif pa.types.is_integer(kind):
                cells = changed(cells, ODD_INTEGERS)
            elif pa.types.is_string(kind):
                cells = changed(cells, ODD_TEXTS)
                kind = pa.dictionary(pa.int32(), pa.string()) if rng.random() < 0.2 else kind
            cells = [None if rng.random() < odd / 2 else cell for cell in cells]
            arrays.append(
                pa.array(cells, pa.string()).dictionary_encode()
                if pa.types.is_dictionary(kind)
                else pa.array(np.array(cells, dtype=object), kind, from_pandas=False)
            )
        table = pa.table(arrays, names=table.column_names)
        sink = pa.BufferOutputStream()
        if rng.random() < 0.5:
            parquet.write_table(table, sink)
            return "parquet", sink.getvalue().to_pybytes()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return "arrow", sink.getvalue().to_pybytes()

    def _there_and_back(self, run: Run, suffix: str, data: bytes) -> str:
        file, packed, back = (self.folder / f"{name}.{suffix}" for name in ("table", "packed", "back"))
        packed = packed.with_suffix(".nicest")
        file.write_bytes(data)
        for old in (packed, back):
            old.unlink(missing_ok=True)
        tables.Codec = Codec if run is self.wine else self.quick
        compress_files(run, [file], out=packed)
        decompress_file(packed, out=back, run="wine" if run is self.wine else run)
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
    parser.add_argument("--state", type=Path, default=Path("codec-trial.json"))
    parser.add_argument("--seconds", type=float, default=math.inf)
    asked = parser.parse_args()
    state = json.loads(asked.state.read_text()) if asked.state.exists() else {"files": 0, "kinds": {}, "seconds": 0.0}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*coupling layer")  # two are enough here
    before, counts, start = state["seconds"], Counter[str](state["kinds"]), time.monotonic()
    disk = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        trial = Trial(Path(folder))
        for i in range(state["files"], asked.files):
            try:
                counts[trial.run(i)] += 1
            except Exception as error:
                raise SystemExit(f"file {i} did not come back: {error!r}") from error
            late = time.monotonic() - start > asked.seconds
            if i % 100 == 99 or i + 1 == asked.files or late:
                seconds = round(before + time.monotonic() - start, 1)
                state = {"files": i + 1, "kinds": dict(counts), "seconds": seconds, "nicest": nicest.__version__}
                asked.state.write_text(json.dumps(state) + "\n")
            if late:
                break
    print(f"{state['files']} files came back: {state['kinds']}, nicest {nicest.__version__}")


if __name__ == "__main__":
    main()
