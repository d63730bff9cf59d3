"""The laws of division, called as the app calls them: sizes, coverage, reproducibility and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from fl_app.data import laws
from fl_app.data.partitions import BY_DOMAIN, LAWS, PartitionSpec, label_counts, partition
from strategies.core.errors import DataError, OptionError
from strategies.core.options import flatten, options_of, parse

LABELS = np.random.default_rng(5).integers(0, 10, 1003)
DRAWN = tuple(law for law in LAWS if law != BY_DOMAIN)
DISJOINT = tuple(law for law in DRAWN if law != "dirichlet-overlap")
COVERING = ("dirichlet-clients", "dirichlet-p4", "dirichlet-p4prep", "classes", "iid")


def spec_of(law: str, **values: float) -> PartitionSpec:
    return PartitionSpec(law=law, sigma=0.4 if law == "lognormal" else 0.0, **values)  # type: ignore[arg-type]


def divide(law: str, *, seed: int = 0, num_clients: int = 10, **values: float) -> list[np.ndarray]:
    return partition(LABELS, spec_of(law, **values), num_clients=num_clients, num_classes=10, seed=seed)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 5.0])
@pytest.mark.parametrize("law", DISJOINT)
def test_every_law_gives_disjoint_positions_that_are_reproducible(law: str, alpha: float) -> None:
    first, second, other = (divide(law, seed=seed, alpha=alpha, min_size=1) for seed in (1, 1, 2))
    together = np.concatenate(first)
    assert len(first) == 10
    assert all(part.dtype == np.int64 and len(part) for part in first)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("shares", "sizes"), [((0.05, 0.95), [50, 100]), ((0.1, 0.9), [100, 100])])
def test_overlapping_clients_hold_a_share_of_copies_of_a_class(shares: tuple[float, float], sizes: list[int]) -> None:
    assert laws.overlapping_sizes(100, np.array(shares), 10.0).tolist() == sizes


def test_overlapping_clients_draw_from_the_whole_class_without_giving_it_twice_to_one() -> None:
    parts, again, other = (divide("dirichlet-overlap", seed=seed, alpha=0.5) for seed in (1, 1, 2))
    assert all(len(np.unique(part)) == len(part) for part in parts)
    counts = label_counts(LABELS, parts, 10)
    whole = np.bincount(LABELS)
    assert (counts <= whole).all()
    assert ((counts == whole).sum(0) >= 1).all()  # some client's share is at least a tenth
    assert counts.sum() > 2 * len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))
    assert sum(map(len, divide("dirichlet-overlap", seed=1, alpha=0.5, copies=1.0))) == pytest.approx(1003, abs=50)


def test_overlapping_clients_are_as_many_as_in_the_published_code() -> None:
    # 2,000 draws with 5 clients at alpha 0.1: 1.66 clients hold a whole class, and a class is handed out 1.98 times.
    rng = np.random.default_rng(0)
    sizes = np.array([laws.overlapping_sizes(1000, rng.dirichlet(np.full(5, 0.1)), 10.0) for _ in range(2000)])
    assert (sizes == 1000).sum(1).mean() == pytest.approx(1.66, abs=0.05)
    assert sizes.sum(1).mean() / 1000 == pytest.approx(1.98, abs=0.05)


@pytest.mark.parametrize("law", COVERING)
def test_covering_laws_give_every_example_to_someone(law: str) -> None:
    assert sum(map(len, divide(law))) == len(LABELS)


@pytest.mark.parametrize("law", DRAWN)
def test_every_law_with_one_client_gives_it_all_it_may_hold(law: str) -> None:
    (part,) = divide(law, num_clients=1, classes_per_client=10)
    assert len(part) == len(LABELS)


@pytest.mark.parametrize("law", DRAWN)
def test_every_law_leaves_the_global_generator_alone(law: str) -> None:
    before = np.random.get_state()[1].copy()
    divide(law)
    assert np.array_equal(before, np.random.get_state()[1])


def test_equal_sizes_are_the_whole_part_of_the_average() -> None:
    assert [len(part) for part in divide("dirichlet-classes")] == [100] * 10
    assert [len(part) for part in divide("dirichlet-p4")] == [103] + [100] * 9
    assert [len(part) for part in divide("dirichlet-p4prep")] == [100] * 9 + [103]
    assert [len(part) for part in divide("iid")] == [101] * 3 + [100] * 7


def test_lognormal_law_fills_the_drawn_sizes() -> None:
    parts = divide("lognormal")
    assert len({len(part) for part in parts}) > 5
    assert 993 < sum(map(len, parts)) <= 1003


@pytest.mark.parametrize("seed", range(3))
def test_dirichlet_over_classes_with_many_clients_and_tiny_alpha_ends(seed: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 60_000)
    parts = partition(labels, PartitionSpec(alpha=0.01), num_clients=100, num_classes=10, seed=seed)
    assert [len(part) for part in parts] == [600] * 100
    # Most of a client's examples are of one class: the skew is over the classes of a client.
    assert np.median(label_counts(labels, parts, 10).max(axis=1)) > 400


def test_shuffled_variant_takes_a_class_in_random_order() -> None:
    part = divide("dirichlet-p4", num_clients=1)[0]
    ordered = divide("dirichlet-classes", num_clients=1)[0]
    zeros, zeros_ordered = (p[LABELS[p] == 0] for p in (part, ordered))
    assert (np.diff(zeros_ordered) < 0).all()
    assert not (np.diff(zeros) < 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_dirichlet_over_clients_starts_over_until_the_smallest_is_large_enough(seed: int) -> None:
    assert min(map(len, divide("dirichlet-clients", seed=seed, alpha=0.1, min_size=25))) >= 25


def test_dirichlet_over_clients_shuffles_each_client() -> None:
    labels_of_first = LABELS[divide("dirichlet-clients", alpha=5.0)[0]]
    assert (np.diff(labels_of_first) < 0).sum() > 10


def test_dirichlet_over_clients_that_never_succeeds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "MAX_TRIES", 20)
    with pytest.raises(DataError, match=r"'data.min-size' is 20: none of 20 divisions.*'data.alpha' 0.01"):
        divide("dirichlet-clients", num_clients=50, alpha=0.01, min_size=20)


@pytest.mark.parametrize("seed", range(5))
def test_classes_law_gives_its_own_and_other_classes_divided_evenly(seed: int) -> None:
    counts = label_counts(LABELS, divide("classes", num_clients=12, classes_per_client=3, seed=seed), 10)
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert all(counts[client, client % 10] > 0 for client in range(12))
    for held in counts.T:
        assert np.ptp(held[held > 0]) <= 1
    assert counts.sum() == len(LABELS)


def test_classes_law_draws_the_other_classes_uniformly() -> None:
    others = np.zeros(10)
    for seed in range(300):
        others += label_counts(LABELS, divide("classes", seed=seed), 10)[3] > 0
    assert others[3] == 300
    # 300 / 9 = 33 expected for each other class, standard deviation 5.4.
    assert np.delete(others, 3).min() > 14
    assert np.delete(others, 3).max() < 55


def test_classes_law_with_fewer_clients_than_classes_says_which_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    parts = divide("classes", num_clients=3, classes_per_client=1)
    assert [set(LABELS[part]) for part in parts] == [{0}, {1}, {2}]
    assert "no client holds the classes [3, 4, 5, 6, 7, 8, 9]" in caplog.text


def test_classes_p1_with_five_clients_walks_through_the_classes() -> None:
    parts = divide("classes-p1", num_clients=5, classes_per_client=3)
    own = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {9, 0, 1}, {2, 3, 4}]
    assert [set(LABELS[part]) for part in parts] == own


def test_classes_p1_with_classes_used_up_gives_no_foreign_ones(caplog: pytest.LogCaptureFixture) -> None:
    parts = divide("classes-p1", num_clients=10, classes_per_client=2)
    assert all(len(np.unique(LABELS[part])) <= 2 for part in parts)
    assert max(map(len, parts)) == 100
    rest = len(LABELS) - sum(map(len, parts))
    assert rest > 3
    assert f"{rest} of 1003 examples are held by no client" in caplog.text


def test_label_counts_are_counted_by_hand() -> None:
    labels = np.array([0, 2, 2, 1, 0])
    counts = label_counts(labels, [np.array([0, 1, 2]), np.array([4])], 4)
    assert counts.tolist() == [[1, 0, 2, 0], [1, 0, 0, 0]]
    assert counts.dtype == np.int64


@pytest.mark.parametrize(
    ("spec", "num_clients", "message"),
    [
        (PartitionSpec(), 41, "40 training examples for 41 clients: must be 1 to 40 clients"),
        (PartitionSpec(), 0, "40 training examples for 0 clients: must be 1 to 40 clients"),
        (PartitionSpec("classes", classes_per_client=5), 2, "'data.classes-per-client' is 5: must be at most 4"),
        (PartitionSpec("classes-p1", classes_per_client=5), 2, "'data.classes-per-client' is 5: must be at most 4"),
        (PartitionSpec("dirichlet-clients"), 5, "'data.min-size' is 10: must be at most 8 where 5 clients share 40"),
    ],
)
def test_partition_of_an_impossible_request_is_one_clear_line(
    spec: PartitionSpec, num_clients: int, message: str
) -> None:
    labels = np.repeat(np.arange(4), 10)
    with pytest.raises((DataError, OptionError), match=message):
        partition(labels, spec, num_clients=num_clients, num_classes=4, seed=0)


def test_partition_that_leaves_a_client_without_examples_is_refused() -> None:
    labels = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    with pytest.raises(DataError, match=r"partition 3 of 4 has no example under 'data.law' 'classes'"):
        partition(labels, PartitionSpec("classes", classes_per_client=1), num_clients=4, num_classes=2, seed=0)


@pytest.mark.parametrize("label", [-1, 4])
def test_partition_with_a_label_that_is_no_class_names_it(label: int) -> None:
    with pytest.raises(DataError, match=f"label {label} of training example 2: must be 0 to 3"):
        partition(np.array([0, 1, label, 3]), PartitionSpec(), num_clients=2, num_classes=4, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"law": "zipf"}, "'data.law' is 'zipf': must be one of 'dirichlet-classes'"),
        ({"alpha": 0.0}, "'data.alpha' is 0.0: must be a number greater than 0"),
        ({"sigma": -1.0}, "'data.sigma' is -1.0"),
        ({"min_size": 0}, "'data.min-size' is 0"),
        ({"law": "lognormal"}, "'data.sigma' is 0.0: must be greater than 0 where 'data.law' is 'lognormal'"),
    ],
)
def test_spec_with_a_bad_value_names_key_value_and_remedy(values: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PartitionSpec(**values)


def test_spec_goes_through_flat_settings_unchanged() -> None:
    spec = PartitionSpec("classes", alpha=0.1, classes_per_client=3, sigma=0.2, copies=3.0, min_size=4)
    assert parse(PartitionSpec, flatten(spec, "data"), "data") == spec
    assert [entry.key for entry in options_of(PartitionSpec, "data")] == [
        "data.law",
        "data.alpha",
        "data.classes-per-client",
        "data.sigma",
        "data.copies",
        "data.min-size",
    ]


def test_domains_when_there_is_one_per_client_go_to_the_clients_in_order() -> None:
    domains = np.array([1, 0, 2, 1, 0, 2, 2])
    labels, spec = np.zeros(7, dtype=np.int64), PartitionSpec(BY_DOMAIN)

    parts = partition(labels, spec, num_clients=3, num_classes=2, seed=0, domains=domains)

    assert [part.tolist() for part in parts] == [[1, 4], [0, 3], [2, 5, 6]]
    for wrong in (2, 4):
        with pytest.raises(OptionError, match=f"{wrong} clients where 'data.law' is 'domains': must be 3, one"):
            partition(labels, spec, num_clients=wrong, num_classes=2, seed=0, domains=domains)
    with pytest.raises(
        OptionError, match="'data.law' is 'domains': must be another law for a data set without domains"
    ):
        partition(labels, spec, num_clients=3, num_classes=2, seed=0)


def test_domains_when_another_law_divides_are_mixed() -> None:
    domains = np.repeat([0, 1], 50)

    parts = partition(LABELS[:100], PartitionSpec("iid"), num_clients=3, num_classes=10, seed=0, domains=domains)

    assert sorted(np.concatenate(parts).tolist()) == list(range(100))


@pytest.mark.parametrize("num_clients", [5, 10, 20, 50, 100])
@pytest.mark.parametrize("sigma", [0.4, 0.8, 1.2])
def test_lognormal_sizes_have_the_published_law_for_every_number_of_clients(num_clients: int, sigma: float) -> None:
    labels = np.tile(np.arange(10), 800)
    spec = PartitionSpec("lognormal", alpha=0.1, sigma=sigma)

    parts = partition(labels, spec, num_clients=num_clients, num_classes=10, seed=3)

    sizes = np.array([len(part) for part in parts])
    assert len(labels) - num_clients < sizes.sum() <= len(labels)
    # The deviation of n normals is known to one in sqrt(2 n - 2); the scale of the sizes drops out of it.
    assert abs(np.log(sizes).std(ddof=1) - sigma) < 4.5 * sigma / np.sqrt(2 * num_clients - 2)


@pytest.mark.parametrize("num_clients", [5, 10, 50, 100])
@pytest.mark.parametrize("held", [1, 2, 5, 10])
@pytest.mark.parametrize("law", ["classes", "classes-p1"])
def test_clients_hold_as_many_classes_as_asked_for(law: str, held: int, num_clients: int) -> None:
    labels = np.tile(np.arange(10), 500)
    spec = PartitionSpec(law, classes_per_client=held)

    counts = label_counts(labels, partition(labels, spec, num_clients=num_clients, num_classes=10, seed=1), 10)

    # P1's release gives equal sizes, filled at random: a class may be gone when a client comes to it.
    assert ((counts > 0).sum(axis=1) <= held).all()
    if law == "classes":
        assert ((counts > 0).sum(axis=1) == held).all()
        assert [int(row[client % 10] > 0) for client, row in enumerate(counts)] == [1] * num_clients
        assert counts.sum() == (len(labels) if num_clients >= 10 else counts.sum())
    else:
        assert counts.sum(axis=1).max() <= len(labels) // num_clients
