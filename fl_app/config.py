"""The app's settings: one frozen dataclass per table; their defaults are the main job.

``[tool.flwr.app.config]`` in pyproject.toml is written from them (``make config``). Keys are kebab-case:
``AppConfig.min_uploads`` is ``min-uploads``, ``AppConfig.data.alpha`` is ``data.alpha``. Unset is ``""`` or 0.
The tables of the methods (``dense.epochs``) belong to the methods and are read by the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_app.data import LAWS, SOURCES, PartitionSpec
from fl_app.models import ARCHITECTURES
from strategies.errors import OptionError
from strategies.options import Scalar, check, check_device, option, parse


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they are divided among the clients."""

    name: str = option("digits", "data set", choices=SOURCES)
    root: str = option("", "folder of copies already on disk; empty: $ONESHOT_DATA, else the user's cache folder")
    image_size: int = option(0, "height and width in pixels; 0 = the data set's own", low=0, high=512)
    law: str = option("dirichlet-classes", "law that divides the training set", choices=tuple(LAWS))
    alpha: float = option(0.3, "concentration of the Dirichlet laws; smaller is more skewed", above=0.0)
    classes_per_client: int = option(2, "classes per client of the laws 'classes' and 'classes-p1'", low=1)
    sigma: float = option(0.0, "sigma of the log-normal client sizes; 0 = equal sizes", low=0.0)
    min_size: int = option(10, "examples of the smallest client under the law 'dirichlet-clients'", low=1)
    limit: int = option(0, "use only the first so many training images, shuffled by the seed; 0 = all", low=0)

    def __post_init__(self) -> None:
        """Check every value, and those of the law together."""
        check(self, "data")
        self.partition_spec()

    def partition_spec(self) -> PartitionSpec:
        """Return the arguments of the law."""
        return PartitionSpec(
            law=self.law,
            alpha=self.alpha,
            classes_per_client=self.classes_per_client,
            sigma=self.sigma,
            min_size=self.min_size,
        )


@dataclass(frozen=True)
class ModelConfig:
    """Which architectures the clients and the server use."""

    name: str = option("lenet5", "architecture of the clients", choices=ARCHITECTURES)
    per_client: str = option("", "comma-separated architectures, dealt to the clients in turn; empty: model.name")
    student: str = option("", "architecture of the server's result; empty: model.name")

    def __post_init__(self) -> None:
        """Check every value, the listed names too."""
        check(self, "model")
        for key, names in (("model.per-client", self.mix()), ("model.student", (self.student,))):
            for name in names:
                if name and name not in ARCHITECTURES:
                    raise OptionError(f"setting {key!r} names {name!r}: allowed are {', '.join(ARCHITECTURES)}")

    def mix(self) -> tuple[str, ...]:
        """Return the architectures that are dealt to the clients in turn."""
        return tuple(name.strip() for name in self.per_client.split(",") if name.strip()) or (self.name,)

    def of_client(self, partition_id: int) -> str:
        """Return the architecture of one client."""
        mix = self.mix()
        return mix[partition_id % len(mix)]

    def of_student(self) -> str:
        """Return the architecture of the server's result."""
        return self.student or self.name


@dataclass(frozen=True)
class ClientConfig:
    """Local training, and what a client tells."""

    epochs: int = option(30, "local epochs", low=1)
    batch_size: int = option(32, "images per step", low=1)
    lr: float = option(0.01, "SGD learning rate", above=0.0)
    momentum: float = option(0.9, "SGD momentum", low=0.0, high=1.0)
    weight_decay: float = option(0.0, "SGD weight decay", low=0.0)
    schedule: str = option("constant", "learning rate over the epochs", choices=("constant", "cosine"))
    clip: float = option(10.0, "largest gradient norm; 0 = no clipping", low=0.0)
    share_label_counts: bool = option(True, "tell the server how many examples of each class there are")
    checkpoint: str = option("", "upload this file and train nothing; {client} and {partition} are filled in")
    state_dir: str = option("", "where a client keeps what it trained; empty: $ONESHOT_CLIENT_STATE, else the cache")

    def __post_init__(self) -> None:
        """Check every value."""
        check(self, "client")
        try:
            self.checkpoint.format(client="", partition=0)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise OptionError(
                f"setting 'client.checkpoint' is {self.checkpoint!r}: "
                "allowed placeholders are {client} and {partition}"
            ) from error


@dataclass(frozen=True)
class AppConfig:
    """The app's settings."""

    method: str = option("dense", "server method; 'oneshot methods' lists them")
    seed: int = option(0, "every random draw of the run follows from it", low=0)
    min_uploads: int = option(2, "quorum: fewer uploads at the deadline fail the run", low=1)
    deadline_s: float = option(3600.0, "seconds that the clients have for their uploads", above=0.0)
    compute: str = option("ray", "where the server stage runs", choices=("ray", "in-process"))
    device: str = option("auto", "device of the server stage: auto, cpu, cuda, cuda:1")
    threads: int = option(0, "torch threads of the server stage; 0 = all cores", low=0)
    max_upload_mib: float = option(2048.0, "largest accepted upload, MiB", above=0.0)
    checkpoint_s: float = option(20.0, "seconds between two checkpoints of the server stage, at least", low=0.0)
    run_dir: str = option("", "run folder; empty: a new one under $ONESHOT_RUNS, else ./runs")
    resume: str = option("", "run folder of a run that was cut off; it goes on there")
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    client: ClientConfig = field(default_factory=ClientConfig)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self)
        check_device(self.device)
        if self.resume and self.run_dir and self.resume != self.run_dir:
            raise OptionError(
                f"settings 'resume' ({self.resume}) and 'run-dir' ({self.run_dir}): allowed is one of them"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Scalar]) -> AppConfig:
        """Read the app's own keys from flat settings.

        Raises:
            OptionError: Names the key, the value and what is allowed.
        """
        return parse(cls, settings)
