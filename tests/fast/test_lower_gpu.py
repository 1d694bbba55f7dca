"""On a GPU: the zoo in its fast form, the kernels against torch, and captured graphs."""

import subprocess
import sys
import time

import pytest
import torch
from parity import assert_close_in_bfloat16, assert_parity, gradients
from scipy import stats
from torch.testing import assert_close
from zoo import PARTITIONS, ZOO, coupling, couplings, inputs, scaling

from nicest.fast import LoweredChain, capture, lower
from nicest.fast.lower import FastCoupling
from nicest.flows import MLP, Additive, Chain, Coupling, Flow, Logistic, Units, halves, odd_even

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
DEVICE = torch.device("cuda")
BURN = """
import torch
x = torch.randn(4096, 4096, device="cuda")
while True:
    x = (x @ x).tanh_()
    x.sum().item()
"""

whole_zoo = pytest.mark.parametrize("name", ZOO)
regular = pytest.mark.parametrize("partition", ["odd_even", "odd_even-swapped", "halves", "halves-swapped"])


class TestZoo:
    @whole_zoo
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_agrees_to_rounding(self, name: str, dtype: torch.dtype):
        for dim in (3, 6, 17):
            assert_parity(ZOO[name](dim).to(DEVICE, dtype), inputs(name, 7, dim).to(DEVICE, dtype))

    @whole_zoo
    def test_agrees_in_bfloat16_within_its_precision(self, name: str):
        for dim in (3, 6):
            assert_close_in_bfloat16(ZOO[name](dim).to(DEVICE).float(), inputs(name, 20, dim).to(DEVICE).float())


class TestKernels:
    @regular
    @pytest.mark.parametrize("dim", [2, 6, 7, 64])
    @pytest.mark.parametrize("batch", [1, 33, 500])
    def test_a_coupling_at_once_is_the_coupling_in_parts(
        self, partition: str, dim: int, batch: int, monkeypatch: pytest.MonkeyPatch
    ):
        layer = coupling(PARTITIONS[partition](dim), Additive()).to(DEVICE).float()
        x, fast = torch.randn(batch, dim, device=DEVICE), LoweredChain(layer, torch.bfloat16)
        if not layer.partition.regular:
            pytest.skip("no kernel for this partition")
        (_, part) = fast.fast[0]
        assert part.at_once(x, None)
        found = (*fast(x), fast.inverse(x)[0], *gradients(fast, layer, x))
        monkeypatch.setattr(FastCoupling, "at_once", lambda *_: False)
        expected = (*fast(x), fast.inverse(x)[0], *gradients(fast, layer, x))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=2e-2, atol=1e-4 * batch)
        assert_close(found[0], expected[0], rtol=0, atol=2**-17)

    def test_rows_that_are_not_contiguous(self):
        layer = couplings(6, Additive(), 4).to(DEVICE).float()
        fast, wide = LoweredChain(layer, torch.bfloat16), torch.randn(40, 12, device=DEVICE)
        for x in (wide[:, ::2], wide[:, :6], wide.T[:6].T, wide[::2, 3:9]):
            assert_close(fast(x), fast(x.contiguous()), rtol=0, atol=0)
            assert_close(fast.inverse(x)[0], fast.inverse(x.contiguous())[0], rtol=0, atol=0)

    def test_a_stack_in_bfloat16_inverts_like_float32(self):
        part, layers = odd_even(64), []
        for _ in range(6):
            layers.append(Coupling(part, Additive(), MLP(32, 32, (64, 64))))
            part = part.swap()
        fast, x = LoweredChain(Chain(*layers).to(DEVICE), torch.bfloat16), torch.randn(2000, 64, device=DEVICE)
        with torch.no_grad():
            y = fast(x)[0]
            assert (fast.inverse(y)[0] - x).abs().max() < 2**-17
            assert torch.equal(fast(fast.inverse(y)[0])[0], y)

    @pytest.mark.parametrize("hidden", [(5,), (24, 24), (600, 600, 600), (40, 7)])
    def test_copies_of_the_weights_compute_what_the_weights_do(self, hidden: tuple[int, ...]):
        part = halves(6)
        layers = [Coupling(p, Additive(), MLP(3, 3, hidden)) for p in (part, part.swap(), part)]
        chain, x = Chain(*layers).to(DEVICE), torch.randn(50, 6, device=DEVICE)
        fast = LoweredChain(chain, torch.bfloat16)
        with torch.no_grad():
            expected = fast(x)[0]
            fast.copy_weights()
            assert_close(fast(x)[0], expected, rtol=0, atol=0.02)


class TestGraphs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_replay_computes_what_the_lowered_flow_does(self, dtype: torch.dtype):
        chain = Chain(couplings(6, Additive(), 4), scaling(6)).float()
        flow = Flow(Units.continuous(6, standardise=False), chain, Logistic(6)).to(DEVICE)
        fast, x = lower(flow, dtype), torch.randn(32, 6, device=DEVICE)
        with torch.no_grad():
            graph, output = capture(lambda: fast.log_prob(x), DEVICE)
            for _ in range(3):
                x.copy_(torch.randn(32, 6))
                graph.replay()
                assert_close(output, fast.log_prob(x))

    def test_gradients_are_captured_too(self):
        chain = couplings(6, Additive(), 4).to(DEVICE).float()
        fast, x = LoweredChain(chain, torch.bfloat16), torch.randn(32, 6, device=DEVICE)
        graph, output = capture(lambda: gradients(fast, chain, x), DEVICE)
        x.copy_(torch.randn(32, 6))
        graph.replay()
        for found, expected in zip(output, gradients(fast, chain, x), strict=True):
            assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_every_replay_draws_anew_and_a_generator_makes_it_reproducible(self):
        units = lower(
            Flow(Units.pixels(6, 17), Chain(couplings(6, Additive(), 3).float()), Logistic(6)).to(DEVICE)
        ).units
        x, generator = torch.randint(17, (50, 6), device=DEVICE), torch.Generator(DEVICE)
        graph, output = capture(lambda: units.enter(x, generator=generator), DEVICE, generator=generator)
        found = []
        for seed in (1, 1, 2):
            generator.manual_seed(seed)
            graph.replay()
            found.append(output.clone())
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        graph.replay()
        assert not torch.equal(output, found[2])

    def test_the_first_replay_has_its_seed_on_a_busy_gpu(self):
        """Other programs delay what was written before a capture; it must not come after what the replay writes."""
        others = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2)]
        try:
            time.sleep(15)  # until they are busy
            for _ in range(50):
                generator = torch.Generator(DEVICE)
                graph, output = capture(
                    lambda: torch.rand(50, 6, device=DEVICE, generator=generator),  # noqa: B023
                    DEVICE,
                    generator=generator,
                )
                generator.manual_seed(1)
                graph.replay()
                first = output.clone()
                generator.manual_seed(1)
                graph.replay()
                assert torch.equal(first, output)
        finally:
            for each in others:
                each.kill()
                each.wait()


class TestUnits:
    @pytest.mark.parametrize("levels", [2, 17, 256, 65536])
    @pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0), (-0.3, 2.7)], ids=str)
    @pytest.mark.parametrize("given", [torch.uint8, torch.int64, torch.float32])
    def test_whole_levels_come_back(self, levels: int, interval: tuple[float, float], given: torch.dtype):
        if levels > torch.iinfo(torch.uint8).max + 1 and given == torch.uint8:
            pytest.skip("more levels than this dtype has")
        plain = Units.pixels(levels, levels, interval).to(DEVICE)
        fast = lower(Flow(plain, Chain(), Logistic(levels)).to(DEVICE)).units
        x = torch.arange(levels, device=DEVICE).to(given)[None].expand(20, -1)
        y = fast.enter(x)
        assert torch.equal(fast.leave(y), x.float())
        assert torch.equal(plain.leave(y), x.float())

    def test_extreme_noise_stays_in_its_level(self, monkeypatch: pytest.MonkeyPatch):
        fast = lower(Flow(Units.pixels(256, 256, (-1.0, 1.0)), Chain(), Logistic(256)).to(DEVICE)).units
        x = torch.arange(256, device=DEVICE)[None]
        for u in (0.0, 1 - 2**-24):
            noise = torch.full((1, 256), u, device=DEVICE)
            monkeypatch.setattr(torch, "rand", lambda *_, noise=noise, **__: noise)
            assert torch.equal(fast.leave(fast.enter(x)), x.float())

    def test_the_noise_has_the_distribution_of_the_plain_units(self):
        plain = Units.pixels(30, 256, (-1.0, 1.0)).to(DEVICE)
        fast = lower(Flow(plain, Chain(), Logistic(30)).to(DEVICE)).units
        x = torch.randint(256, (2000, 30), device=DEVICE)
        u, expected = (((each.enter(x) + 1) * 128 - x).flatten().double().cpu() for each in (fast, plain))
        assert stats.ks_2samp(u.numpy(), expected.numpy()).pvalue > 0.01
        assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
