"""Tables come back to the bit, at the cost that the flow says."""

import contextlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from nicest.cli import app
from nicest.codec import tables
from nicest.codec.cells import MISSING, Quantizer, TableCells
from nicest.codec.codec import Codec
from nicest.codec.container import ENTRY, START
from nicest.codec.files import compress_files, decompress_file
from nicest.codec.stack import Stack
from nicest.errors import NicestError
from nicest.runs.run import Run

pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")
pa = pytest.importorskip("pyarrow", reason="tables need pyarrow: install nicest[tables]")


@pytest.fixture(scope="module")
def run() -> Run:
    return Run("wine", dtype=torch.float64)


@pytest.fixture(scope="module")
def lines(run: Run) -> list[str]:
    """Wines that the model draws, with two decimals, as the data has."""
    torch.manual_seed(0)
    rows = run.flow.sample(16).numpy()
    cells = []
    for d, column in enumerate(run.columns):
        if column.values:
            cells.append([column.values[int(k)] for k in rows[:, d]])
        elif column.step:
            cells.append([str(int(column.low + k * column.step)) for k in rows[:, d]])
        else:
            cells.append([f"{x + column.taken_off:.2f}" for x in rows[:, d]])
    return [",".join(row) for row in zip(*cells, strict=True)]


def there_and_back(run: Run, file: Path) -> tuple[dict, Path]:
    packed, back = file.with_name("packed.nicest"), file.with_name(f"back{file.suffix}")
    result = compress_files(run, [file], out=packed)
    decompress_file(packed, out=back, run=run)
    return result, back


def changed(line: str, cell: int, text: str) -> str:
    cells = line.split(",")
    return ",".join([*cells[:cell], text, *cells[cell + 1 :]])


def test_a_csv_file_comes_back_to_the_byte(run: Run, lines: list[str], tmp_path: Path):
    """In other orders and with other line ends; lines that are not as the rest are stored."""
    head = ",".join(f'"{column.name}"' if d == 3 else column.name for d, column in enumerate(run.columns))
    odd = [
        changed(lines[0], 0, each) for each in ("1.5e1", "nan", " 13.05", "+13.05", "inf", "1" * 400, "13.0500000001")
    ]
    odd += [changed(lines[1], 13, each) for each in ("never seen", "é", '"a,b"', '"open')]
    odd += [changed(lines[2], 4, "70.5"), changed(lines[2], 4, "99999999999999999999"), "", ",", "one cell", "," * 30]
    gaps = [changed(lines[3], 2, ""), changed(lines[4], 13, ""), "," * 13]
    file = tmp_path / "wines.csv"
    for end, last in [("\n", "\n"), ("\r\n", "")]:
        data = (end.join([head, *lines[:3], *odd, *gaps, *lines[9:12]]) + last).encode() + b"\xff\n" * (end == "\n")
        file.write_bytes(data)
        result, back = there_and_back(run, file)
        assert back.read_bytes() == data
        assert result["stored_rows"] >= len(odd)
        assert result["stored_rows"] <= len(odd) + 1
    for data in (head, f"{head}\n\n"):
        file.write_text(data)
        assert there_and_back(run, file)[1].read_text() == data
    order = [*range(13, -1, -1)]
    turned = [",".join(np.array(line.split(","))[order]) for line in [head, *lines[:5]]]
    file.write_text("\n".join(turned))
    result, back = there_and_back(run, file)
    assert back.read_text() == "\n".join(turned)
    assert result["stored_rows"] == 0


def bits(table: pa.Table) -> list[list]:
    """Cells, floats as their bytes."""
    kinds = {pa.float32(): np.float32, pa.float64(): np.float64}
    return [
        [
            kinds[column.type](cell).tobytes() if column.type in kinds and cell is not None else cell
            for cell in column.to_pylist()
        ]
        for column in table.columns
    ]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_bit_of_every_cell_comes_back(run: Run, lines: list[str], suffix: str, tmp_path: Path):
    from pyarrow import ipc, parquet

    texts = list(zip(*(line.split(",") for line in lines), strict=True))
    cells = [list(map(float, each)) for each in texts[:13]]
    rng = np.random.default_rng(0)
    cells[0] = [x * (1 + 1e-12 * rng.normal()) for x in cells[0]]  # all digits of a float64
    cells[1][:5] = [math.nan, math.inf, -0.0, 5e-324, None]
    cells[4] = [*map(int, cells[4][:14]), None, (1 << 62) + 1]
    cells[12] = list(map(int, cells[12]))
    labels = [*texts[13][:14], None, "never seen"]
    types = [pa.float64()] * 13
    types[2], types[4], types[12] = pa.float32(), pa.int64(), pa.int16()
    arrays = [pa.array(each, kind) for each, kind in zip(cells, types, strict=True)]
    arrays.append(pa.array(labels).dictionary_encode())
    schema = pa.schema(
        [pa.field(c.name, a.type, metadata={"unit": "g"}) for c, a in zip(run.columns, arrays, strict=True)],
        {"by": "us"},
    )
    table, file = pa.table(arrays, schema=schema), tmp_path / f"wines{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, file)
    else:
        with ipc.new_file(file, schema) as writer:
            writer.write_table(table)
    result, back = there_and_back(run, file)
    assert result["stored_rows"] == 3  # NaN, infinity, and an integer beyond float64 beside a new text
    found = parquet.read_table(back) if suffix == ".parquet" else ipc.open_file(back).read_all()
    assert found.schema.equals(table.schema, check_metadata=suffix == ".arrow")
    assert bits(found) == bits(table)


def test_the_cost_is_the_log_likelihood(run: Run):
    """-log2 of density times 0.01 in each column of two decimals; a missing cell costs little."""
    quantizers = [Quantizer() if column.discrete else Quantizer(2, column.taken_off) for column in run.columns]
    codec, columns = Codec(run.flow, quantizers), run.columns
    torch.manual_seed(1)
    drawn = run.flow.sample(150).double()
    real = torch.tensor([not column.discrete for column in columns])
    off = torch.tensor([column.taken_off for column in columns], dtype=torch.float64)
    drawn = torch.where(real, ((drawn + off) * 100).round() / 100 - off, drawn)
    places = torch.where(real, (drawn + off) * 100, drawn).round().long().numpy()
    stack = Stack(np.random.default_rng(0).integers(0, 1 << 32, 40_000, dtype=np.uint32), fresh=True)
    before = stack.bits
    codec._push(places, stack)
    cost = (stack.bits - before) / len(places)
    with torch.no_grad():
        nats = torch.stack([codec.flow.log_prob(drawn) for _ in range(8)]).mean().item()
    spikes = torch.tensor(
        [[x in c.spikes for x, c in zip(row, columns, strict=True)] for row in (drawn + off).tolist()]
    )
    counted = (real & ~spikes).sum().item() / len(drawn)  # cells with a density
    says = -nats / math.log(2) + counted * math.log2(100)
    assert cost == pytest.approx(says, rel=0.01)
    places[:, 3] = MISSING
    before = stack.bits
    codec._push(places, stack)
    assert (stack.bits - before) / len(places) < cost - 3


def test_stored_rows_that_shrink_to_nothing_come_back(run: Run, lines: list[str], tmp_path: Path):
    """What unpacks to over a thousand times its size is refused, so it must never be written."""
    file = tmp_path / "wines.csv"
    odd = [line.rpartition(",")[0] + "," + "x" * 400_000 for line in lines[:4]]
    file.write_text("\n".join([",".join(column.name for column in run.columns), *odd]))
    result, back = there_and_back(run, file)
    assert result["stored_rows"] == 4
    assert back.read_bytes() == file.read_bytes()


def test_the_first_float_of_a_point_is_found_wherever_it_lies(run: Run):
    """The float before it is of an earlier point; beyond all floats the last one is given."""
    cells = TableCells(run.flow.units, [Quantizer(-1 if column.kind == "real" else None) for column in run.columns])
    i = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 37), 1 << 37, (50, len(cells.floats))))
    i[0], i[1], i[2], i[3] = 0, 1, -(1 << 50), 1 << 50
    found = cells._first_float(i)

    def point(k: np.ndarray) -> torch.Tensor:
        x = torch.zeros((50, 14), dtype=torch.float64)
        x[:, cells.floats] = torch.from_numpy(Quantizer(-1).numbers(k))
        return cells._point(run.flow.units.place(x), inside=True)[:, cells.floats]

    most = Quantizer(-1).nearest(np.array([np.finfo(float).max]))
    last, first = found == most, found == -most
    assert bool((point(found) >= i)[torch.from_numpy(~last)].all())
    assert bool((point(found - 1) < i)[torch.from_numpy(~first)].all())
    assert 0.5 < (~last & ~first).mean() < 1


def test_floats_are_counted_in_their_order():
    numbers = np.array(
        [-np.finfo(float).max, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.5, np.nextafter(1.5, 2), np.finfo(float).max]
    )
    places = Quantizer(-1).nearest(numbers)
    assert (np.diff(places) > 0).all()
    assert places[7] == places[6] + 1
    assert np.array_equal(Quantizer(-1).numbers(places).view(np.int64), numbers.view(np.int64))


def test_other_tables_are_refused(run: Run, lines: list[str], tmp_path: Path):
    names = [column.name for column in run.columns]
    file, out = tmp_path / "wines.csv", tmp_path / "packed.nicest"
    for data, match in [
        ("", "expected the columns of training"),
        ("a,b\n1,2\n", "expected the columns of training.*got a, b|got 'a'"),
        (",".join([*names, "extra"]) + "\n", "expected the columns of training"),
    ]:
        file.write_text(data)
        with pytest.raises(NicestError, match=match):
            compress_files(run, [file], out=out)
    file.write_text("\n".join([",".join(names), *lines]))
    with pytest.raises(NicestError, match="expected one file"):
        compress_files(run, [file, file], out=out)
    assert not out.exists()
    compress_files(run, [file], out=out)
    answer = CliRunner().invoke(app, ["decompress", str(out), "--out", str(tmp_path / "back.parquet")])
    assert "ends in .csv" in str(answer.exception)
    other = Run("wine", dtype=torch.float64)
    with torch.no_grad():
        next(other.flow.parameters()).view(-1)[0] *= 1 + 1e-15
    with pytest.raises(NicestError, match="expected the model that compressed it"):
        decompress_file(out, out=tmp_path / "back.csv", run=other)


def test_a_header_of_nonsense_is_refused(run: Run, lines: list[str], tmp_path: Path):
    """With a right checksum; nothing but one line comes of it."""
    file, out, back = tmp_path / "wines.csv", tmp_path / "packed.nicest", tmp_path / "back.csv"
    file.write_text("\n".join([",".join(column.name for column in run.columns), *lines[:2]]))
    compress_files(run, [file], out=out)
    data = out.read_bytes()
    size = START.unpack_from(data)[2]
    says, rest = json.loads(data[START.size : START.size + size]), data[START.size + size :]
    places = [(says, key) for key in says] + [(says["table"], key) for key in says["table"]]
    for among, key in places:
        kept = among[key]
        for nonsense in (None, -1, 1 << 40, "x", [[1]] * 14):
            among[key] = nonsense
            text = json.dumps(says).encode()
            entry = struct.pack("<QII", START.size + len(text) + 16, *ENTRY.unpack_from(rest)[1:])
            check = zlib.crc32(text + entry)
            out.write_bytes(START.pack(b"\x89NICEST\n", 1, len(text), check) + text + entry + rest[16:])
            with contextlib.suppress(NicestError):
                decompress_file(out, out=back, run=run)
        among[key] = kept


FULL_DISK = """
import resource, signal, sys
from nicest.runs.run import Run
from nicest.codec.files import compress_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # a write beyond 1000 bytes fails, as on a full disk
compress_files(Run("wine"), [sys.argv[1]], out=sys.argv[2])
"""


def test_a_full_disk_and_a_kill_leave_what_was_there(lines: list[str], run: Run, tmp_path: Path):
    file, out = tmp_path / "wines.csv", tmp_path / "packed.nicest"
    file.write_text("\n".join([",".join(column.name for column in run.columns), *lines]))
    out.write_text("before")
    found = subprocess.run([sys.executable, "-c", FULL_DISK, str(file), str(out)], capture_output=True, text=True)
    assert found.returncode != 0
    assert "what was there before is untouched" in found.stderr
    assert out.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["packed.nicest", "wines.csv"]
    command = [sys.executable, "-m", "nicest", "compress", "wine", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):  # until it has begun to write
        if len(list(tmp_path.iterdir())) > 2 or process.poll() is not None:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL
    assert out.read_text() == "before"


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_two_workers_write_the_same_file(
    run: Run, lines: list[str], suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Blocks of five rows, some of them stored."""
    from pyarrow import csv, parquet

    monkeypatch.setattr(tables, "BLOCK", 5)
    file, packed, back = tmp_path / "wines.csv", tmp_path / "packed.nicest", tmp_path / f"back{suffix}"
    head = ",".join(column.name for column in run.columns)
    file.write_text("\n".join([head, *lines[:12], *([changed(lines[12], 13, "é")] if suffix == ".csv" else [])]))
    if suffix == ".parquet":
        parquet.write_table(csv.read_csv(file), file := file.with_suffix(suffix))
    compress_files(run, [file], out=packed)
    alone = packed.read_bytes()
    compress_files(run, [file], out=packed, jobs=2)
    assert packed.read_bytes() == alone
    decompress_file(packed, out=back, run=run)
    alone = back.read_bytes()
    decompress_file(packed, out=back, run=run, jobs=2)
    assert back.read_bytes() == alone
