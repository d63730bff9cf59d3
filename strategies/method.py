"""What a method is: a value with a name, a config type, and one function from a Job to an Outcome.

A method knows torch and nothing of Flower, Ray, files or processes. What it is given is a :class:`Job`, what it says
while it works goes to a :class:`Progress`, what it ends with is an :class:`Outcome`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from .core.options import Always
from .core.registry import TEACHER_HOMES, Registry

if TYPE_CHECKING:
    import torch

    from .core.clients import Clients
    from .core.shards import Shards

    State = dict[str, torch.Tensor]
    ModelBuilder = Callable[[], torch.nn.Module]
    Observer = Callable[[int, torch.nn.Module], Mapping[str, float]]


class Need(enum.Enum):
    """What a method cannot do without; checked before it starts."""

    SAME_ARCHITECTURE = "every client's model has the same architecture"
    LABEL_COUNTS = "every client tells how many examples of each class it trained on"
    IMAGES = "the examples are images"
    SIDES_OF_FOUR = "the height and the width of images are multiples of 4"
    PROXY_IMAGES = "the server holds real, unlabelled images"


@dataclass(frozen=True)
class Normalization:
    """How pixels in [0, 1] become a model's input: ``(pixel - mean) / std``, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Upload:
    """One client's accepted upload.

    Attributes:
        client: The client's stable name.
        architecture: The key of its model in :attr:`Job.builders`.
        read: Reads the weights anew at each call (never cached), so that uploads need not be in memory together.
        num_examples: Size of its training set; None for a pretrained model without data.
        label_counts: Training examples per class [C]; None if the client does not tell.
        ranges: Of each layer that quantisation looks at, the smallest and the largest output on the client's own
            data; None if the client does not tell.
    """

    client: str
    architecture: str
    read: Callable[[], State]
    num_examples: int | None = None
    label_counts: tuple[int, ...] | None = None
    ranges: Mapping[str, tuple[float, float]] | None = None


@dataclass(frozen=True)
class Job:
    """Everything a method works on.

    Attributes:
        uploads: In the order of client names, never of arrival.
        builders: Architecture name -> callable that returns a fresh, untrained module.
        student: The architecture of the result.
        num_classes: C.
        input_shape: (channels, height, width) of one image; (F, 1, 1) of a row of F features, (1, 1, L) of a text of
            L tokens, both of which are stored as models take them.
        normalization: The input space of the models.
        config: The method's config, an instance of :attr:`Method.config`.
        seed: The run's seed; every draw is derived from it.
        threads: Torch threads of the server stage; results are equal bit for bit at equal threads.
        device: A torch device, for example ``"cpu"`` or ``"cuda"``.
        start: Weights the student starts from; None for a fresh, seeded initialisation.
        server_round: The round of federated learning that the uploads are of, from 1; 1 where there is one only.
        memory: What the method left in the round before (:attr:`Outcome.memory`); None in its first.
        proxy: Real images on the server, without labels: uint8 [N, ch, H, W] on the CPU; None if it has none.
        labelled: Real images with their labels [N] on the server, as ``proxy``; None if it has none.
        teacher: How the uploads' logits are combined where a method distils their ensemble: an ensemble by reference;
            or a key of :data:`TEACHERS`, built where the method runs; None: as the method has it. A method refuses a
            teacher that is not among its :attr:`Method.teachers`.
        observer: ``(epoch, module) -> scores``; runs under no_grad with mode and random state restored. Its scores
            are recorded and never reach the method.
        shards: Holds the members of ensembles where they are not to be in the method's process; None: they are.
    """

    uploads: tuple[Upload, ...]
    builders: Mapping[str, ModelBuilder]
    student: str
    num_classes: int
    input_shape: tuple[int, int, int]
    normalization: Normalization
    config: Any
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    start: State | None = None
    server_round: int = 1
    memory: State | None = None
    proxy: torch.Tensor | None = None
    labelled: tuple[torch.Tensor, torch.Tensor] | None = None
    teacher: EnsembleSpec | str | None = None
    observer: Observer | None = None
    shards: Shards | None = None


@dataclass(frozen=True)
class ClientAsks:
    """What a method asks of its clients beside the upload, whose kind is :attr:`Method.uploads`.

    Attributes:
        holdout: Share of its examples that a client keeps from training; 0: none.
        holdout_per_class: Whether the share is kept of every class, not of all examples at random.
        calibrate: Whether a client sends the ranges of its layers' outputs, by which a server quantises its model.
    """

    holdout: float = 0.0
    holdout_per_class: bool = False
    calibrate: bool = False


@dataclass(frozen=True)
class EnsembleSpec:
    """An ensemble by reference: which uploads, and how their logits are combined.

    Attributes:
        clients: Names of the members, in the order of the job.
        combiner: A key of ``distillation.combiners.COMBINERS``.
        weights: The combiner's tensors.
        precision: ``"float32"``, or ``"int8"``: members are quantised as they are sent to clients.
    """

    clients: tuple[str, ...]
    combiner: str
    weights: State = field(default_factory=dict)
    precision: str = "float32"


@dataclass(frozen=True)
class Teacher:
    """All uploads of a job under a pool of their opinions, which other methods distil in place of their own ensemble.

    Attributes:
        name: Its key in :data:`TEACHERS`.
        build: ``(job, *, fold=True, precision="float32")`` -> the ensemble, and the pool that is its combiner.
        check: Refuses a job that it cannot teach, given the key that names the teacher; uploads may be missing.
    """

    name: str
    build: Callable[..., tuple[Any, Any]]
    check: Callable[[Job, str], None]


TEACHERS: Registry[Teacher] = Registry("teacher", TEACHER_HOMES)
GIVEN: Final = "given"  # the teacher that is an EnsembleSpec
POOLS = frozenset(TEACHERS)  # the teachers of a method that works on the members singly as well


@dataclass(frozen=True)
class Outcome:
    """What a method ends with: one model, an ensemble, or both.

    Attributes:
        student: Weights of the resulting model, on the CPU; None if the result is the ensemble.
        ensemble: The ensemble the method ends with; None if it has none of its own.
        timings: Phase -> seconds of this process; a resumed run counts from its resumption.
        images: A sample of synthetic images [N, ch, H, W] in uint8, for the report; None if the method makes none.
        memory: What the method goes on from where it runs in every round: its generator's weights, on the CPU.
    """

    student: State | None = None
    ensemble: EnsembleSpec | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    images: torch.Tensor | None = None
    memory: State = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The state of a method at an epoch border, enough to go on with the same bits.

    Attributes:
        step: Finished epochs.
        state: A tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None.
        appended: Rows of growing buffers. Handed to :meth:`Progress.checkpoint`: only the rows that are new since
            the last checkpoint taken. Got from :meth:`Progress.resume`: all of them.
    """

    step: int
    state: Any
    appended: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Progress(Protocol):
    """Where a method tells what it does. Implementations write, print, or send it to the driver."""

    def resume(self) -> Snapshot | None:
        """Return the snapshot to go on from, or None for a fresh start."""

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None) -> None:
        """Say that ``step`` of ``total`` epochs are done; cheap, call it as often as work is done."""

    def record(self, row: Mapping[str, Any]) -> None:
        """Add a row to the run's metrics; rows of a server epoch carry ``"epoch"``."""

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Offer a checkpoint at an epoch border; ``take`` is called only if one is due."""


class Silent:
    """A Progress that keeps nothing: for tests and for callers who only want the outcome."""

    def resume(self) -> Snapshot | None:
        """Start afresh."""
        return None

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None) -> None:
        """Say nothing."""

    def record(self, row: Mapping[str, Any]) -> None:
        """Keep nothing."""

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Take none."""


@dataclass(frozen=True)
class Method:
    """A server method as a value.

    What follows from a method's config is a function of that config, and no other code looks into a config.

    Attributes:
        name: Its key in settings and on the command line.
        title: Its name in the literature.
        source: Paper, venue and year, for lists and reports.
        config: The type of its config, a frozen dataclass of options.
        fit: The method itself.
        needs: What it refuses to start without, however it is configured.
        needs_as_configured: What else it refuses to start without under a config.
        kind: What it ends with: ``"student"``, ``"ensemble"`` or ``"baseline"``, as the result table names it.
        fit_with: The method where clients are in reach after their upload; None if it has no use for them.
        uploads: What its clients train and send: a key of the client app's tasks.
        check: Refuses a job, its uploads perhaps still missing, for reasons of the method's own.
        teachers: Which teachers it distils in place of its own ensemble: keys of :data:`TEACHERS`, and :data:`GIVEN`.
        lends: Set where what the method remembers of a round goes to the clients with the next round's request, as
            the array record ``generator``: what the request's config tells of it, given the job of the round.
        asks: What it asks of its clients beside the upload, given its config.
        rounds: How many times its clients upload, given its config.
        augmentation: How it changes the server's images, given its config: a key of ``AUGMENTATIONS``.
        labelled: Set where it can learn from labelled images of the server: whether it has to, given its config.
        rate: The option of its learning rate, without its table.
        by_round: Whether its draws differ from round to round by :attr:`Job.server_round`; if not, the seed does.
    """

    name: str
    title: str
    source: str
    config: type
    fit: Callable[[Job, Progress], Outcome]
    needs: frozenset[Need] = frozenset()
    kind: str = "student"
    fit_with: Callable[[Job, Progress, Clients], Outcome] | None = None
    uploads: str = "classifier"
    check: Callable[[Job], None] | None = None
    teachers: frozenset[str] = frozenset()
    lends: Callable[[Job], Mapping[str, str | int | float]] | None = None
    by_round: bool = False
    needs_as_configured: Callable[[Any], frozenset[Need]] = field(default=Always(frozenset()))
    asks: Callable[[Any], ClientAsks] = field(default=Always(ClientAsks()))
    rounds: Callable[[Any], int] = field(default=Always(1))
    augmentation: Callable[[Any], str] = field(default=Always("none"))
    labelled: Callable[[Any], bool] | None = None
    rate: str = "student-lr"

    def all_needs(self, config: Any) -> frozenset[Need]:
        """Return what the method refuses to start without under a config."""
        return self.needs | self.needs_as_configured(config)

    def titled(self, config: Any) -> str:  # noqa: ARG002  federated rounds, which have a title too, go by it
        """Return what tables call the result."""
        return self.title


# The module of method "co-boosting" is co_boosting.py.
_MODULES = (
    "fedavg", "fedens", "dw_fedens", "label_count_ensemble", "fens", "feddf", "fedkd", "fed_et", "f_dafl", "f_adi",
    "dense", "co_boosting", "intactofl", "fedhydra", "tally", "flboost", "fedov", "fedcvae_ens", "fed_gen",
)  # fmt: skip
METHODS: Registry[Method] = Registry("method", {name.replace("_", "-"): f"{name}:METHOD" for name in _MODULES})
