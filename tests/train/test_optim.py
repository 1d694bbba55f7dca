"""Optimisers and schedules: the text's Adam, the released code's RMSProp, AdamW; rates step by step."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nicest.recipes import load_recipe
from nicest.recipes.recipe import TrainSettings
from nicest.train.optim import RMSProp, learning_rate, make_optimizer, set_rates


def quadratic(theta: np.ndarray) -> np.ndarray:
    """The gradient of a bowl, large in some coordinates and tiny in others."""
    return theta * np.array([5.0, 1.0, 1e-2, 1e-4])


class TestRMSProp:
    def test_is_the_released_codes_over_the_switch_of_momentum_at_epoch_5(self):
        settings = load_recipe("mnist-released").train
        theta = np.array([1.0, -2.0, 3.0, -4.0])
        square, velocity, lr = np.zeros(4), np.zeros(4), 1e-3
        floored = set()
        model = nn.Linear(1, 1, bias=False).double()
        model.weight = nn.Parameter(torch.from_numpy(theta.copy()))
        optimizer = make_optimizer(model, settings)
        for step in range(24):  # eight epochs of three steps
            gradient = quadratic(theta)
            square = 0.95 * square + 0.05 * gradient**2
            floored |= set(np.sqrt(square) < 1e-2)
            velocity = (0.5 if step >= 15 else 0.0) * velocity - lr * gradient / np.maximum(np.sqrt(square), 1e-2)
            theta = theta + velocity
            lr = max(lr / 1.0005, 1e-4)

            set_rates(optimizer, settings, step, step // 3, 24)
            model.weight.grad = torch.from_numpy(quadratic(model.weight.detach().numpy()))
            optimizer.step()
            np.testing.assert_allclose(model.weight.detach().numpy(), theta, rtol=1e-12)
        assert floored == {True, False}

    def test_leaves_alone_what_has_no_gradient(self):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        a.grad = torch.ones(2)
        RMSProp([a, b], lr=0.1).step()
        assert a.ne(1).all()
        assert b.eq(1).all()


class TestAdam:
    def test_has_the_papers_settings(self):
        optimizer = make_optimizer(nn.Linear(3, 2), load_recipe("mnist").train)
        assert len(optimizer.param_groups) == 2
        for group in optimizer.param_groups:
            assert (group["lr"], tuple(group["betas"]), group["eps"]) == (1e-3, (0.9, 0.99), 1e-4)
            assert (group["weight_decay"], group["amsgrad"]) == (0, False)

    def test_adam_decays_matrices_only_and_apart_from_the_gradient(self):
        model = nn.Linear(3, 2)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = make_optimizer(model, TrainSettings(optimizer="adam", lr=0.1, weight_decay=0.5))
        assert isinstance(optimizer, AdamW)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
        assert torch.equal(model.bias, before["bias"])

    def test_is_torchs_to_the_bit(self):
        ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
        theirs.load_state_dict(ours.state_dict())
        settings = TrainSettings(optimizer="adam", lr=0.1, weight_decay=0.0)
        one = make_optimizer(ours, settings)
        other = AdamW(theirs.parameters(), 0.1, settings.betas, settings.eps, weight_decay=0, fused=True)
        for x in torch.randn(4, 5, 3):
            for model, optimizer in ((ours, one), (theirs, other)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))

    def test_adam_without_matrices(self):
        model = nn.Linear(1, 1)
        model.weight = nn.Parameter(torch.ones(3))
        (group,) = make_optimizer(model, TrainSettings(optimizer="adam", weight_decay=0.5)).param_groups
        assert (len(group["params"]), group["weight_decay"]) == (2, 0)

    @pytest.mark.parametrize("name", ["adam", "rmsprop"])
    def test_what_is_held_is_not_given_to_the_optimizer(self, name: str):
        model = nn.Linear(3, 2)
        model.weight.requires_grad_(False)
        optimizer = make_optimizer(model, TrainSettings(optimizer=name))
        assert [p is model.bias for group in optimizer.param_groups for p in group["params"]] == [True]


class TestRates:
    def rates(self, total: int, **settings: float | str) -> list[float]:
        chosen = TrainSettings(**settings)
        return [learning_rate(chosen, step, total) for step in range(total)]

    def test_warmup_rises_to_the_rate_and_stays(self):
        assert self.rates(6, lr=1.0, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    def test_cosine_starts_at_the_rate_falls_and_ends_near_0(self):
        rates = self.rates(1000, lr=0.1, schedule="cosine")
        assert rates[0] == 0.1
        assert rates[500] == pytest.approx(0.05)
        assert rates[250] == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)
        assert all(a > b for a, b in pairwise(rates))
        assert 0 < rates[-1] < 1e-6

    def test_cosine_begins_after_the_warmup(self):
        rates = self.rates(110, lr=0.1, schedule="cosine", warmup=10)
        assert rates[9] == rates[10] == 0.1
        assert rates[60] == pytest.approx(0.05)
        assert rates[-1] < 1e-4

    def test_exponential_divides_at_every_minibatch_down_to_the_floor(self):
        settings = load_recipe("cifar10-released").train
        rates = [learning_rate(settings, step, 10_000) for step in range(10_000)]
        assert rates[0] == 2e-4
        above = [rate for rate in rates if rate > 1e-5]
        assert len(above) == math.ceil(math.log(20) / math.log(1.0005))
        np.testing.assert_allclose(np.array(above[:-1]) / np.array(above[1:]), 1.0005, rtol=1e-12)
        assert set(rates[len(above) :]) == {1e-5}

    def test_every_group_gets_the_rates_of_its_step(self):
        settings = TrainSettings(optimizer="adam", lr=1.0, warmup=2)
        optimizer = make_optimizer(nn.Linear(3, 2), settings)
        assert [set_rates(optimizer, settings, step, 9, 10) for step in range(3)] == [0.5, 1.0, 1.0]
        set_rates(optimizer, settings, 0, 9, 10)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        assert not any("momentum" in group for group in optimizer.param_groups)
