"""Recipes of models that predict some columns from the others: what they say of them, and the flow they build."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nicest.errors import NicestError
from nicest.flows import Flow, Mixture
from nicest.recipes import Recipe, parse
from nicest.recipes.build import build
from nicest.recipes.defaults import conditional
from nicest.recipes.recipe import DataSettings

Refusal = Callable[..., str]
GIVEN: dict[str, dict] = {"model": {}, "train": {}}
TWO = {"shape": (4,), "targets": (1, 3), "categories": (0, 0, 3, 0)}


def recipe(targets: int = 1, **data: object) -> Recipe:
    """The recipe that is chosen for 200 rows."""
    chosen = conditional(200, 4, targets, {"model": {"width": 8}, "train": {"effort": "low"}})[0]
    settings = {"shape": (4,), "targets": (1, 3)[:targets], "categories": (0, 0, 3, 0)} | data
    return replace(chosen, data=DataSettings(**settings))  # type: ignore[arg-type]


class TestSettings:
    @pytest.mark.parametrize(
        "targets", [(3, 1), (1, 1), (4,), (-1,), (0, 1, 2, 3), (0, 10**18)], ids=["unsorted", "twice", *"beyond"[:4]]
    )
    def test_targets_that_cannot_be_are_refused(self, targets: tuple[int, ...], refusal: Refusal):
        said = refusal(with_data, **TWO | {"targets": targets})
        assert "data.targets must be places of some columns, sorted; got [" in said

    def test_targets_are_of_rows_not_of_images(self, refusal: Refusal):
        assert "data.targets" in refusal(with_data, shape=(2, 2), targets=(1,), categories=(0, 0, 3, 0))

    @pytest.mark.parametrize("counts", [(), (0, 0, 3), (0, 0, 3, 0, 0), (0, 0, -1, 0), (0, 0, 10**9, 0), (0, 2, 3, 0)])
    def test_categories_that_cannot_be_are_refused(self, counts: tuple[int, ...], refusal: Refusal):
        said = refusal(with_data, **TWO | {"categories": counts})
        assert "data.categories must be a count for each column, from 0 to 65536, and 0 for targets; got [" in said

    def test_categories_come_with_targets_alone(self, refusal: Refusal):
        assert "data.categories" in refusal(with_data, shape=(4,), categories=(0, 0, 3, 0))

    def test_a_forged_shape_costs_no_memory(self, refusal: Refusal):
        said = refusal(with_data, shape=(2**62,), targets=(1, 3), categories=(0, 0, 3, 0))
        assert "data.categories" in said

    def test_are_written_and_read(self):
        one = recipe(2)
        assert parse(one.to_toml(), "x") == replace(one, name="table")

    def test_of_thousands_of_columns_are_written_and_read(self):
        """As those of a classifier, whose columns are all targets but one."""
        dim = 5000
        data = DataSettings(shape=(dim,), targets=tuple(range(1, dim)), categories=(10, *[0] * (dim - 1)))
        one = Recipe(data=data)
        assert parse(one.to_toml(), "x").data == data

    def test_members_are_for_tables(self):
        assert len(build(parse("model.members=2\ndata.shape=[4]", "x")).members) == 2
        with pytest.raises(NicestError, match=r"model\.members is for tables: expected 1 for images, got 2"):
            build(parse("model.members=2\ndata.shape=[4]\ndata.levels=17", "x"))


def with_data(**data: object) -> Recipe:
    return Recipe(data=DataSettings(**data))  # type: ignore[arg-type]


class TestDefaults:
    @pytest.mark.parametrize("n", [2, 49, 50, 400, 600, 10_000, 1_000_000])
    @pytest.mark.parametrize("targets", [1, 3, 7])
    @pytest.mark.parametrize("effort", ["low", "medium", "high"])
    def test_are_recipes_for_any_table(self, n: int, targets: int, effort: str):
        found = conditional(n, 20, targets, {"model": {}, "train": {"effort": effort}})
        assert len(found) == (1 if effort == "low" or n < 500 else 2)
        for each in found:
            assert each.model.law == "affine-spline"
            assert each.model.mixing == (targets > 1)
            assert (each.model.members > 1) == (targets <= 4)
            assert 1 <= each.train.evaluate_every <= each.train.patience

    def test_what_is_given_comes_in_place_of_what_is_chosen(self):
        (found,) = conditional(200, 4, 1, {"model": {"members": 3, "width": 9}, "train": {"epochs": 7}})
        assert (found.model.members, found.model.width, found.train.epochs) == (3, 9, 7)


class TestFlow:
    @pytest.mark.parametrize("targets", [1, 2])
    @pytest.mark.parametrize("network", ["mlp", "residual"])
    def test_is_a_density_of_the_targets_given_the_rest(self, targets: int, network: str):
        one = recipe(targets)
        flow = build(replace(one, model=replace(one.model, network=network))).double().eval()
        assert isinstance(flow, Mixture)
        assert (flow.dim, flow.prior.dim) == (targets, targets)
        for parameter in flow.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        rows = torch.randn(6, 4, dtype=torch.float64)
        rows[:, 2] = torch.arange(6) % 3
        rows[0, 0] = rows[1, 2] = torch.nan
        x, context = one.data.split(rows)
        for member in flow.members:
            c, f = member.embed(context), member.bijection
            y, log_det = f(x, c)
            torch.testing.assert_close(f.inverse(y, c)[0], x)
            jacobian = torch.autograd.functional.jacobian(lambda x, c=c, f=f: f(x, c)[0].sum(0), x).transpose(0, 1)
            torch.testing.assert_close(log_det, torch.linalg.slogdet(jacobian)[1], rtol=0, atol=1e-9)

    def test_one_member_is_a_plain_flow(self):
        one = recipe()
        assert type(build(replace(one, model=replace(one.model, members=1, trees=0)))) is Flow

    def test_every_target_reads_every_other_column(self):
        one = recipe(2)
        flow = build(replace(one, model=replace(one.model, members=1))).double().eval()
        for parameter in flow.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x, context = torch.tensor([[-0.2, 0.4]]).double(), torch.tensor([[0.3, 1.0]]).double()
        of_x, of_context = torch.autograd.functional.jacobian(lambda *each: flow.bijection(*each)[0][0], (x, context))
        assert (of_x != 0).all()
        assert (of_context[..., 0] != 0).all()  # a category has no derivative
        other = context.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(2.0).double())
        assert (flow.bijection(x, context)[0] != flow.bijection(x, other)[0]).all()

    def test_convolutions_are_refused(self, refusal: Refusal):
        text = (
            'data.shape=[4]\ndata.targets=[1]\ndata.categories=[0, 0, 0, 0]\n[[model.blocks]]\nkind = "coupling"\n'
            'network = { kind = "conv" }\n'
        )
        assert "network conv is for images; these are columns of a table" in refusal(build, parse(text, "x"))
