"""Images given their labels: exact densities, samples that others name rightly, Bayes' rule, and what is refused."""

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nicest
from nicest import Run
from nicest.cli import main
from nicest.data import load
from nicest.errors import NicestError
from nicest.fast import lower
from nicest.flows import Flow
from nicest.recipes import load_recipe
from nicest.recipes.build import build
from nicest.runs.runtime import rows_to
from nicest.tasks.certify import certify
from nicest.tasks.classify import classify, judged, log_likelihoods, posterior
from nicest.tasks.evaluate import evaluate
from nicest.tasks.inpaint import inpaint
from nicest.tasks.latent import spectrum
from nicest.tasks.sample import sample
from nicest.tasks.score import score
from nicest.train.fit import start, train
from nicest.train.step import TrainingStep
from small_runs import run, same_run

QUICK = (
    "model.width=128",
    "train.epochs=20",
    "train.lr=0.02",
    "train.weight_decay=0.1",
    "train.ema=0.95",
    "train.evaluate_every=5",
)
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "labels"
    train(load_recipe("digits-labels"), out, overrides=QUICK, device="cpu")
    return out


@pytest.fixture
def labelled(folder: Path) -> Run:
    return nicest.open(folder)


def lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize(("recipe", "precision"), [("digits-labels", "float32"), ("digits-conv", "bfloat16")])
def test_the_label_term_is_minus_log_p_of_the_label_against_another(recipe: str, precision: str):
    """Its gradient is that of the formula, of images with the same noise under both labels."""
    own = ("data.labels=true", "train.label_weight=3", f"train.precision={precision}", "train.ema=0")
    made, splits = load_recipe(recipe).override(*own), load("digits", labels=True)
    state = start(made, splits, torch.device("cpu"))
    with torch.no_grad():
        for p in state.flow.parameters():
            p.add_(0.02 * torch.randn_like(p))
    for module in state.flow.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    rows, index = rows_to(splits.train, state.device), torch.arange(20)
    step = TrainingStep(state, rows, 20)
    step.index.copy_(index)
    torch.manual_seed(5)
    step.differentiate()
    found = torch.cat([p.grad.flatten() for p in state.flow.parameters() if p.grad is not None])

    torch.manual_seed(5)
    other, noise = torch.randint(1, 10, (20,)), torch.rand(20, 64)
    x, label = rows[:20, :64], rows[:20, 64:].float()
    right, wrong = (state.flow.log_prob(x, c, noise=noise) for c in (label, (label + other[:, None]) % 10))
    log_share = torch.log_softmax(torch.stack((right, wrong)).double(), 0)[0]
    expected = torch.autograd.grad(-(right + 3 * log_share).mean() / 64, list(state.flow.parameters()))
    assert float(step.loss) == pytest.approx(-right.mean().item() / 64, abs=1e-2 if precision == "bfloat16" else 1e-5)
    expected = torch.cat([each.flatten() for each in expected])
    assert (found - expected).norm() < (0.1 if precision == "bfloat16" else 1e-4) * expected.norm()


def random_flow(shape: tuple[int, ...], labels: int, *own: str, recipe: str = "digits", std: float = 0.3) -> Flow:
    """An untrained flow of images of 17 levels given labels, its weights moved at random, in float64."""
    torch.manual_seed(0)
    made = load_recipe(recipe).override("data.labels=true", *own)
    made = replace(made, data=replace(made.data, shape=shape, levels=17, classes=(2,) * labels))
    flow = build(made).double().eval()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return flow


FLOWS = {
    "mlp": lambda: random_flow((4, 4), 3, "model.width=8", "model.law=affine"),
    "residual": lambda: random_flow((4, 4), 3, "model.width=8", "model.network=residual", "model.hidden_layers=2"),
    "conv": lambda: random_flow((4, 4), 3, recipe="digits-conv", std=0.03),
}


class TestFlow:
    @pytest.mark.parametrize("kind", FLOWS)
    def test_its_log_det_is_that_of_autograd_in_the_pixels(self, kind: str):
        flow, y = FLOWS[kind](), torch.rand(1, 16, dtype=torch.float64)
        nats = []
        for label in torch.arange(3.0, dtype=torch.float64).view(3, 1, 1):
            context = flow.embed(label)
            with torch.no_grad():
                h, log_det = flow.bijection(y, context)
                nats.append(float(flow.log_density(y, label)))
            jacobian = torch.autograd.functional.jacobian(lambda y, c=context: flow.bijection(y, c)[0], y)[0, :, 0]
            assert float(log_det) == pytest.approx(float(torch.linalg.slogdet(jacobian).logabsdet), abs=1e-8)
            assert torch.allclose(flow.bijection.inverse(h, context)[0], y, atol=1e-8)
        assert min(abs(nats[i] - nats[i - 1]) for i in range(3)) > 1e-3  # the label matters

    def test_it_integrates_to_one_for_every_label(self):
        flow = random_flow((1, 2), 2, "model.width=4", "model.law=affine", "model.prior=gaussian", std=0.1)
        at = torch.linspace(-20, 20, 801, dtype=torch.float64)
        y = torch.cartesian_prod(at, at)
        for label in range(2):
            context = torch.full((len(y), 1), float(label), dtype=torch.float64)
            mass = float(flow.log_density(y, context).detach().exp().sum()) * float(at[1] - at[0]) ** 2
            assert mass == pytest.approx(1, abs=1e-4)  # networks have kinks

    @pytest.mark.parametrize("kind", FLOWS)
    def test_its_fast_form_gives_the_same_numbers(self, kind: str):
        flow = FLOWS[kind]()
        x, label = torch.randint(17, (6, 16)).double(), torch.tensor([[0.0], [1.0], [2.0]] * 2).double()
        fast = lower(flow)
        assert torch.allclose(fast.log_prob(x, label, noise=False), flow.log_prob(x, label, noise=False), atol=1e-9)
        h = flow.encode(x, label, noise=False)
        assert torch.equal(fast.decode(h, label), x)


def test_a_run_goes_on_to_the_bit_with_warped_images(tmp_path: Path):
    small = ("model.width=8", "train.schedule=constant", "train.warmup=0", "train.evaluate_every=1")
    settings = (*small, "train.epochs=3", "augment.share=0.5", "augment.shift=0.5")
    run(tmp_path / "straight", settings=settings, recipe="digits-labels")
    run(tmp_path / "parts", "train.epochs=1", settings=settings, recipe="digits-labels")
    torch.manual_seed(99)
    train(load_recipe("digits-labels"), tmp_path / "parts", overrides=("train.epochs=3",), resume=True, device="cpu")
    assert same_run(tmp_path / "straight", tmp_path / "parts")


def test_a_certificate_is_of_images_and_samples(labelled: Run, tmp_path: Path):
    own = nicest.open(shutil.copytree(labelled.path, tmp_path / "run"))
    result = certify(own, n=20, jacobians=2)
    assert result.n == 20
    assert max(result.max_logdet_error) < 1e-3
    assert result.max_roundtrip[0] < 1e-12


def test_what_is_evaluated_is_the_density_given_the_label(labelled: Run):
    result = evaluate(labelled, draws=2)
    assert (result.dim, result.baselines) == (64, {})
    assert result.level_nats == pytest.approx(result.mean_nats - 64 * math.log(17))
    wrong = labelled.splits.test.copy()
    wrong[:, -1] = (wrong[:, -1] + 1) % 10
    assert labelled.nats(torch.from_numpy(wrong)).mean() < result.mean_nats - 10


class TestClassify:
    def test_is_bayes_rule(self, labelled: Run, half_noise: None):
        """Against numpy on the densities that the plain flow gives, in float64, noise put to its mean."""
        exact, images = nicest.open(labelled.path, dtype=torch.float64), labelled.splits.test[:7, :-1]
        x, classes = torch.from_numpy(images).double(), labelled.recipe.data.classes
        likelihood = torch.stack([exact.flow.log_prob(x, torch.tensor([float(c)])) for c in range(10)], 1)
        found = log_likelihoods(exact, images, 3).numpy()
        assert np.allclose(found, likelihood.detach().numpy() + 64 * math.log(17), atol=1e-8)
        for row, log_p in zip(found, posterior(found, classes), strict=True):
            joint = [
                count / sum(classes) * math.exp(nats - row.max()) for count, nats in zip(classes, row, strict=True)
            ]
            assert np.allclose(np.exp(log_p), np.array(joint) / sum(joint), atol=1e-12)

    def test_draws_of_the_noise_are_averaged_in_logarithms(self, labelled: Run):
        images, found = labelled.splits.test[:7, :-1], []
        for draws in ([3], [1, 1, 1]):
            torch.manual_seed(0)
            found.append(torch.stack([log_likelihoods(labelled, images, n) for n in draws]).mean(0))
        torch.testing.assert_close(*found)

    def test_finds_the_labels_of_digits(self, labelled: Run, tmp_path: Path, picture_at: Callable):
        result = classify(labelled, out=tmp_path / "a.png", draws=2)
        confusion = np.array(result.confusion)
        assert result.accuracy > 0.95
        assert result.accuracy == pytest.approx(np.trace(confusion) / 180)
        assert confusion.sum(1).tolist() == np.bincount(labelled.splits.test[:, -1], minlength=10).tolist()
        assert 0 < result.nll < 0.3
        assert result.ece < 0.05
        assert picture_at(tmp_path / "a.png").width > 500

    def test_accuracy_nll_and_calibration_by_hand(self):
        """Two bins: 0.9 (right, right), 0.6 (right, wrong); and a label that was given probability 0.3."""
        p = np.array([[0.9, 0.1, 0], [0.1, 0.9, 0], [0.6, 0.1, 0.3], [0.1, 0.3, 0.6]])
        with np.errstate(divide="ignore"):
            found = judged(np.log(p), np.array([0, 1, 0, 1]))
        assert found["accuracy"] == 0.75
        assert found["nll"] == pytest.approx(-math.log(0.9 * 0.9 * 0.6 * 0.3) / 4)
        assert found["ece"] == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)
        assert found["confusion"].tolist() == [[2, 0, 0], [0, 1, 1], [0, 0, 0]]

    def test_writes_a_line_for_every_image(self, labelled: Run, tmp_path: Path):
        test = labelled.splits.test
        classify(labelled, out=tmp_path / "split.csv", draws=1)
        np.save(tmp_path / "some.npy", test[:3, :-1].reshape(-1, 8, 8))
        result = classify(labelled, [tmp_path / "some.npy"], out=tmp_path / "some.csv", draws=4)
        assert result.accuracy is None
        assert result.n == 3
        split, some = (lines(tmp_path / f"{name}.csv") for name in ("split", "some"))
        assert [int(line["truth"]) for line in split] == test[:, -1].tolist()
        right = sum(line["truth"] == line["label"] for line in split)
        assert right > 170
        shares = np.array(labelled.recipe.data.classes) / sum(labelled.recipe.data.classes)
        for line, truth in zip(some, test[:, -1], strict=False):
            nats = np.array([float(line[f"log_density_{label}"]) for label in range(10)])
            density = math.log(sum(shares * np.exp(nats - nats.max()))) + nats.max()
            assert float(line["log_density"]) == pytest.approx(density, abs=1e-6)
            assert int(line["label"]) == truth
            best = math.log(shares[truth]) + nats[truth] - density
            assert float(line["probability"]) == pytest.approx(math.exp(best), abs=1e-6)

    def test_names_the_images_of_a_folder(self, labelled: Run, tmp_path: Path):
        (tmp_path / "pictures").mkdir()
        with pytest.raises(NicestError, match="found none in the folder"):
            classify(labelled, [tmp_path / "pictures"], out=tmp_path / "a.csv")
        for i, image in enumerate(labelled.splits.test[:2, :-1].reshape(-1, 8, 8)):
            Image.fromarray(image).save(tmp_path / "pictures" / f"{i}.png")
        classify(labelled, [tmp_path / "pictures"], out=tmp_path / "a.csv", draws=1)
        assert [line["file"] for line in lines(tmp_path / "a.csv")] == ["0.png", "1.png"]


class TestSample:
    def test_draws_digits_that_another_classifier_names(self, labelled: Run, tmp_path: Path):
        digits = load_digits()
        judge = LogisticRegression(max_iter=2000).fit(digits.data, digits.target)
        sample(labelled, 300, out=tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz") as arrays:
            images, labels = arrays["samples"], arrays["labels"]
        assert labels.tolist() == np.repeat(range(10), 30).tolist()
        assert (judge.predict(images.reshape(-1, 64)) == labels).mean() > 0.7

    def test_of_a_label_is_all_of_it(self, labelled: Run, tmp_path: Path):
        sample(nicest.open(labelled.path, label=3), 500, out=tmp_path / "a.npy")  # of 20, 16 or fewer may be threes
        images = np.load(tmp_path / "a.npy")
        assert images.shape == (500, 8, 8)
        nats = log_likelihoods(labelled, images.reshape(-1, 64), 2).numpy()
        assert (posterior(nats, labelled.recipe.data.classes).argmax(1) == 3).mean() > 0.8

    def test_grid_has_a_row_for_every_label(self, labelled: Run, tmp_path: Path, picture_at: Callable):
        result = sample(labelled, 25, out=tmp_path / "a.png")
        assert result.n == 30  # three of each
        picture = picture_at(tmp_path / "a.png")
        assert picture.width * (10 * 9 + 1) == picture.height * (3 * 9 + 1)


class TestOneLabel:
    """A run opened with a label is one of images alone: every task takes it."""

    def test_has_the_density_and_the_images_of_the_label(self, labelled: Run):
        three = nicest.open(labelled.path, label=3, dtype=torch.float64)
        rows = labelled.splits.test[labelled.splits.test[:, -1] == 3]
        assert np.array_equal(three.splits.test, rows[:, :-1])
        assert (three.flow.dim, three.recipe.data.classes, three.kind) == (64, (), "images")
        x, flow = torch.from_numpy(rows[:, :-1]), nicest.open(labelled.path, dtype=torch.float64).flow
        expected = flow.log_prob(x, torch.tensor([3.0], dtype=torch.float64), noise=False)
        assert torch.allclose(three.flow.log_prob(x, noise=False), expected, atol=1e-9)
        assert {"dequantise", "coupling1", "scaling", "prior"} <= set(three.flow.terms(x))
        assert torch.equal(three.flow.decode(three.flow.encode(x, noise=False)), x.double())

    def test_is_inpainted_explored_and_scored(self, folder: Path, tmp_path: Path):
        three, two = (nicest.open(shutil.copytree(folder, tmp_path / str(k)), label=k) for k in (3, 2))
        assert inpaint(three, mask="top", n=3, steps=5, out=tmp_path / "a.npz").n == 3
        assert len(spectrum(three, out=tmp_path / "b.png").sigma) == 64
        np.save(tmp_path / "some.npy", three.splits.test.reshape(-1, 8, 8))
        own, other = (score(r, [tmp_path / "some.npy"], out=tmp_path / "a.csv", draws=2) for r in (three, two))
        assert own.mean_nats > other.mean_nats + 10
        assert (three.path / "training-scores-3.npy").is_file()
        evaluated = evaluate(three, draws=2)
        assert evaluated.n == len(three.splits.test)
        assert evaluated.baselines


class TestRefusals:
    @pytest.mark.parametrize("label", [-1, 10])
    def test_a_label_that_is_not_there(self, folder: Path, refusal: Refusal, label: int):
        assert refusal(nicest.open, folder, label=label) == f"expected a label from 0 to 9, got {label}"

    def test_a_label_for_a_model_without(self, digits_run: Run, refusal: Refusal):
        assert "without labels" in refusal(nicest.open, digits_run.path, label=1)
        assert "without labels" in refusal(classify, digits_run)

    @pytest.mark.parametrize(
        "command", [["inpaint"], ["latent", "sphere"], ["score", "pictures"]], ids=lambda words: words[0]
    )
    def test_what_needs_images_alone(
        self,
        folder: Path,
        command: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ):
        monkeypatch.chdir(tmp_path)  # which can be written
        group = 2 if command[0] == "latent" else 1
        monkeypatch.setattr("sys.argv", ["nicest", *command[:group], str(folder), *command[group:]])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "model of images given their labels, 0 to 9: say which by --label" in message

    def test_a_figure_of_files(self, labelled: Run, refusal: Refusal, tmp_path: Path):
        assert ".csv or .parquet" in refusal(classify, labelled, [tmp_path], out=tmp_path / "a.png")

    def test_a_recipe_that_is_chosen_by_size(self, refusal: Refusal):
        assert "data.labels must be false" in refusal(load_recipe("images").override, "data.labels=true")
