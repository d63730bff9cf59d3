import numpy as np
import pytest
import torch
from statistics_fakes import CLASSES, FEATURES, divided, examples, of

from strategies.core.fingerprint import packed
from strategies.statistics.sums import Statistics, from_arrays, merged, projection, to_arrays

PROBE = torch.arange(16.0)


def test_of_in_any_batches_is_numpys_sums() -> None:
    rows, labels = examples(0)
    found = Statistics.of(zip(rows.split(7), labels.split(7), strict=True), CLASSES, FEATURES)
    array, onehot = rows.numpy(), np.eye(CLASSES)[labels.numpy()]
    np.testing.assert_allclose(found.gram, array.T @ array, rtol=1e-12)
    np.testing.assert_allclose(found.sums, onehot.T @ array, rtol=1e-12, atol=1e-14)
    assert found.counts.tolist() == onehot.sum(0).tolist()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 100.0])
@pytest.mark.parametrize("clients", [1, 10, 1000])
def test_total_of_any_division_in_any_order_is_that_of_all_examples(alpha: float, clients: int) -> None:
    rows, labels = examples(1, 2000)
    parts = list(divided(rows, labels, clients, alpha).values())
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(3)).tolist()
    whole, found = of(rows, labels), Statistics.total(parts[k] for k in order)
    assert torch.equal(found.counts, whole.counts)
    torch.testing.assert_close(found.sums, whole.sums, rtol=0, atol=1e-11)
    torch.testing.assert_close(found.gram, whole.gram, rtol=0, atol=1e-11)


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


def test_projected_sums_are_the_sums_of_projected_features() -> None:
    rows, labels = examples(5)
    basis = projection(FEATURES, 4, seed=7)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(of(rows, labels).projected(basis).gram, of(rows @ basis, labels).gram)
    assert torch.equal(basis, projection(FEATURES, 4, seed=7))
    assert not torch.equal(basis, projection(FEATURES, 4, seed=8))
    with pytest.raises(ValueError, match="must be 1 to 6"):
        projection(FEATURES, 7, seed=0)


def test_the_merged_upload_of_a_node_is_that_of_all_its_clients_examples() -> None:
    rows, labels = examples(0)
    fingerprint = packed({"backbone": "tiny"})
    of_one = {"fingerprint": fingerprint, "probe": PROBE, "noise": torch.zeros(1)}
    sent = [{**to_arrays(of(rows[part], labels[part])), **of_one} for part in (slice(0, 40), slice(40, None))]
    found, whole = merged(sent), to_arrays(of(rows, labels))

    assert float(found["noise"]) == 0.0
    assert torch.equal(found["fingerprint"], fingerprint)
    assert torch.equal(found["probe"], PROBE)
    for key, value in whole.items():
        assert found[key].dtype == value.dtype
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="differ in arrays or fingerprints"):
        merged([sent[0], {**sent[1], "fingerprint": fingerprint + 1}])
    with pytest.raises(ValueError, match="differ in arrays or fingerprints"):
        merged([sent[0], {**sent[1], "squares": torch.zeros(CLASSES, FEATURES)}])
    with pytest.raises(ValueError, match="an upload has noise of 3: must be 0, for a server refuses more"):
        merged([sent[0], {**sent[1], "noise": torch.tensor([3.0])}])
    with pytest.raises(ValueError, match="must be at least one"):
        merged([])
