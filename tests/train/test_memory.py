"""Memory that runs out: one line with the batch that would fit; scoring and sampling go on with fewer rows."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nicest.flows import Flow
from nicest.inference.engine import Engine, out_of_memory
from nicest.recipes import load_recipe
from nicest.recipes.build import build
from nicest.runs.folder import LAST, MODEL
from nicest.runs.run import load
from small_runs import digests, interrupt_at, resume, run

Refusal = Callable[..., str]
Room = Callable[..., None]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Let memory run out when more than so many rows go through these methods of a flow at once."""

    def of(rows: int, *methods: str) -> None:
        for method in methods:
            real = getattr(Flow, method)

            def tight(flow: Flow, x: Tensor, *rest: object, real: Callable = real, **options: object) -> object:
                if len(x) > rows:
                    raise torch.OutOfMemoryError(f"no room for {len(x)} rows")
                return real(flow, x, *rest, **options)

            monkeypatch.setattr(Flow, method, tight)

    return of


class TestTraining:
    @pytest.mark.filterwarnings("ignore:out of memory with")  # validation halves its batches
    def test_the_line_names_a_batch_and_the_run_can_be_made_with_it(self, refusal: Refusal, tmp_path: Path, room: Room):
        room(70, "forward")
        message = refusal(run, tmp_path, "train.batch=1000")
        assert re.fullmatch(
            r"out of memory on .+ with a batch of 1000: a batch of 62 would fit: set train\.batch=62", message
        )
        assert run(tmp_path, "train.batch=62")["finished"]  # in the same folder

    def test_a_batch_beyond_the_data_is_named_as_it_is(self, refusal: Refusal, tmp_path: Path, room: Room):
        room(400, "forward")
        message = refusal(run, tmp_path, "train.batch=100000")
        assert "with a batch of 1437: a batch of 359 would fit" in message

    def test_a_run_that_had_begun_keeps_its_state(
        self, refusal: Refusal, tmp_path: Path, room: Room, monkeypatch: pytest.MonkeyPatch
    ):
        interrupt_at(17, signal.SIGINT, monkeypatch)
        run(tmp_path)
        monkeypatch.undo()
        before = digests(tmp_path)
        room(60, "forward")
        message = refusal(resume, tmp_path)
        monkeypatch.undo()
        assert "a batch of 50 would fit, but a resumed run keeps its own: free the device and resume" in message
        assert f"the last state is kept in {tmp_path}" in message
        assert digests(tmp_path) == before
        assert resume(tmp_path)["finished"]

    def test_where_nothing_fits_no_batch_is_promised(self, refusal: Refusal, tmp_path: Path, room: Room):
        room(0, "forward")
        message = refusal(run, tmp_path)
        assert "not even one row fits beside the model and the data (0 MiB)" in message
        assert message.endswith("train on the CPU")
        assert not (tmp_path / LAST).exists()

    def test_other_errors_are_left_as_they_are(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def broken(flow: Flow, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

        monkeypatch.setattr(Flow, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            run(tmp_path)


def test_an_error_that_came_of_memory_counts_as_one():
    def fail() -> None:
        try:
            raise torch.OutOfMemoryError
        finally:
            raise RuntimeError("the capture was broken off")

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert out_of_memory(caught.value)
    assert not out_of_memory(RuntimeError("something else"))


class TestEngine:
    @pytest.fixture
    def flow(self) -> Flow:
        recipe = load_recipe("digits").override("model.width=16", "model.dropout=0", "data.shape=[6]", "data.levels=0")
        return build(recipe).eval()

    def test_goes_on_with_fewer_rows_and_says_so(self, flow: Flow, room: Room):
        rows = torch.randn(100, 6)
        expected = flow.log_prob(rows).detach()
        room(13, "log_prob", "decode")
        engine = Engine(flow, batch=40)
        with pytest.warns(UserWarning, match="out of memory") as told:
            scores = engine.log_prob(rows)
        assert [str(each.message) for each in told] == [
            "out of memory with 40 rows at once: going on with 20",
            "out of memory with 20 rows at once: going on with 10",
        ]
        torch.testing.assert_close(scores, expected)
        torch.testing.assert_close(engine.log_prob(rows), expected)  # and needs to be told no more

    def test_samples_are_the_same_in_smaller_batches(self, flow: Flow, room: Room):
        expected = Engine(flow, batch=40).sample(90, generator=torch.Generator().manual_seed(3))
        room(13, "log_prob", "decode")
        with pytest.warns(UserWarning, match="going on with"):
            drawn = Engine(flow, batch=40).sample(90, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(drawn, expected)

    def test_where_one_row_does_not_fit_the_error_comes_out(self, flow: Flow, room: Room):
        room(0, "log_prob")
        with (
            pytest.warns(UserWarning, match="going on with"),
            pytest.raises(torch.OutOfMemoryError, match="no room for 1 rows"),
        ):
            Engine(flow, batch=4).log_prob(torch.randn(9, 6))


LITTLE = """
import sys, torch
torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.get_device_properties(0).total_memory)
from nicest import cli
sys.argv = ["nicest", *sys.argv[1:]]
cli.main()
"""


@on_gpu
class TestOnGpu:
    """For real: processes that may take 2 GiB of a GPU, of which nothing is left when they end."""

    def nicest(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LITTLE, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_a_run_with_the_batch_that_is_named_fits_and_one_of_four_times_as_much_does_not(
        self, tmp_path: Path, precision: str
    ):
        np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (300_000, 16), np.uint8))
        settings = (
            *(f"data.name={tmp_path / 'rows.npy'}", "model.width=1024", "model.hidden_layers=2", "model.dropout=0"),
            *("train.epochs=1", "train.evaluate_every=1", f"train.precision={precision}"),
        )

        def attempt(out: str, batch: int) -> subprocess.CompletedProcess[str]:
            changes = [word for each in (*settings, f"train.batch={batch}") for word in ("--set", each)]
            return self.nicest("train", "digits", "--out", tmp_path / out, "--device", "cuda", *changes)

        (line,) = attempt("run", 240_000).stderr.splitlines()
        found = re.search(r"error: out of memory on .+ with a batch of 240000: a batch of (\d+) would fit", line)
        assert found, line
        batch = int(found.group(1))
        assert 100 < batch < 240_000
        assert "would fit" in attempt("more", 4 * batch).stderr
        end = attempt("run", batch)
        assert end.returncode == 0, end.stderr
        assert (tmp_path / "run" / MODEL).exists()

    def test_scoring_goes_on_with_fewer_rows(self, tmp_path: Path):
        """In this process, which holds most of a small part of the GPU, so that a large batch cannot fit."""
        run(tmp_path, "train.epochs=1", "model.width=2048")
        flow = load(tmp_path, device="cuda")
        x = torch.randint(0, 17, (2000, 64), device="cuda", dtype=torch.uint8)
        expected = flow(x, noise=False).detach()
        rows = x.repeat(200, 1)
        engine = Engine(flow, batch=len(rows))
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
        try:
            with pytest.warns(UserWarning, match="out of memory with .* rows at once: going on with"):
                scores = torch.cat([part.clone() for part in engine.each("log_prob", rows, noise=False)])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        torch.testing.assert_close(scores[-2000:], expected, rtol=1e-4, atol=1e-2)
