"""The app's settings: one frozen dataclass per table; their defaults are those of a plain run.

``make config`` writes ``[tool.flwr.app.config]`` in pyproject.toml from them. Keys are kebab-case:
``AppConfig.min_uploads`` is ``min-uploads``, ``AppConfig.data.alpha`` is ``data.alpha``. Unset is ``""`` or 0.
The tables of the methods (``dense.epochs``) belong to the methods; only the server reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fl_app.attacks import AttackConfig
from fl_app.data import (
    AUGMENTATIONS,
    DOMAINED,
    HALVES,
    IMAGELESS,
    LAWS,
    NORMALIZATIONS,
    SOURCES,
    PartitionSpec,
    check_left_out,
    check_normalization,
)
from fl_app.models import ARCHITECTURES
from fl_app.models.features_config import FeaturesConfig
from fl_app.privacy import PrivacyConfig
from strategies.core.errors import OptionError
from strategies.core.options import Scalar, check, check_device, flatten, meant, option, parse, shortened
from strategies.core.registry import TEACHER_HOMES


@dataclass(frozen=True)
class DataConfig:
    """The data set, and how it is divided among the clients."""

    name: str = option("digits", "data set", choices=SOURCES)
    root: str = option("", "folder of the data sets; empty: $ONESHOT_DATA, else the user's cache folder")
    image_size: int = option(0, "height and width in pixels; 0 = the data set's own", low=0, high=512)
    normalization: str = option(
        "half", "input space: mean and deviation 0.5 per channel, or those of the data set", choices=NORMALIZATIONS
    )
    law: str = option("dirichlet-classes", "law that divides the training set", choices=tuple(LAWS))
    alpha: float = option(0.3, "concentration of the Dirichlet laws; smaller is more skewed", above=0.0)
    classes_per_client: int = option(2, "classes per client of the laws 'classes' and 'classes-p1'", low=1)
    sigma: float = option(0.0, "sigma of the log-normal client sizes; 0 = equal sizes", low=0.0)
    copies: float = option(10.0, "how often the law 'dirichlet-overlap' hands a class out", above=0.0)
    min_size: int = option(10, "examples of the smallest client under the law 'dirichlet-clients'", low=1)
    limit: int = option(0, "number of training images to use (of each domain), drawn by the seed; 0 = all", low=0)
    left_out: str = option("", "the domain to test on, for a data set of domains")
    proxy: float = option(
        0.0, "share of the training images that no client gets and the server may use without labels", low=0.0, high=0.9
    )
    proxy_name: str = option("", "data set whose training images the server uses without labels, in place of a share")
    proxy_limit: int = option(0, "largest number of images of data.proxy-name, drawn by the seed; 0 = all", low=0)
    held_out: str = option(
        "all", "held-out examples that score: all, the half to choose by, or the half to report on", choices=HALVES
    )

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        check(self, "data")
        self.partition_spec()
        check_left_out(self.name, self.left_out)
        check_normalization(self.name, self.normalization)
        if self.law == "domains" and self.name not in DOMAINED:
            raise OptionError(
                f"setting 'data.law' is 'domains' and 'data.name' {self.name!r}: must be a data set of domains, one of "
                f"{', '.join(DOMAINED)}"
            )
        self._check_proxy()

    def _check_proxy(self) -> None:
        # Only images replace images, and a set of domains would have to leave one out.
        others = () if self.name in IMAGELESS else SOURCES
        allowed = [name for name in others if name not in (self.name, *DOMAINED, *IMAGELESS)]
        if self.proxy_name and self.proxy_name not in allowed:
            raise OptionError(
                f"setting 'data.proxy-name' is {self.proxy_name!r}: must be one of {', '.join([*allowed, repr('')])} "
                f"where 'data.name' is {self.name!r}"
            )
        if self.proxy_name and self.proxy:
            raise OptionError(
                f"settings 'data.proxy' ({self.proxy}) and 'data.proxy-name' ({self.proxy_name!r}) exclude each other: "
                "set one of them"
            )
        if self.proxy_limit and not self.proxy_name:
            raise OptionError(
                f"setting 'data.proxy-limit' is {self.proxy_limit}: must be 0 where 'data.proxy-name' names no data "
                "set; 'data.proxy' is a share"
            )

    def partition_spec(self) -> PartitionSpec:
        """Return the law of the division with its settings."""
        return PartitionSpec(
            law=self.law,
            alpha=self.alpha,
            classes_per_client=self.classes_per_client,
            sigma=self.sigma,
            copies=self.copies,
            min_size=self.min_size,
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which architectures the clients and the server use."""

    name: str = option("lenet5", "architecture of the clients", choices=ARCHITECTURES)
    per_client: str = option("", "comma-separated architectures, assigned to the clients in turn; empty: model.name")
    student: str = option("", "architecture of the server's result; empty: model.name")
    accepted: str = option("", "comma-separated architectures that uploads may have; empty: all of the zoo")

    def __post_init__(self) -> None:
        """Check every value, the listed names too."""
        check(self, "model")
        accepted = [name.strip() for name in self.accepted.split(",") if name.strip()]
        if accepted and (missing := sorted(set(self.mix()) - set(accepted))):
            raise OptionError(
                f"setting 'model.accepted' is {self.accepted!r}: must be '', or name {', '.join(missing)} too"
            )
        for key, name in [*self.named(), *(("model.accepted", name) for name in accepted)]:
            if name not in ARCHITECTURES:
                raise OptionError(
                    f"setting {key!r} names {name!r}: must be one of {', '.join(ARCHITECTURES)}"
                    f"{meant(name, ARCHITECTURES)}"
                )

    def mix(self) -> tuple[str, ...]:
        """Return the architectures that the clients get in turn."""
        return tuple(name.strip() for name in self.per_client.split(",") if name.strip()) or (self.name,)

    def named(self) -> list[tuple[str, str]]:
        """Return the architectures in use, each with the setting that names it."""
        own = "model.per-client" if self.per_client else "model.name"
        result = "model.student" if self.student else "model.name"
        return [*((own, name) for name in self.mix()), (result, self.of_student())]

    def of_client(self, partition_id: int) -> str:
        """Return the architecture of one client."""
        mix = self.mix()
        return mix[partition_id % len(mix)]

    def of_student(self) -> str:
        """Return the architecture of the server's result."""
        return self.student or self.name


@dataclass(frozen=True)
class ClientConfig:
    """Local training, and which facts a client sends."""

    epochs: int = option(30, "local epochs", low=1, scaled=True)
    steps: int = option(0, "optimiser steps of local training, in place of client.epochs; 0 = whole epochs", low=0)
    batch_size: int = option(32, "images per step", low=1)
    optimizer: str = option("sgd", "optimiser", choices=("sgd", "adam"))
    lr: float = option(0.01, "learning rate", above=0.0)
    momentum: float = option(0.9, "momentum of sgd", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "weight decay", low=0.0)
    schedule: str = option("constant", "learning rate over the epochs", choices=("constant", "cosine"))
    final_lr: float = option(0.0, "learning rate that the cosine ends at", low=0.0)
    clip: float = option(10.0, "largest gradient norm; 0 = no clipping", low=0.0)
    loss: str = option("cross-entropy", "training loss", choices=("cross-entropy", "ldam"))
    sam_rho: float = option(0.0, "radius rho of sharpness-aware minimisation; 0 = off, its paper has 0.05", low=0.0)
    attack_steps: int = option(5, "FedOV: steps that make destroyed images look known", low=0)
    latent: int = option(10, "FedCVAE-Ens: length of the CVAE's noise z", low=1)
    augmentation: str = option(
        "data-set", "change of the training images; data-set: the data set's own", choices=("data-set", *AUGMENTATIONS)
    )
    init: str = option(
        "same",
        "start weights: the same for all clients of an architecture, or different ones for each client",
        choices=("same", "different"),
    )
    share_label_counts: bool = option(True, "send the server the number of examples of each class")
    label_counts_as: str = option(
        "numbers",
        "presence sends only which classes exceed a fifth of an equal share, and divides the number of examples "
        "equally over these",
        choices=("numbers", "presence"),
    )
    checkpoint: str = option("", "upload this file and train nothing; {client} and {partition} are filled in")
    max_ensemble_mib: float = option(0.0, "largest ensemble that a client accepts, MiB; 0 = any", low=0.0)
    nodes: str = option("", "folder of node configs, or one such file: a simulation plays these nodes")
    state_dir: str = option("", "folder of a client's trained models; empty: $ONESHOT_CLIENT_STATE, else the cache")

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        check(self, "client")
        if self.final_lr and self.schedule != "cosine":
            raise OptionError(
                f"setting 'client.final-lr' is {self.final_lr}: must be 0 unless 'client.schedule' is 'cosine'"
            )
        if self.final_lr > self.lr:
            raise OptionError(f"setting 'client.final-lr' is {self.final_lr}: must be at most 'client.lr', {self.lr}")
        try:
            self.checkpoint.format(client="", partition=0)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise OptionError(
                f"setting 'client.checkpoint' is {self.checkpoint!r}: "
                "its placeholders must be {client} and {partition}"
            ) from error


@dataclass(frozen=True)
class AppConfig:
    """The app's settings."""

    method: str = option("tally", "server method; 'oneshot methods' lists them")
    seed: int = option(0, "seed of every random draw of the run", low=0)
    scale: float = option(
        1.0, "factor of the local and server epochs, to shorten a published setting", above=0.0, high=1.0
    )
    min_uploads: int = option(2, "quorum: fewer uploads at the deadline fail the run", low=1)
    deadline_s: float = option(3600.0, "seconds within which the clients must upload", above=0.0)
    compute: str = option("ray", "where the server stage runs", choices=("ray", "in-process"))
    shards: int = option(
        0,
        "Ray actors that hold the clients' models; 0 = one per GPU, or as many as memory needs; 1 = no sharding",
        low=0,
    )
    device: str = option("auto", "device of the server stage: auto, cpu, cuda, cuda:1")
    threads: int = option(0, "torch threads of the server stage; 0 = all cores", low=0)
    max_upload_mib: float = option(2048.0, "largest accepted upload, MiB", above=0.0)
    checkpoint_s: float = option(20.0, "shortest time between two checkpoints of the server stage, seconds", low=0.0)
    run_dir: str = option("", "run folder; empty: a new one under $ONESHOT_RUNS, else ./runs")
    resume: str = option("", "run folder of an interrupted run, which continues there")
    teacher: str = option(
        "method",
        "the ensemble that is distilled; method: the method's own; run: the ensemble of the replayed run (replay "
        "only); else all uploads under the pool of this name",
        choices=("method", "run", *TEACHER_HOMES),
    )
    uploads: str = option("", "run folder whose stored uploads are used; no client trains")
    forget: str = option("", "comma-separated clients whose stored uploads are left out")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self)
        check_device(self.device)
        self._check_attack()
        self.privacy.check_settings(flatten(self))
        if self.data.name in IMAGELESS and self.client.augmentation not in ("data-set", "none"):
            raise OptionError(
                f"setting 'client.augmentation' is {self.client.augmentation!r}: must be 'data-set' or 'none' where "
                f"'data.name' is {self.data.name!r}, whose examples are no images"
            )
        if self.resume and self.run_dir and self.resume != self.run_dir:
            raise OptionError(
                f"settings 'resume' ({self.resume}) and 'run-dir' ({self.run_dir}) differ: set one of them"
            )
        if self.forget and not self.uploads:
            raise OptionError(
                f"setting 'forget' is {self.forget!r}: must be '' unless 'uploads' names the run folder of the uploads"
            )

    def _check_attack(self) -> None:
        if self.attack.kind == "backdoor" and self.data.name in IMAGELESS:
            raise OptionError(
                f"setting 'attack.kind' is 'backdoor': must be another attack where 'data.name' is {self.data.name!r}, "
                "whose examples are no images"
            )
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
