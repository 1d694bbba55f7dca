"""Scoring and sampling any number of rows: batches, precision, and the flow left as it was."""

import pytest
import torch

from nicest.flows import Coupling, Flow
from nicest.inference import engine
from nicest.inference.engine import Engine
from nicest.recipes import load_recipe
from nicest.recipes.build import build


@pytest.fixture
def flow() -> Flow:
    torch.manual_seed(0)
    recipe = load_recipe("digits").override("model.width=16", "model.dropout=0", "data.shape=[6]", "data.levels=0")
    return build(recipe).eval()


def sizes(flow: Flow) -> list[int]:
    """The batches that go through a flow from now on."""
    seen: list[int] = []
    flow.chain.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


def test_rows_are_scored_in_batches_and_in_order(flow: Flow, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "BATCH", 4)
    rows, seen = torch.randn(10, 6), sizes(flow)
    scores = Engine(flow).log_prob(rows)
    assert seen == [4, 4, 2]
    assert not scores.requires_grad
    torch.testing.assert_close(scores, flow(rows).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 5, 12])
def test_samples_are_those_of_the_prior_in_order(flow: Flow, n: int):
    drawn = Engine(flow, batch=5).sample(n, temperature=0.5, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    parts = [flow.sample(min(5, n - k), temperature=0.5, generator=generator) for k in range(0, n, 5)]
    torch.testing.assert_close(drawn, torch.cat(parts))
    assert drawn.shape == (n, 6)


def test_terms_come_by_name(flow: Flow):
    rows = torch.randn(7, 6)
    parts = list(Engine(flow, batch=3).each("terms", rows))
    torch.testing.assert_close(torch.cat([part["prior"] for part in parts]), flow.terms(rows)["prior"].detach())


def test_precision_is_the_engines_own_and_the_flow_keeps_its(flow: Flow):
    rows = torch.randn(9, 6)
    couplings = [layer for layer in flow.chain if isinstance(layer, Coupling)]
    couplings[0].precision = torch.float16
    exact = Engine(flow).log_prob(rows)
    half = Engine(flow, precision=torch.float16).log_prob(rows)
    assert [layer.precision for layer in couplings] == [torch.float16, None, None, None]
    assert not torch.equal(exact, half)
    torch.testing.assert_close(exact, half, rtol=0.02, atol=0.02)
    couplings[0].precision = None
    torch.testing.assert_close(exact, flow(rows).detach())


def test_the_flow_keeps_its_precision_also_when_a_batch_fails(flow: Flow):
    with pytest.raises(ValueError, match="expected 6 features"):
        Engine(flow, precision=torch.float16).log_prob(torch.randn(3, 5))
    assert {layer.precision for layer in flow.chain if isinstance(layer, Coupling)} == {None}
