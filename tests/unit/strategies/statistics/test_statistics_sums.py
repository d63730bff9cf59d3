import numpy as np
import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, examples, of

from strategies.core.fingerprint import encode_fingerprint
from strategies.statistics.gaussians import Gaussians
from strategies.statistics.moments import FeatureMoments, moments_from_arrays, moments_to_arrays
from strategies.statistics.sums import Statistics, from_arrays, merge_sums, to_arrays

PROBE = torch.arange(16.0)


def test_of_in_any_batches_is_numpys_sums() -> None:
    rows, labels = examples(0)
    found = Statistics.of(zip(rows.split(7), labels.split(7), strict=True), CLASSES, FEATURES)
    array, onehot = rows.numpy(), np.eye(CLASSES)[labels.numpy()]
    np.testing.assert_allclose(found.gram, array.T @ array, rtol=1e-12)
    np.testing.assert_allclose(found.sums, onehot.T @ array, rtol=1e-12, atol=1e-14)
    assert found.counts.tolist() == onehot.sum(0).tolist()


def test_scatter_is_numpys_covariance_times_n() -> None:
    rows, labels = examples(3)
    found = of(rows, labels)
    np.testing.assert_allclose(found.scatter, np.cov(rows.numpy().T, bias=True) * len(rows), atol=1e-12)
    centred = rows - torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])[labels]
    torch.testing.assert_close(found.scatter_within, centred.T @ centred, rtol=0, atol=1e-12)


def test_arrays_round_once_to_float32_and_keep_counts() -> None:
    made = of(*examples(4))
    arrays = to_arrays(made)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in arrays.items()} == {
        "counts": (torch.float64, (CLASSES,)),
        "sums": (torch.float32, (CLASSES, FEATURES)),
        "gram": (torch.float32, (FEATURES * (FEATURES + 1) // 2,)),
    }
    found = from_arrays(arrays)
    assert torch.equal(found.counts, made.counts)
    assert torch.equal(found.gram, made.gram.float().double())
    assert torch.equal(found.gram, found.gram.T)


def test_the_merged_upload_of_a_node_is_that_of_all_its_clients_examples() -> None:
    rows, labels = examples(0)
    fingerprint = encode_fingerprint({"backbone": "tiny"})
    of_one = {"fingerprint": fingerprint, "probe": PROBE, "noise": torch.zeros(1)}
    sent = [{**to_arrays(of(rows[part], labels[part])), **of_one} for part in (slice(0, 40), slice(40, None))]
    found, whole = merge_sums(sent), to_arrays(of(rows, labels))

    assert float(found["noise"]) == 0.0
    assert torch.equal(found["fingerprint"], fingerprint)
    assert torch.equal(found["probe"], PROBE)
    for key, value in whole.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="differ in arrays or fingerprints"):
        merge_sums([sent[0], {**sent[1], "fingerprint": fingerprint + 1}])
    with pytest.raises(ValueError, match="differ in arrays or fingerprints"):
        merge_sums([sent[0], {**sent[1], "squares": torch.zeros(CLASSES, FEATURES)}])
    with pytest.raises(ValueError, match="an upload has noise of 3: must be 0, for a server refuses more"):
        merge_sums([sent[0], {**sent[1], "noise": torch.tensor([3.0])}])
    with pytest.raises(ValueError, match="must be at least one"):
        merge_sums([])


# Moments of classes: one diagonal Gaussian for each, from sums alone.


ANY = torch.full((FEATURES,), 7.0, dtype=torch.float64)


def moments(rows: torch.Tensor, labels: torch.Tensor) -> FeatureMoments:
    found = FeatureMoments.zeros(CLASSES, FEATURES)
    for some, own in zip(rows.split(7), labels.split(7), strict=True):
        found.include(some, own)
    return found


def test_variances_are_numpys_within_each_class() -> None:
    rows, labels = examples(0)
    found = moments(rows, labels).variances(ANY)
    for c in range(CLASSES):
        np.testing.assert_allclose(found[c], rows[labels == c].numpy().var(0), rtol=1e-9)


def test_arrays_round_once_to_float32() -> None:
    made = moments(*examples(4))
    found = moments_from_arrays(moments_to_arrays(made))
    assert torch.equal(found.counts, made.counts)
    assert torch.equal(found.squares, made.squares.float().double())


# Full Gaussians of classes: pooled over clients as if their examples were one client's, and drawn from.


def rows_of(seed: int, count: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=rng)
    rows = torch.randn(count, 4, generator=rng) @ torch.randn(4, 4, generator=rng) + shift + labels[:, None]
    return rows, labels


def test_pooled_gaussians_are_numpys_of_all_examples() -> None:
    clients = [rows_of(seed, count, 100.0 * seed) for seed, count in ((1, 9), (2, 1), (3, 14))]
    found = Gaussians.pooled([Gaussians.of(rows, labels, 4) for rows, labels in clients])

    rows, labels = (torch.cat(parts).numpy() for parts in zip(*clients, strict=True))
    assert found.counts.tolist() == np.bincount(labels, minlength=4).tolist()
    for c in range(3):
        own = rows[labels == c].astype(float)
        np.testing.assert_allclose(found.means[c], own.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.covariances[c], np.cov(own.T), rtol=1e-9)
    assert float(found.means[3].abs().sum() + found.covariances[3].abs().sum()) == 0.0  # no client has class 3


def test_pooling_what_travelled_in_float32_loses_no_digits_far_from_the_origin() -> None:
    rows, labels = rows_of(4, 40, 1000.0)
    halves = [Gaussians.of(rows[part], labels[part], 3) for part in (slice(0, 20), slice(20, 40))]
    sent = [Gaussians(half.counts, half.means.float(), half.covariances.float()) for half in halves]

    exact, found = Gaussians.of(rows, labels, 3).covariances, Gaussians.pooled(sent).covariances

    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e4])
def test_what_examples_have_passes_the_check_in_float32_for_any_scale_and_rank(scale: float) -> None:
    for count in (1, 2, 3, 30):
        rows, labels = rows_of(5, count, 10.0)
        rows[:, 3] = rows[0, 3]  # a feature that is constant
        rows[:, 2] *= 1e-9
        made = Gaussians.of(rows * scale, labels, 4)
        Gaussians(made.counts, made.means.float(), made.covariances.float()).check(count)


def test_arrays_are_read_with_their_values_after_a_form_was_read_without() -> None:
    found = Statistics.of([(torch.rand(20, 11, dtype=torch.float64), torch.arange(20) % 4)], 4, 11)
    with torch.device("meta"):
        to_arrays(Statistics.zeros(4, 11))

    assert torch.allclose(from_arrays(to_arrays(found)).gram, found.gram, atol=1e-5)
