"""torchvision's data sets, read from disk or downloaded by torchvision."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strategies.core.errors import DataError
from strategies.core.facts import PIXELS

from .files import why_missing

# Errors of reading a damaged file, in torchvision, numpy, scipy and pickle.
DAMAGE = (RuntimeError, OSError, ValueError, TypeError, AssertionError, EOFError, LookupError, pickle.UnpicklingError)


@dataclass(frozen=True)
class TorchvisionSet:
    """A data set of torchvision.

    Attributes:
        factory: Its class in ``torchvision.datasets``.
        place: Its file or folder under the root; ``{split}`` stands for the split.
        image_size: Height and width that the papers use, in pixels.
        augmentation: The papers' augmentation of its training images.
        classes: The names of its classes, in the order of their numbers; empty where numbers are their names.
        mean: Of its training pixels in [0, 1], per channel, at their own size; as FLBoost's and others' code has it.
        std: Their standard deviation, per channel.
    """

    factory: str
    place: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10
    channels: int = 3
    image_size: int = 32
    augmentation: str = "none"
    classes: tuple[str, ...] = ()


CLOTHES = "T-shirt/top trouser pullover dress coat sandal shirt sneaker bag ankle-boot"
THINGS = "airplane automobile bird cat deer dog frog horse ship truck"

KNOWN: Mapping[str, TorchvisionSet] = {
    "mnist": TorchvisionSet("MNIST", "MNIST", *PIXELS["mnist"], channels=1),
    "fashion-mnist": TorchvisionSet(
        "FashionMNIST", "FashionMNIST", *PIXELS["fashion-mnist"], channels=1, classes=(*CLOTHES.split(),)
    ),
    "svhn": TorchvisionSet("SVHN", "{split}_32x32.mat", *PIXELS["svhn"]),
    "cifar10": TorchvisionSet(
        "CIFAR10",
        "cifar-10-batches-py",
        *PIXELS["cifar10"],
        augmentation="crop-flip",
        classes=(*THINGS.split(),),
    ),
    "cifar100": TorchvisionSet(
        "CIFAR100",
        "cifar-100-python",
        *PIXELS["cifar100"],
        num_classes=100,
        augmentation="crop-flip",
    ),
}


def open_set(
    name: str, split: str, root: Path, *, download: bool
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Open one half of a torchvision set.

    Returns:
        The labels, int64 [N], and a function positions [B] -> uint8 [B, ch, H, W].

    Raises:
        DataError: The set is missing and cannot be downloaded, or it is incomplete or damaged.
    """
    known = KNOWN[name]
    place = known.place.format(split=split)
    target = root / place
    fetch = partial(_construct, known, split, download=True)
    if not target.exists() and (reason := why_missing(root, [place], fetch, download=download)):
        half = f", split={split!r}" if known.factory == "SVHN" else ""
        raise DataError(
            f"data set {name!r} is not in {root} (data.root) and {reason}. Get it where there is a network, "
            f"with torchvision.datasets.{known.factory}(root{half}, download=True), and copy it to "
            f"{target}, or set data.root to the folder that holds {target.name}"
        )
    try:
        images, labels = _read(known, split, root)
    except DAMAGE as error:
        raise DataError(
            f"data set {name!r} in {root} (data.root) is incomplete or damaged ({error}): remove {target} "
            "to download it again, or put an intact copy there"
        ) from error
    return labels, images.__getitem__


def _read(known: TorchvisionSet, split: str, root: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 images [N, ch, H, W] and int64 labels [N] as stored on disk."""
    opened = _construct(known, split, root, download=False)
    images = torch.as_tensor(opened.data)
    labels = torch.as_tensor(np.asarray(opened.labels if known.factory == "SVHN" else opened.targets)).long()
    # Grey images come without a channel, SVHN's with the channels first, CIFAR's with the channels last.
    if images.ndim == 3:
        images = images[:, None]
    elif known.factory != "SVHN":
        images = images.permute(0, 3, 1, 2)
    if len(images) != len(labels) or not len(labels):
        raise ValueError(f"{len(images)} images and {len(labels)} labels")
    if images.dtype != torch.uint8 or images.shape[1] != known.channels:
        raise ValueError(f"images of {images.dtype} with {images.shape[1]} channels")
    if labels.min() < 0 or labels.max() >= known.num_classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} for {known.num_classes} classes")
    return images, labels


def _construct(known: TorchvisionSet, split: str, root: Path, *, download: bool) -> Any:
    from strategies.core.vision import torchvision

    half = {"split": split} if known.factory == "SVHN" else {"train": split == "train"}
    return getattr(torchvision.datasets, known.factory)(str(root), download=download, **half)
