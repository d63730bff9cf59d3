"""One half of a data set: opened, and decoded.

Opening a split reads its labels and leaves the images as they are stored. Only the requested positions are decoded and
resized, so a client that holds a hundredth of a training set does a hundredth of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from strategies.core.facts import Agreement, Normalization, holds_images
from strategies.core.seeds import generator

from .preprocessing import check_pixels, normalize, resize

CHECKED = 256  # examples whose values are checked at a time


@dataclass(frozen=True)
class ImageData:
    """Decoded images with their labels, or examples of another kind, which a model takes unchanged.

    Attributes:
        images: uint8 [N, ch, H, W]; rows of F features are float32 [N, F, 1, 1], texts of L tokens int64 [N, 1, 1, L].
        labels: int64 [N], in 0 .. C - 1.
    """

    images: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Split:
    """One half of a data set, opened but not decoded.

    Attributes:
        labels: int64 [N], in 0 .. C - 1.
        input_shape: (ch, H, W) of the images that :meth:`take` returns; (F, 1, 1) of rows, (1, 1, L) of texts.
        normalization: Of the pixels, before a model.
        augmentation: Of the training images: ``"none"`` or ``"crop-flip"``.
        read: positions [B] -> uint8 [B, ch, h, w] at any size; rows and texts as in :class:`ImageData`.
        domains: The domain of each example, int64 [N], from 0; None if the set has none.
        texts: The texts themselves [N]; None if the examples are none.
        by_client: Whether a domain is what one client holds: then no other division makes sense.
        classes: The names of the classes, in the order of their numbers; empty where numbers are their names.
        columns: How each column of a table becomes features, one text per column; empty for other examples.
        groups: The group of each example, such as its patient, int64 [N]; None if each example is its own.
        files: The name of each example's file [N]; empty where examples have none of their own.
        named: Whether the classes are known to all parties by name or number; not those of a user's own code.
        targets: What a user's own training learns in place of classes [N, ...]; None: the labels.
    """

    labels: torch.Tensor
    num_classes: int
    input_shape: tuple[int, int, int]
    normalization: Normalization
    augmentation: str
    read: Callable[[torch.Tensor], torch.Tensor]
    domains: torch.Tensor | None = None
    texts: Sequence[str] | None = None
    by_client: bool = False
    groups: torch.Tensor | None = None
    classes: tuple[str, ...] = ()
    files: Sequence[str] = ()
    columns: tuple[str, ...] = ()
    named: bool = True
    targets: torch.Tensor | None = None

    @property
    def agreement(self) -> Agreement:
        """What all parties must share to train on such examples: class names and their order, and the input."""
        numbers = map(str, range(self.num_classes)) if self.named else ()
        mean, std = (" ".join(f"{value:g}" for value in values) for values in self.normalization)
        kind = "tokens" if self.texts is not None else "columns" if self.columns else "pixels"
        shape = " x ".join(map(str, self.input_shape))
        of_input = (
            (f"{kind} {shape}", f"mean {mean}", f"std {std}")
            if holds_images(self.input_shape)
            else (f"{kind} {shape}",)
        )
        return Agreement.of(self.classes or tuple(numbers), (*of_input, *self.columns))

    def tokenized(self, tokens: Callable[[Sequence[str]], torch.Tensor], length: int) -> Split:
        """Return a split of texts with other tokens; any other split unchanged.

        Args:
            tokens: Texts [B] -> int64 [B, 1, 1, L].
            length: L.
        """
        if self.texts is None:
            return self
        return replace(self, input_shape=(1, 1, length), read=tokens_of(self.texts, tokens))

    def check_pixels(self, name: str) -> None:
        """Refuse float images outside [0, 1]; images of bytes are not read.

        Raises:
            DataError: See :func:`.preprocessing.check_pixels`.
        """
        if self.normalization == Normalization.identity(self.input_shape[0]):
            for positions in torch.split(torch.arange(len(self.labels)), CHECKED):  # a copy of all may be too large
                check_pixels(self.read(positions), f"data set {name!r}")

    def take(self, positions: Sequence[int] | npt.NDArray[np.int64] | torch.Tensor | None = None) -> ImageData:
        """Decode the images at these positions [B], in this order; without positions, all images.

        Raises:
            DataError: An image cannot be decoded; names its file.
        """
        every = torch.arange(len(self.labels))
        chosen = every if positions is None else torch.as_tensor(positions, dtype=torch.int64)
        return ImageData(resize(self.read(chosen), self.input_shape[1]), self.labels[chosen])

    def pairs(self, positions: torch.Tensor, taken: ImageData | None = None) -> TensorDataset:
        """Return the examples at these positions [B] as a user's own training takes them, with their targets.

        Args:
            taken: What :meth:`take` returned for these positions; None: they are read here.

        Returns:
            Normalised images [B, ch, H, W], rows [B, F] or texts [B, L], and targets [B, ...] or labels [B].

        Raises:
            DataError: An image cannot be decoded; names its file.
        """
        taken = self.take(positions) if taken is None else taken
        inputs = normalize(taken.images, *self.normalization)
        inputs = inputs if holds_images(self.input_shape) else inputs.flatten(1)
        return TensorDataset(inputs, (self.labels if self.targets is None else self.targets)[positions])


def pixels(
    labels: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_classes: int,
    shape: tuple[int, int],
) -> Split:
    """Return the split of a set of square images (channels, side), with mean and deviation 0.5 per channel."""
    channels, size = shape
    return Split(labels, num_classes, (channels, size, size), Normalization.half(channels), "none", read)


def unchanged(
    labels: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_classes: int,
    shape: tuple[int, int, int],
) -> Split:
    """Return the split of a set whose examples a model takes unchanged: its normalisation is the identity."""
    return Split(labels, num_classes, shape, Normalization.identity(shape[0]), "none", read)


NO_LABELS = torch.zeros(0, dtype=torch.int64)


def bare_pixels(shape: tuple[int, int], num_classes: int) -> Split:
    """Return a split of images (channels, side) without any."""
    channels, side = shape
    none = torch.zeros(0, channels, side, side, dtype=torch.uint8)
    return pixels(NO_LABELS, none.__getitem__, num_classes=num_classes, shape=shape)


def bare_rows(features: int, num_classes: int) -> Split:
    """Return a split of rows of features without any."""
    shape = (features, 1, 1)
    return unchanged(NO_LABELS, torch.zeros(0, *shape).__getitem__, num_classes=num_classes, shape=shape)


def tokens_of(
    texts: Sequence[str], tokens: Callable[[Sequence[str]], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function positions [B] -> tokens of the texts there, int64 [B, 1, 1, L]."""
    return lambda positions: tokens([texts[position] for position in positions.tolist()])


# The two halves of the held-out examples: one to choose by, the other to report on.
#
# A figure that was chosen on the images that report it is too good. So the selection half makes a choice, such as that
# of a rate, and the report half scores it. Both have the same number of examples of each class, up to one.


HALVES = ("all", "selection", "report")
SEED = 2024  # the same halves in every run, whatever its seed


def half_of(labels: torch.Tensor, half: str, groups: torch.Tensor | None = None) -> torch.Tensor:
    """Return the positions of a half of the held-out examples, ascending; no group is cut.

    Args:
        labels: int64 [N], of all held-out examples.
        half: One of :data:`HALVES`. Of a class with an odd number of examples, the report half has the larger part.
        groups: The group of each example [N], of the class of its first one; None if each is its own.
    """
    if half == "all":
        return torch.arange(len(labels))
    if groups is not None:
        _, first, units = np.unique(groups.numpy(), return_index=True, return_inverse=True)
        return torch.from_numpy(np.flatnonzero(np.isin(units, half_of(labels[first], half))))
    order = torch.randperm(len(labels), generator=generator(SEED, "held-out halves"))
    chosen = []
    for label in range(int(labels.max()) + 1):
        own = order[labels[order] == label]
        middle = len(own) // 2
        chosen.append(own[:middle] if half == "selection" else own[middle:])
    return torch.cat(chosen).sort().values
