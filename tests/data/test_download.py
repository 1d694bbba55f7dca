"""The data home: real downloads from a server on this machine, checksums, and what is said when they fail."""

import hashlib
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from published import cifar10_rows, publish, write_cifar10, write_cifar10_tar, write_fer2013, write_mnist, write_svhn

from nicest.data import download, load
from nicest.data.download import SETS, DataSet

Refusal = Callable[..., str]


class _Quiet(SimpleHTTPRequestHandler):
    requested: list[str] = []  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        self.requested.append(self.path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the folder tmp_path/mirror."""
    (tmp_path / "mirror").mkdir()
    _Quiet.requested.clear()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "mirror")))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def closed() -> str:
    """An address where nobody answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: str, home: Path) -> DataSet:
    """MNIST in small, served here."""
    write_mnist(tmp_path / "mirror")
    return publish(monkeypatch, tmp_path / "mirror", "mnist", server)


def _left_behind(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


def test_get_check_and_load(mnist: DataSet, home: Path) -> None:
    assert [status for _, status in download.check("mnist")] == ["missing"] * 4
    assert download.get("mnist") == home / "mnist"
    assert download.check("mnist") == [(file.path, "ok") for file in mnist.files]
    assert len(load("mnist").train) == 10
    assert sorted(path.name for path in (home / "mnist").iterdir()) == sorted(file.path for file in mnist.files)


def test_a_good_file_is_kept_and_a_damaged_one_replaced(mnist: DataSet, home: Path) -> None:
    folder = download.get("mnist")
    _Quiet.requested.clear()
    kept = folder / "train-images-idx3-ubyte.gz"
    before = kept.stat().st_mtime_ns
    damaged = folder / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(b"damaged")
    status = dict(download.check("mnist"))[damaged.name]
    expected = next(file.md5 for file in mnist.files if file.path == damaged.name)
    assert status == f"wrong checksum: MD5 {hashlib.md5(b'damaged').hexdigest()}, expected {expected}"
    download.get("mnist")
    assert kept.stat().st_mtime_ns == before
    assert _Quiet.requested == [f"/{damaged.name}"]
    assert {status for _, status in download.check("mnist")} == {"ok"}


def test_a_rebuilt_copy_is_known_by_its_images(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    train, test = write_svhn(home / "svhn")
    digests = [hashlib.md5(X.transpose(3, 0, 1, 2).tobytes()).hexdigest() for X in (train, test)]
    known = [replace(file, rebuilt=digest) for file, digest in zip(SETS["svhn"].files, digests, strict=True)]
    monkeypatch.setitem(SETS, "svhn", replace(SETS["svhn"], files=tuple(known), mirrors=()))
    assert [status for _, status in download.check("svhn")] == [download.REBUILT] * 2
    assert download.get("svhn") == home / "svhn"  # nothing is fetched
    write_svhn(home / "svhn", n_test=4)
    assert "wrong checksum" in dict(download.check("svhn"))["test_32x32.mat"]


def test_wrong_checksum_is_rejected_and_nothing_left(
    mnist: DataSet, home: Path, tmp_path: Path, refusal: Refusal
) -> None:
    served = tmp_path / "mirror" / "train-images-idx3-ubyte.gz"
    served.write_bytes(served.read_bytes() + b"tampered")
    message = refusal(download.get, "mnist")
    assert "cannot download train-images-idx3-ubyte.gz" in message
    assert f"expected md5:{mnist.files[0].md5} but got {hashlib.md5(served.read_bytes()).hexdigest()}" in message
    assert _left_behind(home) == []


def test_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: str, closed: str, home: Path, refusal: Refusal
) -> None:
    write_mnist(tmp_path / "mirror")
    publish(monkeypatch, tmp_path / "mirror", "mnist", closed, f"{server}/gone")
    message = refusal(download.get, "mnist")
    url = f"{closed}/train-images-idx3-ubyte.gz"
    assert f"mnist: cannot download train-images-idx3-ubyte.gz ({url}: ConnectionError; " in message
    assert "404 Client Error" in message
    assert f"put it in {home / 'mnist'} from {url} or {server}/gone/" in message
    assert _left_behind(home) == []


def test_cifar10_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: str, home: Path) -> None:
    rows = cifar10_rows()
    write_cifar10(tmp_path / "mirror", rows)
    write_cifar10_tar(tmp_path / "mirror" / "cifar-10-binary.tar.gz", rows)
    dataset = publish(monkeypatch, tmp_path / "mirror", "cifar10", server)
    folder = download.get("cifar10")
    assert download.check("cifar10") == [(file.path, "ok") for file in dataset.files]
    np.testing.assert_array_equal(load("cifar10").valid, rows["data_batch_5.bin"][:, 1:])
    assert sorted(path.name for path in (folder / "cifar-10-batches-bin").iterdir()) == sorted(rows)  # no readme
    assert not list(tmp_path.rglob("outside.txt"))

    _Quiet.requested.clear()
    for batch in (folder / "cifar-10-batches-bin").iterdir():
        batch.unlink()
    assert download.check("cifar10") == [("cifar-10-binary.tar.gz", "ok")]
    download.get("cifar10")
    assert _Quiet.requested == []  # the archive was here
    assert {status for _, status in download.check("cifar10")} == {"ok"}


def test_tfd_and_digits_are_not_downloaded(home: Path, refusal: Refusal) -> None:
    message = refusal(download.get, "tfd")
    for part in ("TFD_48x48.mat", str(home / "tfd"), "no public download", "ask the University of Toronto"):
        assert part in message
    (home / "tfd").mkdir(parents=True)
    (home / "tfd" / "TFD_48x48.mat").write_bytes(b"...")
    assert download.check("tfd") == [("TFD_48x48.mat", "ok")]
    assert download.get("tfd") == home / "tfd"
    download.get("digits")
    assert download.check("digits") == []
    assert "did you mean 'svhn'" in refusal(download.get, "svnh")


def test_fer2013_is_not_downloaded_and_either_layout_will_do(
    monkeypatch: pytest.MonkeyPatch, home: Path, refusal: Refusal
) -> None:
    message = refusal(download.get, "fer2013")
    for part in ("expected fer2013.csv", str(home / "fer2013"), "found none", "no direct download", "Kaggle"):
        assert part in message
    assert download.check("fer2013") == [("fer2013.csv", "missing")]

    write_fer2013(home / "fer2013", suffix=".npz")
    assert download.check("fer2013") == [("fer2013.npz", "ok")]
    assert download.get("fer2013") == home / "fer2013"
    listing = next(row for row in download.list_sets() if row.name == "fer2013")
    assert (listing.present, listing.size_bytes) == (True, (home / "fer2013" / "fer2013.npz").stat().st_size)

    write_fer2013(home / "fer2013")
    assert download.check("fer2013")[0][1].startswith("wrong checksum: MD5 ")
    assert "found one of another checksum; it has no direct download" in refusal(download.get, "fer2013")
    publish(monkeypatch, home / "fer2013", "fer2013")
    assert download.check("fer2013") == [("fer2013.csv", "ok")]
    assert download.get("fer2013") == home / "fer2013"


def test_a_home_that_cannot_be_written(
    mnist: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("NICEST_DATA", str(tmp_path / "file"))
    message = refusal(download.get, "mnist")
    assert f"cannot write in {tmp_path / 'file' / 'mnist'} (" in message
    assert "NICEST_DATA" in message


def test_a_disk_without_room(mnist: DataSet, home: Path, refusal: Refusal) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write beyond it fails as on a full disk
    try:
        message = refusal(download.get, "mnist")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot write in {home / 'mnist'} (File too large); free some room" in message
    assert _left_behind(home) == []


def test_list_sets(home: Path) -> None:
    write_mnist(home / "mnist")
    write_cifar10_tar(home / "cifar10" / "cifar-10-binary.tar.gz", cifar10_rows())
    rows = {row.name: row for row in download.list_sets()}
    assert list(rows) == ["digits", "mnist", "cifar10", "svhn", "tfd", "fer2013"]
    assert [row.present for row in rows.values()] == [True, True, True, False, False, False]
    assert [row.dim for row in rows.values()] == [64, 784, 3072, 3072, 2304, 2304]
    assert [row.n for row in rows.values()] == [1797, 70_000, 60_000, 99_289, 102_236, 35_887]
    assert rows["mnist"].size_bytes == sum(path.stat().st_size for path in (home / "mnist").iterdir())
    assert rows["svhn"].size_bytes == 0
    assert rows["tfd"].folder == home / "tfd"


def test_data_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NICEST_DATA", "~/elsewhere")
    assert download.data_home() == Path.home() / "elsewhere"
    for unset in (lambda: monkeypatch.setenv("NICEST_DATA", ""), lambda: monkeypatch.delenv("NICEST_DATA")):
        unset()
        assert download.data_home().name == "nicest"
