"""The app's settings: one frozen dataclass per table; their defaults are those of a plain run.

``make config`` writes ``[tool.flwr.app.config]`` in pyproject.toml from them. Keys are kebab-case:
``AppConfig.min_uploads`` is ``min-uploads``, ``AppConfig.data.alpha`` is ``data.alpha``. Unset is ``""`` or 0.
The tables of the methods (``server``, ``dense``) belong to the methods; only the server reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fl_app.attacks import AttackConfig
from fl_app.data import AUGMENTATIONS
from fl_app.data.config import DataConfig
from fl_app.models.config import ModelConfig
from fl_app.models.features_config import FeaturesConfig
from fl_app.node_config import PLACEHOLDERS, has_known_placeholders
from fl_app.privacy import PrivacyConfig
from strategies.core.errors import OptionError
from strategies.core.facts import HEADLINES
from strategies.core.options import (
    ADOPTION,
    ANYWHERE,
    PRESET_NAMES,
    QUICK,
    REPLAY,
    RESUME,
    Scalar,
    check_device,
    config_class,
    meant,
    option,
    options_of,
    parse,
    shortened,
)
from strategies.core.stage_options import StageOptions


@config_class("client")
class ClientConfig:
    """Local training, and which facts a client sends."""

    epochs: int = option(30, "local epochs", low=1, high=10**6, scaled=True)
    steps: int = option(
        0, "optimiser steps of local training, in place of client.epochs; 0 = whole epochs", low=0, high=10**7
    )
    batch_size: int = option(32, "images per step", low=1)
    whole_batches: bool = option(
        False, "leave out an epoch's last batch if it is smaller; a client with fewer images has a batch of all"
    )
    optimizer: str = option("sgd", "optimiser", choices=("sgd", "adam"))
    lr: float = option(0.01, "learning rate", above=0.0)
    momentum: float = option(0.9, "momentum of sgd", low=0.0, high=1.0)
    momentum_epochs: int = option(0, "epochs after which the optimiser forgets its momentum; 0 = never", low=0)
    weight_decay: float = option(0.0, "weight decay", low=0.0)
    schedule: str = option("constant", "learning rate over the epochs", choices=("constant", "cosine"))
    final_lr: float = option(0.0, "learning rate that the cosine ends at", low=0.0)
    clip: float = option(10.0, "largest gradient norm; 0 = no clipping", low=0.0)
    loss: str = option(
        "cross-entropy", "training loss", choices=("cross-entropy", "ldam"),
        private=("cross-entropy", "the other losses use the label counts"),
    )  # fmt: skip
    sam_rho: float = option(
        0.0, "radius rho of sharpness-aware minimisation; 0 = off, its paper has 0.05", low=0.0,
        private=(0.0, "its second gradient is not accounted for"),
    )  # fmt: skip
    attack_steps: int = option(5, "FedOV: steps that make destroyed images look known", low=0, high=1000)
    views: str = option(
        "image",
        "FAFI: two views are drawn for each image, or for a whole batch as in its published code",
        choices=("image", "batch"),
    )
    blocks: int = option(2, "FuseFL: blocks K that a model is cut into, 2 or 4", low=2, high=4)
    latent: int = option(10, "FedCVAE-Ens: length of the CVAE's noise z", low=1, high=4096)
    augmentation: str = option(
        "data-set", "change of the training images; data-set: the data set's own", choices=("data-set", *AUGMENTATIONS)
    )
    device: str = option(
        "auto",
        "device on which a client trains a classifier, or a block of one; the node's own key goes first",
        free=(RESUME, ADOPTION),
    )
    init: str = option(
        "same",
        "start weights: the same for all clients of an architecture, or different ones for each client",
        choices=("same", "different"),
    )
    share_label_counts: bool = option(
        True, "send the server the number of examples of each class", private=(False, "the counts carry no noise")
    )
    label_counts_as: str = option(
        "numbers",
        "presence sends only which classes exceed a fifth of an equal share, and divides the number of examples "
        "equally over these",
        choices=("numbers", "presence"),
    )
    checkpoint: str = option(
        "", "upload this file and train nothing; {client} and {partition} are filled in", path=True,
        private=("", "a checkpoint has no privacy guarantee"),
    )  # fmt: skip
    test_share: float = option(
        0.1, "share of each class that a client keeps from training where clients evaluate the result", above=0.0,
        high=0.5,
    )  # fmt: skip
    max_ensemble_mib: float = option(
        0.0, "largest ensemble that a client accepts, and most logits of it, MiB; 0 = any ensemble", low=0.0,
        free=(RESUME, ADOPTION),
    )  # fmt: skip
    nodes: str = option("", "folder of node configs, or one such file: a simulation plays these nodes", path=True)
    state_dir: str = option(
        "", "folder of a client's trained models; empty: $ONESHOT_CLIENT_STATE, else the cache", path=True,
        free=(RESUME, ADOPTION),
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        check_device(self.device, "setting 'client.device'")
        if self.final_lr and self.schedule != "cosine":
            raise OptionError(
                f"setting 'client.final-lr' is {self.final_lr}: must be 0 unless 'client.schedule' is 'cosine'"
            )
        if self.final_lr > self.lr:
            raise OptionError(f"setting 'client.final-lr' is {self.final_lr}: must be at most 'client.lr', {self.lr}")
        if not has_known_placeholders(self.checkpoint):
            raise OptionError(f"setting 'client.checkpoint' is {self.checkpoint[:200]!r}: {PLACEHOLDERS}")


@config_class("evaluate")
class EvaluateConfig:
    """Where results are scored."""

    on: str = option(
        "auto",
        "where the result is scored: on the server's held-out examples, on the clients' own ones, both or none; auto: "
        "on the server if it has such examples",
        choices=("auto", "server", "clients", "both", "none"),
        free=(ADOPTION,),
    )
    results: str = option(
        "", "with resume: comma-separated folders, of the finished run and its replays, whose results the clients "
        "score again; 'oneshot evaluate' sets it", free=ANYWHERE,
    )  # fmt: skip


NO_TRACKER = "none"
TRACKERS = (NO_TRACKER, "tensorboard", "mlflow", "wandb")


@dataclass(frozen=True)
class AppConfig(StageOptions):
    """The app's settings."""

    method: str = option("tally", "server method; 'oneshot methods' lists them", free=(REPLAY, ADOPTION))
    preset: str = option(
        QUICK,
        "values of the method's options: quick takes minutes on a CPU, published is what the literature reports, paper "
        "follows the text and published-code the authors' code where they differ; other names are a paper's "
        "comparison. A method without the preset has its published values",
        choices=PRESET_NAMES,
        free=(REPLAY, ADOPTION),
    )
    metric: str = option(
        "accuracy",
        f"score that heads the tables, one of {', '.join(HEADLINES)}, or with model.evaluate of those that it returns; "
        "results hold all of them",
        free=ANYWHERE,
    )
    seed: int = option(0, "seed of every random draw of the run", low=0, free=(REPLAY,))
    scale: float = option(
        1.0, "factor of the local and server epochs, to shorten a published setting", above=0.0, high=1.0,
        free=(ADOPTION,),
    )  # fmt: skip
    min_uploads: int = option(2, "quorum: fewer uploads at the deadline fail the run", low=1, free=(RESUME, ADOPTION))
    deadline_s: float = option(
        3600.0, "seconds within which the clients must upload", above=0.0, free=(RESUME, ADOPTION)
    )
    compute: str = option(
        "auto",
        "where the server stage runs: ray, in a Ray actor; in-process, in the ServerApp's process; auto: in an actor "
        "where there is a GPU, a Ray cluster or several shards",
        choices=("auto", "ray", "in-process"),
        free=(RESUME, ADOPTION),
    )
    shards: int = option(
        0,
        "Ray actors that hold the clients' models; 0 = one per GPU, or as many as memory needs; 1 = no sharding",
        low=0,
        free=ANYWHERE,
    )
    run_dir: str = option(
        "",
        "run folder; empty: a new one in $ONESHOT_RUNS, else ./runs; of `flwr run`: ~/.local/state/oneshot-fl/runs",
        free=(RESUME, ADOPTION),
    )
    resume: str = option("", "run folder of an interrupted run, which continues there", free=(RESUME, ADOPTION))
    tracker: str = option(
        NO_TRACKER, "experiment tracker that gets the metrics, on this machine", choices=TRACKERS, free=ANYWHERE
    )
    teacher_run: str = option(
        "", "replay of the same run whose ensemble is the teacher, with teacher=run", free=(REPLAY, ADOPTION)
    )
    uploads: str = option("", "run folder whose stored uploads are used; no client trains", free=(ADOPTION,))
    forget: str = option("", "comma-separated clients whose stored uploads are left out", free=(ADOPTION,))
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        super().__post_init__()
        self._check_attack()
        self.privacy.check_options(options_of(self))
        if self.data.imageless:
            self.check_imageless()
        if self.metric not in HEADLINES and not self.model.evaluate:
            words = ", ".join(map(repr, HEADLINES))
            raise OptionError(
                f"setting 'metric' is {self.metric!r:.200}: must be one of {words}{meant(self.metric, HEADLINES)}"
            )
        if self.resume and self.run_dir and self.resume != self.run_dir:
            raise OptionError(
                f"settings 'resume' ({self.resume}) and 'run-dir' ({self.run_dir}) differ: set one of them"
            )
        if self.evaluate.results and not self.resume:
            raise OptionError(
                f"setting 'evaluate.results' is {self.evaluate.results!r}: must be '' unless 'resume' names the "
                "finished run whose clients score these results"
            )
        if self.teacher_run and self.teacher != "run":
            raise OptionError(
                f"setting 'teacher-run' is {self.teacher_run!r}: must be '' unless 'teacher' is 'run', not "
                f"{self.teacher!r}"
            )
        if self.forget and not self.uploads:
            raise OptionError(
                f"setting 'forget' is {self.forget!r}: must be '' unless 'uploads' names the run folder of the uploads"
            )

    def check_imageless(self) -> None:
        """Refuse settings of images, for a data set whose examples are rows or texts.

        Raises:
            OptionError: The error names the setting, its value and the possible values.
        """
        why = f"where 'data.name' is {self.data.name!r}, whose examples are not images"
        if self.client.augmentation not in ("data-set", "none"):
            raise OptionError(
                f"setting 'client.augmentation' is {self.client.augmentation!r}: must be 'data-set' or 'none' {why}"
            )
        if self.attack.kind == "backdoor":
            raise OptionError(f"setting 'attack.kind' is 'backdoor': must be another attack {why}")

    def _check_attack(self) -> None:
        if self.attack.kind != "none" and self.client.checkpoint:
            raise OptionError(
                f"setting 'attack.kind' is {self.attack.kind!r}: must be 'none' where 'client.checkpoint' names a "
                "file, because no client trains"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Scalar]) -> AppConfig:
        """Read the app's own keys from flat settings; :attr:`scale` shortens the local epochs.

        Raises:
            OptionError: Names the key, the value and the range.
        """
        config = parse(cls, settings)
        return replace(config, client=shortened(config.client, config.scale))
