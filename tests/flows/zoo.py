"""Every bijection and its variations, name -> constructor of dimension D, in float64 with random parameters.

One new line in `ZOO` tests a new layer, in `test_bijections.py` and, in its fast form, in `tests/fast`. A name that
starts with "logit" gets its inputs from (0, 1), all others from R^D.
"""

import math
import random
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from nicest import flows
from nicest.flows import (
    MLP,
    ZCA,
    Additive,
    Affine,
    AffineSpline,
    AtContext,
    Bijection,
    Bounded,
    Chain,
    ChannelMixing,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Law,
    Logit,
    Mixing,
    Multiplicative,
    Partition,
    ResidualMLP,
    SinhArcsinh,
    Spline,
    Squeeze,
    Standardise,
    TriangularAffine,
    Within,
    channels,
    checkerboard,
    halves,
    odd_even,
)

DIMS = (2, 3, 6, 17)

Module = TypeVar("Module", bound=nn.Module)
Layer = TypeVar("Layer", bound=Bijection)


def irregular(dim: int) -> Partition:
    """A random index set, without a stride from D = 5 on."""
    return Partition(random.Random(dim + 1).sample(range(dim), (dim + 1) // 2), dim)


def board(dim: int) -> Partition:
    """The checkerboard of the squarest image of D pixels."""
    height = max(h for h in range(1, math.isqrt(dim) + 1) if dim % h == 0)
    return checkerboard(height, dim // height)


LAWS: dict[str, Law] = {name: kind() for name, kind in flows.LAWS.items()}
PARTITIONS: dict[str, Callable[[int], Partition]] = {
    "odd_even": odd_even,
    "odd_even-swapped": lambda dim: odd_even(dim).swap(),
    "halves": halves,
    "halves-swapped": lambda dim: halves(dim).swap(),
    "irregular": irregular,
    "checkerboard": board,
}


def randomised(module: Module, std: float = 0.3) -> Module:
    """The module in float64, every parameter drawn from N(0, std²)."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=std)
    return module


def initialised(layer: Layer, rows: Tensor) -> Layer:
    """Return the layer after its data-dependent start."""
    layer.initialise(rows)
    return layer


def coupling(partition: Partition, law: Law, context_dim: int = 0) -> Coupling:
    """A coupling layer with a random rectified network; a spline, of logits, takes smaller numbers than a shift."""
    network = MLP(len(partition.i1), law.size * len(partition.i2), (16, 16), context_dim=context_dim)
    return randomised(Coupling(partition, law, network), std=0.15 if isinstance(law, Spline | AffineSpline) else 0.3)


def residual(dim: int) -> Coupling:
    """An affine coupling layer with a random residual network."""
    partition = odd_even(dim)
    network = ResidualMLP(len(partition.i1), 2 * len(partition.i2), 16, dropout=0.1)
    return randomised(Coupling(partition, Affine(), network)).eval()


def image(dim: int) -> tuple[int, int, int]:
    """An image of D numbers: of two pixels, if these leave two channels, else of one."""
    return (dim // 2, 1, 2) if dim % 2 == 0 and dim > 2 else (dim, 1, 1)


def convolution(shape: tuple[int, int, int], law: Law, partition: Partition | None = None) -> Coupling:
    """A coupling layer with a random convolutional network, by channels unless told otherwise."""
    part = partition or channels(*shape)
    height, width = shape[1], shape[2] // (1 if partition is None else 2)
    read, changed = (len(each) // (height * width) for each in (part.i1, part.i2))
    network = ConvNet((read, height, width), changed, law.size, 8, 1, dropout=0.1)
    return randomised(Coupling(part, law, network), std=0.15).eval()


def scales(shape: tuple[int, int, int], *inner: Bijection) -> Chain:
    """A step of a multi-scale flow, half of whose channels go no further than this step."""
    count, height, width = shape
    steps = randomised(ChannelMixing(shape), std=0.15), convolution(shape, Affine())
    if count < 2 or not inner:
        return Chain(*steps)
    return Chain(*steps, Within(Partition(range(count // 2 * height * width), math.prod(shape)), Chain(*inner)))


def multi_scale(dim: int) -> Chain:
    shape = image(dim)
    rest = ((shape[0] + 1) // 2, *shape[1:])
    return scales(shape, scales(rest) if rest[0] > 1 else scaling(math.prod(rest)))


def couplings(dim: int, law: Law, n: int, partition: Callable[[int], Partition] = odd_even, **options: int) -> Chain:
    """n coupling layers that exchange the roles of I1 and I2."""
    first = partition(dim)
    return Chain(*(coupling(first if k % 2 == 0 else first.swap(), law, **options) for k in range(n)))


def correlated(n: int, dim: int) -> Tensor:
    """n rows of correlated data, off centre."""
    mixing = torch.eye(dim) + torch.randn(dim, dim) / (2 * math.sqrt(dim))
    return torch.randn(n, dim, dtype=torch.float64) @ mixing.double() + torch.arange(dim)


def scaling(dim: int) -> DiagonalScaling:
    return randomised(DiagonalScaling(dim))


def sinh_arcsinh(dim: int) -> SinhArcsinh:
    layer = SinhArcsinh(dim).double()
    for buffer in layer.buffers():
        nn.init.normal_(buffer, std=0.3)
    return layer


def everything(dim: int) -> Chain:
    """All linear layers and all laws in one chain."""
    linear = [ZOO[name](dim) for name in ("zca", "triangular-fitted", "triangular", "diagonal-scaling")]
    return Chain(*linear, *(coupling(irregular(dim), law) for law in LAWS.values()))


def conditional(dim: int) -> Within:
    """Couplings of the second half whose context is a network of the first; scaling alone where they have no room."""
    if dim < 4:
        return Within(halves(dim), scaling(dim // 2))
    network = randomised(MLP((dim + 1) // 2, 3, (8,)))
    return Within(halves(dim), couplings(dim // 2, Affine(), 2, context_dim=3), network)


def conditional_law(dim: int) -> Within:
    """A law of the second half whose parameters are a network of the first."""
    part = halves(dim)
    conditioner = MLP(len(part.i1), len(part.i2) * Affine().size, (8,))
    return Within(part, randomised(Elementwise(Affine(), len(part.i2), conditioner)), nn.Identity())


def at_context(dim: int) -> AtContext:
    """Couplings at a fixed context of two numbers."""
    return AtContext(couplings(dim, Affine(), 2, context_dim=2), torch.tensor([[0.7, -0.2]], dtype=torch.float64))


ZOO: dict[str, Callable[[int], Bijection]] = {
    **{
        f"{law}-{partition}": lambda dim, law=law, partition=partition: coupling(PARTITIONS[partition](dim), LAWS[law])
        for law in LAWS
        for partition in PARTITIONS
    },
    "multiplicative-bound": lambda dim: coupling(halves(dim), Multiplicative(bound=0.5)),
    "affine-bound": lambda dim: coupling(halves(dim), Affine(bound=5.0)),
    "spline-bins": lambda dim: coupling(halves(dim), Spline(bins=3, bound=1.5)),
    "residual": residual,
    "squeeze": lambda dim: Squeeze((1, 2, 3), (1, 3)) if dim == 6 else Squeeze((dim, 1, 1), (1, 1)),
    "channel-mixing": lambda dim: randomised(ChannelMixing(image(dim))),
    "convolution": lambda dim: convolution(image(dim), Affine()),
    "convolution-spline": lambda dim: convolution(image(dim), AffineSpline()),
    "multi-scale": multi_scale,
    "elementwise": lambda dim: randomised(Elementwise(Spline(bins=16), dim)),
    "elementwise-conditioner": conditional_law,
    "mixing": lambda dim: randomised(Mixing(dim)),
    "diagonal-scaling": scaling,
    "triangular": lambda dim: randomised(TriangularAffine(dim)),
    "triangular-fitted": lambda dim: initialised(TriangularAffine(dim).double(), correlated(20 * dim, dim)),
    "zca": lambda dim: initialised(ZCA(dim).double(), correlated(20 * dim, dim)),
    "sinh-arcsinh": sinh_arcsinh,
    "sinh-arcsinh-fitted": lambda dim: initialised(SinhArcsinh(dim).double(), correlated(20 * dim, dim)),
    "logit": lambda dim: Logit(),
    "logit-margin": lambda dim: Logit(margin=0.05),
    "logit-bounded": lambda dim: Bounded([(2, 1, 0)[d % 3] for d in range(dim)]),
    "logit-chain": lambda dim: Chain(Logit(0.01), coupling(halves(dim), Affine(bound=0.5)), scaling(dim)),
    "standardise": lambda dim: coupling(halves(dim), Standardise()),
    "at-context": at_context,
    "within": lambda dim: Within(irregular(dim), scaling(dim // 2)),
    "within-conditional": conditional,
    "chain-empty": lambda dim: Chain(),
    "chain-nice": lambda dim: Chain(couplings(dim, Additive(), 4), scaling(dim)),
    "chain-affine": lambda dim: couplings(dim, Affine(), 4, irregular),
    "chain-named": lambda dim: Chain({"bottom": coupling(halves(dim), Affine()), "top": scaling(dim)}),
    "chain-nested": lambda dim: Chain(Chain(Chain(coupling(odd_even(dim), Affine())), scaling(dim)), Chain()),
    "chain-everything": everything,
}

FIXED = {"logit-bounded"}  # whose stored numbers are not drawn
ANY_DIM = {"logit", "logit-margin", "chain-empty"}  # these treat every component alike, however many there are


def inputs(name: str, batch: int, dim: int) -> Tensor:
    """Points in the domain of a bijection of the zoo."""
    draw = torch.rand if name.startswith("logit") else torch.randn
    return draw(batch, dim, dtype=torch.float64)


def jacobian(layer: Bijection, x: Tensor, context: Tensor | None = None) -> Tensor:
    """dy/dx at each row of x, (B, D, D), by automatic differentiation of one row at a time."""
    rows = []
    for i, row in enumerate(x):
        given = () if context is None else (context[i : i + 1],)
        rows.append(torch.autograd.functional.jacobian(lambda r, given=given: layer(r[None], *given)[0][0], row))
    return torch.stack(rows)
