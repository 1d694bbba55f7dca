"""The data home, the published data sets, and how their files come there with their checksums."""

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nicest.data.images import read_svhn
from nicest.errors import NicestError
from nicest.files import replacing
from nicest.messages import brief, nearest, shown

REBUILT = "rebuilt"
GOOD = ("ok", REBUILT)


@dataclass(frozen=True)
class File:
    """One published file: its path in the set's folder and below the mirrors, its MD5, and what may replace it.

    `rebuilt` is the MD5 of the images (N, height, width, 3) of a known copy that was made anew.
    """

    path: str
    md5: str | None = None
    instead: str | None = None
    rebuilt: str | None = None


@dataclass(frozen=True)
class DataSet:
    """One published data set; where it comes as an archive, its files are members of that. `mirrors` are URLs."""

    name: str
    title: str
    dim: int
    n: int
    licence: str
    how: str
    files: tuple[File, ...] = ()
    archive: File | None = None
    mirrors: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return data_home() / self.name


class Listing(NamedTuple):
    """One row of the list of data sets; present says that every file is there."""

    name: str
    title: str
    dim: int
    n: int
    present: bool
    size_bytes: int
    folder: Path


SETS = {
    "digits": DataSet(
        name="digits",
        title="scikit-learn's handwritten digits, 8 x 8 grey of 17 levels",
        dim=64,
        n=1797,
        licence="CC BY 4.0; Alpaydin and Kaynak 1998, UCI Machine Learning Repository",
        how="it comes with scikit-learn, there is nothing to get",
    ),
    "mnist": DataSet(
        name="mnist",
        title="MNIST handwritten digits, 28 x 28 grey",
        dim=784,
        n=70_000,
        licence="CC BY-SA 3.0; LeCun, Cortes and Burges",
        how="run `nicest data get mnist`",
        files=(
            File("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            File("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            File("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            File("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "cifar10": DataSet(
        name="cifar10",
        title="CIFAR-10 photographs, 32 x 32 RGB",
        dim=3072,
        n=60_000,
        licence="cite Krizhevsky 2009, Learning multiple layers of features from tiny images",
        how="run `nicest data get cifar10`",
        files=(
            File("cifar-10-batches-bin/data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
            File("cifar-10-batches-bin/data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
            File("cifar-10-batches-bin/data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
            File("cifar-10-batches-bin/data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
            File("cifar-10-batches-bin/data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
            File("cifar-10-batches-bin/test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),
        ),
        archive=File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
    "svhn": DataSet(
        name="svhn",
        title="Street View House Numbers, cropped, 32 x 32 RGB",
        dim=3072,
        n=99_289,
        licence="non-commercial use; cite Netzer et al. 2011",
        how="run `nicest data get svhn`",
        files=(
            File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", rebuilt="77daf93a1cd3ab6e1d0d01d29b8ff9db"),
            File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", rebuilt="d48661d6f473e67ecbc2b7d49a1e730b"),
        ),
        mirrors=("http://ufldl.stanford.edu/housenumbers/",),
    ),
    "tfd": DataSet(
        name="tfd",
        title="Toronto Face Dataset, 48 x 48 grey",
        dim=2304,
        n=102_236,
        licence="by permission; cite Susskind, Anderson and Hinton 2010",
        how="it has no public download: ask the University of Toronto's machine learning group and put the file there",
        files=(File("TFD_48x48.mat"),),
    ),
    "fer2013": DataSet(
        name="fer2013",
        title="FER2013 faces, 48 x 48 grey",
        dim=2304,
        n=35_887,
        licence="the terms of the Kaggle challenge, of photographs found on the web; cite Goodfellow et al. 2013, "
        "Challenges in representation learning",
        how="it has no direct download: log in to Kaggle, get it from the challenge "
        '"Challenges in Representation Learning: Facial Expression Recognition" and put the file there',
        files=(File("fer2013.csv", "f8428a1edbd21e88f42c73edd2a14f95", instead="fer2013.npz"),),
    ),
}


def data_home() -> Path:
    """Return the folder of all data sets: $NICEST_DATA, or the user's cache."""
    if chosen := os.environ.get("NICEST_DATA"):
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("nicest"))


def find_set(name: str) -> DataSet:
    """Return a data set by its name."""
    if name not in SETS:
        raise unknown(name)
    return SETS[name]


def unknown(name: str) -> NicestError:
    """Return the error for a name that is no data set's."""
    known = f"{nearest(name, SETS)}; known are {', '.join(sorted(SETS))}"
    return NicestError(f"unknown data set {shown(name)}{known}; for your own data, give its path")


def list_sets() -> list[Listing]:
    """List every data set: what it is, whether it is here, and the bytes it takes."""
    rows = []
    for each in SETS.values():
        found, archive = [_find(each, file) for file in each.files], _find_archive(each)
        size = sum(path.stat().st_size for path in (*found, archive) if path)
        rows.append(Listing(each.name, each.title, each.dim, each.n, all(found) or bool(archive), size, each.folder))
    return rows


def _find(dataset: DataSet, file: File) -> Path | None:
    """Return the path of a file of a set, gunzipped or not, or of what stands in its place; None if it is absent."""
    path = _held(dataset, file).path
    places = (dataset.folder / path, dataset.folder / path.removesuffix(".gz"))
    return next((place for place in places if place.is_file()), None)


def _held(dataset: DataSet, file: File) -> File:
    """Return the file, or what may stand in its place where only that is here."""
    if file.instead and not (dataset.folder / file.path).is_file() and (dataset.folder / file.instead).is_file():
        return File(file.instead)
    return file


def _find_archive(dataset: DataSet) -> Path | None:
    path = dataset.folder / dataset.archive.path if dataset.archive else None
    return path if path and path.is_file() else None


def locate(name: str, files: Sequence[str]) -> list[Path]:
    """Return the paths of a set's files, unpacked from its archive where only that is here; download nothing."""
    dataset, paths = find_set(name), []
    wanted = {file.path: file for file in dataset.files}
    lacking = [wanted[each] for each in files if not _find(dataset, wanted[each])]
    if lacking and dataset.archive and _find_archive(dataset):
        _unpack(dataset, dataset.archive, lacking)
    for each in files:
        path = _find(dataset, wanted[each])
        if path is None:
            raise NicestError(f"{name}: expected {each} in {dataset.folder}, found none; {dataset.how}")
        paths.append(path)
    return paths


def check(name: str) -> list[tuple[str, str]]:
    """Return each file with "ok", "rebuilt", "missing" or "wrong checksum: ..."; or the archive if it is packed."""
    dataset = find_set(name)
    packed = _find_archive(dataset) and not any(_find(dataset, file) for file in dataset.files)
    files = [dataset.archive] if packed and dataset.archive else [_held(dataset, file) for file in dataset.files]
    return [(file.path, _status(dataset, file)) for file in files]


def _status(dataset: DataSet, file: File) -> str:
    path = dataset.folder / file.path
    if not path.is_file():
        return "missing"
    if file.md5 is None:
        return "ok"
    try:
        with path.open("rb") as data:
            md5 = hashlib.file_digest(data, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise NicestError(f"{path}: cannot be read ({error.strerror or error})") from error
    if md5 == file.md5:
        return "ok"
    return REBUILT if _is_rebuilt(path, file) else f"wrong checksum: MD5 {md5}, expected {file.md5}"


def _is_rebuilt(path: Path, file: File) -> bool:
    """Return True if a file holds the images of the known copy, whatever bytes are around them."""
    if file.rebuilt is None:
        return False
    try:
        pixels = read_svhn(path).transpose(0, 2, 3, 1).tobytes()
    except NicestError:
        return False
    return hashlib.md5(pixels, usedforsecurity=False).hexdigest() == file.rebuilt


def get(name: str) -> Path:
    """Download the files of a set that are missing or damaged, checked by MD5, and return their folder."""
    dataset = find_set(name)
    wanted = [file for file in dataset.files if _status(dataset, _held(dataset, file)) not in GOOD]
    if wanted and dataset.archive:
        _fetch(dataset, dataset.archive)
        _unpack(dataset, dataset.archive, wanted)
    else:
        for file in wanted:
            _fetch(dataset, file)
    return dataset.folder


def _fetch(dataset: DataSet, file: File) -> None:
    """Download one file from the first mirror that has it; pooch checks a temporary file, then renames it."""
    import pooch
    from requests.exceptions import RequestException

    pooch.get_logger().setLevel("WARNING")
    failures, urls = [], [mirror + file.path for mirror in dataset.mirrors]
    for url in urls:
        try:
            pooch.retrieve(url, f"md5:{file.md5}", file.path, dataset.folder, downloader=_stream)
            return
        except RequestException as error:
            answer = type(error).__name__ if error.response is None else str(error).split(" for url")[0]
            failures.append(f"{url}: {answer}")
        except ValueError as error:  # pooch's word for a wrong checksum
            failures.append(f"{url}: {brief(error)}")
        except OSError as error:
            advice = "free some room or set NICEST_DATA to another folder"
            raise NicestError(f"cannot write in {dataset.folder} ({error.strerror or error}); {advice}") from error
    if not urls:
        found = "one of another checksum" if (dataset.folder / file.path).is_file() else "none"
        raise NicestError(f"{dataset.name}: expected {file.path} in {dataset.folder}, found {found}; {dataset.how}")
    raise NicestError(
        f"{dataset.name}: cannot download {file.path} ({'; '.join(failures)}); "
        f"put it in {dataset.folder} from {' or '.join(urls)}"
    )


def _stream(url: str, target: str, _: object) -> None:
    """Write what a URL gives to a file, with a progress bar."""
    import requests

    from nicest.progress import Bar

    with requests.get(url, stream=True, timeout=30) as response, Path(target).open("wb") as out:
        response.raise_for_status()
        size = int(response.headers.get("content-length", 0))
        with Bar(url.rpartition("/")[2], size) as bar:
            for chunk in response.iter_content(1 << 16):
                out.write(chunk)
                bar.update(out.tell(), f"{out.tell() / 1e6:.1f} of {size / 1e6:.1f} MB")


def _unpack(dataset: DataSet, archive: File, files: Iterable[File]) -> None:
    """Unpack files from an archive that has the published checksum."""
    if (status := _status(dataset, archive)) != "ok":
        raise NicestError(f"{dataset.folder / archive.path}: {status}; remove it and get it again")
    with tarfile.open(dataset.folder / archive.path) as tar:
        for file in files:
            source = tar.extractfile(file.path)
            assert source is not None  # a file by the checksum of the archive
            with source, replacing(dataset.folder / file.path) as temporary, temporary.open("wb") as out:
                shutil.copyfileobj(source, out)
