"""inpaint: the observed stay as they are, the hidden stay in their interval, and the likelihood rises."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from nicest import Run
from nicest.flows import Chain, DiagonalScaling, Flow, Gaussian, Logistic, Units
from nicest.inference.engine import frozen
from nicest.inference.fill import OURS, PRESETS, Ascent, Schedule, ascend, fill
from nicest.plots import image_grid
from nicest.tasks.inpaint import choose_schedule, inpaint
from nicest.tasks.masks import FIGURE
from nicest.tasks.sample import draw

SHORT = replace(OURS, steps=60)
MAP = replace(SHORT, noise=0.0)


@pytest.fixture
def digits(digits_run: Run) -> tuple[Flow, Tensor]:
    return digits_run.flow, digits_run.rows("test")[:6]


def ascent_of(flow: Flow, x: Tensor, schedule: Schedule, generator: torch.Generator) -> Ascent:
    """The ascent of `fill` in the first half of every row."""
    units = flow.units
    return Ascent(flow, units.enter(x, noise=False), half(x).to(x.device), units.box(), schedule, generator)


def half(x: Tensor) -> Tensor:
    hidden = torch.zeros(x.shape, dtype=torch.bool)
    hidden[:, : x.shape[1] // 2] = True
    return hidden


class TestFill:
    def test_the_observed_come_back_bit_for_bit(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        hidden = torch.rand(x.shape) < 0.5
        filled = fill(flow, x, hidden, schedule=SHORT, chains=3, looks=(1, 7))
        assert filled.looks == (0, 1, 7, 60)
        assert (filled.states.shape, filled.states.dtype) == ((4, 3, 6, 64), torch.uint8)
        assert (filled.states[..., ~hidden] == x[~hidden]).all()
        assert (filled.result[..., hidden] != x[hidden]).any()

    def test_look_by_look_it_is_the_same_ascent(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        whole = fill(flow, x[:1], half(x[:1]), schedule=SHORT, chains=3, looks=(20, 40), seed=5)
        looks = list(ascend(flow, x[:1], half(x[:1]), lambda i: i % 20 == 0, schedule=SHORT, chains=3, seed=5))
        assert [each.looks for each in looks] == [(0,), (20,), (40,), (60,)]
        assert (torch.cat([each.states for each in looks]) == whole.states).all()
        assert (torch.cat([each.nats for each in looks]) == whole.nats).all()

    def test_an_ascent_that_is_left_leaves_the_flow_as_it_was(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        before = [parameter.requires_grad for parameter in flow.parameters()]
        looks = ascend(flow, x[:1], half(x[:1]), lambda i: True, schedule=SHORT)
        next(looks)
        looks.close()  # type: ignore[attr-defined]
        assert [parameter.requires_grad for parameter in flow.parameters()] == before

    @pytest.mark.parametrize("schedule", [SHORT, replace(SHORT, direction="gradient", gradient_scale=50, noise=9)])
    def test_the_hidden_stay_in_the_interval(self, digits: tuple[Flow, Tensor], schedule: Schedule):
        flow, x = digits
        ascent = ascent_of(flow, x, schedule, torch.Generator().manual_seed(0))
        with frozen(flow):
            for _ in range(20):
                ascent.iteration()
                y = ascent.y.detach()
                assert 0 <= float(y.min()) <= float(y.max()) <= 1
        assert fill(flow, x, half(x), schedule=schedule).states.max() <= 16

    @pytest.mark.parametrize("direction", ["adam", "gradient"])
    def test_the_likelihood_rises_without_noise(self, digits: tuple[Flow, Tensor], direction: str):
        flow, x = digits
        schedule = choose_schedule("ours", steps=200, direction=direction, gradient_scale=0.003, noise=0.0)
        nats = fill(flow, x, half(x), schedule=schedule, looks=range(0, 200, 40)).nats
        assert (nats.diff(dim=0) > 0).all()

    def test_the_default_beats_the_truth(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        filled = fill(flow, x, half(x), schedule=replace(OURS, steps=300))
        assert (filled.nats[-1] > flow.log_prob(x, noise=False)).all()

    def test_nats_are_those_of_the_flow_in_its_own_space(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        nats = flow.log_density((x + 0.5) / 17).detach() - 64 * math.log(17)
        nothing = fill(flow, x, torch.zeros_like(half(x)), schedule=replace(MAP, steps=1)).nats[-1, 0]
        torch.testing.assert_close(nothing, nats.double(), rtol=1e-6, atol=1e-4)

    def test_chains_differ(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        filled = fill(flow, x, half(x), schedule=MAP, chains=4)
        assert len(torch.unique(filled.states[0, :, 0], dim=0)) == 4

    def test_the_seed_decides_and_the_global_random_state_is_left_alone(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        before = torch.get_rng_state()
        first, again, other = (fill(flow, x, half(x), schedule=SHORT, seed=seed).nats for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), before)

    def test_rows_go_in_parts_of_bounded_size(self, digits: tuple[Flow, Tensor], monkeypatch: pytest.MonkeyPatch):
        flow, x = digits
        monkeypatch.setattr("nicest.inference.fill.BATCH", 5)
        heard: list[float] = []
        filled = fill(flow, x, half(x), schedule=MAP, chains=2, watch=lambda share, nats: heard.append(share))
        assert filled.result.shape == (2, 6, 64)
        assert (filled.result[:, ~half(x)] == x[~half(x)]).all()
        assert (filled.nats[1] > filled.nats[0]).all()
        assert heard == pytest.approx(np.arange(1, 181) / 180)

    def test_gradients_are_taken_in_x_alone_and_the_flow_is_as_before(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        next(flow.parameters()).requires_grad_(False)
        flow.train()
        wanted = [p.requires_grad for p in flow.parameters()]
        seen: list[bool] = []

        def watch(share: float, nats: float) -> None:
            seen.extend(p.requires_grad for p in flow.parameters())
            seen.extend(module.training for module in flow.modules())

        fill(flow, x, half(x), schedule=replace(MAP, steps=2), watch=watch)
        assert seen
        assert not any(seen)
        assert [p.requires_grad for p in flow.parameters()] == wanted
        assert all(module.training for module in flow.modules())
        assert all(p.grad is None for p in flow.parameters())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_missing_numbers_of_a_table_are_found(self, dtype: torch.dtype):
        """Independent Gaussians after a change of units: the mode of every column is known."""
        mean, spread = torch.tensor([5.0, -20.0, 0.3]), torch.tensor([1.0, 10.0, 0.1])
        flow = Flow(Units.continuous(3), Chain(DiagonalScaling(3)), Gaussian(3)).to(dtype)
        flow.units.fit(mean, spread**2)
        x = (mean + spread * torch.randn(50, 3)).to(dtype)
        hidden = torch.rand(50, 3) < 0.5
        holes = x.masked_fill(hidden, math.nan)
        filled = fill(flow, holes, hidden, schedule=replace(OURS, noise=0.0))
        assert torch.equal(filled.result[0][~hidden], x[~hidden])
        error = (filled.result[0] - mean.to(dtype)) / spread
        assert error[hidden].abs().max() < 1e-2

    @settings(max_examples=15, deadline=None)
    @given(st.integers(2, 9), st.integers(2, 300), st.data())
    def test_any_size_and_number_of_levels(self, dim: int, levels: int, data: st.DataObject):
        flow = Flow(Units.pixels(dim, levels, (-1.0, 1.0)), Chain(DiagonalScaling(dim)), Logistic(dim))
        x = torch.tensor(data.draw(st.lists(st.integers(0, levels - 1), min_size=dim, max_size=dim)))[None]
        hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=dim, max_size=dim)))[None]
        result = fill(flow, x, hidden, schedule=replace(SHORT, steps=3)).result[0]
        assert torch.equal(result[~hidden], x[~hidden])
        assert 0 <= int(result.min()) <= int(result.max()) < levels


class TestIteration:
    def test_is_the_formula(self):
        """One plain step of a logistic in closed form: ∂ log p/∂x = -tanh(x/2)."""
        flow = Flow(Units.continuous(3), Chain(DiagonalScaling(3)), Logistic(3))
        x, hidden = torch.tensor([[0.5, -2.0, 1.0]]), torch.tensor([[True, True, False]])
        schedule = Schedule(steps=9, direction="gradient", gradient_scale=0.7, noise=0.2)
        box = (torch.full((1, 3), -math.inf), torch.full((1, 3), math.inf))
        ascent = Ascent(flow, x, hidden, box, schedule, torch.Generator().manual_seed(3))
        expected = ascent.y.detach().clone()
        generator = torch.Generator()
        generator.set_state(ascent.generator.get_state())
        for i in range(5):
            ascent.iteration()
            noise = torch.empty(1, 3).normal_(generator=generator)
            step = 10 / (100 + i) * (-0.7 * torch.tanh(expected / 2) + 0.2 * noise)
            expected = torch.where(hidden, expected + step, expected)
            torch.testing.assert_close(ascent.y.detach(), expected)
        assert float(ascent.i) == 5

    def test_adam_is_torchs_adam(self):
        flow = Flow(Units.continuous(4), Chain(DiagonalScaling(4)), Gaussian(4))
        box = (torch.full((1, 4), -math.inf), torch.full((1, 4), math.inf))
        ascent = Ascent(flow, torch.zeros(6, 4), torch.ones(6, 4, dtype=torch.bool), box, MAP, torch.Generator())
        peer = ascent.y.detach().clone().requires_grad_()
        optimizer = torch.optim.Adam([peer], betas=(0.9, 0.99), eps=0.0)
        for i in range(10):
            optimizer.param_groups[0]["lr"] = 10 / (100 + i)
            optimizer.zero_grad()
            (-flow.log_prob(peer).sum()).backward()
            optimizer.step()
            ascent.iteration()
            torch.testing.assert_close(ascent.y, peer)

    def test_keeps_every_tensor_in_its_place(self, digits: tuple[Flow, Tensor]):
        flow, x = digits
        ascent = ascent_of(flow, x, SHORT, torch.Generator())
        places = [each.data_ptr() for each in (ascent.z, ascent.i, ascent.noise, ascent.mean, ascent.square)]
        with frozen(flow):
            ascent.iteration()
        after = [each.data_ptr() for each in (ascent.z, ascent.i, ascent.noise, ascent.mean, ascent.square)]
        assert places == after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
class TestCaptured:
    """On a GPU: the iteration replayed from a CUDA graph is the iteration called."""

    @staticmethod
    def after(flow: Flow, x: Tensor, schedule: Schedule, how: str, steps: int = 50) -> tuple[Tensor, Tensor]:
        """The state and the generator's after some steps."""
        generator = torch.Generator("cuda").manual_seed(5)
        with frozen(flow):
            ascent = ascent_of(flow, x, schedule, generator)
            iterate = ascent.captured(torch.float32) if how == "captured" else ascent.iteration
            for _ in range(steps):
                iterate()
        assert float(ascent.i) == steps
        return ascent.y.detach(), generator.get_state()

    @pytest.mark.parametrize("noise", [0.0, 0.03])
    @pytest.mark.parametrize("direction", ["adam", "gradient"])
    def test_is_the_iteration_from_the_same_random_state(
        self, digits: tuple[Flow, Tensor], direction: str, noise: float
    ):
        flow, x = digits[0].cuda(), digits[1].cuda()
        schedule = choose_schedule(direction=direction, gradient_scale=0.01, noise=noise)
        called, random = self.after(flow, x, schedule, "called")
        replayed, random_too = self.after(flow, x, schedule, "captured")
        torch.testing.assert_close(replayed, called, rtol=0, atol=1e-4)
        assert torch.equal(random_too, random)

    def test_in_bfloat16_it_climbs_as_high(self, digits: tuple[Flow, Tensor], monkeypatch: pytest.MonkeyPatch):
        flow, x = digits[0].cuda(), digits[1].cuda()
        reduced = fill(flow, x, half(x).cuda(), schedule=choose_schedule(steps=300, noise=0.0)).nats[-1]
        captured = Ascent.captured
        monkeypatch.setattr(Ascent, "captured", lambda ascent: captured(ascent, torch.float32))
        exact = fill(flow, x, half(x).cuda(), schedule=choose_schedule(steps=300, noise=0.0)).nats[-1]
        assert not torch.equal(reduced, exact)
        assert (reduced - exact).mean().abs() < 2

    def test_draws_anew_in_every_replay_and_the_same_from_the_same_seed(self, digits: tuple[Flow, Tensor]):
        flow, x = digits[0].cuda(), digits[1].cuda()
        first, again, other = (fill(flow, x, half(x).cuda(), schedule=SHORT, seed=seed).nats for seed in (1, 1, 2))
        torch.testing.assert_close(first, again, rtol=0, atol=1e-3)
        assert (first - other).abs().max() > 1e-2
        generator = torch.Generator("cuda").manual_seed(0)
        with frozen(flow):
            ascent = ascent_of(flow, x, SHORT, generator)
            iterate, drawn = ascent.captured(), []
            for _ in range(3):
                iterate()
                drawn.append(ascent.noise.clone())
        assert all((one - two).abs().max() > 0.1 for one, two in itertools.pairwise(drawn))


class TestCommand:
    def test_the_papers_masks_make_the_figure_the_film_and_the_arrays(self, digits_run: Run, tmp_path: Path):
        outs = [tmp_path / "deep" / f"a.{end}" for end in ("png", "gif", "npz")]
        result = inpaint(digits_run, n=2, steps=30, chains=2, out=outs)
        assert json.loads(result.to_json()) == result.to_dict()
        for each in result.masks:
            truth, end = np.array(each["truth_nats"]), np.array(each["end_nats"])
            assert each["mean_gain_nats"] == pytest.approx((end - each["start_nats"]).mean())
            assert each["mean_truth_nats"] == pytest.approx(truth.mean())
            assert each["images_above_truth"] == (end.max(0) > truth).sum()
        assert result.out == [str(out) for out in outs]
        assert [each["mask"] for each in result.masks] == list(FIGURE)
        assert [each["images"] for each in result.masks] == [[2 * k, 2 * k + 1] for k in range(10)]
        assert np.shape([each["end_nats"] for each in result.masks]) == (10, 2, 2)
        assert {key: getattr(result, key) for key in ("steps", "direction", "gradient_scale", "noise")} == {
            **{"steps": 30, "direction": "adam", "gradient_scale": 1.0, "noise": 0.03}
        }
        with Image.open(outs[0]) as picture:
            assert picture.format == "PNG"
        with Image.open(outs[1]) as film:
            assert film.n_frames > 10
        with np.load(outs[2]) as archive:
            assert list(archive["masks"]) == list(FIGURE)
            assert archive["result"].shape == archive["start"].shape == (2, 20, 8, 8)
            assert archive["result"].dtype == np.uint8
            seen = ~archive["hidden"]
            assert np.array_equal(archive["result"][:, seen], np.stack([archive["truth"][seen]] * 2))
            assert archive["nats"].shape == (len(archive["looks"]), 2, 20)
            ends = np.concatenate([each["end_nats"] for each in result.masks], axis=1)
            assert np.array_equal(archive["nats"][-1], ends)
            truth = digits_run.splits.test[:20].reshape(20, 8, 8)
            assert np.array_equal(archive["truth"], truth)

    def test_the_figure_has_a_row_for_each_mask_and_the_likeliest_chain_first(
        self, digits_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        figures: list[Figure] = []
        monkeypatch.setattr("nicest.tasks.inpaint.save_figure", lambda figure, path: figures.append(figure))
        masks, outs = ["top", "left", "random:50"], [tmp_path / "a.png", tmp_path / "a.npz"]
        inpaint(digits_run, mask=masks, n=6, steps=5, chains=3, out=outs)
        (figure,) = figures
        with np.load(outs[1]) as archive:
            truth, start, result, nats = (archive[name] for name in ("truth", "start", "result", "nats"))
        order, every = (-nats[-1]).argsort(0), np.arange(18)
        assert len(np.unique(order, axis=1).T) > 1
        panels = {"truth": truth, "start": start[order[0], every]}
        panels |= {f"result {k + 1}": result[order[k], every] for k in range(3)}
        shown = {ax.get_title(): np.asarray(ax.images[0].get_array()) for ax in figure.axes if ax.images}
        assert list(shown) == list(panels)
        for name, images in panels.items():
            assert np.array_equal(shown[name], np.asarray(image_grid(images, brightest=16, columns=6, size=1))), name
        labelled = [ax for ax in figure.axes if len(ax.get_yticks())]
        assert [ax.get_title() for ax in labelled if ax.images] == ["truth", "result 2"]
        for ax in (ax for ax in labelled if ax.images):
            assert [label.get_text() for label in ax.get_yticklabels()] == masks
            assert (np.diff(ax.get_yticks()) > 0).all()
            assert ax.yaxis_inverted()
        assert figure.get_suptitle().startswith("digits (recipe digits): ")

    def test_every_random_mask_is_drawn_anew(self, digits_run: Run, tmp_path: Path):
        inpaint(digits_run, mask=["random:50"] * 2, n=4, steps=1, out=tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz") as archive:
            one, two = np.split(archive["hidden"], 2)
        assert all((a != b).any() for a, b in zip(one, two, strict=True))

    def test_endings_may_be_of_either_case(self, digits_run: Run, tmp_path: Path):
        outs = [tmp_path / name for name in ("a.PNG", "a.Gif", "a.NPZ")]
        inpaint(digits_run, mask="top", n=2, steps=5, out=outs)
        with Image.open(outs[0]) as picture, Image.open(outs[1]) as film:
            assert (picture.format, film.format) == ("PNG", "GIF")
        with np.load(outs[2]) as archive:
            assert len(archive["looks"]) > 2

    def test_nats_are_on_the_recipes_interval(self, colour_run: Run, tmp_path: Path):
        result = inpaint(colour_run, mask="columns:0-3", n=2, steps=5, out=tmp_path / "a.npz")
        y = (colour_run.rows("test")[:2] + 0.5) / 128 - 1
        expected = colour_run.flow.log_density(y).detach().numpy()
        np.testing.assert_allclose(result.masks[0]["truth_nats"], expected, rtol=1e-4)

    def test_masks_of_any_kind_on_colour_images(self, colour_run: Run, tmp_path: Path):
        Image.fromarray(np.eye(4, 6, dtype=np.uint8) * 255).save(tmp_path / "mask.png")
        masks = ["channels:1", str(tmp_path / "mask.png"), np.ones((3, 4, 6), bool)]
        result = inpaint(colour_run, mask=masks, n=1, steps=5, out=[tmp_path / "a.png", tmp_path / "a.gif"])
        assert [each["mask"] for each in result.masks] == ["channels:1", "mask.png", "array"]

    def test_rows_of_numbers_are_filled_in_too(self, rows_run: Run, tmp_path: Path):
        result = inpaint(rows_run, mask="columns:1-3", n=3, out=tmp_path / "a.npz", noise=0)
        (columns,) = result.masks
        assert (np.array(columns["end_nats"]) > columns["truth_nats"]).all()
        with np.load(tmp_path / "a.npz") as archive:
            assert np.array_equal(archive["result"][0][:, [0, 3, 4]], archive["truth"][:, [0, 3, 4]])

    def test_wraps_around_a_small_split(self, colour_run: Run, tmp_path: Path):
        size = len(colour_run.splits.test)
        result = inpaint(colour_run, mask=["top", "bottom"], n=size, steps=1, out=tmp_path / "a.npz")
        assert result.masks[0]["images"] == result.masks[1]["images"] == list(range(size))


def test_samples_of_the_model_need_no_data(digits_run: Run, copy_of: Callable[[Run], Run], tmp_path: Path):
    run = copy_of(digits_run)
    result = inpaint(run, mask="top", n=3, split="samples", steps=2, seed=1, out=tmp_path / "a.npz")
    assert "splits" not in vars(run)  # which were not read
    truth = np.load(tmp_path / "a.npz")["truth"]
    np.testing.assert_array_equal(truth, draw(run, 3, seed=1))
    assert result.masks[0]["images"] == [0, 1, 2]


def test_draws_differ_and_keep_the_observed(digits_run: Run, tmp_path: Path):
    files = [tmp_path / "a.npz", tmp_path / "a.png", tmp_path / "a.gif"]
    result = inpaint(digits_run, mask="top", n=2, draws=True, chains=3, steps=8, out=files)
    found = np.load(tmp_path / "a.npz")
    drawn, hidden = found["result"], found["hidden"]
    assert drawn.shape == (3, 2, 8, 8)
    assert (np.where(hidden, 0, drawn) == np.where(hidden, 0, found["truth"])).all()
    assert all((drawn[i] != drawn[j]).any() for i, j in itertools.combinations(range(3), 2))
    (row,) = result.masks
    assert (len(row["r_hat"]), len(row["acceptance"])) == (2, 2)
    flow = digits_run.flow
    nats = flow.log_prob(torch.from_numpy(drawn.reshape(6, 64)), noise=False) + flow.units.interval_nats
    np.testing.assert_allclose(np.ravel(row["end_nats"]), nats.detach(), rtol=1e-5)
    assert all(file.exists() for file in files)


class TestRefusals:
    def test_of_what_cannot_be_written(self, refusal: Callable[..., str], rows_run: Run, tmp_path: Path):
        assert ".png, .svg, .pdf, .gif, .npz" in refusal(inpaint, rows_run, out=tmp_path / "a.jpg")
        assert "write arrays, to inpaint.npz" in refusal(inpaint, rows_run, out=tmp_path / "a.png")
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "a.npz").mkdir()
        says = f"cannot write {tmp_path / 'a.npz'}: it is a folder"
        assert refusal(inpaint, rows_run, mask="columns:0", out=tmp_path / "a.npz") == says

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"n": 0}, "1 to 180 images of the test split"),
            ({"n": 181}, "1 to 180 images"),
            ({"mask": "topp"}, "did you mean 'top'"),
            ({"steps": 0}, "at least 1 step"),
            ({"chains": 0}, "at least 1 chain"),
            ({"noise": -1.0}, "noise of 0"),
            ({"gradient_scale": 0.0}, "gradient scale above 0"),
            ({"gradient_scale": math.nan}, "gradient scale above 0"),
            ({"direction": "up"}, "a direction of adam, gradient"),
            ({"preset": "paper"}, "a preset of ours, authors"),
            ({"draws": True, "noise": 0.1}, "apply to the ascent only"),
            ({"draws": True, "steps": 3}, "4 draws or more of each chain"),
        ],
    )
    def test_of_options(self, refusal: Callable[..., str], digits_run: Run, tmp_path: Path, options: dict, says: str):
        assert says in refusal(inpaint, digits_run, out=tmp_path / "a.npz", **options)

    def test_of_rows_and_masks_that_do_not_fit(self, refusal: Callable[..., str], digits: tuple[Flow, Tensor]):
        flow, x = digits
        assert "(N, 64)" in refusal(fill, flow, x[:, :9], half(x)[:, :9])
        assert "torch.uint8" in refusal(fill, flow, x, half(x).byte())

    def test_of_what_is_not_finite(self, refusal: Callable[..., str]):
        flow = Flow(Units.continuous(2), Chain(DiagonalScaling(2)), Gaussian(2))
        x, hidden = torch.zeros(1, 2), torch.tensor([[True, False]])
        assert "every observed value a number" in refusal(fill, flow, x / 0, hidden)
        wild = Schedule(steps=300, direction="gradient", gradient_scale=1e9, noise=0.0)
        assert "smaller gradient scale" in refusal(fill, flow, x, hidden, schedule=wild)


def test_the_authors_setting_is_a_preset():
    authors = PRESETS["authors"]
    assert (authors.steps, authors.direction, authors.noise) == (111_895, "gradient", 1.0)
    assert authors.gradient_scale == 1 / 100  # they differentiate the mean of their 100 images
    assert choose_schedule("authors", noise=0.0) == replace(authors, noise=0.0)
    assert choose_schedule() == OURS
