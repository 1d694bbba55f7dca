"""Many clients of the studio at once: `python tests/load.py RUN`; make load-test runs it and keeps the figures.

Every client asks, waits a while as a person does, and asks again: mostly for scores, also for moves, samples and ways,
and now and then for an ascent, of which the server refuses those beyond its slots. One more user inpaints all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any, ClassVar

import httpx
import numpy as np
import torch

from nicest.files import to_json, write_text
from nicest.runs.runtime import environment

WAIT = (0.3, 1.2)  # seconds between an answer and the next question


class Load:
    """The clients of one run, and what they measure."""

    kinds: ClassVar = {"score": 60, "move": 20, "between": 8, "samples": 10, "inpaint": 2}  # relative frequencies

    def __init__(self, url: str, run: str, pictures: list[str], mask: str) -> None:
        self.url, self.run, self.pictures, self.mask = url, run, pictures, mask
        self.seconds: dict[str, list[float]] = {}
        self.statuses: Counter[int] = Counter()
        self.frames: list[float] = []
        self.end = 0.0

    async def ask(self, client: httpx.AsyncClient, what: str) -> httpx.Response:
        path, picture = f"/api/runs/{self.run}", random.choice(self.pictures)
        began = time.perf_counter()
        match what:
            case "score":
                answer = await client.post(f"{path}/score", json={"pictures": [picture]})
            case "move":
                places = [random.uniform(-3, 3) for _ in range(12)]
                answer = await client.post(f"{path}/move", json={"picture": picture, "places": places})
            case "between":
                ends = {"start": {"picture": picture}, "end": {"picture": random.choice(self.pictures)}}
                answer = await client.post(f"{path}/between", json=ends)
            case "samples":
                answer = await client.get(f"{path}/samples", params={"n": 24, "seed": random.randrange(10**6)})
            case "metrics" | "rows":
                answer = await client.get(f"{path}/{what}")
            case _:
                ascent = {"picture": picture, "mask": self.mask, "steps": 100, "chains": 2}
                answer = await client.post(f"{path}/inpaint", json=ascent)
        self.statuses[answer.status_code] += 1
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)
        return answer

    async def client(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            await asyncio.sleep(random.uniform(0, WAIT[1]))
            while time.perf_counter() < self.end:
                await self.ask(client, random.choices(list(self.kinds), list(self.kinds.values()))[0])
                await asyncio.sleep(random.uniform(*WAIT))

    async def painter(self) -> None:
        """Inpaint all the time, and record when frames arrive."""
        ascent = {"picture": self.pictures[0], "mask": self.mask, "steps": 1000, "chains": 4}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            while time.perf_counter() < self.end:
                async with client.stream("POST", f"/api/runs/{self.run}/inpaint", json=ascent) as answer:
                    if answer.status_code == 429:
                        await asyncio.sleep(0.2)
                        continue
                    async for line in answer.aiter_lines():
                        if line.startswith("event: frame"):
                            self.frames.append(time.perf_counter())

    async def memory(self, pid: int) -> list[tuple[float, float]]:
        """Return the memory of the server in megabytes, with seconds since the start."""
        began, found = time.perf_counter(), []
        while time.perf_counter() < self.end:
            found.append((time.perf_counter() - began, resident(pid)))
            await asyncio.sleep(1)
        return found

    async def all(self, clients: int, seconds: float, pid: int) -> list[tuple[float, float]]:
        self.end = time.perf_counter() + seconds
        work = [self.memory(pid), self.painter(), *(self.client() for _ in range(clients))]
        return (await asyncio.gather(*work))[0]


def resident(pid: int) -> float:
    """Return the resident memory of a process in megabytes."""
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each)
    return int(line.split()[1]) / 1024


def start_studio(*runs: Path, port: int = 0, log: IO[str] | None = None) -> tuple[subprocess.Popen[str], str]:
    """Start a `nicest studio`; return the process and its address."""
    command = [sys.executable, "-m", "nicest", "studio", *map(str, runs), "--port", str(port), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout
    return server, json.loads(server.stdout.readline())["url"]


def examples(url: str) -> tuple[str, list[str], str]:
    """Return the id of the first run, images of its test data and a mask."""
    with httpx.Client(base_url=url, timeout=120) as client:
        run = client.get("/api/runs").json()["runs"][0]["id"]
        client.get(f"/api/runs/{run}/reference-scores").raise_for_status()  # computed once in the life of a run
        pictures = client.get(f"/api/runs/{run}/pictures", params={"n": 50}).json()["pictures"]
        return run, pictures, client.get(f"/api/runs/{run}/mask", params={"name": "top"}).json()["mask"]


def measure(url: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    load = Load(url, *examples(url))
    memory = asyncio.run(load.all(clients, seconds, pid))
    warm = [each for second, each in memory if second >= seconds / 4]
    gaps = np.diff(load.frames)
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": sum(load.statuses.values()),
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "milliseconds": {
            what: {f"p{q}": round(1000 * float(np.percentile(found, q)), 1) for q in (50, 95, 99)}
            for what, found in sorted(load.seconds.items())
        },
        "painter_frames_per_second": round(len(load.frames) / seconds, 1),
        "painter_longest_gap_seconds": round(float(gaps.max()), 2),
        "megabytes_after_warm_up": round(warm[0], 1),
        "megabytes_at_the_end": round(warm[-1], 1),
        "megabytes_most": round(max(warm), 1),
        "megabytes_growth": round(max(warm) - warm[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    server, url = start_studio(asked.run)
    with server:
        try:
            result = measure(url, server.pid, asked.clients, asked.seconds)
        finally:
            server.terminate()
    about = environment(torch.device("cpu")) | {
        "command": f"python tests/load.py {asked.run} --clients {asked.clients}"
    }
    text = to_json(about | result)
    print(text, end="")
    if asked.out:
        write_text(asked.out, text)


if __name__ == "__main__":
    main()
