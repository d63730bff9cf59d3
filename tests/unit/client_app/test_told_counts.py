"""What a client tells of its examples per class."""

from __future__ import annotations

import pytest

from client_app.node import check_shares_counts, equal_parts, reported_counts
from fl_app.config import ClientConfig
from fl_app.node_policy import FREE, NodePolicy
from strategies.core.errors import UploadError


def test_counts_are_sent_unchanged_unless_disabled() -> None:
    counts = (90, 3, 7, 0)

    assert reported_counts(counts, ClientConfig()) == counts
    assert reported_counts(counts, ClientConfig(label_counts_as="presence")) == (50, 0, 50, 0)
    for how in ("numbers", "presence"):
        assert reported_counts(counts, ClientConfig(share_label_counts=False, label_counts_as=how)) is None


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (ClientConfig(share_label_counts=False), FREE),
        (ClientConfig(label_counts_as="presence"), FREE),
        (ClientConfig(), NodePolicy(label_counts="presence")),
        (ClientConfig(), NodePolicy(label_counts="none")),
        (ClientConfig(), NodePolicy(max_epsilon=1.0)),
    ],
)
def test_what_holds_exact_counts_is_refused_where_they_are_not_told(config: ClientConfig, policy: NodePolicy) -> None:
    with pytest.raises(UploadError, match="its examples per class, which are part of a$"):
        check_shares_counts(config, policy, what="a")
    check_shares_counts(ClientConfig(), FREE, what="a")


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((10, 0, 0, 0, 0, 0, 0, 0, 0, 0), (10, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
        ((98, 2, 0, 0, 0, 0, 0, 0, 0, 0), (100, 0, 0, 0, 0, 0, 0, 0, 0, 0)),  # 2 % is not more than 2 %
        ((97, 3, 0, 0, 0, 0, 0, 0, 0, 0), (50, 50, 0, 0, 0, 0, 0, 0, 0, 0)),
        ((1, 0, 98, 0, 2, 0), (0, 0, 101, 0, 0, 0)),
        ((0, 5, 0, 5, 1), (0, 4, 0, 4, 3)),
        ((1,) * 100, (1,) * 100),  # each a hundredth
        ((1, 0, 0), (1, 0, 0)),
    ],
)
def test_parts_are_equal_over_the_classes_that_are_present_and_their_sum_is_the_truth(
    counts: tuple[int, ...], told: tuple[int, ...]
) -> None:
    assert equal_parts(counts) == told
    assert sum(told) == sum(counts)


def test_a_class_when_it_grows_or_shrinks_within_its_bounds_tells_nothing() -> None:
    assert equal_parts((30, 30, 40, 0)) == equal_parts((60, 20, 20, 0))
