"""Simulators with known posteriors: five tasks of Lueckmann et al. (2021), "Benchmarking simulation-based inference".

The package sbibm has files with their observations, and with draws from the posteriors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, tensor
from torch.distributions import Distribution, Independent, LogNormal, MultivariateNormal, Uniform

from nicest.errors import NicestError

Generator = np.random.Generator
OBSERVATIONS = range(1, 11)
PEOPLE, TESTED = 1e6, 1000  # of the epidemic: population, and tests per day
DAYS, STEPS = range(0, 160, 17), 20  # days of the tests; solver steps per day


class Task(NamedTuple):
    """A simulator, from parameters (N, P) to data (N, C), and the prior of its parameters."""

    name: str
    prior: Callable[[], Distribution]
    simulate: Callable[[np.ndarray, Generator], np.ndarray]

    def draw(self, n: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw n parameters from the prior, and simulate their data."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(1 << 31)))
            theta = self.prior().sample(torch.Size((n,))).double().numpy()
        return theta, self.simulate(theta, rng)

    def outside(self, theta: Tensor) -> Tensor:
        """Return which parameters lie outside of the support of the prior, (N,)."""
        return ~self.prior().support.check(theta)  # type: ignore[union-attr]

    def observation(self, i: int) -> np.ndarray:
        """Read an observation, (1, C)."""
        return np.loadtxt(files(self.name) / f"num_observation_{i}/observation.csv", delimiter=",", skiprows=1, ndmin=2)

    def posterior(self, i: int) -> np.ndarray:
        """Read 10,000 draws from the posterior of an observation, (10000, P)."""
        path = files(self.name) / f"num_observation_{i}/reference_posterior_samples.csv.bz2"
        return np.loadtxt(path, delimiter=",", skiprows=1)


def files(task: str) -> Path:
    """Return the folder of a task in the package sbibm, which is not imported: it needs Julia and an old sbi."""
    found = find_spec("sbibm")
    if found is None or found.origin is None:
        raise NicestError("sbibm is not installed, which has the posteriors: pip install --no-deps sbibm")
    return Path(found.origin).parent / "tasks" / task / "files"


def box(size: float, dim: int) -> Distribution:
    """Return the uniform distribution on [-size, size]^dim."""
    return Independent(Uniform(torch.full((dim,), -size), torch.full((dim,), size)), 1)


def two_moons(theta: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw a point of a crescent that the parameters shift, one of them by its absolute value."""
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, len(theta)), rng.normal(0.1, 0.01, len(theta))
    moon = np.column_stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)])
    return moon + np.column_stack([-np.abs(theta.sum(1)), theta[:, 1] - theta[:, 0]]) / np.sqrt(2)


def slcp(theta: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw four points of a Gaussian in the plane with mean θ1 θ2, deviations θ3² θ4² and correlation tanh θ5."""
    (m1, m2, s1, s2, r), noise = theta.T[..., None], rng.normal(size=(2, len(theta), 4))
    s1, s2, r = s1**2, s2**2, np.tanh(r)
    x1, x2 = m1 + s1 * noise[0], m2 + s2 * (r * noise[0] + np.sqrt(1 - r**2) * noise[1])
    return np.stack([x1, x2], 2).reshape(len(theta), 8)


def gaussian_mixture(theta: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw a point around the parameters, from a wide or a narrow Gaussian."""
    return theta + np.where(rng.random((len(theta), 1)) < 0.5, 1.0, 0.1) * rng.normal(size=theta.shape)


def sir(theta: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw how many of 1,000 tested people are infected on ten days, for a contact rate β and a recovery rate γ."""
    return rng.binomial(TESTED, infected(theta) / PEOPLE).astype(float)


def infected(theta: np.ndarray) -> np.ndarray:
    """Solve dS/dt = -β S I / N, dI/dt = β S I / N - γ I by the Runge-Kutta method, from one infected person.

    Return I on the days of the tests, (N, 10).
    """
    beta, gamma = theta.T
    state, found = np.array([np.full(len(theta), PEOPLE - 1), np.ones(len(theta))]), []

    def slope(state: np.ndarray) -> np.ndarray:
        new = beta * state[0] * state[1] / PEOPLE
        return np.array([-new, new - gamma * state[1]])

    for step in range(DAYS[-1] * STEPS + 1):
        if step % (DAYS.step * STEPS) == 0:
            found.append(state[1])
        k1 = slope(state)
        k2 = slope(state + k1 / (2 * STEPS))
        k3 = slope(state + k2 / (2 * STEPS))
        k4 = slope(state + k3 / STEPS)
        state = state + (k1 + 2 * k2 + 2 * k3 + k4) / (6 * STEPS)
    return np.stack(found, 1).clip(0, PEOPLE)


def bernoulli_glm(theta: np.ndarray, rng: Generator) -> np.ndarray:
    """Draw spikes of a neuron over 100 steps, y ~ Bernoulli(sigmoid(X θ)); return the sufficient sums Xᵀy."""
    design = torch.load(files("bernoulli_glm") / "design_matrix.pt", weights_only=True).double().numpy()
    chance = 1 / (1 + np.exp(-theta @ design.T))
    return (rng.random(chance.shape) < chance) @ design


def smooth_filter() -> Distribution:
    """Return the prior of an offset and of a filter of nine numbers with small second differences."""
    difference = torch.eye(9) - torch.ones(8).diag(-1)
    filtered = difference @ difference + (torch.arange(9) / 9).sqrt().diag()
    precision = torch.block_diag(tensor([[0.5]]), filtered.mT @ filtered)
    return MultivariateNormal(torch.zeros(10), precision_matrix=precision)


TASKS = {
    task.name: task
    for task in (
        Task("two_moons", lambda: box(1.0, 2), two_moons),
        Task("slcp", lambda: box(3.0, 5), slcp),
        Task("gaussian_mixture", lambda: box(10.0, 2), gaussian_mixture),
        Task("sir", lambda: Independent(LogNormal(tensor([0.4, 0.125]).log(), tensor([0.5, 0.2])), 1), sir),
        Task("bernoulli_glm", smooth_filter, bernoulli_glm),
    )
}
