"""A conditioner that is a random forest: trees learn more from few noisy rows than a network does."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from nicest.flows.laws import AffineSpline
from nicest.flows.priors import Prior

VALUES = 4  # quantiles of the targets in a leaf that stand for them
SHAPES = (
    (1, 0.6),
    (2, 0.6),
    (2, 1.0),
    (5, 1.0),
)  # fewest rows in a leaf, and share of the columns that a split chooses from, in turn
STEEPEST = 8.0  # largest log-scale
SHARPNESS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)  # to try, on so many rows
CHOICE_ROWS = 5000
SPREADS = tuple(np.geomspace(0.003, 0.3, 9).tolist())
ROWS = 4096  # that are read at once


class Trees(NamedTuple):
    """Trees side by side, (trees, nodes); the children of a leaf are itself."""

    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    left: np.ndarray
    right: np.ndarray
    values: np.ndarray  # (trees, nodes, VALUES), those of the targets that a leaf was grown from

    @classmethod
    def empty(cls, trees: int, nodes: int) -> Self:
        kinds = {"feature": "i4", "threshold": "f4", "missing_left": "?", "left": "i4", "right": "i4"}
        found = {name: np.zeros((trees, nodes), kind) for name, kind in kinds.items()}
        return cls(**found, values=np.zeros((trees, nodes, VALUES)))

    def take(self, t: int, tree: Any) -> None:
        """Take the t-th from scikit-learn, but for its values."""
        n, is_leaf = tree.node_count, tree.children_left < 0
        self.feature[t, :n] = np.where(is_leaf, 0, tree.feature)
        rounded = tree.threshold.astype("f4")  # down, so that the same numbers of float32 are at most as large
        lower = np.nextafter(rounded, np.float32(-np.inf))
        self.threshold[t, :n] = np.where(rounded > tree.threshold, lower, rounded)
        self.missing_left[t, :n] = tree.missing_go_to_left
        self.left[t, :n] = np.where(is_leaf, np.arange(n), tree.children_left)
        self.right[t, :n] = np.where(is_leaf, np.arange(n), tree.children_right)


class Forest(nn.Module):
    """From numbers c to the b of an affine-spline law, by the leaves that c lies in (Meinshausen 2006, "Quantile
    regression forests").

    The targets in those leaves, one leaf of every tree, stand for x given c. The knots of the spline lie at m +
    `sharpness` (x_j - m) + `spread` h_j: x_j are their quantiles, m is their median, and h_j are the latent coordinates
    with the same shares under the prior. So the law takes x to the prior. Sharpness and spread are those under which
    rows are likeliest in the leaves of trees that were grown without them. A cell of c may be NaN. Nothing here is
    trained by gradients.
    """

    feature: Tensor
    threshold: Tensor
    missing_left: Tensor
    left: Tensor
    right: Tensor
    values: Tensor
    depth: Tensor
    sharpness: Tensor
    spread: Tensor
    latent: Tensor
    shares: Tensor

    def __init__(self, inputs: int, law: AffineSpline, prior: Prior, trees: int, leaves: int) -> None:
        super().__init__()
        self.inputs, self.law, self.prior, self.leaves = inputs, law, type(prior)(1), leaves
        shape = trees, 2 * leaves - 1
        for name in ("feature", "left", "right"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("missing_left", torch.zeros(shape, dtype=torch.bool))
        self.register_buffer("threshold", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(*shape, VALUES))
        self.register_buffer("depth", torch.zeros((), dtype=torch.int32))
        self.register_buffer("sharpness", torch.ones(()))
        self.register_buffer("spread", torch.ones(()))
        self.steps = 0  # from the root to the deepest leaf, as `depth`, but for a graph that is captured
        latent = torch.linspace(-law.bound, law.bound, law.bins + 1)
        self.register_buffer("latent", latent, persistent=False)
        self.register_buffer("shares", self.prior.cdf(latent), persistent=False)

    def forward(self, c: Tensor) -> Tensor:
        """b, (B, law.size), of rows c."""
        several = [c] if torch.compiler.is_compiling() else c.split(ROWS)  # a graph is for any number of rows
        parts = (self._quantiles(part) for part in several)
        return torch.cat([self._params(part, self.sharpness, self.spread) for part in parts])

    def _quantiles(self, c: Tensor) -> Tensor:
        x, trees, nodes = c.float(), *self.feature.shape  # as the trees were grown: in float32
        first = nodes * torch.arange(trees, device=c.device)
        feature, threshold, missing_left = self.feature.flatten(), self.threshold.flatten(), self.missing_left.flatten()
        at = first.expand(len(c), -1)
        for _ in range(self.steps):
            cell = x.gather(1, feature[at].long())
            goes_left = torch.where(cell.isnan(), missing_left[at], cell <= threshold[at])
            at = first + torch.where(goes_left, self.left.flatten()[at], self.right.flatten()[at])
        found = self.values.flatten(0, 1)[at].flatten(1).to(c.dtype)
        return quantiles(found.sort(1).values, self.shares, torch.full_like(found[:, 0], found.shape[1]))

    def _params(self, x: Tensor, sharpness: Tensor | float, spread: Tensor | float) -> Tensor:
        """The b of the laws whose knots come from quantiles x, (B, bins + 1)."""
        law, bound, middle = self.law, self.law.bound, x[:, self.law.bins // 2, None]
        x = middle + sharpness * (x - middle) + spread * self.latent.to(x)
        log_scale = (2 * bound / (x[:, -1:] - x[:, :1])).log().clamp(-0.99 * law.log_scale, 0.99 * law.log_scale)
        inner = (x - x[:, :1]) * log_scale.exp() - bound
        knots = self.latent[1:-1].to(x).expand(len(x), -1)
        spline = law.spline.through(inner[:, 1:-1], knots)  # type: ignore[attr-defined]
        b1 = law.log_scale * (log_scale / law.log_scale).atanh()
        return torch.cat((b1, -bound - x[:, :1] * log_scale.exp(), spline), 1)

    @torch.no_grad()
    def initialise(self, c: Tensor, x: Tensor) -> None:
        """Grow the trees from contexts c, (N, C), and targets x, (N, 1)."""
        target, seed = x[:, 0].double().cpu(), int(torch.randint(1 << 31, ()))
        trees, unseen = self._grown(c.float().cpu().numpy(), target.numpy(), seed)
        for name, each in trees._asdict().items():
            kept = getattr(self, name)
            kept.zero_()[:, : each.shape[1]] = torch.from_numpy(each).to(kept)
        step = -(-len(unseen) // CHOICE_ROWS)
        unseen, target = unseen[::step], target[::step]
        count = unseen.isfinite().sum(1).to(unseen)
        some = count > 0
        found = quantiles(unseen[some].sort(1).values, self.shares.to(unseen), count[some])
        best = -math.inf
        for sharpness, spread in product(SHARPNESS, SPREADS):
            h, log_slope = self.law.forward(target[some][:, None], self._params(found, sharpness, spread)[:, None])
            if (nats := float((self.prior.log_prob(h) + log_slope[:, 0]).mean())) > best:
                best = nats
                self.sharpness.fill_(sharpness)
                self.spread.fill_(spread)

    def _grown(self, given: np.ndarray, target: np.ndarray, seed: int) -> tuple[Trees, Tensor]:
        """Trees, and what each row has in the leaves of those that were grown without it, (N, M); infinite for the
        other trees."""
        from sklearn.ensemble import RandomForestRegressor

        whole = np.ascontiguousarray(np.column_stack([given, target]))
        which_row = np.unique(whole.view(f"V{whole.shape[1] * whole.itemsize}")[:, 0], return_inverse=True)[1]
        total, nodes = self.feature.shape
        found = Trees.empty(total, nodes)
        unseen, t, self.steps = np.empty((len(given), total, VALUES)), 0, 0
        for i, (leaf, share) in enumerate(SHAPES):
            if not (count := len(range(i, total, len(SHAPES)))):
                continue
            options: dict[str, Any] = {"min_samples_leaf": leaf, "max_features": share, "random_state": seed}
            forest = RandomForestRegressor(count, max_leaf_nodes=self.leaves, **options).fit(given, target)
            leaves = forest.apply(given)
            for own, each, rows in zip(leaves.T, forest.estimators_, forest.estimators_samples_, strict=True):
                found.take(t, each.tree_)
                order = rows[np.lexsort((target[rows], own[rows]))]
                which, start, size = np.unique(own[order], return_index=True, return_counts=True)
                middle = (np.arange(VALUES) + 0.5) / VALUES
                found.values[t, which] = target[order][start[:, None] + (size[:, None] * middle).astype(int)]
                unseen[:, t] = found.values[t, own]
                unseen[np.isin(which_row, which_row[rows]), t] = np.inf  # copies of a row have seen each other
                self.steps, t = max(self.steps, each.tree_.max_depth), t + 1
        self.depth.fill_(self.steps)
        return found, torch.from_numpy(unseen.reshape(len(given), -1))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in ("threshold", "values"):  # which need no more than float32, in a flow of float64 too
            self._buffers[name] = getattr(self, name).float()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        nodes, errors = self.feature.shape[1], args[-1]
        limits = {"feature": self.inputs, "left": nodes, "right": nodes, "depth": nodes}
        for name, limit in limits.items():
            if bool(((found := getattr(self, name)) < 0).any()) or bool((found >= limit).any()):
                errors.append(f"{prefix}{name}: expected numbers from 0 to {limit - 1}")
        self.steps = 0 if errors else int(self.depth)

    def extra_repr(self) -> str:
        return f"{len(self.feature)} trees of at most {self.leaves} leaves"


def quantiles(ordered: Tensor, shares: Tensor, count: Tensor) -> Tensor:
    """Quantiles (B, L) at shares (L,) of the first `count` (B,) of ordered numbers (B, M)."""
    place = (shares.to(ordered) * count[:, None] - 0.5).clamp_min(0).minimum(count[:, None] - 1)
    low = place.floor()
    start, end = (ordered.gather(1, each.long()) for each in (low, (low + 1).minimum(count[:, None] - 1)))
    return torch.lerp(start, end, place - low)
