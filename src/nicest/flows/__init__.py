"""Coupling flows from parts: tensors in, tensors out."""

from nicest.flows.bijection import Bijection
from nicest.flows.chain import Chain
from nicest.flows.coupling import Coupling, Partition, channels, checkerboard, halves, odd_even
from nicest.flows.density import Density
from nicest.flows.features import Features
from nicest.flows.flow import Flow
from nicest.flows.images import ChannelMixing, ConvNet, Squeeze
from nicest.flows.laws import LAWS, Additive, Affine, AffineSpline, Law, Multiplicative, Spline
from nicest.flows.linear import ZCA, DiagonalScaling, Mixing, TriangularAffine, moments
from nicest.flows.marginals import Bounded, Elementwise, Logit, SinhArcsinh
from nicest.flows.mixture import Mixture, members
from nicest.flows.networks import MLP, OneHot, ResidualMLP
from nicest.flows.presets import glow, nice, spline
from nicest.flows.priors import Gaussian, Logistic, Prior
from nicest.flows.units import Units, bits_per_dim
from nicest.flows.vae import VAE, Standardise
from nicest.flows.within import AtContext, Within

__all__ = [
    "LAWS", "MLP", "VAE", "ZCA", "Additive", "Affine", "AffineSpline", "AtContext", "Bijection", "Bounded", "Chain",
    "ChannelMixing", "ConvNet", "Coupling", "Density", "DiagonalScaling", "Elementwise", "Features", "Flow", "Gaussian",
    "Law", "Logistic", "Logit", "Mixing", "Mixture", "Multiplicative", "OneHot", "Partition", "Prior", "ResidualMLP",
    "SinhArcsinh", "Spline", "Squeeze", "Standardise", "TriangularAffine", "Units", "Within", "bits_per_dim",
    "channels", "checkerboard", "glow", "halves", "members", "moments", "nice", "odd_even", "spline",
]  # fmt: skip
