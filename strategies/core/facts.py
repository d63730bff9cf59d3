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
