"""The two opinion pools and the class shares once more, in numpy, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.tally_pool import geometric_mean, response_shares, row_shares
from strategies.methods.tally import class_weighted

Array = NDArray[np.float64]
RNG = np.random.default_rng(8)
LOGITS: Array = RNG.normal(size=(4, 9, 5)) * 3
# A class of one client alone, a class of no client, and a client without examples.
COUNTS = np.array([[3, 0, 12, 0, 1], [1, 70, 2, 0, 1], [0.5, 0, 4, 0, 1.25], [0, 0, 0, 0, 0]])
HELD = [0, 1, 2, 4]
SCALES, BIAS = np.array([0.3, 1.0, 0.0, 2.0]), np.array([0.5, -1.0, 0.0, 9.0, 0.25])
WEIGHTS, TEMPERATURES, SMOOTHING = np.array([1.0, 0.5, 2.0, 3.0]), np.array([1.0, 2.0, 0.7, 1.3]), 0.03


def opinion(logits: Array, counts: Array, temperature: float) -> list[float]:
    """Return one client's posterior without its prior, on one image."""
    classes, total = len(logits), sum(counts)
    prior = [(n + SMOOTHING * total) / (total * (1 + classes * SMOOTHING)) if total else 1 / classes for n in counts]
    odds = [math.exp((z - math.log(p)) / temperature) for z, p in zip(logits, prior, strict=True)]
    return [odd / sum(odds) for odd in odds]


def pooled(rule: str, *, calibrated: bool) -> Array:
    """Return the logits that a pool gives [B, C]; those of class 3, which no client holds, are left out."""
    found = np.zeros(LOGITS.shape[1:])
    for image in range(LOGITS.shape[1]):
        opinions = [opinion(LOGITS[k, image], COUNTS[k], TEMPERATURES[k]) for k in range(4)]
        for c in range(5):
            total = sum(WEIGHTS[k] * COUNTS[k, c] for k in range(4))
            shares = [WEIGHTS[k] * COUNTS[k, c] / total if total else 0.0 for k in range(4)]
            if rule == "linear":
                mass = sum(share * q[c] for share, q in zip(shares, opinions, strict=True))
                found[image, c] = math.log(mass) if total else 0.0
            else:
                found[image, c] = sum(share * math.log(q[c] + 1e-4) for share, q in zip(shares, opinions, strict=True))
            if calibrated:
                above = [LOGITS[k, image, c] - sum(LOGITS[k, image]) / 5 for k in range(4)]
                found[image, c] += (
                    sum(share * s * z for share, s, z in zip(shares, SCALES, above, strict=True)) + BIAS[c]
                )
    return found[:, HELD]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("rule", ["linear", "log"])
def test_pool_equals_numpy(rule: str, calibrated: bool) -> None:
    given = [torch.from_numpy(values) for values in (COUNTS, WEIGHTS, TEMPERATURES, np.array([SMOOTHING]))]
    more = {"scales": torch.from_numpy(SCALES), "bias": torch.from_numpy(BIAS)} if calibrated else {}
    logits = OpinionPool(rule, *given, **more)(torch.from_numpy(LOGITS).float()).numpy()
    expected = pooled(rule, calibrated=calibrated)
    np.testing.assert_allclose(logits[:, HELD], expected, rtol=1e-4, atol=1e-4)
    assert bool((logits[:, 3] <= expected.min(1) - 9.99).all())


def test_calibration_equals_numpy() -> None:
    pool = OpinionPool("log", *(torch.from_numpy(values) for values in (COUNTS, WEIGHTS)))
    pool.calibrate(torch.from_numpy(LOGITS).float())
    above = LOGITS - LOGITS.mean(2, keepdims=True)
    scales = np.array([1 / math.sqrt((above[k] ** 2).mean() - above[k].mean() ** 2) for k in range(4)])
    np.testing.assert_allclose(pool.scales.numpy(), scales, rtol=1e-4)
    held = (WEIGHTS[:, None] * COUNTS).sum(0)
    shares = WEIGHTS[:, None] * COUNTS / np.where(held > 0, held, 1)
    evidence = np.array(
        [[sum(shares[k, c] * scales[k] * above[k, x, c] for k in range(4)) for c in range(5)] for x in range(9)]
    )
    wanted, bias = held / held.sum(), np.zeros(5)
    for _ in range(100):
        odds = np.exp(4 * evidence + bias)
        predicted = (odds / odds.sum(1, keepdims=True)).mean(0)
        bias += 0.5 * (np.log(wanted + 1e-2 / len(wanted)) - np.log(predicted + 1e-5 / len(wanted)))
    np.testing.assert_allclose(pool.bias.numpy(), bias / 4, rtol=1e-3, atol=1e-3)


def test_response_shares_equal_numpy() -> None:
    expected = np.zeros((4, 5))
    for k in range(4):
        for c in range(5):
            squares = [
                (math.exp(LOGITS[k, image, c]) / sum(math.exp(z) for z in LOGITS[k, image])) ** 2 for image in range(9)
            ]
            expected[k, c] = math.sqrt(sum(squares) / 9)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(response_shares(torch.from_numpy(LOGITS)).numpy(), expected, rtol=1e-10)


def test_row_shares_and_geometric_mean_by_hand() -> None:
    rows = row_shares(torch.tensor([[1.0, 2.0, 0.0]]))  # 1, 16 and 0 of 17
    np.testing.assert_allclose(rows.numpy(), [[1 / 17, 16 / 17, 0]])
    other = torch.tensor([[16 / 17, 1 / 17, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(geometric_mean(rows, other).numpy(), [[0.5, 0.5, 0]], rtol=1e-6)


def test_class_weighted_layer_equals_numpy() -> None:
    rows, otherwise = RNG.normal(size=(3, 4, 6)), RNG.normal(size=(4, 6))
    shares = np.array([[0.2, 1.0, 0.0, 0.0], [0.3, 0.0, 0.5, 0.0], [0.5, 0.0, 0.5, 0.0]])
    expected = np.array([sum(shares[k, c] * rows[k, c] for k in range(3)) for c in range(3)] + [otherwise[3]])
    found = class_weighted(
        [torch.from_numpy(row) for row in rows], torch.from_numpy(shares), torch.from_numpy(otherwise)
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
