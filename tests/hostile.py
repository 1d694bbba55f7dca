"""Hostile clients of the studio beside an honest one: `python tests/hostile.py RUN`; make load-test keeps the figures.

Some never read what they are sent, some never finish what they send, and some send what grows when it is unpacked.
The server must answer the honest client all the while, stay below a gigabyte, and be free of them at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet

from nicest.files import to_json, write_text
from nicest.recipes import load_recipe
from nicest.runs.runtime import environment
from nicest.train.fit import train

LIMIT = 1024  # megabytes of the server, at most


def bombs() -> dict[str, tuple[str, bytes]]:
    """Return small files that unpack to huge ones, and where to send them."""
    picture, long, rows, packed = (io.BytesIO() for _ in range(4))
    Image.new("RGBA", (4096, 4096), (9, 9, 9, 99)).save(picture, "PNG")
    Image.new("1", (20_000, 20_000)).save(long, "PNG")
    cells = [pa.array([value]).take(pa.array(np.zeros(5_000_000, np.int32))) for value in (1.5, 2.5)]
    parquet.write_table(pa.table(cells, ["a", "b"]), rows)
    zeros = pa.table([np.zeros(40_000_000)] * 2, ["a", "b"])
    with pa.ipc.new_file(packed, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(zeros)
    return {
        "picture": ("/api/runs/{images}/upload", picture.getvalue()),
        "large picture": ("/api/runs/{images}/upload", long.getvalue()),
        "rows": ("/api/runs/table/table?format=parquet", rows.getvalue()),
        "packed rows": ("/api/runs/table/table?format=arrow", packed.getvalue()),
        "rows to train on": ("/api/train/data?format=parquet", rows.getvalue()),
        "packed rows to train on": ("/api/train/data?format=arrow", packed.getvalue()),
        "nested": ("/api/runs/{images}/score", b"[" * 1_000_000),
        "endless": ("/api/runs/{images}/upload", bytes(60 * 2**20)),
    }


class Attack:
    def __init__(self, url: str, run: str, ascent: dict[str, Any], seconds: float) -> None:
        self.url, self.run, self.ascent = url, run, ascent
        self.port = int(url.rsplit(":", 1)[1].strip("/"))
        self.bombs = bombs()
        self.end = time.perf_counter() + seconds
        self.statuses: Counter[str] = Counter()
        self.honest: list[float] = []

    def over(self) -> bool:
        return time.perf_counter() > self.end

    async def stall(self, text: bytes, drip: bytes, after: float = 0) -> None:
        """Send a part of a request, then a few bytes now and then, and read nothing; reconnect when dropped."""
        await asyncio.sleep(after)
        while not self.over():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2048)
                writer.write(text)
                while not self.over() and not reader.at_eof() and not writer.is_closing():
                    writer.write(drip)
                    await writer.drain()
                    await asyncio.sleep(1)
                writer.close()
            await asyncio.sleep(0.1)

    async def throw(self, client: httpx.AsyncClient, name: str, path: str, content: bytes) -> None:
        while not self.over():
            typed = {"content-type": "application/json"}
            try:
                answer = await client.post(path.format(images=self.run), content=content, headers=typed)
                self.statuses[f"{name}: {answer.status_code}"] += 1
            except httpx.TransportError:
                self.statuses[f"{name}: sent away"] += 1
            await asyncio.sleep(random.uniform(0, 0.5))

    async def ask(self, client: httpx.AsyncClient) -> None:
        """Be the honest client."""
        while not self.over():
            began = time.perf_counter()
            try:
                answer = await client.post(f"/api/runs/{self.run}/score", json={"pictures": [self.ascent["picture"]]})
                self.statuses[f"honest: {answer.status_code}"] += 1
                self.honest.append(time.perf_counter() - began)
            except httpx.TransportError:
                self.statuses["honest: sent away"] += 1
            await asyncio.sleep(0.25)

    async def memory(self, pid: int) -> float:
        most = 0.0
        while not self.over():
            most = max(most, resident(pid))
            await asyncio.sleep(0.1)
        return most

    async def all(self, pid: int) -> float:
        body = json.dumps(self.ascent).encode()
        head = b"POST /api/runs/%s/inpaint HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        asked = head % self.run.encode() + b"Content-Length: %d\r\n\r\n" % len(body)
        work = [self.memory(pid)]
        half = (self.end - time.perf_counter()) / 2  # until then, data to train on gets a slot
        work += [self.stall(asked + body, b"", half) for _ in range(8)]  # never read
        work += [self.stall(asked, b" ") for _ in range(20)]  # never finish the body
        work += [self.stall(b"GET / HTTP/1.1\r\n", b"X: y\r\n") for _ in range(20)]  # never finish the head
        work += [self.stall(b"", b"") for _ in range(100)]  # send nothing
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            work += [self.throw(client, name, *each) for name, each in self.bombs.items() for _ in range(2)]
            return (await asyncio.gather(*work, self.ask(client)))[0]  # type: ignore[return-value]


def resident(pid: int) -> float:
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
    return int(line.split()[1]) / 1024


def table_run(folder: Path) -> Path:
    """Train a small model of a table, which then gets bombs."""
    rows = np.random.default_rng(0).normal(size=(300, 2))
    (folder / "table.csv").write_text("a,b\n" + "".join(f"{a:.3f},{b:.3f}\n" for a, b in rows))
    own = (f'data.name="{folder / "table.csv"}"', "train.epochs=2", "train.evaluate_every=1")
    train(load_recipe("table"), folder / "table", overrides=own, device="cpu")
    return folder / "table"


def measure(url: str, pid: int, seconds: float) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=120) as client:
        run = client.get("/api/runs").json()["runs"][0]["id"]
        picture = client.get(f"/api/runs/{run}/pictures?n=1").json()["pictures"][0]
        mask = client.get(f"/api/runs/{run}/mask?name=top").json()["mask"]
        ascent = {"picture": picture, "mask": mask, "steps": 5000, "chains": 8}
        attack = Attack(url, run, ascent, seconds)
        most = asyncio.run(attack.all(pid))
        time.sleep(20)  # until the server has dropped the last of them
        assert client.get("/api/status").json()["ascents"] == 0
        assert client.post(f"/api/runs/{run}/inpaint", json=ascent | {"steps": 10}).status_code == 200
    assert attack.honest
    assert most < LIMIT
    return {
        "seconds": seconds,
        "answers": dict(sorted(attack.statuses.items())),
        "honest_milliseconds": {f"p{q}": round(1000 * np.percentile(attack.honest, q), 1) for q in (50, 95, 100)},
        "megabytes_most": round(most, 1),
        "megabytes_at_the_end": round(resident(pid), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [str(asked.run), str(table_run(Path(folder)))]
        command = [
            sys.executable,
            "-m",
            "nicest",
            "studio",
            *runs,
            "--port",
            "0",
            "--json",
            "--folder",
            f"{folder}/own",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            try:
                result = measure(json.loads(server.stdout.readline())["url"], server.pid, asked.seconds)
            finally:
                server.terminate()
    text = to_json(environment(torch.device("cpu")) | {"command": f"python tests/hostile.py {asked.run}"} | result)
    print(text, end="")
    if asked.out:
        write_text(asked.out, text)


if __name__ == "__main__":
    main()
