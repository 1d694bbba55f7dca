"""The weight of a forest in a mixture with trained flows."""

import numpy as np
import pytest
import torch

from nicest import NICERegressor
from nicest.recipes.forest import Forest
from nicest.train import blend
from nicest.train.blend import PRIOR, weight


def test_rows_that_one_side_explains_better_move_the_weight():
    same = torch.zeros(100)
    assert weight(same, same) == pytest.approx(0.5)
    assert weight(same, same + 5) > 0.9
    assert weight(same, same - 5) < 0.1
    assert weight(same, same - 50) == pytest.approx(PRIOR / (100 + 2 * PRIOR), abs=1e-6)
    assert weight(same, torch.full((100,), -torch.inf)) == pytest.approx(0.5)  # of rows that say nothing


def test_the_weight_is_of_rows_that_neither_flows_nor_forest_have_seen(monkeypatch: pytest.MonkeyPatch):
    grown, weighed, initialise = [], [], Forest.initialise
    monkeypatch.setattr(Forest, "initialise", lambda forest, c, x: grown.append(x) or initialise(forest, c, x))
    monkeypatch.setattr(blend, "weight", lambda *each: weighed.append(each) or weight(*each))
    rng = np.random.default_rng(0)
    X, short = rng.normal(size=(200, 2)), {"effort": "low", "epochs": 2, "random_state": 0, "trees": 5}
    NICERegressor(**short, validation_fraction=0.2).fit(X, rng.normal(size=200))
    assert [len(each) for each in weighed[-1]] == [40, 40]
    assert len(grown[-1]) == 160  # of training rows alone


def test_few_noisy_rows_leave_much_to_the_forest_and_a_function_little():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 8))
    short = {"effort": "low", "epochs": 30, "random_state": 0, "trees": 40}
    noisy = NICERegressor(**short).fit(X, (X[:, 0] > 0) + rng.normal(size=300)).flow_
    smooth = NICERegressor(**short).fit(X, X @ rng.normal(size=8)).flow_
    assert float(noisy.weights[-1]) > 0.25
    assert float(smooth.weights[-1]) < 0.25
    plain = NICERegressor(**short | {"trees": 0}).fit(X, X[:, 0] + rng.normal(size=300)).flow_
    assert len(plain.members) == 2
