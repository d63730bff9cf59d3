"""The ledger of the privacy that a node has given up over all runs."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fl_app.ledger import Ledger
from fl_app.node_policy import FREE, NodePolicy
from fl_app.privacy import PrivacyConfig
from strategies.core.durable import write_facts
from strategies.core.errors import OptionError, StoreError, UploadError

EIGHT = PrivacyConfig(epsilon=8.0)
BUDGET = NodePolicy.of({"max-epsilon": 20.0})


def enter(folder: Path, privacy: PrivacyConfig = EIGHT, policy: NodePolicy = BUDGET, run: str = "a") -> None:
    Ledger.of(folder, "alice").enter(privacy, policy, run=run, server_round=1)


def test_releases_of_all_runs_add_up_and_the_one_beyond_the_budget_is_refused(tmp_path: Path) -> None:
    ledger = Ledger.of(tmp_path, "alice")
    assert ledger.spent() == (0.0, 0.0)

    for run in "ab":
        enter(tmp_path, run=run)

    assert ledger.spent() == (16.0, 2e-5)
    with pytest.raises(
        UploadError, match=r"'privacy.epsilon' is 8: must be at most 4 .* over all runs is 20, of which 16 is"
    ):
        ledger.check(EIGHT, BUDGET)
    with pytest.raises(UploadError, match="must be at most 4"):
        enter(tmp_path, run="c")
    enter(tmp_path, PrivacyConfig(epsilon=4.0), run="c")
    assert ledger.spent()[0] == 20.0
    assert [row["run"] for row in ledger.releases()] == ["a", "b", "c"]
    assert Ledger.of(tmp_path, "bob").spent() == (0.0, 0.0)


def enter_sums(folder: Path, epsilon: float, policy: NodePolicy = BUDGET, **more: float) -> None:
    """Enter the upload of sums with noise."""
    privacy = PrivacyConfig(epsilon=epsilon, **more)
    Ledger.of(folder, "alice").enter(privacy, policy, run="r", server_round=1, mu=privacy.mu)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism, by bisection over the integral of both densities' difference."""
    grid = torch.linspace(-20, 20 + mu, 100001, dtype=torch.float64)
    one, other = (torch.exp(-((grid - shift) ** 2) / 2) / math.sqrt(2 * math.pi) for shift in (mu, 0.0))
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        found = float((one - math.exp(middle) * other).clamp_min(0).sum() * (grid[1] - grid[0]))
        low, high = (middle, high) if found > delta else (low, middle)
    return high


def test_gaussian_mechanisms_compose_exactly(tmp_path: Path) -> None:
    for epsilon in (1.0, 2.0, 1.0):
        enter_sums(tmp_path, epsilon)
    ledger = Ledger.of(tmp_path, "alice")
    mu = math.sqrt(sum(row["mu"] ** 2 for row in ledger.releases()))

    epsilon, delta = ledger.spent()

    assert epsilon == pytest.approx(epsilon_of(mu, 1e-5), abs=1e-4)
    assert epsilon < 3.0  # the sum would be 4
    assert delta == 1e-5


def test_a_gaussian_mechanism_beyond_the_budget_is_told_what_is_left(tmp_path: Path) -> None:
    policy = NodePolicy.of({"max-epsilon": 12.0})
    enter(tmp_path, policy=policy)
    enter_sums(tmp_path, 3.0, policy)
    with pytest.raises(
        UploadError, match=r"'privacy.epsilon' is 3: must be at most 2\.\d+ on this .* of which 11 is s"
    ) as told:
        enter_sums(tmp_path, 3.0, policy)
    left = float(str(told.value).split("must be at most ")[1].split(" ")[0])
    with pytest.raises(UploadError, match=r"must be at most 1 on this node"):
        enter(tmp_path, policy=policy)  # a trained model's epsilon is added

    enter_sums(tmp_path, left - 1e-3, policy)

    assert Ledger.of(tmp_path, "alice").spent()[0] == pytest.approx(12.0, abs=0.01)


def test_total_of_a_run_bounds_all_runs_on_a_node_without_a_policy(tmp_path: Path) -> None:
    total = PrivacyConfig(epsilon=8.0, total_epsilon=10.0)
    enter(tmp_path, total, FREE)
    with pytest.raises(UploadError, match=r"at most 2 .* whose privacy.total-epsilon over all runs is 10, of which 8"):
        enter(tmp_path, total, FREE)
    assert len(Ledger.of(tmp_path, "alice").releases()) == 1
    with pytest.raises(OptionError, match=r"'privacy.total-epsilon' is 4: must be 0, or at least 'privacy.epsilon', 8"):
        PrivacyConfig(epsilon=8.0, total_epsilon=4.0)


def test_every_changed_bit_of_a_ledger_is_an_error_or_the_same_sum(tmp_path: Path) -> None:
    enter(tmp_path)
    ledger = Ledger.of(tmp_path, "alice")
    data = ledger.path.read_bytes()

    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        ledger.path.write_bytes(changed)
        try:
            found = ledger.spent()
        except StoreError:
            with pytest.raises(UploadError, match=f"{ledger.path}: damaged"):
                ledger.check(EIGHT, BUDGET)
        else:
            assert found == (8.0, 1e-5)


def test_damaged_ledger_is_never_replaced(tmp_path: Path) -> None:
    enter(tmp_path)
    path = Ledger.of(tmp_path, "alice").path
    write_facts(path, {"releases": [{"epsilon": 8.0, "delta": 0.0, "mu": 0.0}]})
    with pytest.raises(UploadError, match="so nothing is sent"):
        enter(tmp_path)
    write_facts(path, {"releases": [{"epsilon": -8.0, "delta": 0.0}]})

    with pytest.raises(UploadError, match="so nothing is sent"):
        enter(tmp_path)
    assert "-8" in path.read_text()


def test_processes_that_enter_at_once_never_exceed_the_budget(tmp_path: Path) -> None:
    def is_refused(run: int) -> bool:
        try:
            enter(tmp_path, run=str(run))
        except UploadError:
            return True
        return False

    with ThreadPoolExecutor(6) as pool:
        refused = sum(pool.map(is_refused, range(6)))

    assert Ledger.of(tmp_path, "alice").spent()[0] == 16.0
    assert refused == 4
