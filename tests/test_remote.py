"""Tables and arrays at addresses: in fsspec's memory, and on a local server that speaks S3."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from typer.testing import CliRunner

from nicest import Run
from nicest.cli import app
from nicest.data import load
from nicest.data.tables import TableFile, write_table, writing
from nicest.errors import NicestError
from nicest.remote import Remote, is_address, place
from nicest.runs.paths import recorded
from small_runs import people

Refusal = Callable[..., str]
TINY = ("table.width=8", "table.depth=1", "train.epochs=2", "train.patience=0")


@pytest.fixture
def memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def nicest(*words: object) -> str:
    """What a command says: nothing, if it did what it was asked."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    return "" if done.exit_code == 0 else str(done.exception or done.output)


def table(n: int = 40) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table({"x": rng.normal(size=n), "y": rng.normal(size=n), "n": rng.integers(0, 5, n)})


def test_addresses_are_told_from_paths() -> None:
    assert place("file:///tmp/x.csv") == place("file://localhost/tmp/x.csv") == Path("/tmp/x.csv")
    assert isinstance(place("a:b/c://d"), Path)
    assert not is_address("file:///x")
    remote = place("memory://a/b.tar.parquet")
    assert isinstance(remote, Remote)
    assert place(remote) is remote
    assert (remote.name, remote.stem, remote.suffix) == ("b.tar.parquet", "b.tar", ".parquet")
    assert str(remote.with_name("c.csv")) == "memory://a/c.csv"
    with pytest.raises(TypeError):
        Path(remote)  # never taken for a file of this machine


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_tables_are_read_and_written_as_on_this_machine(suffix: str, memory: Any, tmp_path: Path) -> None:
    near, far = tmp_path / f"t{suffix}", place(f"memory://there/t{suffix}")
    for path in (near, far):
        write_table(path, table())
    assert memory.cat_file(f"/there/t{suffix}") == near.read_bytes()
    assert memory.ls("/there", detail=False) == [f"/there/t{suffix}"]  # no temporary file
    some, other = (pa.Table.from_batches(TableFile(path).batches(["x", "n"])) for path in (near, far))
    assert some.equals(other)
    assert load(str(near)).digest() == load(str(far)).digest()


def test_a_result_that_was_broken_off_is_not_there(memory: Any, refusal: Refusal) -> None:
    path = place("memory://there/t.parquet")
    write_table(path, table())
    before = memory.cat_file("/there/t.parquet")

    def broken() -> None:
        with writing(path, table().schema) as write:
            write(table().columns)
            assert len(memory.ls("/there")) == 2  # under another name
            raise NicestError("a fault")

    assert refusal(broken) == "a fault"
    assert memory.cat_file("/there/t.parquet") == before
    assert memory.ls("/there", detail=False) == ["/there/t.parquet"]


def test_a_run_on_data_at_an_address(memory: Any, tmp_path: Path) -> None:
    """Train, score, impute, predict and sample, by the command line."""
    memory.pipe_file("/d/people.csv", people(tmp_path / "people.csv").read_bytes())
    sets = [word for each in TINY for word in ("--set", each)]
    address, run = "memory://d/people.csv", tmp_path / "run"
    assert not nicest("train", "table", "--data", address, "--out", run, "--device", "cpu", *sets)
    assert Run(run).recipe.data.name == address
    assert recorded(Run(run).recipe, run, private=True).data.name == "./people.csv"
    for data, out in ((tmp_path / "people.csv", tmp_path / "s.csv"), (address, "memory://d/s.csv")):
        assert not nicest("score", run, data, "--out", out)
    assert memory.cat_file("/d/s.csv") == (tmp_path / "s.csv").read_bytes()
    assert len(memory.cat_file("/d/s.csv").splitlines()) == 401
    assert not nicest("sample", run, "-n", 5, "--out", "memory://d/some.parquet")
    assert parquet.read_table(memory.open("/d/some.parquet")).num_rows == 5
    memory.pipe_file("/d/few.csv", b"height,weight,colour,member\n170,,red,true\n,68,blue,false\n")
    cells = ("--cells", "memory://d/cells.csv")
    assert not nicest("impute", run, "memory://d/few.csv", "--out", "memory://d/whole.arrow", *cells)
    assert not any(column.null_count for column in feather.read_table(memory.open("/d/whole.arrow")).columns)
    assert len(memory.cat_file("/d/cells.csv").splitlines()) == 3
    rows = TableFile(tmp_path / "people.csv")
    for name in ("b", "a", "_c"):
        write_table(place(f"memory://d/parts/{name}.parquet"), pa.Table.from_batches(rows.batches(rows.names)))
    every = []
    for files in ("memory://d/parts/*.parquet", "memory://d/parts"):
        assert not nicest("score", run, files, "--out", tmp_path / "s.parquet")
        every.append(parquet.read_table(tmp_path / "s.parquet"))
    assert every[0].equals(every[1])
    names = every[0].column("file").unique().to_pylist()
    assert names == ["memory:///d/parts/a.parquet", "memory:///d/parts/b.parquet"]
    assert "separate file" in nicest("score", run, address, "--out", address)  # not over its input


def test_bad_addresses_are_one_line(
    memory: Any, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(TableFile, place("memory://d/none.csv")) == (
        "expected a table (.csv, .tsv, .parquet, .arrow, .feather, .xlsx), found no memory://d/none.csv"
    )
    assert "expected an address such as s3://bucket/file" in refusal(place, "nothing://x/y.csv")
    memory.pipe_file("/d/picture.png", b"")
    assert "copy images to this machine first" in refusal(load, "memory://d/picture.png")
    assert "expected a path on this machine, got the address s3://b/run" in nicest("evaluate", "s3://b/run")
    assert "got the address" in nicest("train", "table", "--data", "x.csv", "--out", "s3://b/run")

    def absent(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    for address, package in {"s3://b/x.csv": "s3fs", "gs://b/x.csv": "gcsfs", "hdfs://h/x.csv": "pyarrow"}.items():
        said = f"{address}: needs {package}, which is not installed: pip install {package}"
        assert refusal(place, address) == said

    def without_java(address: str) -> None:
        raise OSError("Unable to load libjvm dlopen(/usr/lib/jvm/default-java/libjvm.so) failed")

    monkeypatch.setattr("fsspec.core.url_to_fs", without_java)
    assert "needs Java and Hadoop's client library: set JAVA_HOME" in refusal(place, "hdfs://h/x.csv")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_that_is_not_there_is_one_line(
    scheme: str, memory: Any, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system in memory, whose folders stand for buckets."""
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda address: (memory, address.partition("://")[2]))
    memory.pipe_file("/there/t.csv", b"a,b\n1,2\n2,3\n4,5\n")
    assert TableFile(place(f"{scheme}://there/t.csv")).names == ["a", "b"]
    said = f"{scheme}://nowhere/t.csv: found no bucket nowhere; check its name, and whose account you use"
    assert refusal(TableFile, place(f"{scheme}://nowhere/t.csv")) == said
    assert refusal(place(f"{scheme}://nowhere/t.csv").require_writable) == said
    assert "found no" in refusal(TableFile, place(f"{scheme}://there/none.csv"))


# ---- S3


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A server that speaks S3, of moto, and fsspec's way to it."""
    pytest.importorskip("moto", reason="needs moto[server]")
    pytest.importorskip("s3fs", reason="needs s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = dict(os.environ)
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.mkdir("bucket")
        yield store
    finally:
        server.kill()
        server.wait()
        os.environ.clear()
        os.environ |= kept


@pytest.mark.filterwarnings("ignore")  # of the libraries that talk to it
def test_s3(s3: Any, tmp_path: Path, refusal: Refusal) -> None:
    write_table(tmp_path / "t.parquet", table(5000))
    far = place("s3://bucket/in/t.parquet")
    write_table(far, table(5000))
    s3.invalidate_cache()
    assert s3.cat_file("bucket/in/t.parquet") == (tmp_path / "t.parquet").read_bytes()
    assert s3.ls("bucket/in", detail=False) == ["bucket/in/t.parquet"]
    assert pa.Table.from_batches(TableFile(far).batches(["x", "y", "n"])).equals(table(5000))
    assert load(str(far)).digest() == load(str(tmp_path / "t.parquet")).digest()
    # a bucket that is not there
    absent = "found no bucket nowhere; check its name, and whose account you use"
    assert refusal(TableFile, place("s3://nowhere/t.parquet")) == f"s3://nowhere/t.parquet: {absent}"
    assert absent in nicest("score", tmp_path, tmp_path / "t.parquet", "--out", "s3://nowhere/s.csv")
    assert "cannot" in refusal(write_table, place("s3://nowhere/s.parquet"), table())
    assert "found no s3://bucket/none.csv" in refusal(TableFile, place("s3://bucket/none.csv"))


@pytest.mark.filterwarnings("ignore")
def test_a_writer_that_is_killed_leaves_nothing_under_the_name_of_its_result(s3: Any, tmp_path: Path) -> None:
    script = """
import os, signal, sys
import pyarrow as pa
from nicest.data.tables import writing
from nicest.remote import place
with writing(place("s3://bucket/out/s.parquet"), pa.schema([("x", pa.float64())])) as write:
    for _ in range(20):
        write([pa.array([0.5] * 100_000)])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    s3.invalidate_cache()
    assert not s3.exists("bucket/out/s.parquet")
    assert json.dumps(s3.find("bucket/out"))  # a temporary name at most
