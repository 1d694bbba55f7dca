"""Files that earlier versions compressed still decompress, and compressing the same input gives the same bytes.

If one of these fails, files of users have become unreadable: the SHA-256 of a flow covers the class names, settings and
parameter names of its modules.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import nicest
from nicest.codec.files import compress, decompress
from nicest.data import load
from nicest.flows import (
    LAWS,
    MLP,
    AffineSpline,
    Chain,
    ChannelMixing,
    ConvNet,
    Coupling,
    DiagonalScaling,
    Elementwise,
    Flow,
    Gaussian,
    Logit,
    Mixing,
    Partition,
    SinhArcsinh,
    Spline,
    Squeeze,
    TriangularAffine,
    Units,
    Within,
    channels,
    odd_even,
)
from nicest.runs.formats import parameter_orders

pytest.importorskip("constriction", reason="compression needs constriction: install nicest[codec]")
FILES = Path(__file__).parent / "files"


def every_layer() -> Flow:
    """Every layer and law that can compress, with weights that are the same on every machine."""
    couplings = [
        Coupling(odd_even(16), law(), MLP(8, 8 * law().size, (4,))) for law in LAWS.values() if law is not AffineSpline
    ]
    law = AffineSpline(bins=4)
    inner = Chain(Mixing(8), TriangularAffine(8), SinhArcsinh(8), Elementwise(Spline(bins=4), 8))
    chain = Chain(
        Logit(),
        *couplings,
        Squeeze((1, 4, 4)),
        ChannelMixing((4, 2, 2)),
        Coupling(channels(4, 2, 2), law, ConvNet((2, 2, 2), 2, law.size, width=4, blocks=1)),
        Within(Partition(range(8), 16), inner),
        DiagonalScaling(16),
    )
    flow = Flow(Units.pixels(16, 17), chain, Gaussian(16, learned=True)).double().eval()
    with torch.no_grad():
        for n, parameter in enumerate(flow.parameters()):
            numbers = (37 * torch.arange(parameter.numel()) + n) % 17 - 8
            parameter.copy_(numbers.view(parameter.shape).double() / 251)
        for name, order in parameter_orders(flow):  # the numbers above are in the order of format 2
            parameter = flow.get_parameter(name)
            parameter.copy_(parameter[order])
        for mixing in (module for module in flow.modules() if isinstance(module, Mixing)):
            mixing.order.copy_(torch.arange(len(mixing.order)).flip(0))
    return flow


def levels() -> np.ndarray:
    return (np.arange(30 * 16).reshape(30, 4, 4) * 7 % 17).astype(np.uint8)


def test_every_layer():
    data = (FILES / "every-layer.nicest").read_bytes()
    assert np.array_equal(nicest.decompress(every_layer(), data), levels())
    assert nicest.compress(every_layer(), levels(), block=20) == data


def test_images(tmp_path: Path):
    """Twenty digits by a convolutional model with affine splines."""
    images, packed = tmp_path / "digits.npy", FILES / "digits.nicest"
    np.save(images, load("digits").test[:20].reshape(-1, 8, 8))
    decompress(packed, out=tmp_path / "back.npy")
    assert (tmp_path / "back.npy").read_bytes() == images.read_bytes()
    compress(nicest.open("digits-conv"), [images], out=tmp_path / "again.nicest")
    assert (tmp_path / "again.nicest").read_bytes() == packed.read_bytes()
