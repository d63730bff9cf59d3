"""The gatekeeper's options."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.options import check, option

OFF, WARN, EXCLUDE = "off", "warn", "exclude"
POLICIES = (OFF, WARN, EXCLUDE)


@dataclass(frozen=True)
class GatekeeperConfig:
    """The policy for uploads that look harmful, and the thresholds that decide it."""

    policy: str = option(
        OFF,
        "uploads that look harmful: off does not inspect, warn reports them, exclude leaves them out",
        choices=POLICIES,
    )
    images: int = option(4, "images inverted from each client's model for each class that it knows", low=1)
    steps: int = option(60, "steps of an inversion", low=1)
    trigger_steps: int = option(60, "steps of the search for a backdoor's trigger; 0 = no search", low=0)
    trigger_images: int = option(16, "images on which a trigger is searched", low=2)
    norm_ratio: float = option(
        3.0, "a layer's norm is suspect above this multiple of the others' median, or below its inverse", above=1.0
    )
    logit_ratio: float = option(
        20.0, "the size of the logits is suspect above this multiple of the others' median", above=1.0
    )
    flat_ratio: float = option(
        0.1, "predictions are flat if they vary less than this multiple of the others' median", low=0.0
    )
    copy_distance: float = option(
        0.05, "two models are copies if their distance is below this multiple of the usual distance", low=0.0
    )
    agreement: float = option(
        0.2, "a client is suspect below this agreement with the others on classes that both know", low=0.0, high=1.0
    )
    trigger_size: float = option(
        0.6, "a trigger is suspect below this multiple of the median of the other clients' smallest", low=0.0
    )
    trigger_lead: float = option(
        0.7, "a trigger is suspect only below this multiple of the same client's next smallest", low=0.0
    )
    trigger_transfer: float = option(
        0.1, "a trigger is suspect only if it moves at most this share of images in other models", low=0.0, high=1.0
    )

    def __post_init__(self) -> None:
        """Check every value."""
        check(self, "gatekeeper")
