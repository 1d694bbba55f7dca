"""nicest.sbi: what sbi's NPE takes as its density estimator; the page about it runs from top to bottom."""

import math
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nicest.errors import NicestError

PAGE = Path(__file__).parent.parent / "docs" / "sbi.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's Python blocks define, run in order in a folder of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that sbi imports, and of a training that is cut short
        pytest.importorskip("sbi")
        found: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
            patch.chdir(tmp_path_factory.mktemp("page"))
            for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M):
                exec(compile(code, PAGE.name, "exec"), found)
    return found


def test_the_posterior_of_the_page_has_two_moons(names: dict[str, Any]):
    """Both crescents have half of the draws, and lie where the simulator can give what was observed."""
    draws = names["draws"]
    assert draws.shape == (1000, 2)
    assert names["log_density"].shape == (1000,)
    assert float((draws.sum(1) > 0).double().mean()) == pytest.approx(0.5, abs=0.15)
    size = draws.sum(1).abs() / math.sqrt(2)  # |θ1 + θ2| / √2 = the moon's first coordinate: 0.25 to 0.35
    assert float(((size > 0.2) & (size < 0.4)).double().mean()) > 0.8


def test_a_gaussian_simulator_gets_its_posterior(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """θ ~ N(0, 1), x = θ + N(0, s²), of one parameter and of two: mean x / (1 + s²), variance s² / (1 + s²)."""
    from sbi.inference import NPE

    monkeypatch.chdir(tmp_path)  # sbi writes logs where it is
    s = 0.5
    for dim in (1, 2):
        torch.manual_seed(0)
        theta = torch.randn(3000, dim)
        x = theta + s * torch.randn(3000, dim)
        prior = torch.distributions.MultivariateNormal(torch.zeros(dim), torch.eye(dim))
        builder = names["NICEPosterior"](prior, members=1, couplings=3, width=24)
        inference = NPE(prior, density_estimator=builder, show_progress_bars=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inference.append_simulations(theta, x).train(max_num_epochs=20, learning_rate=1e-3)
        posterior = inference.build_posterior()
        observed = torch.full((1, dim), 0.8)
        draws = posterior.sample((4000,), x=observed, show_progress_bars=False)
        torch.testing.assert_close(draws.mean(0), torch.full((dim,), 0.8 / 1.25), rtol=0, atol=0.1)
        torch.testing.assert_close(draws.std(0), torch.full((dim,), math.sqrt(0.2)), rtol=0, atol=0.06)
        exact = torch.distributions.Normal(0.8 / 1.25, math.sqrt(0.2)).log_prob(draws).sum(1)
        assert float((posterior.log_prob(draws, x=observed) - exact).abs().median()) < 0.25
        several = posterior.sample_batched((7,), x=x[:3], show_progress_bars=False)
        assert several.shape == (7, 3, dim)


def test_shapes_and_the_density_in_units_of_theta(names: dict[str, Any]):
    theta, x = 100 + 5 * torch.randn(500, 2), torch.randn(500, 3)
    estimator = names["NICEPosterior"](couplings=3, width=8)(theta, x)
    with torch.no_grad():
        for parameter in estimator.eval().parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        assert estimator.log_prob(theta[:6].view(2, 3, 2), x[:3]).shape == (2, 3)
        assert estimator.log_prob(theta[:3], x[:3]).shape == (1, 3)
        torch.testing.assert_close(estimator.loss(theta[:3], x[:3]), -estimator.log_prob(theta[:3], x[:3])[0])
        assert estimator.sample((4, 5), x[:3]).shape == (4, 5, 3, 2)
        side = torch.linspace(40, 160, 300)
        grid = torch.cartesian_prod(side, side)[:, None]
        mass = estimator.log_prob(grid, x[:1]).exp().sum() * (side[1] - side[0]) ** 2
        assert float(mass) == pytest.approx(1, abs=0.01)


def test_draws_keep_to_the_bounds_of_the_prior(names: dict[str, Any]):
    """One parameter between two bounds, one above one, two free: the density is of these alone, and has a mass of 1."""
    from sbi.utils import process_prior
    from torch.distributions import Gamma, MultivariateNormal, Uniform

    parts = [
        Uniform(torch.tensor([2.0]), torch.tensor([3.0])),
        Gamma(torch.ones(1), torch.ones(1)),
        MultivariateNormal(torch.zeros(2), torch.eye(2)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prior = process_prior(parts)[0]
    torch.manual_seed(0)
    theta, x = prior.sample((500,)), torch.randn(500, 3)
    estimator = names["NICEPosterior"](prior, members=2, couplings=3, width=8)(theta, x).eval()
    with torch.no_grad():
        for parameter in estimator.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        draws = estimator.sample((5000,), x[:1])[:, 0]
        assert bool(((draws[:, 0] >= 2) & (draws[:, 0] <= 3) & (draws[:, 1] >= 0)).all())
        assert draws[:, 2].min() < 0 < draws[:, 2].max()
        two = names["NICEPosterior"](torch.distributions.Beta(torch.ones(2), 1.0), couplings=3, width=8)
        estimator = two(torch.rand(500, 2), x).eval()
        for parameter in estimator.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        t = torch.linspace(-16, 16, 400)
        grid, slope = t.sigmoid(), t.sigmoid() * (-t).sigmoid()
        density = estimator.log_prob(torch.cartesian_prod(grid, grid)[:, None], x[:1]).exp()[:, 0]
        mass = (density * torch.cartesian_prod(slope, slope).prod(1)).sum() * (t[1] - t[0]) ** 2
        assert float(mass) == pytest.approx(1, abs=0.01)


def test_it_is_pickled_and_its_weights_load(names: dict[str, Any]):
    posterior = pickle.loads(pickle.dumps(names["posterior"]))
    trained, loaded = names["posterior"].posterior_estimator, posterior.posterior_estimator
    theta, x, series = torch.randn(5, 2), torch.randn(5, 2), torch.randn(5, 20, 3)
    with torch.no_grad():
        assert torch.equal(loaded.log_prob(theta, x), trained.log_prob(theta, x))
        assert torch.equal(names["again"].log_prob(theta, series), names["estimator"].log_prob(theta, series))
    assert pickle.loads(pickle.dumps(names["NICEPosterior"]())) == names["NICEPosterior"]()


def test_data_that_are_not_rows_need_an_embedding(names: dict[str, Any]):
    with pytest.raises(NicestError, match=r"x \(9, 4, 5\): x needs an embedding"):
        names["NICEPosterior"]()(torch.randn(9, 2), torch.randn(9, 4, 5))


def test_without_sbi_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [each for each in sys.modules if each == "nicest.sbi" or each.split(".")[0] == "sbi"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sbi", None)
    with pytest.raises(NicestError, match=r"pip install 'nicest\[sbi\]'"):
        __import__("nicest.sbi")
