"""An upload and its facts, one value from the message over the index to the method; the input space of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]


class Normalization(NamedTuple):
    """How pixels in [0, 1] become a model's input: ``(pixel - mean) / std``, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def half(cls, channels: int) -> Normalization:
        """Return mean and deviation 0.5 per channel, the default."""
        return cls((0.5,) * channels, (0.5,) * channels)

    @classmethod
    def identity(cls, channels: int) -> Normalization:
        """Return mean 0 and deviation 1 per channel, which change nothing."""
        return cls((0.0,) * channels, (1.0,) * channels)


@dataclass(frozen=True)
class UploadFacts:
    """The facts of one upload.

    Attributes:
        client: The client's stable name.
        architecture: The key of its model in the builders.
        num_examples: Size of its training set; None for a pretrained model without data.
        label_counts: Training examples per class [C]; None if the client sends none.
        pretrained: Whether the client trained nothing itself.
        ranges: Smallest and largest output of each layer that quantisation reads, on the client's own data, by layer;
            None if the client sends none.
    """

    client: str
    architecture: str
    num_examples: int | None = None
    label_counts: tuple[int, ...] | None = None
    pretrained: bool = False
    ranges: Mapping[str, tuple[float, float]] | None = None

    def as_row(self) -> dict[str, Any]:
        """Return the facts as JSON writes them, by the names of the fields."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> UploadFacts:
        """Return the facts of a JSON row.

        Raises:
            AttributeError: The ranges are no mapping.
            KeyError: The row lacks the label counts or the ranges.
            TypeError: The row has another field, or a value of another kind.
            ValueError: A layer does not have two numbers.
        """
        counts, ranges = row["label_counts"], row["ranges"]
        pairs = None if ranges is None else {layer: (float(low), float(high)) for layer, (low, high) in ranges.items()}
        return cls(**{**row, "label_counts": None if counts is None else tuple(counts), "ranges": pairs})


@dataclass(frozen=True)
class Upload:
    """One client's accepted upload.

    Attributes:
        facts: The client's facts about it; methods read each fact as a property of the upload.
        read: Reads the weights anew at each call (never cached), so that uploads need not be in memory together.
    """

    facts: UploadFacts
    read: Callable[[], State]

    @property
    def client(self) -> str:
        """The client's stable name."""
        return self.facts.client

    @property
    def architecture(self) -> str:
        """The key of the client's model in :attr:`Job.builders`."""
        return self.facts.architecture

    @property
    def num_examples(self) -> int | None:
        """See :attr:`UploadFacts.num_examples`."""
        return self.facts.num_examples

    @property
    def label_counts(self) -> tuple[int, ...] | None:
        """See :attr:`UploadFacts.label_counts`."""
        return self.facts.label_counts

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]] | None:
        """See :attr:`UploadFacts.ranges`."""
        return self.facts.ranges


# The kinds of uploads: a classifier, its first block, one with a class "unknown", an encoder, a decoder, or sums.
#
# The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.


CLASSIFIER = "classifier"
OPEN_SET = "open-set"
PROTOTYPES = "prototypes"
BLOCK = "block"
CVAE = "cvae"
STATISTICS = "statistics"
HEAD = "head+"  # before the name of a backbone
# The second moments of sums of features: Gram matrices, sums of squares per class, or both.
GRAM, SQUARES = "gram", "squares"
# The kinds that answer an example with logits, and so have an accuracy of their own; others may follow the C logits.
PREDICTING = (CLASSIFIER, OPEN_SET, PROTOTYPES)
# The kinds whose architectures are classifiers' with a suffix.
SUFFIXES = {OPEN_SET: "+unknown", PROTOTYPES: "+prototypes", BLOCK: "+block"}
# What a model raises on examples that it does not take.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def kind_of(architecture: str) -> str:
    """Return the kind of an architecture: ``net+unknown``, ``cvae-decoder``, sums of features, or any classifier.

    Sums are ``statistics``, of the run's backbone, or ``statistics+<backbone>``.
    """
    for kind, suffix in SUFFIXES.items():
        if architecture.endswith(suffix):
            return kind
    if architecture.partition("+")[0] == STATISTICS:
        return STATISTICS
    return CVAE if architecture == "cvae-decoder" else CLASSIFIER


def is_head(architecture: str) -> bool:
    """Say whether an architecture is a head on a frozen backbone, ``head+<backbone>``: its images get no gradient."""
    return architecture.startswith(HEAD)


def backbone_in(architecture: str) -> str:
    """Return the backbone that the name of a head or of sums has; empty for that of the run."""
    return architecture.partition("+")[2] if is_head(architecture) or kind_of(architecture) == STATISTICS else ""


def base_of(architecture: str) -> str:
    """Return an architecture's name without the suffix of its kind: that of the classifier that it was made of."""
    return architecture.removesuffix(SUFFIXES.get(kind_of(architecture), ""))


def holds_images(input_shape: tuple[int, int, int]) -> bool:
    """Say whether examples of this shape are images; rows of features are (F, 1, 1), texts of L tokens (1, 1, L)."""
    return input_shape[1] > 1


def default_normalization(input_shape: tuple[int, int, int]) -> Normalization:
    """Return the input space where none is given: images from -1 to 1, rows and texts as they are stored."""
    channels = input_shape[0]
    return Normalization.half(channels) if holds_images(input_shape) else Normalization.identity(channels)


def run_on_blanks(model: Callable[..., Any], input_shape: tuple[int, int, int]) -> Any:
    """Return what a model makes of two blank examples; texts that it refuses as floats are whole numbers.

    Raises:
        REFUSALS: It takes neither.
    """
    import torch

    blank = torch.zeros(2, *input_shape)
    try:
        return model(blank)
    except REFUSALS as error:
        if tuple(input_shape[:2]) != (1, 1):
            raise
        try:
            return model(blank.long())
        except REFUSALS as again:
            raise TypeError(f"{error}; as whole numbers: {again}") from again
