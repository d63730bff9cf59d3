"""The gatekeeper's options."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.options import check, option

OFF = "off"
WARN = "warn"
EXCLUDE = "exclude"
POLICIES = (OFF, WARN, EXCLUDE)


@dataclass(frozen=True)
class GatekeeperConfig:
    """The policy for uploads that look harmful, and the effort of an inspection."""

    policy: str = option(
        OFF,
        "uploads that look harmful: off does not inspect, warn reports them, exclude leaves them out",
        choices=POLICIES,
    )
    images: int = option(4, "images inverted from each client's model for each class that it knows", low=1)
    steps: int = option(60, "steps of an inversion", low=1)
    trigger_steps: int = option(60, "steps of the search for a backdoor's trigger; 0: no search", low=0)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self, "gatekeeper")
