"""Rows with missing cells: drawn from the model while it learns, and all else as for whole rows."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from nicest import NICE
from nicest.data import Splits, load
from nicest.flows import Chain, Flow, Gaussian, TriangularAffine, Units
from nicest.inference import langevin as chains
from nicest.inference.langevin import Chains
from nicest.recipes import load_recipe
from nicest.recipes.splits import describe
from nicest.train import loop
from nicest.train import missing_cells as module
from nicest.train.fit import start, train
from nicest.train.initial import sized
from nicest.train.missing_cells import MissingCells
from small_runs import SMALL, counters, interrupt_at, last, people, run, same_run

Refusal = Callable[..., str]
COVARIANCE = torch.tensor([[1.0, 0.8, 0.3], [0.8, 1.0, 0.5], [0.3, 0.5, 1.0]]).double()
TABLE = (*SMALL, "train.batch=50", "train.epochs=4", "model.preprocess=zca", "model.width=16")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return people(tmp_path_factory.mktemp("holes") / "people.csv")


def trained(out: Path, table: Path, *more: str) -> None:
    run(out, f'data.name="{table}"', *more, settings=TABLE, recipe="digits")


class TestChains:
    """Of a Gaussian, of which all conditionals are known."""

    @pytest.fixture
    def flow(self) -> Flow:
        whitening = TriangularAffine(3).double()
        whitening.fit_moments(torch.zeros(3).double(), COVARIANCE)
        return Flow(Units.continuous(3, standardise=False), Chain(whitening), Gaussian(3)).double()

    @pytest.mark.parametrize("moves", [1, 10, 200])
    def test_draws_of_the_law_stay_draws_of_it_and_others_become_so(self, flow: Flow, moves: int):
        n, generator = 4000, torch.Generator().manual_seed(0)
        root = torch.linalg.cholesky(COVARIANCE)
        samples = torch.randn(n, 3, generator=generator).double() @ root.T
        hidden = torch.tensor([False, True, True]).expand(n, 3)
        chains = Chains(flow, samples, None, generator)
        solve = torch.linalg.solve(COVARIANCE[:1, :1], COVARIANCE[:1, 1:])
        given = samples[:, :1]
        left = COVARIANCE[1:, 1:] - COVARIANCE[1:, :1] @ solve
        starts = [samples] + [torch.where(hidden, 3.0, samples)] * (moves == 200)
        for begin in starts:
            found = torch.cat(
                [chains.moved(x, h, moves) for x, h in zip(begin.split(2000), hidden.split(2000), strict=True)]
            )
            assert torch.equal(found[:, 0], samples[:, 0])
            assert (found[:, 1:] != begin[:, 1:]).any(1).double().mean() > 0.3
            rest = (found[:, 1:] - given @ solve) @ torch.linalg.inv(torch.linalg.cholesky(left)).T
            for d in range(2):
                assert stats.kstest(rest[:, d].numpy(), "norm").pvalue > 1e-3
            assert abs(float((rest[:, 0] * rest[:, 1]).mean())) < 0.06

    def test_the_law_stays_where_rows_need_steps_of_their_own(self):
        """A funnel, y ~ N(0, 1) and two x ~ N(0, e^2y): a row's own past must not choose its step."""
        generator = torch.Generator().manual_seed(0)

        class Funnel(Gaussian):
            def log_prob(self, h: Tensor) -> Tensor:
                y, x = h[:, 0], h[:, 1:3]
                return -0.5 * y**2 - 2 * y - 0.5 * (x * (-y)[:, None].exp()).square().sum(1) - 0.5 * h[:, 3] ** 2

        x = torch.randn(8000, 4, generator=generator).double()
        x[:, 1:3] *= x[:, :1].exp()
        chains = Chains(Flow(Units.continuous(4), Chain(), Funnel(4)).double(), x, None, generator)
        hidden = torch.tensor([True, True, True, False]).expand(8000, 4)
        for _ in range(25):
            x = torch.cat([chains.moved(a, b, 10) for a, b in zip(x.split(2000), hidden.split(2000), strict=True)])
        assert stats.kstest(x[:, 0].numpy(), "norm").pvalue > 1e-3

    @pytest.mark.parametrize("top", [1.0, 1e5])
    def test_the_law_stays_between_bounds_also_near_an_end(self, top: float):
        """Uniform in a box, and in its first thousandth: cells that no proposal moves must not move."""
        generator = torch.Generator().manual_seed(0)

        class Even(Gaussian):
            def log_prob(self, h: Tensor) -> Tensor:
                return 0.0 * h.sum(1)

        flow = Flow(Units.continuous(2), Chain(), Even(2)).double()
        x = torch.rand(4000, 2, generator=generator).double() * top
        bounds = torch.zeros(2).double(), torch.full((2,), top).double()
        hidden = torch.tensor([True, False]).expand(4000, 2)
        chains = Chains(flow, x, bounds, generator)
        found = torch.cat([chains.moved(a, b, 10) for a, b in zip(x.split(2000), hidden.split(2000), strict=True)])
        assert stats.kstest(found[:, 0].numpy() / top, "uniform").pvalue > 1e-3
        small = torch.where(hidden, x * 1e-4, x)
        stay = chains.moved(small[:2000], hidden[:2000], 0)
        torch.testing.assert_close(stay, small[:2000], rtol=1e-4, atol=2e-6 * top)

    def test_where_nothing_is_finite_the_cells_stay(self, flow: Flow):
        generator = torch.Generator().manual_seed(0)
        chains = Chains(flow, torch.randn(100, 3, generator=generator).double(), None, generator)
        x = torch.tensor([[1e300, 2.0, 3.0], [0.0, 2.0, 3.0]]).double()
        found = chains.moved(x, torch.tensor([[False, True, True]] * 2), 10)
        assert torch.equal(found[0], x[0])
        assert not torch.equal(found[1], x[1])


class TestLikelihood:
    def correlated(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """A curved pair of columns and one more; holes in the second where the first is large."""
        rng = np.random.default_rng(seed)
        first = rng.normal(size=n)
        rows = np.column_stack([first, first**2 / 2 + 0.3 * rng.normal(size=n), rng.normal(size=n) + first])
        missing = np.zeros(rows.shape, dtype=bool)
        missing[:, 1] = rng.random(n) < 0.8 / (1 + np.exp(-3 * first))
        missing[:, 2] = rng.random(n) < 0.2
        return rows, missing

    def test_what_whole_rows_do_not_tell_is_learned_and_not_by_the_first_draws(self, monkeypatch: pytest.MonkeyPatch):
        """The first are of a copula, which knows no curve."""
        rows, missing = self.correlated(600, 0)
        test, _ = self.correlated(2000, 1)
        holed = np.where(missing, np.nan, rows)

        def score(data: np.ndarray) -> float:
            return NICE(effort="low", law="additive", random_state=0).fit(data).score(test)

        full, whole, ours = score(rows), score(holed[~missing.any(1)]), score(holed)
        monkeypatch.setattr(MissingCells, "draw", lambda self, epoch, stopped: True)
        first = score(holed)
        assert max(whole, first) < ours < full
        assert full - ours < 0.5 * (full - max(whole, first))


class TestCells:
    def made(self, table: Path, epoch: int) -> tuple[Splits, Tensor, MissingCells]:
        recipe = describe(load_recipe("digits").override(*TABLE, f'data.name="{table}"'), load(str(table)))
        splits = load(str(table))
        state = start(recipe, splits, torch.device("cpu"))
        rows = torch.from_numpy(splits.training)
        holes = MissingCells(state, splits, rows)
        holes.draw(epoch)
        return splits, rows, holes

    def test_what_is_there_stays_and_what_is_drawn_is_of_its_column(self, table: Path, tmp_path: Path):
        splits, rows, holes = self.made(table, 1)
        before, missing = splits.training, np.vstack([np.zeros((len(splits.train), 4), bool), splits.missing])
        assert len(splits.missing) == 80
        found = rows.numpy()
        np.testing.assert_array_equal(found[~missing], before[~missing])
        assert (found[missing] != before[missing]).mean() > 0.3
        assert np.isfinite(found).all()
        for d, column in enumerate(splits.columns):
            if column.discrete:
                assert set(found[:, d]) <= set(range(int(column.most) + 1))
        assert torch.equal(holes.state.cells, holes.incomplete[holes.missing])

    def test_whole_numbers_in_the_million_stay_in_their_column(self, tmp_path: Path):
        """Where float32 rounds the end of the last step up to the next."""
        rng = np.random.default_rng(0)
        lines = [f"{rng.normal():.3f},{rng.choice([0, 1, 1_000_000])}" for _ in range(200)]
        lines += [f"{rng.normal():.3f}," for _ in range(200)]
        (tmp_path / "t.csv").write_text("\n".join(["a,b", *lines]) + "\n")
        splits, rows, _ = self.made(tmp_path / "t.csv", 1)
        assert splits.columns[1].most == 1_000_000
        assert 0 <= float(rows[:, 1].min()) <= float(rows[:, 1].max()) <= 1_000_000
        assert bool((rows[:, 1] == rows[:, 1].floor()).all())

    def test_they_move_after_a_validation_and_not_before_the_first_epoch(self, table: Path, tmp_path: Path):
        for epoch in (0, 1):
            splits, rows, _ = self.made(table, epoch)
            assert np.array_equal(rows.numpy(), splits.training) == (epoch == 0)

    def test_of_many_some_move_each_time_and_all_in_turn(
        self, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(module, "AT_LEAST", 1)
        monkeypatch.setattr(module, "MOVES", 20)  # which are so dear that 16 of 80 rows move at once
        _, rows, holes = self.made(table, 0)
        changed = torch.zeros(80, dtype=torch.bool)
        for epoch in range(1, 6):
            before = holes.incomplete.clone()
            holes.draw(epoch)
            now = (holes.incomplete != before).any(1)
            assert 0 < int(now.sum()) <= len(rows) // 20
            changed |= now
        assert changed.double().mean() > 0.6

    def test_they_are_in_the_state_and_the_note_says_how_many(
        self, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        trained(tmp_path, table)
        assert last(tmp_path)["cells"].shape == (int(load(str(table)).missing.sum()),)
        assert "80 of 320 training rows have missing values" in capsys.readouterr().err


@pytest.fixture(scope="module")
def straight(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    trained(out, table)
    return out


class TestRuns:
    @pytest.mark.parametrize("step", [2, 5, 6, 14])  # of 6 in an epoch: before the first draws, at its end, ...
    def test_a_stopped_run_resumes_to_the_bit(
        self, table: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
    ):
        interrupt_at(step, signal.SIGINT, monkeypatch)
        trained(tmp_path, table)
        monkeypatch.undo()
        torch.manual_seed(99)
        assert train(load_recipe("digits"), tmp_path, resume=True, device="cpu")["finished"]
        assert same_run(tmp_path, straight)

    def test_a_signal_does_not_wait_for_the_draws_and_the_resumed_run_makes_them(
        self, table: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Of a large table they take longer than the seconds in which a run is to be saved."""
        monkeypatch.setattr(chains, "ROWS", 20)  # four parts, of which the second hears the signal
        trained(tmp_path / "parts", table)
        moved, parts = Chains.moved, iter(range(999))

        def heard(*given: Any) -> Tensor:
            if next(parts) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return moved(*given)

        monkeypatch.setattr(Chains, "moved", heard)
        trained(tmp_path / "stopped", table)
        assert (next(parts), counters(tmp_path / "stopped")["step"]) == (2, 6)
        monkeypatch.setattr(Chains, "moved", moved)
        assert train(load_recipe("digits"), tmp_path / "stopped", resume=True, device="cpu")["finished"]
        assert same_run(tmp_path / "stopped", tmp_path / "parts")
        assert not same_run(tmp_path / "parts", straight)  # parts have draws of their own

    def test_a_cell_that_was_missing_and_is_there_is_noticed(self, table: Path, tmp_path: Path, refusal: Refusal):
        own = tmp_path / "own.csv"
        own.write_text(table.read_text())
        trained(tmp_path / "run", own, "train.epochs=1")
        own.write_text(table.read_text().replace("\n,", "\n170.00,", 1))
        assert "has changed since" in refusal(train, load_recipe("digits"), tmp_path / "run", resume=True, device="cpu")

    def test_after_a_sick_step_the_cells_are_those_of_the_last_state(
        self, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """Sick in the third epoch, whose cells have moved since the state that is gone back to."""
        monkeypatch.setattr(loop, "CHEAP", 60.0)  # a state at every validation
        holes: list[MissingCells] = []
        made, roll_back, step = MissingCells.__init__, loop.Training.roll_back, loop.TrainingStep.__call__
        monkeypatch.setattr(MissingCells, "__init__", lambda self, *rest: (holes.append(self), made(self, *rest))[1])
        passes = iter(range(999))
        moved: list[Tensor] = []
        back: list[Tensor] = []

        def sicken(self: loop.TrainingStep, index: Tensor) -> Tensor:
            now = next(passes)
            if now == 14:
                moved.append(holes[0].incomplete[holes[0].missing])
            if len(back) == 1:
                back.append(holes[0].incomplete[holes[0].missing])
            return step(self, index) * (math.nan if now == 14 else 1.0)

        def recovered(*rest: Any) -> None:
            back.append(last(tmp_path)["cells"])
            roll_back(*rest)
            monkeypatch.setattr(
                MissingCells, "draw", lambda self, epoch, stopped: True
            )  # which comes before the step at once

        monkeypatch.setattr(loop.TrainingStep, "__call__", sicken)
        monkeypatch.setattr(loop.Training, "roll_back", recovered)
        trained(tmp_path, table)
        assert not torch.equal(moved[0], back[0])
        assert torch.equal(back[0], back[1])

    def test_few_whole_rows_are_helped_out_in_validation_but_not_in_the_test(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(200, 6)) + rng.normal(size=(200, 1))
        missing = rng.random(rows.shape) < 0.3
        missing[:9] = False
        lines = [
            ",".join("" if m else f"{x:.4f}" for x, m in zip(*each, strict=True))
            for each in zip(rows, missing, strict=True)
        ]
        (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d,e,f", *lines]) + "\n")
        splits = load(str(tmp_path / "t.csv"))
        whole = int((~missing.any(1)).sum())
        assert len(splits.train) + len(splits.valid) + len(splits.test) == whole
        assert len(splits.validating) == 20 > len(splits.valid) == len(splits.test) == round(whole / 4)
        assert np.isnan(splits.incomplete[: splits.n_incomplete_valid]).sum(1).max() <= splits.missing.sum(1).min()
        assert all(np.isfinite(each).all() for each in (splits.training, splits.validating, splits.test))
        assert len(splits.training) + len(splits.validating) + len(splits.test) == 200

    def test_without_whole_rows_one_line_says_so(self, tmp_path: Path, refusal: Refusal):
        (tmp_path / "t.csv").write_text("a,b\n1.5,\n2.5,1\n,2.5\n,3.25\n,4.1\n")
        message = refusal(load, str(tmp_path / "t.csv"))
        assert "at least 3 complete rows, to train, validate and test on, got 1 of 5" in message
        assert "set 'data.drop=[\"a\"]'" in message

    def test_few_cells_in_a_column_choose_a_small_model(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        lines = [
            f"{a:.3f},{b:.3f},{'' if i > 20 else f'{c:.3f}'}" for i, (a, b, c) in enumerate(rng.normal(size=(300, 3)))
        ]
        (tmp_path / "t.csv").write_text("\n".join(["a,b,c", *lines, ",,"]) + "\n")
        splits = load(str(tmp_path / "t.csv"))
        assert splits.fewest_observed == len(splits.train)
        assert len(splits.incomplete) == 279  # without the empty row
        (recipe,) = sized(load_recipe("table"), splits, {"model": {}, "train": {}})
        assert (recipe.model.marginals, recipe.model.couplings) == ("none", 0)

    def test_in_wide_tables_they_are_left_out_and_that_is_said(self, tmp_path: Path):
        rng = np.random.default_rng(0)
        lines = [",".join(f"{x:.3f}" for x in row) for row in rng.normal(size=(12, 201))]
        lines[3] = "," + lines[3].partition(",")[2]
        names = ",".join(f"c{i}" for i in range(201))
        (tmp_path / "t.csv").write_text("\n".join([names, *lines]) + "\n")
        with pytest.warns(UserWarning, match="1 of 12 rows have missing values and are left out"):
            splits = load(str(tmp_path / "t.csv"))
        assert len(splits.training) == len(splits.train)


class TestEstimator:
    def test_every_row_may_have_a_hole(self):
        rng = np.random.default_rng(0)
        rows = rng.multivariate_normal(np.zeros(4), 0.3 * np.eye(4) + 0.7, 300)
        holed = rows.copy()
        holed[np.arange(300), rng.integers(0, 4, 300)] = np.nan
        model = NICE(effort="low", law="additive", random_state=0, epochs=30).fit(holed)
        truth = stats.multivariate_normal(np.zeros(4), 0.3 * np.eye(4) + 0.7)
        test = rng.multivariate_normal(np.zeros(4), 0.3 * np.eye(4) + 0.7, 1000)
        assert abs(model.score(test) - truth.logpdf(test).mean()) < 0.3
        filled = model.impute(holed[:100], steps=300)
        error = (filled - rows[:100])[np.isnan(holed[:100])]
        assert np.sqrt((error**2).mean()) < 0.75  # by column means it is 1, by the best guess 0.6
        assert np.isnan(model.score_samples(holed)).all()
        assert (model.predict(holed) == 1).all()
        assert np.isnan(model.transform(holed)).all()

    @pytest.mark.parametrize(("whole", "share"), [(3, 0.2), (2, 0.5), (0, 0.2), (40, 0.0)])
    def test_however_few_rows_validate(self, whole: int, share: float):
        rows = np.random.default_rng(0).normal(size=(whole + 3, 3))
        rows[np.arange(whole, whole + 3), np.arange(3)] = np.nan
        rows = rows[: whole + 1] if whole else rows
        assert np.isfinite(NICE(random_state=0, validation_fraction=share, epochs=3).fit(rows).score(np.zeros((1, 3))))

    @pytest.mark.parametrize("there", [10, 30])
    def test_a_column_with_few_cells_does_no_harm(self, there: int):
        """Copies of few cells, filled in, are not many: no bend and no couplings by them."""
        rng = np.random.default_rng(0)
        rows = rng.multivariate_normal(np.zeros(3), COVARIANCE.numpy(), 200)
        test = rng.multivariate_normal(np.zeros(3), COVARIANCE.numpy(), 1000)
        holed = rows.copy()
        holed[there:, 1] = np.nan
        model = NICE(random_state=0).fit(holed)
        assert (model.recipe_.model.marginals, model.recipe_.model.couplings) == ("none", 0)
        assert model.score(test) > NICE(random_state=0).fit(rows[:there]).score(test) - 0.1

    def test_empty_rows_say_nothing(self):
        rows = np.random.default_rng(0).normal(size=(60, 2))
        more = np.concatenate([rows, np.full((300, 2), np.nan)])
        one, two = (
            NICE(law="additive", random_state=0, epochs=3).fit(each).score_samples(rows) for each in (rows, more)
        )
        np.testing.assert_array_equal(one, two)

    def test_a_score_of_rows_with_holes_alone_is_refused(self):
        model = NICE(random_state=0, epochs=1).fit(np.random.default_rng(0).normal(size=(20, 2)))
        with pytest.raises(ValueError, match="expected a row without NaN to score"):
            model.score([[1.0, np.nan]])
        assert model.score([[1.0, np.nan], [0.0, 0.0]]) == model.score([[0.0, 0.0]])

    def test_a_seed_gives_the_same_model(self):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(100, 3))
        rows[rng.random(rows.shape) < 0.2] = np.nan
        one, two = (NICE(law="additive", random_state=0, epochs=5).fit(rows) for _ in range(2))
        test = rng.normal(size=(10, 3))
        np.testing.assert_array_equal(one.score_samples(test), two.score_samples(test))

    def test_digits_that_float32_lacks_are_kept(self):
        rng = np.random.default_rng(0)
        rows = rng.multivariate_normal(np.zeros(3), COVARIANCE.numpy(), 400)
        holed = np.where(rng.random(rows.shape) < 0.2, np.nan, rows)
        test = rng.multivariate_normal(np.zeros(3), COVARIANCE.numpy(), 500)
        far = np.array([1e7, 0, 0])
        near, there = (
            NICE(law="additive", random_state=0, epochs=20).fit(holed + each).score(test + each)
            for each in (0 * far, far)
        )
        assert there == pytest.approx(near, abs=0.1)

    def test_wide_tables_are_refused(self):
        rows = np.random.default_rng(0).normal(size=(10, 201))
        rows[0, 0] = np.nan
        with pytest.raises(ValueError, match="more than 200 columns"):
            NICE().fit(rows)
