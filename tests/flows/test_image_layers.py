"""Parts for images, on images: squeeze, channel mixing, convolutional couplings, and several scales in one flow."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from zoo import convolution, initialised, jacobian, randomised, scales

from nicest.fast import LoweredChain
from nicest.flows import (
    Affine,
    Bijection,
    Chain,
    ChannelMixing,
    ConvNet,
    Coupling,
    Flow,
    Gaussian,
    Squeeze,
    Units,
    channels,
    checkerboard,
)


def rows(shape: tuple[int, int, int], n: int = 3) -> Tensor:
    return torch.randn(n, shape[0] * shape[1] * shape[2], dtype=torch.float64)


def assert_bijection(layer: Bijection, x: Tensor) -> None:
    y, log_det = layer(x)
    assert (layer.inverse(y)[0] - x).abs().max() < 1e-10
    torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobian(layer, x)).logabsdet, rtol=0, atol=1e-9)


def flow_of_images() -> Chain:
    """Three scales of images of 3 x 4 x 4: a checkerboard, then channels, half of which go no further, twice."""
    first = convolution((3, 4, 4), Affine(), checkerboard(4, 4, 3))
    last = scales((12, 1, 1))
    # 12 channels of 2 x 2 pixels, of which 6 go on, to be 24 of one
    squeeze = Squeeze((3, 4, 4))
    return Chain(first, squeeze, scales(squeeze.squeezed, Squeeze((6, 2, 2)), scales((24, 1, 1), last)))


class TestSqueeze:
    @pytest.mark.parametrize(("shape", "by"), [((3, 4, 6), (2, 2)), ((1, 9, 3), (3, 3)), ((2, 3, 4), (1, 2))])
    def test_tiles_become_pixels(self, shape: tuple[int, int, int], by: tuple[int, int]):
        x, layer = rows(shape), Squeeze(shape, by)
        image, found = x[0].reshape(shape), layer(x)[0][0].reshape(layer.squeezed)
        (count, height, width), (n, m) = shape, by
        assert layer.squeezed == (count * n * m, height // n, width // m)
        for c in range(count):
            for i in range(height):
                for j in range(width):
                    tile = (i % n) * m + j % m
                    assert found[tile * count + c, i // n, j // m] == image[c, i, j]

    def test_other_sizes_are_refused(self):
        with pytest.raises(ValueError, match=r"height and width that 2 x 2 divides, got 4 x 7"):
            Squeeze((1, 4, 7))


class TestChannelMixing:
    def test_is_a_convolution_of_one_by_one(self):
        shape = (5, 2, 3)
        layer, x = randomised(ChannelMixing(shape)), rows(shape)
        kernel = layer.mixing.matrix[:, :, None, None]
        expected = functional.conv2d(x.reshape(-1, *shape), kernel, layer.mixing.b).flatten(1)
        torch.testing.assert_close(layer(x)[0], expected, rtol=0, atol=1e-12)
        assert_bijection(layer, x)

    @pytest.mark.parametrize("trained", [False, True])
    def test_fitted_channels_have_mean_0_and_variance_1(self, trained: bool):
        shape = (3, 2, 2)
        layer = ChannelMixing(shape).double()
        if trained:
            randomised(layer)
        x = rows(shape, 500) * 7 + torch.arange(12)
        y = initialised(layer, x)(x)[0].reshape(-1, 3, 4).transpose(0, 1).flatten(1)
        torch.testing.assert_close(y.mean(1), torch.zeros(3).double(), rtol=0, atol=1e-9)
        torch.testing.assert_close(y.std(1, correction=0), torch.ones(3).double(), rtol=0, atol=1e-9)
        assert_bijection(layer, x[:2])


class TestConvNet:
    def test_the_parameters_of_a_component_are_consecutive(self):
        network = ConvNet((1, 2, 3), 4, 5, 8, 1)
        planes = torch.arange(4 * 5 * 2 * 3).reshape(1, 20, 2, 3)
        found = network.at_components(planes).reshape(4, 2, 3, 5)
        for c, i, j, k in itertools.product(range(4), range(2), range(3), range(5)):
            assert found[c, i, j, k] == planes[0, 5 * c + k, i, j]

    def test_starts_at_zero_and_learns(self):
        network = ConvNet((2, 4, 4), 3, 2, 8, 2)
        b = network(torch.randn(5, 32))
        assert torch.equal(b, torch.zeros(5, 2 * 3 * 16))
        assert torch.autograd.grad(b.sum(), network.last.weight)[0].abs().sum() > 0

    def test_reads_near_pixels_by_convolution_and_all_by_their_mean(self):
        network = randomised(ConvNet((1, 16, 16), 1, 2, 4, 1))
        corner = torch.zeros(1, 256, dtype=torch.float64)
        corner[0, 0] = 1.0
        change = (network(corner) - network(torch.zeros_like(corner))).reshape(16, 16, 2).abs().amax(2)
        assert change[0, 0] > 1e3 * change[15, 15] > 0
        torch.nn.init.zeros_(network.blocks[0].pooled.weight)
        change = (network(corner) - network(torch.zeros_like(corner))).reshape(16, 16, 2).abs().amax(2)
        assert change[:4, :4].min() > 0
        assert change[4:].max() == change[:, 4:].max() == 0

    def test_reads_a_checkerboard_as_an_image_of_half_the_width(self):
        i1 = torch.tensor(checkerboard(4, 6, 2).i1).reshape(2, 4, 3)
        for c in range(2):
            for r in range(4):
                assert i1[c, r].tolist() == [24 * c + 6 * r + 2 * k + r % 2 for k in range(3)]

    def test_a_context_moves_it_and_one_of_another_size_is_refused(self):
        part = channels(2, 2, 2)
        layer = randomised(Coupling(part, Affine(), ConvNet((1, 2, 2), 1, 2, 4, 1, context_dim=3)))
        x, context = rows((2, 2, 2)), torch.randn(3, 3, dtype=torch.float64)
        y = layer(x, context)[0]
        assert not torch.equal(y, layer(x, context.flip(0))[0])
        torch.testing.assert_close(layer.inverse(y, context)[0], x)
        for wrong in (None, context[:, :2]):
            with pytest.raises(ValueError, match="expected a context of 3 numbers"):
                layer(x, wrong)


class TestSeveralScales:
    def test_is_a_bijection(self):
        assert_bijection(flow_of_images(), rows((3, 4, 4), 2))

    def test_every_number_depends_on_every_other(self):
        assert (jacobian(flow_of_images(), rows((3, 4, 4), 1)).abs().sum(2) > 0).all()

    def test_inner_couplings_are_fast_and_reduced_in_bfloat16(self):
        layer, x = flow_of_images().float(), rows((3, 4, 4)).float()
        assert LoweredChain(layer, torch.bfloat16).plain_layers == []
        seen: list[torch.dtype] = []
        inner = [module for module in layer.modules() if isinstance(module, ConvNet)]
        for network in inner:
            network.first.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        LoweredChain(layer, torch.bfloat16)(x)
        assert seen == [torch.bfloat16] * len(inner)

    def test_channels_are_fitted_on_all_scales_in_one_pass(self):
        chain = flow_of_images().float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flow = Flow(Units.pixels(48), chain, Gaussian(48))
        mixings = [module for module in chain.modules() if isinstance(module, ChannelMixing)]
        calls: list[int] = []
        for module in chain.modules():
            if isinstance(module, ConvNet):
                module.register_forward_hook(lambda *_: calls.append(1))
        seen: dict[ChannelMixing, Tensor] = {}
        data = torch.randint(0, 256, (200, 48), dtype=torch.uint8)
        flow.initialise(data)
        assert len(calls) == len(mixings) == 3  # all but the last coupling, once
        for layer in mixings:
            layer.register_forward_hook(lambda module, _, out: seen.update({module: out[0]}))
        flow.log_prob(data)
        for layer, y in seen.items():
            each = y.reshape(len(y), -1, layer.pixels).transpose(0, 1).flatten(1)
            assert each.mean(1).abs().max() < 0.1
            assert (each.std(1) - 1).abs().max() < 0.1
