"""The surprise of a pixel, compared with the conditional of a Gaussian in closed form, summed over all levels."""

from collections.abc import Callable

import pytest
import torch

from nicest.flows import Chain, Flow, Gaussian, TriangularAffine, Units
from nicest.inference.engine import Engine
from nicest.inference.surprise import surprise

DEVIATIONS = torch.tensor([0.006, 0.05, 0.4]).double()  # from 1.5 of 256 levels to nearly all


def gaussian(levels: int) -> tuple[Flow, torch.Tensor]:
    """y ~ N(0.4, covariance) on [0, 1], correlated."""
    correlation = torch.tensor([[1, 0.5, -0.3], [0.5, 1, 0.2], [-0.3, 0.2, 1]]).double()
    covariance = DEVIATIONS[:, None] * correlation * DEVIATIONS
    layer = TriangularAffine(3).double()
    layer.fit_moments(torch.full((3,), 0.4).double(), covariance)
    return Flow(Units.pixels(3, levels), Chain(layer), Gaussian(3)).double().eval(), covariance


@pytest.mark.parametrize(("levels", "off"), [(17, 1e-5), (64, 1e-5), (256, 0.1), (1000, 0.1)])
@pytest.mark.parametrize("place", [0.4, 0.41, 0.9])
def test_it_is_the_conditional_of_the_level_and_its_entropy(levels: int, off: float, place: float):
    flow, covariance = gaussian(levels)
    row = torch.full((3,), int(place * levels)).double()
    y = (row + 0.5) / levels
    found = list(surprise(Engine(flow), row, levels, rows=100))
    nats, entropy = (torch.cat([getattr(part, name) for part in found]) for name in ("nats", "entropy"))
    assert torch.cat([part.dims for part in found]).tolist() == [0, 1, 2]
    precision = torch.linalg.inv(covariance)
    middles = (torch.arange(levels) + 0.5).double() / levels
    for d in range(3):
        others = [k for k in range(3) if k != d]
        mean = 0.4 - (precision[d, others] / precision[d, d]) @ (y[others] - 0.4)
        log_p = torch.log_softmax(-0.5 * precision[d, d] * (middles - mean) ** 2, 0)
        relative = off * max(1.0, float(-log_p[int(row[d])]))
        assert float(nats[d]) == pytest.approx(float(-log_p[int(row[d])]), abs=relative)
        assert float(entropy[d]) == pytest.approx(
            float(-(log_p.exp() * log_p).nan_to_num(0).sum()), abs=max(off, 2 * off)
        )


def test_a_model_without_levels_is_refused(refusal: Callable[..., str]):
    flow = Flow(Units.continuous(3), Chain(TriangularAffine(3)), Gaussian(3))
    assert "images with levels" in refusal(list, surprise(Engine(flow), torch.zeros(3), 0))
