"""Coupling flows from parts: tensors in, tensors out."""

from nicest.flows.bijection import Bijection, Chain
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
from nicest.flows.networks import MLP
from nicest.flows.pixels import Dequantize, Logit, Rescale
from nicest.flows.priors import Gaussian, Logistic, Prior

__all__ = [
    "MLP",
    "ZCA",
    "Additive",
    "Affine",
    "Bijection",
    "Chain",
    "Coupling",
    "Dequantize",
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
    "TriangularAffine",
    "checkerboard",
    "halves",
    "moments",
    "odd_even",
]
