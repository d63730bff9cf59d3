"""The privacy that a node has given up over all runs: a ledger on its own disk, and the budget that it must not exceed.

Budgets add up by basic composition: k releases, each (epsilon_i, delta_i)-differentially private, are together
(sum epsilon_i, sum delta_i)-differentially private.

Source: Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014, Theorem 3.16.

An upload is entered before it can be sent, so a crash may count a release that never arrived, and never misses one.
The ledger lies in the node's state folder, outside the folders of single runs, and is never shortened.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.core.durable import make_folder, read_facts, write_facts
from strategies.core.errors import StoreError, UploadError

if TYPE_CHECKING:
    from fl_app.node_policy import NodePolicy
    from fl_app.privacy import PrivacyConfig


# Ten times 1e-5 is 1e-4 but for the last bits.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Ledger:
    """One client's ledger.

    Attributes:
        path: Its file, ``<client>-privacy.json``.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path, client: str) -> Ledger:
        """Return the ledger of a client in its state folder."""
        return cls(folder / f"{client}-privacy.json")

    def releases(self) -> list[dict[str, Any]]:
        """Return the entries: ``run``, ``round``, ``epsilon``, ``delta`` and ``time``.

        Raises:
            StoreError: The file is damaged.
        """
        if not self.path.exists():
            return []
        facts = read_facts(self.path)
        rows = facts.get("releases") if isinstance(facts, dict) else None
        if not isinstance(rows, list) or not all(_is_release(row) for row in rows):
            raise StoreError(f"{self.path}: damaged, it holds no list of releases")
        return rows

    def spent(self) -> tuple[float, float]:
        """Return the sums of epsilon and of delta over all releases.

        Raises:
            StoreError: The file is damaged.
        """
        rows = self.releases()
        return math.fsum(row["epsilon"] for row in rows), math.fsum(row["delta"] for row in rows)

    def check(self, privacy: PrivacyConfig, policy: NodePolicy) -> None:
        """Refuse a private upload that would exceed the node's budget.

        Raises:
            UploadError: Names the budget, the spent part and the requested one; or the file that is damaged.
        """
        if not privacy.on:
            return
        try:
            epsilon, delta = self.spent()
        except StoreError as error:
            raise UploadError(f"the privacy ledger cannot be read, so nothing is sent: {error}") from error
        if policy.max_epsilon is None:
            return
        limits = {
            "epsilon": (epsilon, privacy.epsilon, policy.max_epsilon),
            "delta": (delta, privacy.delta, policy.max_delta),
        }
        for name, (spent, asked, most) in limits.items():
            if math.fsum((spent, asked, -most)) > ROUNDING * most:
                raise UploadError(
                    f"setting 'privacy.{name}' is {asked:g}: must be at most {max(0.0, most - spent):g} on this node, "
                    f"whose max-{name} over all runs is {most:g}, of which {spent:g} is spent"
                )

    def enter(self, privacy: PrivacyConfig, policy: NodePolicy, *, run: str, server_round: int) -> None:
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
            "time": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        }
        try:
            make_folder(self.path.parent, 0o700)
            with self._alone():
                self.check(privacy, policy)
                write_facts(self.path, {"releases": [*self.releases(), row]})
        except (OSError, StoreError) as error:
            raise UploadError(f"the privacy ledger cannot be written, so nothing is sent: {error}") from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from the ledger; the lock ends with the process that holds it."""
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _is_release(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    return all(isinstance(row.get(key), int | float) and row[key] >= 0 for key in ("epsilon", "delta"))
