"""Memory that runs out: one line with the batch that would fit; scoring and sampling go on with fewer rows."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import digests, interrupt_at, resume, run
from torch import Tensor

from nicest.flows import Flow
from nicest.recipes import load_recipe
from nicest.recipes.build import build
from nicest.train.checkpoint import LAST, MODEL, load
from nicest.train.engine import Engine, out_of_memory
from nicest.train.loop import train

Refusal = Callable[..., str]
Room = Callable[..., None]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Let memory run out when more than so many rows go through these methods of a flow at once."""

    def of(rows: int, *methods: str) -> None:
        for method in methods:
            real = getattr(Flow, method)

            def tight(flow: Flow, x: Tensor, *rest: object, real: Callable = real) -> object:
                if len(x) > rows:
                    raise torch.OutOfMemoryError(f"no room for {len(x)} rows")
                return real(flow, x, *rest)

            monkeypatch.setattr(Flow, method, tight)

    return of


class TestTraining:
    def test_the_line_names_a_batch_and_the_run_can_be_made_with_it(self, refusal: Refusal, tmp_path: Path, room: Room):
        room(70, "forward")
        message = refusal(run, tmp_path, "train.batch=1000")
        assert re.fullmatch(
            r"out of memory on .+ with a batch of 1000: a batch of 62 would fit: --set train\.batch=62", message
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
        assert "a batch of 50 would fit, but a resumed run keeps its own: free the device and --resume" in message
        assert f"the last state is kept in {tmp_path}" in message
        assert digests(tmp_path) == before
        assert resume(tmp_path)["finished"]

    def test_where_nothing_fits_no_batch_is_promised(self, refusal: Refusal, tmp_path: Path, room: Room):
        room(0, "forward")
        message = refusal(run, tmp_path)
        assert "not even one row fits beside the model and the data (0 MiB)" in message
        assert message.endswith("--device cpu")
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


@pytest.fixture
def small_gpu() -> Iterator[None]:
    """A GPU on which this process may take 1 GiB more than it holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@on_gpu
@pytest.mark.usefixtures("small_gpu")
class TestOnGpu:
    """For real: the memory of a GPU runs out."""

    @pytest.mark.filterwarnings("ignore:out of memory")  # of a validation beside a step that just fits
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_a_run_with_the_batch_that_is_named_fits_and_one_of_four_times_as_much_does_not(
        self, refusal: Refusal, tmp_path: Path, precision: str
    ):
        np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (300_000, 16), np.uint8))
        settings = (
            *(f"data.name={tmp_path / 'rows.npy'}", "model.width=1024", "model.hidden_layers=2", "model.dropout=0"),
            *("train.epochs=1", "train.evaluate_every=1", f"train.precision={precision}"),
        )

        def attempt(out: str, batch: int) -> dict:
            overrides = (*settings, f"train.batch={batch}")
            return train(load_recipe("digits"), tmp_path / out, overrides=overrides, device="cuda")

        message = refusal(attempt, "run", 240_000)
        found = re.search(r"a batch of (\d+) would fit", message)
        assert found, message
        batch = int(found.group(1))
        assert 100 < batch < 240_000
        assert "would fit" in refusal(attempt, "more", 4 * batch)
        assert attempt("run", batch)["finished"]
        assert (tmp_path / "run" / MODEL).exists()

    def test_scoring_and_sampling_go_on_with_fewer_rows(self, tmp_path: Path):
        run(tmp_path, "train.epochs=1", "model.width=2048")
        flow = load(tmp_path, device="cuda").continuous()
        x = torch.rand(2000, 64, device="cuda")
        rows = x.repeat(200, 1)
        engine = Engine(flow, batch=len(rows))
        with pytest.warns(UserWarning, match="out of memory with .* rows at once: going on with"):
            scores = engine.log_prob(rows)
        torch.testing.assert_close(scores[-2000:], flow(x).detach(), rtol=1e-4, atol=1e-2)
        del engine, rows
        with pytest.warns(UserWarning, match="going on with"):
            drawn = [part.cpu() for part in Engine(flow, batch=400_000).draws(400_000)]
        assert sum(map(len, drawn)) == 400_000
        assert all(part.isfinite().all() for part in drawn)

    def test_the_memory_of_what_failed_is_given_back(self, refusal: Refusal, tmp_path: Path):
        np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 256, (300_000, 16), np.uint8))
        overrides = (f"data.name={tmp_path / 'rows.npy'}", "model.width=1024", "train.batch=240000")
        before = torch.cuda.memory_allocated()
        refusal(train, load_recipe("digits"), tmp_path / "run", overrides=overrides, device="cuda")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() < before + 2**27
