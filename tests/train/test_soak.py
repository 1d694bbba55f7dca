"""The soak, without its hour: it sees what it is there to see."""

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from load import Load
from soak import Clients, Disk, failures, growth


def life(minutes: int, megabytes_an_hour: float) -> list[tuple[float, float]]:
    """A studio that takes 100 MB more in its first five minutes, and then grows."""
    return [(7.0 + t, 300 + min(t, 300) / 3 + megabytes_an_hour * t / 3600 + t % 3) for t in range(60 * minutes)]


@pytest.mark.parametrize("leak", [0.0, 50.0])
def test_growth_of_memory_is_seen(leak: float):
    assert growth(life(40, leak))["megabytes_an_hour"] == pytest.approx(leak, abs=0.2)
    assert growth(life(20, leak))["megabytes_an_hour"] is None


def test_failures_count_unless_the_server_was_down():
    failed = [(1.0, 2.0, "before"), (4.0, 6.0, "killed on the way"), (7.0, 7.5, "down"), (9.0, 9.5, "after")]
    assert failures(failed, [(5.0, 8.0)]) == ["before", "after"]


def test_clients_go_on_where_there_is_no_server():
    async def once() -> None:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as client:
            await clients.ask(client, "metrics")

    clients = Clients(0, Load.kinds, "", "images", ["picture"], "mask")
    asyncio.run(once())
    assert [how for _, _, how in clients.failed] == ["metrics: ConnectError"]


@pytest.mark.parametrize("mounted", [True, False])
def test_a_full_disk_takes_nothing_until_it_is_emptied(tmp_path: Path, mounted: bool, monkeypatch: pytest.MonkeyPatch):
    if not mounted:
        monkeypatch.setattr("soak.subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    disk = Disk(tmp_path / "disk")
    try:
        if disk.mounted != mounted:
            pytest.skip("no small disk can be mounted here")
        code = f"input(); open({str(disk.folder / 'new')!r}, 'wb').write(bytes(10_000))"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        disk.fill(process.pid)
        _, said = process.communicate(b"\n", timeout=60)
        assert (b"No space left on device" if mounted else b"File too large") in said
        disk.empty()
        (disk.folder / "new").write_bytes(bytes(10_000))
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    finally:
        disk.close()
