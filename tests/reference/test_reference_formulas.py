"""Every formula once more, in numpy, from the papers' equations: the torch code must agree."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strategies.distillation.augment import Standardize
from strategies.distillation.average import weighted_mean
from strategies.distillation.batchnorm import statistics_distance
from strategies.distillation.combiners import LabelCount, Mean, Weighted
from strategies.distillation.generators import UpsampleConv
from strategies.distillation.losses import adversarial_divergence, cross_entropy, soft_kl
from strategies.method import Normalization

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


def test_combiners_equal_numpy() -> None:
    weights = np.array([4.0, 1.0, 5.0])
    counts = np.array([[3, 0, 2, 0, 1], [1, 0, 2, 7, 1], [0, 0, 4, 1, 1]])
    share = np.array([[row[c] / max(1, counts[:, c].sum()) for c in range(5)] for row in counts])
    expected = {
        "mean": sum(MEMBERS) / 3,
        "weighted": sum(w * z for w, z in zip(weights / 10, MEMBERS, strict=True)),
        "label-count": sum(lam * z for lam, z in zip(share, MEMBERS, strict=True)),
    }
    logits = tensor(MEMBERS).float()
    got = {"mean": Mean(), "weighted": Weighted(weights.tolist()), "label-count": LabelCount(counts.tolist())}
    for name, combiner in got.items():
        np.testing.assert_allclose(combiner(logits).numpy(), expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_weighted_mean_equals_numpy() -> None:
    weights = [12.0, 7.0, 30.0]
    expected = np.average(MEMBERS, axis=0, weights=weights)
    mean = weighted_mean([{"w": tensor(member)} for member in MEMBERS], weights)
    np.testing.assert_allclose(mean["w"].numpy(), expected, rtol=1e-12)


def test_weighted_mean_of_two_clients_by_hand() -> None:
    # Clients with 1 and 3 examples, a layer of two weights: (1 * 4 + 3 * 8) / 4 = 7 and (1 * 0 + 3 * 2) / 4 = 1.5.
    states = [{"w": torch.tensor([4.0, 0.0])}, {"w": torch.tensor([8.0, 2.0])}]
    assert weighted_mean(states, [1, 3])["w"].tolist() == [7.0, 1.5]


def test_ensemble_distillation_of_two_clients_by_hand() -> None:
    # One image, two classes: clients say (ln 4, 0) and (ln 4, 2 ln 2); their mean is (ln 4, ln 2), so p = (2/3, 1/3).
    # A student that says (0, 0) has q = (1/2, 1/2): KL = 2/3 ln(4/3) + 1/3 ln(2/3).
    members = torch.tensor([[[math.log(4), 0.0]], [[math.log(4), 2 * math.log(2)]]])
    teacher = Mean()(members)
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert float(soft_kl(torch.zeros(1, 2), teacher)) == pytest.approx(expected, rel=1e-5)
    assert float(cross_entropy(teacher, torch.tensor([1]))) == pytest.approx(math.log(3), rel=1e-5)
    assert float(adversarial_divergence(teacher, torch.tensor([[0.0, 1.0]]))) < 0
    assert float(adversarial_divergence(teacher, torch.tensor([[1.0, 0.0]]))) == 0.0


def test_upsample_conv_equals_loops() -> None:
    layer = UpsampleConv(2, 3)
    x, weight = RNG.normal(size=(1, 2, 3, 2)), layer.weight.detach().double().numpy()
    large = np.pad(x.repeat(2, axis=2).repeat(2, axis=3), [(0, 0), (0, 0), (1, 1), (1, 1)])
    expected = np.zeros((1, 3, 6, 4))
    for o, i, j in np.ndindex(3, 6, 4):
        expected[0, o, i, j] = (weight[o] * large[0, :, i : i + 3, j : j + 3]).sum()
    np.testing.assert_allclose(layer.double()(tensor(x)).detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def test_standardize_equals_numpy() -> None:
    pixels, mean, std = RNG.uniform(size=(2, 3, 4, 4)), (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    expected = np.stack([(pixels[:, c] - mean[c]) / std[c] for c in range(3)], axis=1)
    result = Standardize(Normalization(mean, std))(tensor(pixels).float())
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)
