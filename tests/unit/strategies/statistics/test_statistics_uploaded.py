import pytest

from strategies.statistics.uploaded import capped


@pytest.mark.parametrize(
    ("sizes", "share"),
    [((1.0, 1.0, 1.0, 100.0), 0.3), ((5.0, 50.0, 60.0, 2.0, 9.0), 0.25), ((1.0, 1.0, 98.0), 0.5)],
)
def test_no_capped_client_exceeds_the_share_and_the_others_keep_theirs(sizes: tuple[float, ...], share: float) -> None:
    named = {f"c{k}": size for k, size in enumerate(sizes)}
    factors = capped(named, share)
    left = {name: size * factors.get(name, 1.0) for name, size in named.items()}
    assert max(left.values()) == pytest.approx(share * sum(left.values()))
    assert factors
    assert all(factor < 1.0 for factor in factors.values())


def test_honest_sizes_are_left_as_they_are() -> None:
    assert capped({"a": 10.0, "b": 12.0, "c": 11.0}, 0.5) == {}


def test_a_share_below_an_equal_one_makes_all_clients_equal() -> None:
    factors = capped({"a": 10.0, "b": 20.0, "c": 40.0}, 0.2)
    assert [10.0 * factors.get("a", 1.0), 20.0 * factors["b"], 40.0 * factors["c"]] == [10.0, 10.0, 10.0]
