"""Blocks for images: what they build, what is refused, and a small flow of digits from training to inpainting."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nicest
from nicest.flows import ChannelMixing, ConvNet, Coupling, Squeeze, Within
from nicest.recipes import Recipe, load_recipe
from nicest.recipes.blocks import Block, layer_of, network_of
from nicest.recipes.build import build
from nicest.recipes.recipe import ModelSettings
from nicest.tasks.certify import certify
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import spectrum
from nicest.train.fit import train

Refusal = Callable[..., str]
SMALL = network_of("conv", blocks=1, width=4)
SQUEEZE, FACTOR_OUT = layer_of("squeeze"), layer_of("factor-out")


def coupling(partition: str = "channels", repeat: int = 2, network: Block = SMALL) -> Block:
    options = {"repeat": repeat, "partition": partition, "network": network, "mixing": True}
    return layer_of("coupling", law=Block("affine-spline"), **options)


def listed(*layers: Block, shape: tuple[int, ...] = (4, 4)) -> Recipe:
    recipe = Recipe(model=ModelSettings(blocks=layers, learned_prior=True))
    return replace(recipe, data=replace(recipe.data, shape=shape, levels=256))


class TestBuilt:
    def test_scales_are_nested_and_each_chain_counts_its_layers(self):
        flow = build(listed(coupling("checkerboard"), SQUEEZE, coupling(), FACTOR_OUT, coupling(repeat=1)))
        names = "mixing coupling1 mixing2 coupling2 squeeze mixing3 coupling3 mixing4 coupling4 rest"
        assert " ".join(flow.bijection.layers) == names
        rest = flow.bijection.layers["rest"]
        assert isinstance(rest, Within)
        assert list(rest.inner.layers) == ["mixing", "coupling1"]
        assert "rest_coupling1" in flow.terms(torch.zeros(2, 16, dtype=torch.uint8))

    def test_shapes_follow_the_blocks(self):
        flow = build(listed(SQUEEZE, coupling(), FACTOR_OUT, coupling(), shape=(3, 4, 6)))
        squeeze, *_ = flow.bijection
        assert isinstance(squeeze, Squeeze)
        assert squeeze.squeezed == (12, 2, 3)
        networks = [m for m in flow.modules() if isinstance(m, ConvNet)]
        assert [m.inputs for m in networks] == [(6, 2, 3)] * 2 + [(3, 2, 3)] * 2
        assert [m.pixels for m in flow.modules() if isinstance(m, ChannelMixing)] == [6] * 4

    def test_an_odd_number_of_channels_is_split_and_factored_out(self):
        flow = build(listed(coupling(repeat=3), FACTOR_OUT, coupling(repeat=1), shape=(3, 2, 2)))
        parts = [m.partition for m in flow.modules() if isinstance(m, Coupling)]
        assert [(len(p.i1), len(p.i2)) for p in parts] == [(8, 4), (4, 8), (8, 4), (4, 4)]

    @pytest.mark.parametrize(
        ("shape", "blocks"),
        [
            ((2, 2), (SQUEEZE, coupling(repeat=3))),
            ((1, 2), (coupling("checkerboard", 3),)),
            ((2, 1, 1), (coupling(repeat=3),)),
            ((3, 9, 3), (layer_of("squeeze", by=3), coupling(repeat=3), FACTOR_OUT, coupling())),
            ((4, 14), (SQUEEZE, coupling(repeat=3))),
        ],
    )
    def test_small_odd_and_oblong_images(self, shape: tuple[int, ...], blocks: tuple[Block, ...]):
        flow = build(listed(*blocks, shape=shape))
        rows = torch.randint(0, 256, (20, flow.dim), dtype=torch.uint8)
        flow.initialise(rows)
        assert flow.log_prob(rows).isfinite().all()
        y = flow.units.enter(rows)
        torch.testing.assert_close(flow.bijection.inverse(flow.bijection(y)[0])[0], y, rtol=0, atol=1e-5)


class TestRefused:
    """Each in one line."""

    @pytest.mark.parametrize(
        ("shape", "blocks", "words"),
        [
            ((5, 5), (SQUEEZE,), "block 1: squeeze: expected a height and width that 2 x 2 divides, got 5 x 5"),
            ((3, 7, 4), (SQUEEZE,), "got 7 x 4: crop or resize the images, set by to a number that divides"),
            ((4, 4), (SQUEEZE, SQUEEZE, SQUEEZE), "block 3: squeeze: expected a height"),
            ((1, 1), (SQUEEZE,), "got 1 x 1"),
            ((16,), (SQUEEZE,), "block 1: squeeze is for images, (H, W) or (C, H, W); these examples are (16,)"),
            ((16,), (coupling(),), "block 1: partition channels is for images"),
            ((16,), (FACTOR_OUT,), "block 1: factor-out is for images"),
            ((4, 4), (FACTOR_OUT,), "block 1: factor-out takes half of the channels, got 1: squeeze first"),
            ((4, 4), (coupling(),), "block 1: one channel cannot be split: squeeze first, or use a checkerboard"),
            ((4, 5), (coupling("checkerboard"),), "network conv takes images of even width; got 4 x 5"),
            ((4, 4), (coupling("odd-even"),), "network conv takes partition channels or checkerboard; got odd-even"),
            ((4, 4), (coupling("halves"),), "network conv takes partition channels or checkerboard; got halves"),
            ((1, 1), (coupling("checkerboard"),), "a coupling needs two parts"),
        ],
    )
    def test_images_that_do_not_fit(
        self, refusal: Refusal, shape: tuple[int, ...], blocks: tuple[Block, ...], words: str
    ):
        assert words in refusal(build, listed(*blocks, shape=shape))

    def test_pictures_of_odd_size_until_they_are_cropped(self, refusal: Refusal, tmp_path: Path):
        rng = np.random.default_rng(0)
        (tmp_path / "pictures").mkdir()
        for k in range(12):
            Image.fromarray(rng.integers(0, 256, (9, 11), np.uint8)).save(tmp_path / "pictures" / f"{k}.png")
        recipe = load_recipe("digits-conv").override(
            f"data.name={tmp_path / 'pictures'}", "train.epochs=1", "train.batch=4"
        )
        message = refusal(train, recipe, tmp_path / "run", device="cpu", callbacks=())
        assert "network conv takes images of even width; got 9 x 11" in message
        train(recipe, tmp_path / "run", overrides=("data.crop=[8,8]",), device="cpu", callbacks=())
        assert nicest.open(tmp_path / "run").recipe.data.shape == (8, 8)


def test_digits_from_training_to_inpainting(tmp_path: Path):
    """A small flow gets more nats in two epochs than the dense recipe in 300 (72.04 on the test set)."""
    network = network_of("conv", blocks=1, width=24)
    couplings = [coupling(partition, network=network) for partition in ("checkerboard", "channels", "channels")]
    scales = (couplings[0], SQUEEZE, couplings[1], FACTOR_OUT, SQUEEZE, couplings[2])
    recipe = load_recipe("digits-conv")
    recipe = replace(recipe, model=recipe.model.changed({"blocks": (layer_of("logit"), *scales)}))
    settings = ("epochs=2", "batch=50", "lr=1e-2", "warmup=20", "ema=0.9")
    out = tmp_path / "run"
    train(recipe, out, overrides=tuple(f"train.{each}" for each in settings), device="cpu", callbacks=())
    run = nicest.open(out)
    assert run.nats(run.rows("test")).mean() > 80
    samples = run.engine.sample(50)
    assert samples.shape == (50, 64)
    assert 2 < samples.mean() < 8  # the digits have 4.9

    certificate = certify(run, n=20, jacobians=2)
    float64, float32 = certificate.max_roundtrip[:2]
    assert float64 < 1e-10
    assert float32 < 1e-4
    assert certificate.mean_roundtrip[1] < 1e-4 / 17  # of the width of a level
    assert certificate.max_logdet_error[0] < 1e-7

    (filled,) = inpaint(run, n=4, mask="left", steps=60, out=tmp_path / "fill.png").masks
    assert filled["mean_gain_nats"] > 0
    assert (tmp_path / "fill.png").exists()
    assert len(spectrum(run, out=tmp_path / "spectrum.png").sigma) == 64
