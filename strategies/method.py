"""The form of a method: a value with a name, a config type, and one function from a Job to an Outcome.

A method knows torch, but no Flower, Ray, files or processes. Its input is a :class:`Job`, its reports go to a
:class:`Progress`, and its result is an :class:`Outcome`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from .core.clients import ClientAsks as ClientAsks
from .core.clients import Clients
from .core.facts import UNNAMED
from .core.facts import Agreement as Agreement
from .core.facts import ModelBuilder as ModelBuilder
from .core.facts import Normalization as Normalization
from .core.facts import State as State
from .core.facts import Upload as Upload
from .core.options import Always, described
from .core.registry import TEACHER_HOMES, Registry
from .core.shards import Shards

if TYPE_CHECKING:
    import torch

Observer = Callable[[int, "torch.nn.Module"], Mapping[str, float]]


class Need(enum.Enum):
    """The requirements of a method, checked before it starts."""

    SAME_ARCHITECTURE = "every client's model has the same architecture"
    COMMON_START = "every client started from the same weights, which are known"
    LABEL_COUNTS = "every client reports how many examples of each class it trained on"
    IMAGES = "the examples are images"
    SIDES_OF_FOUR = "the height and the width of images are multiples of 4"
    EXACT_SUMS = "the sums of features carry no noise"
    IMAGE_GRADIENTS = "gradients reach the images through every client's model, so that images can be made"
    PROXY_IMAGES = "the server holds images without labels"


# Said where no normalization is given for images.
ASSUMED = "normalization is not given: assumed are a mean and a deviation of 0.5 per channel"
Part = tuple[int, int]  # steps done of an epoch, and its number of steps


@dataclass(frozen=True)
class Job:
    """The whole input of a method: the first seven fields always matter, the others where they are given.

    Attributes:
        uploads: In the order of client names, never of arrival.
        builders: Architecture name -> callable that returns a fresh, untrained module.
        student: The architecture of the result.
        num_classes: C.
        input_shape: (channels, height, width) of one image, (F, 1, 1) of a row of F features, or (1, 1, L) of a text
            of L tokens. Rows and texts are stored in the form that models take.
        normalization: The input space of the models.
        config: The method's config, an instance of :attr:`Method.config`.
        seed: The run's seed; every draw is derived from it.
        threads: Torch threads of the server stage; results are equal bit for bit at equal threads. 0: chosen where the
            stage runs, and adapted there to the cores that it gets.
        later_threads: Epoch -> the number of threads from its end on, where ``threads`` is not 0.
        device: A torch device, for example ``"cpu"`` or ``"cuda"``.
        shards: Holds the members of ensembles outside the method's process; None to hold them inside.
        start: Weights that the clients were sent, or in rounds the uploads' combination. A student starts from them
            unless its method makes a start of its own; None for a fresh, seeded initialisation.
        clients_seed: The seed that the clients drew their fresh weights from; None if they started otherwise. With
            ``start``, which they were sent, they drew none.
        teacher: The combination of the uploads' logits where a method distils their ensemble: an ensemble by reference,
            or a key of :data:`TEACHERS`, built where the method runs; None for the method's own. A method refuses a
            teacher that is not among its :attr:`Method.teachers`.
        proxy: Images on the server, without labels: [N, ch, H, W] on the CPU, uint8 or float32 in [0, 1]; None if it
            has none.
        labelled: Real images with their labels [N] on the server, as ``proxy``; None if it has none.
        server_round: The round of federated learning that the uploads belong to, from 1; 1 for one-shot runs.
        memory: The method's memory from the round before (:attr:`Outcome.memory`); None in its first.
        observer: ``(epoch, module) -> scores``; runs under no_grad with mode and random state restored. Its scores
            are recorded and never reach the method.
        store_images: The number of synthetic images that the outcome shall hold, the last ones made; 0 for a sample.
        agreement: The names of the classes and the preprocessing, which every upload that names its own must share.
        collect: Takes name and tensor of a merge of weights as they come, and returns the student: in memory, or where
            a caller has written them.
    """

    uploads: tuple[Upload, ...]
    builders: Mapping[str, ModelBuilder]
    student: str
    num_classes: int
    input_shape: tuple[int, int, int]
    normalization: Normalization
    config: Any
    # How and where it runs.
    seed: int = 0
    threads: int = 1
    later_threads: Mapping[int, int] = field(default_factory=dict)
    device: str = "cpu"
    shards: Shards | None = None
    # Where the student starts, and from whom it learns.
    start: State | None = None
    clients_seed: int | None = None
    teacher: EnsembleSpec | str | None = None
    # The server's own images.
    proxy: torch.Tensor | None = None
    labelled: tuple[torch.Tensor, torch.Tensor] | None = None
    # In rounds.
    server_round: int = 1
    memory: State | None = None
    # What is reported beside the result.
    observer: Observer | None = None
    store_images: int = 0
    agreement: Agreement = UNNAMED
    collect: Callable[[Iterable[tuple[str, torch.Tensor]]], State] = dict

    @property
    def means_of_examples(self) -> bool:
        """Whether the student's weights are means over a client's examples, as its builder says by this name."""
        return bool(getattr(self.builders.get(self.student), "means_of_examples", False))

    @property
    def refines(self) -> bool:
        """Whether ``start`` is the uploads' combination, which no client started from and a method fine-tunes."""
        return self.start is not None and self.clients_seed is None


@dataclass(frozen=True)
class EnsembleSpec:
    """An ensemble by reference: its uploads, and the combination of their logits.

    Attributes:
        clients: Names of the members, in the order of the job.
        combiner: A key of ``combiners.combiners.COMBINERS``.
        weights: The combiner's tensors.
        precision: ``"float32"``, or ``"int8"``: the members are quantised, as on their way to clients.
    """

    clients: tuple[str, ...]
    combiner: str
    weights: State = field(default_factory=dict)
    precision: str = "float32"

    @classmethod
    def of(cls, job: Job, combiner: str, weights: Mapping[str, Any] | None = None, precision: str = "float32") -> Self:
        """Return the ensemble of all uploads of a job."""
        return cls(tuple(upload.client for upload in job.uploads), combiner, dict(weights or {}), precision)


@dataclass(frozen=True)
class Teacher:
    """A teacher for any method: all uploads of a job, combined by a pool of their opinions.

    Attributes:
        name: Its key in :data:`TEACHERS`.
        build: ``(job, *, fold=True, precision="float32")`` -> the ensemble, and its combiner, for :data:`POOLS` a pool.
        check: Refuses a job that it cannot teach, given the teacher's key; uploads may still be missing.
    """

    name: str
    build: Callable[..., tuple[Any, Any]]
    check: Callable[[Job, str], None]


TEACHERS: Registry[Teacher] = Registry("teacher", TEACHER_HOMES)
GIVEN: Final = "given"  # the teacher that is an EnsembleSpec
POOLS = frozenset({"tally"})  # the teachers of a method that also works on single members
ENSEMBLES = frozenset({*TEACHERS, GIVEN})  # the teachers of a method that needs nothing but an ensemble


@dataclass(frozen=True)
class Outcome:
    """The result of a method: one model, an ensemble, or both.

    Attributes:
        student: Weights of the resulting model, on the CPU; None if the result is the ensemble.
        ensemble: The resulting ensemble; None if the method has none of its own.
        timings: Phase -> seconds of this process; a resumed run counts from its resumption.
        images: Synthetic images [N, ch, H, W]: a sample in uint8 for the report, or the last :attr:`Job.store_images`,
            in uint8 or as pixels in [0, 1]; None if the method makes none.
        memory: The method's state for the next round of a run in rounds: its generator's weights, on the CPU.
        work: Counts of passes and steps, :class:`.core.work.Work`; the place that runs the method fills them in.
        threads: Epoch -> the number of threads from its end on, from 0 at the beginning; filled in as ``work``.
    """

    student: State | None = None
    ensemble: EnsembleSpec | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    images: torch.Tensor | None = None
    memory: State = field(default_factory=dict)
    work: Mapping[str, int] = field(default_factory=dict)
    threads: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """The state of a method at an epoch border, enough to resume with the same bits.

    Attributes:
        step: Finished epochs.
        state: A tree of dicts, lists, tuples, tensors, numbers, strings, booleans and None.
        appended: Rows of growing buffers. :meth:`Progress.checkpoint` takes only the rows since the last checkpoint
            taken; :meth:`Progress.resume` returns all of them.
    """

    step: int
    state: Any
    appended: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Progress(Protocol):
    """Receives the reports of a method. Implementations write, print, or send them to the driver."""

    def resume(self) -> Snapshot | None:
        """Return the snapshot to resume from, or None for a fresh start."""

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:
        """Report that ``step`` of ``total`` epochs are done; cheap enough to call often.

        Args:
            step: Epochs done.
            total: T.
            values: Numbers to show.
            part: Steps done of the epoch under way, and its number of steps, 0 if unknown. At a border: 0, and the
                number of steps of the epoch before.
        """

    def record(self, row: Mapping[str, Any]) -> None:
        """Add a row to the run's metrics; rows of a server epoch carry ``"epoch"``."""

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Offer a checkpoint at an epoch border; ``take`` is called only if one is due."""


class Silent:
    """A Progress that keeps nothing: for tests and for callers who need only the outcome."""

    def resume(self) -> Snapshot | None:
        """Start afresh."""
        return None

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:
        """Ignore the report."""

    def record(self, row: Mapping[str, Any]) -> None:
        """Ignore the row."""

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Take no checkpoint."""


@dataclass(frozen=True)
class Plan:
    """What a run of a method involves under one config, beside the steps that its options describe.

    Attributes:
        needs: Requirements beside :attr:`Method.needs`.
        rounds: The number of uploads per client.
        asks: Requests to the clients beside the upload.
        random: Whether the result follows from random draws; None: if it is a student.
        labelled: Whether labelled images of the server are ``"unused"``, ``"used"`` where there are any, or
            ``"required"``.
        mark: What sets the result apart from others in tables; empty for nothing.
    """

    needs: frozenset[Need] = frozenset()
    rounds: int = 1
    asks: ClientAsks = field(default_factory=ClientAsks)
    random: bool | None = None
    labelled: str = "unused"
    mark: str = ""


@dataclass(frozen=True)
class ClientPhase:
    """The part of a method that works with the clients after their upload.

    Attributes:
        fit: The method with clients in reach, in place of :attr:`Method.fit`.
        check_alone: Refuses a job where no client is in reach, as in a replay.
    """

    fit: Callable[[Job, Progress, Clients], Outcome]
    check_alone: Callable[[Job], None]


@dataclass(frozen=True)
class InRounds:
    """How a method behaves as the refiner of every round of federated learning.

    Attributes:
        shares_generator: Set if the method's memory of a round is a generator that goes to the clients with the next
            round's request, as the array record ``generator``. Given the job of the round, it returns the entries of
            the request's config that describe the generator.
        draws_by_round: Its draws depend on :attr:`Job.server_round` too, not on the seed alone.
        learning_rate: The option to lower where a round's model is not finite, without its table.
    """

    shares_generator: Callable[[Job], Mapping[str, str | int | float]] | None = None
    draws_by_round: bool = False
    learning_rate: str = "student-lr"


@dataclass(frozen=True)
class Method:
    """A server method as a value.

    The first six fields describe most methods. No other code reads a config: what follows from it stands in
    :attr:`plan`. An option that is called ``augmentation`` changes images, and is refused for other examples.

    Attributes:
        name: Its key in settings and on the command line.
        title: Its name in the literature.
        source: Paper, venue and year, for lists and reports.
        config: The type of its config, a frozen dataclass of options.
        fit: The method itself.
        needs: Its requirements under every config.
        kind: The kind of result: ``"student"``, ``"ensemble"`` or ``"baseline"``, as the result table names it.
        uploads: The task of its clients, a key of the client app's tasks, which train and send.
        teachers: The teachers that may replace its own ensemble: keys of :data:`TEACHERS`, and :data:`GIVEN`.
        check: Refuses a job, its uploads perhaps still missing, for reasons of the method's own.
        plan: Given a config, what a run involves.
        client_phase: Its work with the clients after their upload; None for a method that works alone.
        in_rounds: Its behaviour as the refiner of every round.
        any_model: Whether it works on the weights of any module alone: without classes, examples, or a device.
    """

    name: str
    title: str
    source: str
    config: type
    fit: Callable[[Job, Progress], Outcome]
    needs: frozenset[Need] = frozenset()
    kind: str = "student"
    uploads: str = "classifier"
    teachers: frozenset[str] = frozenset()
    check: Callable[[Job], None] | None = None
    plan: Callable[[Any], Plan] = field(default=Always(Plan()))
    client_phase: ClientPhase | None = None
    in_rounds: InRounds = field(default_factory=InRounds)
    any_model: bool = False

    @property
    def averages_weights(self) -> bool:
        """Whether it averages weights as they are, whatever they started from and whatever clients measure."""
        return self.merges_weights_alone and Need.COMMON_START not in self.needs

    @property
    def merges_weights_alone(self) -> bool:
        """Whether it merges weights of any model, and nothing that clients measure beside them."""
        return self.any_model and not self.plan(self.config()).asks.sums

    def all_needs(self, config: Any) -> frozenset[Need]:
        """Return the requirements of the method under a config."""
        return self.needs | self.plan(config).needs

    def titled(self, config: Any) -> str:
        """Return the title of the result in tables, with the config's preset and shorter lengths."""
        marks = ", ".join(filter(None, [described(config), self.plan(config).mark]))
        return f"{self.title} ({marks})" if marks else self.title


TRANSDUCTIVE: Final = "transductive"  # the mark of a result whose predictions depend on the other test images

# In the order in which lists show them. The method "co-boosting" is METHOD of methods/co_boosting.py.
_NAMES = (
    "fedavg", "task-arithmetic", "ties", "dare", "tsv", "fisher", "regmean",
    "fedens", "dw-fedens", "label-count-ensemble", "fens", "feddf", "fedkd", "fed-et", "distill", "f-dafl",
    "f-adi", "dense", "co-boosting", "intactofl", "tally", "flboost", "fedov", "fafi", "fedcvae-ens",
    "fusefl", "fed-gen", "ridge", "lda", "fedpft",
)  # fmt: skip
METHODS: Registry[Method] = Registry("method", {name: f"methods.{name.replace('-', '_')}:METHOD" for name in _NAMES})
