"""The page about flows of your own runs from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parent.parent / "docs" / "own-flows.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the page's Python blocks in order in a temporary folder and return what they define."""
    pytest.importorskip("tensorboard")
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.chdir(tmp_path_factory.mktemp("page"))
        for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M):
            exec(compile(code, PAGE.name, "exec"), found)
    return found


def test_flows_of_the_page_score_as_it_says(names: dict[str, Any]):
    """With tolerances: rounding differs between machines."""
    with torch.no_grad():
        assert float(names["fitted"].flow.log_prob(names["test"]).mean()) == pytest.approx(-3.80, abs=0.05)
        assert float(names["run"].flow.log_prob(names["test"]).mean()) > -4.5
    assert len(names["half"].bijection.plain_layers) == 4


def test_conditional_density_is_near_the_true_one(names: dict[str, Any]):
    x, c, noise = (torch.tensor(names[name][2500:]) for name in ("x", "c", "noise"))
    truth = torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum(1) - torch.tensor(0.2 * 0.5).log()
    with torch.no_grad():
        nats = names["conditional"].log_prob(x.float(), c.float())
    assert float(nats.mean()) == pytest.approx(float(truth.mean()), abs=0.25)
    assert float(names["draws"][:, 0].mean()) == pytest.approx(0.997, abs=0.1)


def test_every_block_is_python_or_text():
    assert set(re.findall(r"^ *```(\w+)$", PAGE.read_text("utf-8"), re.M)) == {"python", "text"}
