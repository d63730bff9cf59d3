import itertools
import math

import numpy as np
import pytest

from strategies.combiners.voting import Array, merged, scores, vote_counts, vote_shares


def one_hot(votes: list[list[int]], classes: int) -> Array:
    """Return logits [M, B, C] whose votes are these."""
    return np.eye(classes, dtype=np.float32)[np.array(votes)]


def drawn(seed: int, members: int = 3, examples: int = 40, classes: int = 4) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(members, examples, classes)).astype(np.float32), rng.integers(0, classes, examples)


def test_vote_counts_equal_counting_one_by_one() -> None:
    logits, labels = drawn(0)
    expected = np.zeros((3, 4, 4), np.int64)
    for member, example in itertools.product(range(3), range(40)):
        expected[member, labels[example], np.argmax(logits[member, example])] += 1

    counts = vote_counts(logits, labels)

    assert counts.dtype == np.int64
    assert np.array_equal(counts, expected)


def test_merged_counts_are_those_of_the_pooled_examples_in_any_order_of_clients() -> None:
    logits, labels = drawn(1)
    parts = [vote_counts(logits[:, a:b], labels[a:b]) for a, b in ((0, 5), (5, 6), (6, 40))]

    assert np.array_equal(merged(parts), vote_counts(logits, labels))
    assert np.array_equal(merged(parts[::-1]), merged(parts))


def test_shares_of_a_class_without_examples_are_equal_over_the_seen_classes() -> None:
    counts = vote_counts(one_hot([[0, 1, 1]], 4), np.array([0, 0, 2]))

    np.testing.assert_allclose(
        vote_shares(counts)[0], [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.5, 0, 0.5, 0]]
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_prediction_is_the_class_with_the_largest_product_by_brute_force(seed: int) -> None:
    counts = 1 + np.random.default_rng(seed).integers(0, 50, (3, 4, 4))  # no share is zero: the floor plays no part
    counts = counts * counts.sum(2).prod(0)[None, :, None] // counts.sum(2, keepdims=True)  # as many per class
    logits, _ = drawn(seed, examples=64)
    shares = counts / counts.sum(2, keepdims=True)
    products = np.array(
        [
            [math.prod(shares[i, r, np.argmax(logits[i, b])] for i in range(3)) for r in range(4)]
            for b in range(logits.shape[1])
        ]
    )

    found = scores(counts, logits)

    assert np.array_equal(found.argmax(1), products.argmax(1))
    np.testing.assert_allclose(found, np.log(products), rtol=1e-4)


def test_every_pattern_of_votes_of_two_members_has_the_answer_by_hand() -> None:
    # P_0 = [[.9, .1], [.4, .6]], P_1 = [[.5, .5], [0, 1]]
    counts = np.array([[[9, 1], [4, 6]], [[5, 5], [0, 10]]])
    votes = [[0, 0, 1, 1], [0, 1, 0, 1]]

    found = scores(counts, one_hot(votes, 2))

    # .45 against .4 * 0; .45 against .4; .05 against .6 * 0; .05 against .6
    assert found.argmax(1).tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(found[0], [math.log(0.45), math.log(0.4 * 1e-6)], rtol=1e-5)
