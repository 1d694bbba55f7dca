"""Scoring and sampling any number of rows: batches, precision, shares, and memory that runs out."""

import copy
from collections.abc import Callable

import pytest
import torch

from nicest.flows import Flow
from nicest.inference import engine
from nicest.inference.engine import Engine, Share
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
    flow.bijection.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
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


def test_precision_is_by_default_that_of_the_flow(flow: Flow):
    rows = torch.randn(9, 6)
    half = Engine(flow, precision=torch.float16).log_prob(rows)
    exact = Engine(flow).log_prob(rows)
    assert exact.dtype == half.dtype == torch.float32
    assert not torch.equal(exact, half)
    torch.testing.assert_close(exact, half, rtol=0.02, atol=0.02)
    torch.testing.assert_close(exact, flow(rows).detach())
    double = Engine(copy.deepcopy(flow).double()).log_prob(rows)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), exact, rtol=1e-4, atol=1e-4)


def test_weights_that_change_are_seen(flow: Flow):
    rows, engine = torch.randn(9, 6), Engine(flow)
    before = engine.log_prob(rows)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1)
    engine.refresh()
    assert not torch.equal(engine.log_prob(rows), before)
    torch.testing.assert_close(engine.log_prob(rows), flow(rows).detach(), rtol=1e-4, atol=1e-4)


def test_no_rows_have_no_scores(flow: Flow):
    engine = Engine(flow)
    assert engine.log_prob(torch.zeros(0, 6)).shape == (0,)
    assert engine.sample(0).shape == (0, 6)


def test_rows_of_another_size_are_refused(flow: Flow):
    with pytest.raises(ValueError, match="expected 6 features, got 5"):
        Engine(flow, precision=torch.float16).log_prob(torch.randn(3, 5))


def test_options_reach_the_method_of_the_flow():
    torch.manual_seed(0)
    recipe = load_recipe("digits").override("model.width=16", "model.dropout=0", "data.shape=[6]")
    flow, rows = build(recipe).eval(), torch.randint(17, (9, 6))
    middle = torch.cat(list(Engine(flow, batch=4).each("log_prob", rows, noise=False)))
    torch.testing.assert_close(middle, flow.log_prob(rows, noise=False).detach(), rtol=1e-4, atol=1e-4)


def test_shares_of_a_batch_score_as_the_whole(flow: Flow):
    rows = torch.randn(11, 6)
    expected = Engine(flow, batch=4).log_prob(rows)
    for rank in range(3):
        share = Share(rank, 3)
        parts = list(Engine(flow, batch=4, share=share).each("log_prob", rows))
        own = torch.cat([share.rows(part) for part in expected.split(4)])
        torch.testing.assert_close(torch.cat(parts), own)


def test_memory_that_runs_out_halves_the_batch(flow: Flow, monkeypatch: pytest.MonkeyPatch):
    rows, engine = torch.randn(20, 6), Engine(flow, batch=16)
    apply = engine._apply

    def scarce(method: str, options: dict, x: torch.Tensor, *, whole: int) -> torch.Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError
        return apply(method, options, x, whole=whole)

    monkeypatch.setattr(engine, "_apply", scarce)
    with pytest.warns(UserWarning, match="going on with"):
        found = engine.log_prob(rows)
    assert engine.batch == 4
    torch.testing.assert_close(found, flow(rows).detach())


def test_batches_stay_as_they_were_when_a_graph_reuses_its_buffer(flow: Flow, monkeypatch: pytest.MonkeyPatch):
    class Replayed:
        """A captured graph without a GPU: every replay writes into the same output."""

        def __init__(self, function: Callable[[], torch.Tensor]) -> None:
            self.function, self.output = function, function()

        def replay(self) -> None:
            self.output.copy_(self.function())

    def capture(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[Replayed, torch.Tensor]:
        replayed = Replayed(function)
        return replayed, replayed.output

    monkeypatch.setattr(engine, "capture", capture)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    rows, scored = torch.randn(10, 6), Engine(flow, batch=4)
    graph = engine.Graph(lambda x: flow(x).detach(), 4, [rows[:4]])
    monkeypatch.setattr(scored, "_one", lambda method, parts, *_: graph(*parts))
    torch.testing.assert_close(torch.cat(list(scored.each("log_prob", rows))), flow(rows).detach())
