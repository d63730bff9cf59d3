"""The privacy that a node has given up over all runs: a ledger on its own disk, and the budget that it must not exceed.

Sums of features with noise are Gaussian mechanisms, which compose exactly: k of them, with mu_i = sensitivity / noise,
are together one with mu = sqrt(sum mu_i^2). Uploads of DP-SGD add up by basic composition: k releases, each (epsilon_i,
delta_i)-differentially private, are together (sum epsilon_i, sum delta_i)-differentially private. So do both kinds.

Sources: Dong, Roth, Su, Gaussian Differential Privacy, 2022, Corollary 3.3; Balle, Wang, ICML 2018, Theorem 8; Dwork,
Roth, The Algorithmic Foundations of Differential Privacy, 2014, Theorem 3.16.

An upload is entered before it can be sent, so a crash may count a release that never arrived, and never misses one.
The ledger lies in the node's state folder, outside the folders of single runs, and is never shortened.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core import refusals
from strategies.core.durable import make_folder, read_json, write_facts
from strategies.core.errors import StoreError

if TYPE_CHECKING:
    from fl_app.node_policy import NodePolicy
    from fl_app.privacy import PrivacyConfig


# Ten times 1e-5 is 1e-4 but for the last bits.
ROUNDING = 1e-9
BUDGET = ("epsilon", "delta")


@dataclass(frozen=True)
class Ledger:
    """One client's ledger."""

    path: Path

    @classmethod
    def of(cls, folder: Path, client: str) -> Ledger:
        """Return the ledger of a client in its state folder."""
        return cls(folder / f"{client}-privacy.json")

    def releases(self) -> list[dict[str, Any]]:
        """Return the entries: ``run``, ``round``, ``epsilon``, ``delta``, ``time``, and ``mu`` of a Gaussian mechanism.

        Raises:
            StoreError: The file is damaged.
        """
        if not self.path.exists():
            return []
        facts = read_json(self.path)
        rows = facts.get("releases") if isinstance(facts, dict) else None
        if not isinstance(rows, list) or not all(_is_release(row) for row in rows):
            raise StoreError(f"{self.path}: damaged, it holds no list of releases")
        return rows

    def spent(self) -> tuple[float, float]:
        """Return the epsilon and the delta of all releases together.

        Raises:
            StoreError: The file is damaged.
        """
        return together(self.releases())

    def check(self, privacy: PrivacyConfig, policy: NodePolicy, *, mu: float | None = None) -> None:
        """Refuse a private upload that would exceed the node's budget, or the run's total.

        Args:
            mu: Of the upload, if it is a Gaussian mechanism: its sensitivity over the deviation of its noise.

        Raises:
            UploadError: Names the budget, the spent part and the requested one; or the file that is damaged.
        """
        if not privacy.on:
            return
        try:
            before, limits = self.releases(), _limits(privacy, policy)
            asked = {"epsilon": privacy.epsilon, "delta": privacy.delta, **({} if mu is None else {"mu": mu})}
            spent, after = (dict(zip(BUDGET, together(rows), strict=True)) for rows in (before, [*before, asked]))
        except StoreError as error:
            raise refusals.no_ledger("read", error) from error
        for limit, (name, most) in limits.items():
            if after[name] - most > ROUNDING * most:
                left = most - spent[name] if name == "delta" else _epsilon_left(before, asked, most)
                raise refusals.not_permitted(
                    f"privacy.{name}",
                    f"{asked[name]:g}",
                    f"at most {max(0.0, left):.4g} on this node, whose {limit} over all runs is {most:g}, of which "
                    f"{spent[name]:.4g} is spent",
                )

    def enter(
        self, privacy: PrivacyConfig, policy: NodePolicy, *, run: str, server_round: int, mu: float | None = None
    ) -> None:
        """Check the budget again, and enter an upload before it is sent; once this returns the entry is on the disk.

        Raises:
            UploadError: The upload would exceed the budget, or the ledger cannot be read or written.
        """
        if not privacy.on:
            return
        row = {
            "run": run,
            "round": server_round,
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            **({} if mu is None else {"mu": mu}),
            "time": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        }
        try:
            make_folder(self.path.parent, 0o700)
            with self._alone():
                self.check(privacy, policy, mu=mu)
                write_facts(self.path, {"releases": [*self.releases(), row]})
        except (OSError, StoreError) as error:
            raise refusals.no_ledger("written", error) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from the ledger; the lock ends with the process that holds it."""
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def together(releases: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the epsilon and the delta of several releases of the same examples.

    Gaussian mechanisms are together one of ``mu = sqrt(sum mu_i^2)``. Its epsilon is that at the least of their deltas.
    The others' epsilons and deltas are added.

    Args:
        releases: Each has ``epsilon`` and ``delta``; a Gaussian mechanism also ``mu``.
    """
    gaussian = [row for row in releases if "mu" in row]
    others = [row for row in releases if "mu" not in row]
    epsilon, delta = (math.fsum(row[key] for row in others) for key in BUDGET)
    if not gaussian:
        return epsilon, delta
    from strategies.statistics.privacy import spent_epsilon  # late: it imports torch

    least = min(row["delta"] for row in gaussian)
    return epsilon + spent_epsilon([row["mu"] for row in gaussian], least), delta + least


def _limits(privacy: PrivacyConfig, policy: NodePolicy) -> dict[str, tuple[str, float]]:
    """Return the name of each limit -> what it limits, and the most of it."""
    found = {"privacy.total-epsilon": ("epsilon", privacy.total_epsilon)} if privacy.total_epsilon else {}
    if policy.max_epsilon is not None:
        found |= {"max-epsilon": ("epsilon", policy.max_epsilon), "max-delta": ("delta", policy.max_delta)}
    return found


def _epsilon_left(before: Sequence[Mapping[str, Any]], asked: Mapping[str, float], most: float) -> float:
    """Return the largest epsilon that an upload of the kind that is asked for may have."""
    if "mu" not in asked:
        return most - together(before)[0]
    from strategies.statistics.privacy import noise_for, spent_epsilon

    gaussian = [row for row in before if "mu" in row]
    room = most - together([row for row in before if "mu" not in row])[0]
    delta = min(row["delta"] for row in [*gaussian, asked])
    square = noise_for(room, delta) ** -2 - math.fsum(row["mu"] ** 2 for row in gaussian) if room > 0 else 0.0
    return spent_epsilon([math.sqrt(square)], asked["delta"]) if square > 0 else 0.0


def _is_release(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    return all(isinstance(row.get(key), int | float) and row[key] >= 0 for key in BUDGET) and (
        "mu" not in row or (isinstance(row["mu"], int | float) and row["mu"] > 0)
    )
