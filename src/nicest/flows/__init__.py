"""Coupling flows from parts: tensors in, tensors out."""

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain
from nicest.flows.coupling import (
    Additive,
    Affine,
    Coupling,
    Law,
    Multiplicative,
    Partition,
    checkerboard,
    halves,
    odd_even,
)
from nicest.flows.flow import Flow
from nicest.flows.linear import ZCA, DiagonalScaling, TriangularAffine, moments
from nicest.flows.marginals import SinhArcsinh
from nicest.flows.networks import MLP
from nicest.flows.pixels import Dequantize, DequantizeColumns, Logit, Rescale
from nicest.flows.priors import Gaussian, Logistic, Prior
from nicest.flows.vae import VAE, Standardise, Within

__all__ = [
    "MLP",
    "VAE",
    "ZCA",
    "Additive",
    "Affine",
    "Bijection",
    "Chain",
    "Coupling",
    "Dequantize",
    "DequantizeColumns",
    "DiagonalScaling",
    "Flow",
    "Gaussian",
    "Law",
    "Logistic",
    "Logit",
    "Multiplicative",
    "Partition",
    "Prior",
    "Rescale",
    "SinhArcsinh",
    "Standardise",
    "TriangularAffine",
    "Within",
    "checkerboard",
    "halves",
    "moments",
    "odd_even",
]
