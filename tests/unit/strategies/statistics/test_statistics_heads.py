import numpy as np
import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, divided, examples, of

from strategies.statistics.choice import choose_penalty, value_clients
from strategies.statistics.heads import Lda, Ridge, squared_error
from strategies.statistics.sums import Statistics


@pytest.mark.parametrize("penalty", [1e-4, 0.1, 10.0])
def test_ridge_is_the_augmented_least_squares_of_numpy(penalty: float) -> None:
    rows, labels = examples(0)
    head, array = Ridge(of(rows, labels)).head(penalty), rows.numpy()
    centred = array - array.mean(0)
    strength = penalty * np.trace(centred.T @ centred) / FEATURES
    # Least squares on examples, with sqrt(l) I below them; the bias's column of ones is not penalised.
    design = np.block(
        [[array, np.ones((len(array), 1))], [np.sqrt(strength) * np.eye(FEATURES), np.zeros((FEATURES, 1))]]
    )
    targets = np.vstack([np.eye(CLASSES)[labels.numpy()], np.zeros((FEATURES, CLASSES))])
    wanted = np.linalg.lstsq(design, targets, rcond=None)[0]
    np.testing.assert_allclose(head.weight, wanted[:-1].T, atol=1e-10)
    np.testing.assert_allclose(head.bias, wanted[-1], atol=1e-10)


@pytest.mark.parametrize("prior", ["counts", "uniform"])
def test_lda_is_the_discriminant_by_definition(prior: str) -> None:
    rows, labels = examples(1)
    head = Lda(of(rows, labels)).head(0.1, prior=prior)
    means = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    centred = rows - means[labels]
    covariance = centred.T @ centred / (len(rows) - CLASSES)
    covariance = 0.9 * covariance + 0.1 * covariance.trace() / FEATURES * torch.eye(FEATURES, dtype=torch.float64)
    weight = means @ torch.linalg.inv(covariance)
    logs = (labels.bincount() / len(rows)).double().log() if prior == "counts" else torch.zeros(CLASSES)
    torch.testing.assert_close(head.weight, weight)
    torch.testing.assert_close(head.bias, logs - (weight * means).sum(1) / 2, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_the_covariance_of_weighted_clients_is_unbiased() -> None:
    def drawn(seed: int) -> torch.Tensor:
        rng = torch.Generator().manual_seed(seed)
        rows = torch.randn(48, 3, generator=rng, dtype=torch.float64)
        labels = torch.arange(48) % 4
        small, large = (Statistics.of([(rows[part], labels[part])], 4, 3) for part in (slice(8), slice(8, 48)))
        whole = Statistics.total([small, large.scaled(0.2)])
        assert whole.freedom == pytest.approx(16 - 4 * (2 + 10 * 0.04) / 4)
        assert (whole - small).freedom == pytest.approx(8 - 4 * 0.2)
        return Lda(whole).spectrum(0.5).mean()

    # The mean eigenvalue of Sigma, where features are independent of variance 1.
    assert float(torch.stack([drawn(seed) for seed in range(400)]).mean()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("clients", [1, 10, 100, 1000])
def test_heads_of_any_division_in_any_order_equal_the_pooled_ones(alpha: float, clients: int) -> None:
    rows, labels = examples(2, 2000)
    parts = list(divided(rows, labels, clients, alpha).values())
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(clients)).tolist()
    pooled, summed = of(rows, labels), Statistics.total(parts[k] for k in order)
    for one, other in (
        (Ridge(pooled).head(0.01), Ridge(summed).head(0.01)),
        (Lda(pooled).head(0.1), Lda(summed).head(0.1)),
    ):
        torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-8)
        torch.testing.assert_close(one.bias, other.bias, rtol=0, atol=1e-8)


def test_afls_pairwise_law_is_the_sum() -> None:
    rows, labels = examples(3)
    onehot, eye = torch.eye(CLASSES, dtype=torch.float64)[labels], torch.eye(FEATURES, dtype=torch.float64)
    whole, weight = torch.zeros_like(eye), torch.zeros(FEATURES, CLASSES, dtype=torch.float64)
    for part in torch.arange(len(rows)).chunk(5):
        own = rows[part].T @ rows[part] + eye
        mine = torch.linalg.solve(own, rows[part].T @ onehot[part])
        both = torch.linalg.inv(whole + own)  # AFL's law: each side's weights, by its share of the Gram matrices
        weight, whole = both @ (whole @ weight + own @ mine), whole + own
    clean = torch.linalg.solve(whole - 5 * eye, whole @ weight)  # its removal of gamma = 1 of each of 5 clients
    summed = of(rows, labels)
    torch.testing.assert_close(clean, torch.linalg.solve(summed.gram, summed.sums.T), rtol=0, atol=1e-9)


def test_squared_error_and_likelihood_need_no_example() -> None:
    rows, labels = examples(5)
    others, onehot = of(*examples(6)), torch.eye(CLASSES, dtype=torch.float64)[labels]
    head = Ridge(others).head(0.1)
    wanted = float((head.logits(rows) - onehot).square().sum())
    assert squared_error(head, of(rows, labels)) == pytest.approx(wanted, rel=1e-10)
    lda = Lda(others)
    covariance = lda._vectors @ torch.diag(lda.spectrum(0.2)) @ lda._vectors.T
    normal = torch.distributions.MultivariateNormal(others.class_means[labels], covariance)
    prior = (others.counts / others.examples).log()[labels]
    found = lda.log_likelihood(of(rows, labels), 0.2)
    assert found == pytest.approx(float((normal.log_prob(rows) + prior).sum()), rel=1e-9)


def test_choice_is_cross_validation_over_clients() -> None:
    clients = divided(*examples(0, 300), 4, 1.0)
    found, grid = choose_penalty(clients, seed=0, grid=(0.01, 0.1, 1.0)), (0.01, 0.1, 1.0)
    total = Statistics.total(clients.values())
    for penalty in grid:
        errors = [squared_error(Ridge(total - own).head(penalty), own) for own in clients.values()]
        assert found.curve[penalty] == pytest.approx(sum(errors) / 300)
    assert found.value == min(grid, key=lambda penalty: found.curve[penalty])
    assert set(found.by_client) == set(clients)


def test_value_is_the_loss_of_the_others_without_a_client() -> None:
    rows, labels = examples(3, 240)
    parts = dict(zip("abcd", torch.arange(240).chunk(4), strict=True))
    clients = {name: of(rows[part], labels[part]) for name, part in parts.items()}
    clients["d"] = of(rows[parts["d"]], (labels[parts["d"]] + 1) % 3)  # wrong labels
    found = value_clients(clients, 0.1)
    assert found["d"] < 0 < min(found["a"], found["b"], found["c"])
    with pytest.raises(ValueError, match="must be at least 3"):
        value_clients({"a": clients["a"], "b": clients["b"]}, 0.1)
