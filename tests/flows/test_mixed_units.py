"""Categories, spikes and bounds; that their probabilities and densities make 1 is in `test_normalised.py`."""

import math

import pytest
import torch
from quadrature import total, values
from scipy import stats
from torch import Tensor

from nicest.flows import MLP, Bounded, Chain, Coupling, Flow, Gaussian, MixedUnits, Spline, odd_even

FREE = (-math.inf, math.inf)
DTYPES = [torch.float32, torch.float64]
# a category, a spike at a bound, spikes inside, counts with a spike, reals, shares, capped shares
STEPS = [0, 0, 0, 1, 0, 0, 0]
ATOMS = [[0, 1, 2, 3], [0.0], [-0.1, 1.0], [0.0], [], [], [1.0]]
CATEGORIES = [True, False, False, False, False, False, False]
BOUNDS = [FREE, (0.0, math.inf), FREE, (0.0, math.inf), FREE, (0.0, 1.0), (0.0, 1.0)]


def table(n: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    category = torch.multinomial(torch.tensor([0.7, 0.1, 0.15, 0.05]), n, True, generator=generator).double()
    gain = torch.where(uniform() < 0.6, 0.0, -500 * uniform().log())
    inside = torch.randn(n, generator=generator, dtype=torch.float64)
    inside = torch.where(uniform() < 0.2, -0.1, torch.where(uniform() < 0.3, 1.0, inside))
    counts = torch.where(uniform() < 0.5, 0.0, (60 * uniform()).floor())
    shares = uniform()
    columns = [category, gain, inside, counts, 1e4 + inside + category, shares, (1.4 * shares).clamp(max=1)]
    return torch.stack(columns, 1).float().double()  # as it is stored


def units(dtype: torch.dtype = torch.float64) -> MixedUnits:
    made = MixedUnits(STEPS, ATOMS, categories=CATEGORIES, bounds=BOUNDS).to(dtype)
    made.fit_rows(table())
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [True, False])
def test_what_enters_leaves_as_it_was(dtype: torch.dtype, noise: bool):
    made, x = units(dtype), table().to(dtype)
    back = made.leave(made.enter(x, noise=noise))
    exact = torch.tensor([True, False, False, True, False, False, False])
    assert (back[:, exact] == x[:, exact]).all()
    spiked = torch.stack([torch.isin(x[:, d].float(), made.at[d].float()) for d in range(7)], 1)
    assert (back[spiked] == x[spiked]).all()  # no spike becomes another number, nor another number a spike
    again = torch.stack([torch.isin(back[:, d].float(), made.at[d].float()) for d in range(7)], 1)
    assert (again == spiked).all()
    torch.testing.assert_close(back, x, rtol=4 * torch.finfo(dtype).eps, atol=1e-3 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_real_number_is_a_value_of_the_column(dtype: torch.dtype):
    made = units(dtype)
    (bounded,) = made.first_layers().values()
    far = torch.cat([torch.linspace(-60, 60, 20_001), torch.linspace(-4, 4, 20_001)]).to(dtype)[:, None].expand(-1, 7)
    x = made.leave(bounded.to(dtype).inverse(far)[0])
    assert x.isfinite().all()
    assert set(x[:, 0].tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert x[:, [1, 3, 5, 6]].min() >= 0
    assert x[:, 5:].max() <= 1
    assert (x[:, 3] == x[:, 3].round()).all()


def flow_of(dim: int, made: MixedUnits) -> Flow:
    torch.manual_seed(0)
    chain = Chain(made.first_layers())
    for i in range(3 if dim > 1 else 0):
        partition = odd_even(dim) if i % 2 else odd_even(dim).swap()
        network = MLP(len(partition.i1), Spline().size * len(partition.i2), (16,))
        chain = Chain(*chain, Coupling(partition, Spline(), network))
    return Flow(made, chain, Gaussian(dim)).double()


@pytest.mark.parametrize("other", ["number", "category"])
def test_values_of_a_category_lie_beside_those_that_are_like_them(other: str):
    """Whatever their codes; their widths are how frequent they are."""
    generator = torch.Generator().manual_seed(0)
    place = torch.multinomial(torch.tensor([0.1, 0.2, 0.1, 0.3, 0.2, 0.1]), 3000, True, generator=generator)
    code = torch.tensor([3, 0, 5, 1, 4, 2])  # of each place along the line
    along = place + 2 * torch.randn(3000, generator=generator)
    if other == "category":
        along = (along > 1).float() + 2 * (along > 4)  # 0, 1, 3
    noise = torch.randn(3000, generator=generator)
    noise[::5] = math.nan  # missing cells
    x = torch.stack([code[place].float(), along, noise], 1).double()
    atoms: list[list[float]] = [[0, 1, 2, 3, 4, 5], [0, 1, 3] if other == "category" else [], []]
    kinds = [True, other == "category", False]
    plain = MixedUnits([0, 0, 0], atoms, categories=kinds).double()
    plain.fit_rows(x)
    assert plain.start[0].argsort().tolist() == [0, 1, 2, 3, 4, 5]  # numbers keep their order
    made = MixedUnits([0, 0, 0], atoms, categories=kinds, unordered=kinds).double()
    made.fit_rows(x)
    order = made.start[0].argsort().tolist()
    assert order in (code.tolist(), code.flip(0).tolist())
    torch.testing.assert_close(made.end[0] - made.start[0], (x[:, 0].long().bincount() + 0.5).double() / 3003)
    codes = torch.arange(6.0).double()
    assert torch.equal(made.values_of(0), codes)
    rows = torch.cat((codes[:, None], x[:6, 1:].nan_to_num(0.0)), 1)
    for u in (0.0, 0.3, 1.0):
        assert torch.equal(made.leave(made.enter(rows, noise=torch.full_like(rows, u)))[:, 0], codes)


def test_the_log_likelihood_is_the_sum_of_its_terms():
    made, x = units(), table()[:50]
    flow = flow_of(7, made)
    torch.manual_seed(1)
    terms = flow.terms(x)
    torch.manual_seed(1)
    torch.testing.assert_close(sum(terms.values()), flow.log_prob(x))
    assert terms["atoms"].std() > 0


def test_independent_columns_are_known_without_training():
    """The likelihood of a category is that of its frequencies; a prior and no couplings reach it."""
    x = table()[:, :1]
    made = MixedUnits([0], [[0, 1, 2, 3]], categories=[True]).double()
    made.fit_rows(x)
    flow, frequency = flow_of(1, made), torch.bincount(x[:, 0].long()) / len(x)
    found = torch.tensor([total(flow, values((k,))) for k in range(4)])
    assert float(frequency @ found.log()) == pytest.approx(float(frequency @ frequency.log()), abs=0.01)


def test_bounded_columns_are_nearly_gaussian():
    x = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)
    rows = torch.stack([x, -torch.log1p(-x)], 1)  # uniform, and exponential
    y, _ = Bounded([2, 1])(rows)
    expected = torch.from_numpy(stats.norm.ppf(x))
    assert (y - expected[:, None]).abs().max() < 0.11


def test_numbers_next_to_a_bound_are_told_apart():
    """Down to the least floats they come back; on a bound, and beyond it, they count as a millionth from it."""
    layer = Bounded([2, 1])
    x = torch.logspace(-29, -7, 100)[:, None].expand(-1, 2)
    y, log_det = layer(x)
    assert bool((y.diff(dim=0) > 0).all())
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-4, atol=0)
    near = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(layer.double()(near)[0].sum(), near)
    torch.testing.assert_close(log_det, slope.log().sum(1).float(), rtol=1e-5, atol=1e-5)
    ends = Bounded([2])(torch.tensor([[-1.0], [0.0], [1e-6], [1 - 2**-24], [1.0], [2.0]]))[0][:, 0]
    assert ends[0] == ends[1] == ends[2]
    assert ends[3] > ends[4] == ends[5] == pytest.approx(-float(ends[2]), rel=0.01)


def test_an_upper_bound_alone_is_refused():
    with pytest.raises(ValueError, match="a lower bound beside every upper bound"):
        MixedUnits([0], [[]], bounds=[(-math.inf, 1.0)])
