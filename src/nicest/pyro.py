"""Flows in Pyro: a flow as a distribution that `pyro.sample` takes (extra `pyro`)."""

from __future__ import annotations

from nicest.errors import needing
from nicest.flows.density import DensityDistribution

with needing("pyro"):
    from pyro.distributions.torch_distribution import TorchDistributionMixin


class PyroFlow(DensityDistribution, TorchDistributionMixin):
    """A flow in a model or a guide of Pyro, in plates too: what `flow.given(context)` is to torch.

        x = pyro.sample("x", PyroFlow(flow))                # under plates, drawn for each of their places
        y = pyro.sample("y", PyroFlow(flow, c), obs=y)      # of a flow of y given the context c

    The parameters of the flow are learned if `pyro.module("flow", flow)` is called in the model or the guide.
    """
