"""From a recipe to a flow: [Dequantize, interval, whitening, couplings ..., DiagonalScaling] under a prior."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import (
    MLP,
    ZCA,
    Additive,
    Affine,
    Bijection,
    Chain,
    Coupling,
    Dequantize,
    DequantizeColumns,
    DiagonalScaling,
    Flow,
    Gaussian,
    Law,
    Logistic,
    Logit,
    Multiplicative,
    Partition,
    Rescale,
    TriangularAffine,
    checkerboard,
    halves,
    odd_even,
)
from nicest.recipes.recipe import DataSettings, ModelSettings, Recipe


def build(recipe: Recipe, steps: Sequence[float] = ()) -> Flow:
    """The flow of a recipe whose data.shape and data.levels are known, untrained; whitening is still the identity.

    `steps` are of the columns of a table, where some hold whole steps (data.discrete).
    """
    dim, settings = recipe.data.dim, recipe.model
    if settings.preprocess == "logit" and not recipe.data.levels:
        raise NicestError("preprocess = logit is for pixels in [0, 1]; this data is continuous")
    layers = input_layers(recipe.data, steps) | _preprocessing(settings, dim)
    partition = _partition(settings, recipe.data.shape)
    for k in range(settings.couplings):
        layers[f"coupling{k + 1}"] = _coupling(settings, partition, k)
        partition = partition.swap()
    layers["scaling"] = DiagonalScaling(dim)
    prior = {"logistic": Logistic, "gaussian": Gaussian}[settings.prior]
    return Flow(Chain(layers), prior(dim, learned=settings.learned_prior))


def needs_moments(flow: Flow) -> bool:
    """Whether `fit_constants` has anything to fit."""
    return any(name == "standardise" or isinstance(x, ZCA | TriangularAffine) for name, x in flow.chain.layers.items())


@torch.no_grad()
def fit_constants(flow: Flow, mean: Tensor, covariance: Tensor) -> None:
    """Fit what is fitted in closed form, to the moments of the training rows: standardisation and whitening.

    The moments are carried, in float64, through the layers before the whitening. Dequantisation noise enters them
    exactly, as its mean 1/2 and variance 1/12 of a level. DIFFERS: the paper whitens one draw of noisy data; the
    expectation has no draw to overfit, which is worth 6 nats to a full Gaussian on CIFAR-10.
    """
    for name, layer in flow.chain.layers.items():
        if isinstance(layer, Dequantize):
            mean = (mean + 0.5) / layer.levels
            covariance = (covariance + torch.eye(len(mean)).to(covariance) / 12) / layer.levels**2
        elif isinstance(layer, DequantizeColumns):
            step = layer.step.to(mean)
            mean, covariance = mean + step / 2, covariance + torch.diag(step**2 / 12)
        elif isinstance(layer, Rescale):
            if name == "standardise":
                layer.scale.copy_(covariance.diagonal().rsqrt())
                layer.shift.copy_(-mean * covariance.diagonal().rsqrt())
            shift, scale = layer.shift.to(mean), layer.scale.to(mean)
            mean, covariance = shift + scale * mean, scale[:, None] * covariance * scale
        elif isinstance(layer, ZCA | TriangularAffine):
            try:
                layer.fit_moments(mean, covariance)
            except ValueError as error:
                raise NicestError(str(error)) from error
        else:
            return


def input_layers(data: DataSettings, steps: Sequence[float] = ()) -> dict[str, Bijection]:
    """From the data as it is stored to real numbers of a sensible size."""
    if not data.levels:
        step = torch.tensor(steps or (0.0,) * data.dim, dtype=torch.get_default_dtype())
        columns: dict[str, Bijection] = {"columns": DequantizeColumns(step)} if data.discrete else {}
        return columns | {"standardise": Rescale(0.0, 1.0, data.dim)}
    low, high = data.interval
    layers: dict[str, Bijection] = {"dequantise": Dequantize(data.levels)}
    if (low, high) != (0.0, 1.0):
        layers["interval"] = Rescale(low, high - low, data.dim)
    return layers


def _preprocessing(settings: ModelSettings, dim: int) -> dict[str, Bijection]:
    if settings.preprocess == "zca":
        return {"zca": ZCA(dim)}
    if settings.preprocess == "triangular":
        # fitted in closed form, then held: App. B learns the whitening before NICE, not with it
        return {"whitening": TriangularAffine(dim).requires_grad_(False)}
    if settings.preprocess == "logit":
        return {"logit": Logit()}
    return {}


def _partition(settings: ModelSettings, shape: tuple[int, ...]) -> Partition:
    dim = math.prod(shape)
    if settings.partition == "halves":
        return halves(dim)
    if settings.partition == "checkerboard":
        if len(shape) not in (2, 3):
            raise NicestError(f"a checkerboard is for images, (H, W) or (C, H, W); these examples are {shape}")
        *channels, height, width = shape
        return checkerboard(height, width, *channels)
    return odd_even(dim)


def _coupling(settings: ModelSettings, partition: Partition, k: int) -> Coupling:
    laws: dict[str, Law] = {
        "additive": Additive(),
        "multiplicative": Multiplicative(settings.bound),
        "affine": Affine(settings.bound),
    }
    law = laws[settings.law]
    depth = settings.hidden_layers[k if len(settings.hidden_layers) > 1 else 0]
    network = MLP(
        len(partition.i1),
        law.size * len(partition.i2),
        (settings.width,) * depth,
        dropout=settings.dropout,
        initialisation=settings.initialisation,
    )
    return Coupling(partition, law, network)
