"""Every formula once more, in numpy, from the papers' equations: the torch code must agree."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strategies.combiners.combiners import weighted_mean_gradient
from strategies.core.facts import UploadFacts
from strategies.distillation.losses import (
    adversarial_divergence,
    cross_entropy,
    hard_cross_entropy,
    information,
    jensen_shannon,
    soft_kl,
    total_variation,
)
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.co_boosting import CoBoostingConfig, CoBoostingServer
from strategies.teacher.augment import Standardize
from strategies.teacher.batchnorm import statistics_distance

Array = NDArray[np.float64]
RNG = np.random.default_rng(20)
TEACHER, STUDENT = RNG.normal(size=(2, 7, 5)) * 3
STUDENT[:3] = 0.5 * TEACHER[:3]  # the two agree on three images
LABELS = RNG.integers(0, 5, size=7)
MEMBERS = RNG.normal(size=(3, 7, 5))


def tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values))


def softmax(logits: Array) -> Array:
    shifted: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return shares


def kl(p: Array, q: Array) -> Array:
    result: Array = (p * np.log(p / q)).sum(axis=1)
    return result


@pytest.mark.parametrize("temperature", [1.0, 4.0, 20.0])
def test_soft_kl_equals_numpy(temperature: float) -> None:
    expected = temperature**2 * kl(softmax(TEACHER / temperature), softmax(STUDENT / temperature)).mean()
    assert float(soft_kl(tensor(STUDENT), tensor(TEACHER), temperature)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_adversarial_divergence_equals_numpy(temperature: float) -> None:
    omega = TEACHER.argmax(1) != STUDENT.argmax(1)
    assert 0 < omega.sum() < len(omega)
    distances = kl(softmax(TEACHER / temperature), softmax(STUDENT / temperature))
    expected = -(temperature**2) * sum(d for d, masked in zip(distances, omega, strict=True) if masked) / len(omega)
    value = adversarial_divergence(tensor(TEACHER), tensor(STUDENT), temperature)
    assert float(value) == pytest.approx(expected, rel=1e-10)


def test_cross_entropy_equals_numpy() -> None:
    expected = -np.mean([math.log(p[y]) for p, y in zip(softmax(TEACHER), LABELS, strict=True)])
    assert float(cross_entropy(tensor(TEACHER), torch.from_numpy(LABELS))) == pytest.approx(expected, rel=1e-10)


def test_batchnorm_distance_equals_numpy() -> None:
    x, mean, var = RNG.normal(size=(6, 4, 3, 2)), RNG.normal(size=4), RNG.uniform(0.5, 2, size=4)
    mu = np.array([x[:, c].sum() / 36 for c in range(4)])
    sigma = np.array([((x[:, c] - mu[c]) ** 2).sum() / 36 for c in range(4)])
    expected = math.sqrt(((mu - mean) ** 2).sum()) + math.sqrt(((sigma - var) ** 2).sum())
    assert float(statistics_distance(tensor(x), tensor(mean), tensor(var))) == pytest.approx(expected, rel=1e-10)


def test_standardize_equals_numpy() -> None:
    pixels, mean, std = RNG.uniform(size=(2, 3, 4, 4)), (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    expected = np.stack([(pixels[:, c] - mean[c]) / std[c] for c in range(3)], axis=1)
    result = Standardize(Normalization(mean, std))(tensor(pixels).float())
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_hard_cross_entropy_equals_numpy(exponent: float) -> None:
    p = [row[y] for row, y in zip(softmax(TEACHER), LABELS, strict=True)]
    expected = sum((1 - q) ** exponent * -math.log(q) for q in p) / len(p)
    value = hard_cross_entropy(tensor(TEACHER), torch.from_numpy(LABELS), exponent)
    assert float(value) == pytest.approx(expected, rel=1e-10)


def test_information_equals_numpy() -> None:
    share = softmax(TEACHER).mean(axis=0)
    assert float(information(tensor(TEACHER))) == pytest.approx((share * np.log10(share)).sum(), rel=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_jensen_shannon_equals_numpy(temperature: float) -> None:
    student, teacher = softmax(4 * STUDENT / temperature), softmax(4 * TEACHER / temperature)
    assert min(student.min(), teacher.min()) < 0.01, "the clamp has something to do"
    middle = np.clip((student + teacher) / 2, 0.01, 0.99)
    halves = [kl(middle, np.clip(p, 0.01, 0.99)).mean() / 2 for p in (student, teacher)]
    value = jensen_shannon(4 * tensor(STUDENT), 4 * tensor(TEACHER), temperature)
    assert float(value) == pytest.approx(sum(halves), rel=1e-10)


def test_total_variation_equals_loops() -> None:
    x = RNG.normal(size=(2, 3, 4, 5))
    expected = 0.0
    for down, across in ((0, 1), (1, 0), (1, 1), (1, -1)):
        squares = [
            (x[n, c, i, j] - x[n, c, i + down, j + across]) ** 2
            for n, c, i, j in np.ndindex(x.shape)
            if i + down < 4 and 0 <= j + across < 5
        ]
        expected += math.sqrt(sum(squares))
    assert float(total_variation(tensor(x))) == pytest.approx(expected, rel=1e-10)


def test_gradient_of_the_weights_in_closed_form_equals_autograd() -> None:
    labels, values = torch.from_numpy(LABELS), tensor(np.array([0.2, 0.9, 0.0])).requires_grad_()
    combined = torch.einsum("m,mbc->bc", values / values.sum(), tensor(MEMBERS))
    (expected,) = torch.autograd.grad(cross_entropy(combined, labels), values)
    closed = weighted_mean_gradient(values.detach(), tensor(MEMBERS), labels)
    torch.testing.assert_close(closed, expected, rtol=1e-10, atol=1e-13)


def co_boosting(weights: Array, biases: Array, **options: object) -> CoBoostingServer:
    """Return the server of clients whose models are ``x -> W x + b`` on images of 16 pixels."""
    classes = biases.shape[1]

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, classes))

    states = [
        {"1.weight": tensor(w).float(), "1.bias": tensor(b).float()} for w, b in zip(weights, biases, strict=True)
    ]
    uploads = tuple(Upload(UploadFacts(f"c{k}", "linear"), partial(dict, state)) for k, state in enumerate(states))
    config = CoBoostingConfig(latent=4, **options)  # type: ignore[arg-type]
    space = Normalization((0.0,), (1.0,))
    return CoBoostingServer(Job(uploads, {"linear": build}, "linear", classes, (1, 4, 4), space, config), Silent())


@pytest.mark.parametrize("form", ["sign", "l2"])
def test_perturbation_equals_numpy(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.distillation.losses.PERTURBATION_TEMPERATURE", 2.0)
    weights, biases = RNG.normal(size=(2, 3, 16)), RNG.normal(size=(2, 3))
    server = co_boosting(weights, biases, perturbation=form, perturbation_size=0.25)
    server.combiner.load_state_dict({"weights": torch.tensor([0.2, 0.6])})
    weight, bias = (0.25 * one + 0.75 * other for one, other in (weights, biases))
    x = RNG.normal(size=(5, 1, 4, 4))
    u = 2 * torch.rand(5, 3, generator=torch.Generator().manual_seed(4)).double().numpy() - 1
    if form == "l2":  # the gradient of u . (W x + b)
        gradient = u @ weight
        step = gradient / np.sqrt((gradient**2).sum(axis=1, keepdims=True))
    else:  # of u . sm((W x + b) / 2)
        p = softmax((x.reshape(5, 16) @ weight.T + bias) / 2)
        step = np.sign((p * (u - (p * u).sum(axis=1, keepdims=True))) @ weight / 2)
    moved = server.perturb(tensor(x).float(), torch.Generator().manual_seed(4))
    assert not moved.requires_grad
    np.testing.assert_allclose(moved.numpy(), x + 0.25 * step.reshape(x.shape), rtol=1e-4, atol=1e-4)


def test_weights_of_two_clients_move_as_by_hand() -> None:
    # Client 0 always says class 1, client 1 always class 0, and class 1 is what the images shall have. The loss falls
    # with w_0 and rises with w_1: two batches of two images are two steps of 0.3 from (0.5, 0.5), then the clip.
    says = np.array([[0.0, 4.0], [4.0, 0.0]])
    server = co_boosting(np.zeros((2, 2, 16)), says, reweighting_step=0.3, reweighting_decay=1.0, batch_size=2)
    server.reweight(0)
    assert server.combiner.weights.tolist() == [0.5, 0.5], "without images the weights stay"
    server.stage.pool.add(images=torch.zeros(2, 1, 4, 4), labels=torch.ones(2, dtype=torch.long))
    server.reweight(1)
    torch.testing.assert_close(server.combiner.weights, torch.tensor([0.8, 0.2]))
    server.reweight(2)
    assert server.combiner.weights.tolist() == [1.0, 0.0]
    inputs = torch.zeros(1, 1, 4, 4)
    torch.testing.assert_close(server.teacher(inputs), torch.tensor([[0.0, 4.0]]))
