"""The options of a server stage, whoever runs it: a Flower strategy, or this app."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from .options import ADOPTION, ANYWHERE, REPLAY, RESUME, check_device, config_class, option
from .registry import TEACHER_HOMES

OFF = "off"
WARN = "warn"
EXCLUDE = "exclude"
POLICIES = (OFF, WARN, EXCLUDE)
GUARDED_SHARE = 0.2  # no bound shows how many examples a client really has
NONE, COUNTS, RIDGE = "none", "counts", "ridge"  # what is done with the last linear layer


@config_class("gatekeeper")
class GatekeeperConfig:
    """The policy for uploads that look harmful, and the effort of an inspection."""

    policy: str = option(
        OFF,
        "uploads that look harmful: off does not inspect, warn reports them, exclude leaves them out",
        choices=POLICIES,
        free=(REPLAY, ADOPTION),
    )
    # An inspection's effort; the figures of the gatekeeper's page have these values.
    images: int = option(
        4, "images inverted from each client's model for each class that it knows", low=1, setting=False
    )
    steps: int = option(60, "steps of an inversion", low=1, setting=False)
    trigger_steps: int = option(60, "steps of the search for a backdoor's trigger; 0: no search", low=0, setting=False)


def max_share() -> float:
    """Declare the option ``max_share`` of a method's config."""
    declared: float = option(
        0.0,
        "largest share of all examples that one client may claim; more is scaled down; 0 = any, or "
        f"{GUARDED_SHARE} where a gatekeeper judges",
        low=0.0,
        high=1.0,
        table="server",
    )
    return declared


def limit_share(config: Any) -> Any:
    """Return a method's config with the cap on a client's share that holds where clients are not trusted."""
    return config if config.max_share else replace(config, max_share=GUARDED_SHARE)


@config_class()
class StageOptions:
    """Settings of the server stage that most users leave alone."""

    threads: int = option(
        0,
        "torch threads of the server stage; 0 = one for small models, else the idle cores, adapted to the load",
        low=0,
        free=(REPLAY, ADOPTION),
    )
    device: str = option("auto", "device of the server stage: auto, cpu, cuda, cuda:1", free=(REPLAY, ADOPTION))
    max_upload_mib: float = option(2048.0, "largest accepted upload, MiB", above=0.0, free=(RESUME, ADOPTION))
    checkpoint_s: float = option(
        20.0, "shortest time between two checkpoints of the server stage, seconds", low=0.0, free=ANYWHERE
    )
    store_images: int = option(
        0, "synthetic images that images.safetensors holds: the last ones of the method; 0 = a sample of 64", low=0,
        free=(REPLAY, ADOPTION),
    )  # fmt: skip
    teacher: str = option(
        "method",
        "the ensemble that is distilled; method: the method's own; run: the ensemble of the replayed run, or of "
        "teacher-run (replay only); else all uploads, as this method combines them",
        choices=("method", "run", *TEACHER_HOMES),
        free=(REPLAY, ADOPTION),
    )
    start: str = option(
        NONE,
        "the last linear layer that clients start from: none, an untrained one; ridge, one that is solved from sums of "
        "its inputs, in a first exchange",
        choices=(NONE, RIDGE),
        private=(NONE, "the sums carry no noise"),
    )
    finish: str = option(
        NONE,
        "the result's last linear layer: none, as the method leaves it; counts, each class's row averaged by the "
        "clients' examples of the class; ridge, solved from sums of its inputs, in a last exchange",
        choices=(NONE, COUNTS, RIDGE),
        free=(REPLAY, ADOPTION),
        private=(NONE, "the sums and the counts carry no noise"),
    )
    gatekeeper: GatekeeperConfig = field(default_factory=GatekeeperConfig)

    def __post_init__(self) -> None:
        """Check every value."""
        check_device(self.device)
