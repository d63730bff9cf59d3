"""Data sets by name: scikit-learn's digits, torchvision's, folders of images, sets of domains, rows, and texts.

Sizes, normalisation and augmentation are those of Co-Boosting's released code (Dai et al., ICLR 2024). All torchvision
sets are 32x32 (28x28 digits and clothes are resized). Mean and standard deviation are 0.5 per channel, or on request
those of the data set, the input space of FLBoost's code. Random crop and flip apply to CIFAR only.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path

import numpy as np
import torch

from strategies.core.errors import DataError, OptionError
from strategies.core.facts import Normalization
from strategies.core.offline import wanted as offline
from strategies.core.places import expand_user
from strategies.core.scan import log_once

from . import domains, folders, tables, text, torchvision_sets
from .files import composed, disk_errors
from .folders import SPLITS
from .split import NO_LABELS, Split, bare_pixels, bare_rows, pixels, tokens_of, unchanged

SOURCES = ("digits", *torchvision_sets.KNOWN, "imagefolder", *domains.GROUPS, *tables.TABLES, *text.TEXTS)
NORMALIZATIONS = ("half", "data-set")

# Sets of images of any size, whose papers name no common size.
SIZELESS = ("imagefolder", *(name for name, group in domains.GROUPS.items() if not group.image_size))

# Sets whose examples come from several domains, and sets whose examples are not images.
DOMAINED = (*domains.GROUPS, *tables.TABLES)
IMAGELESS = (*tables.TABLES, *text.TEXTS)

# The first of the 1797 embedded digits; the other 500 are held out.
DIGITS_TRAIN = 1297


@disk_errors()
def open_split(
    name: str,
    split: str,
    *,
    root: str = "",
    image_size: int = 0,
    left_out: str = "",
    normalization: str = "half",
    download: bool = True,
) -> Split:
    """Open the training or the test half of a data set.

    Args:
        name: One of :data:`SOURCES`.
        split: ``"train"`` or ``"test"``.
        root: The folder that holds the set in torchvision's layout, or ``train/<class>/`` and ``test/<class>/`` for
            ``imagefolder``; for sets of domains see :mod:`fl_app.data.domains`, for others :mod:`fl_app.data.tables`
            and :mod:`fl_app.data.text`. Empty: the environment's ``ONESHOT_DATA``, else ``~/.cache/oneshot-fl/data``.
        image_size: Height and width of the images in pixels; 0 for the set's own size. Sets of :data:`SIZELESS` have
            none; sets of :data:`IMAGELESS` take 0 only.
        left_out: The domain that is the test half, for a set of domains; empty for every other set.
        normalization: ``"half"``, or ``"data-set"`` for the mean and deviation of one of torchvision's sets.
        download: Whether a missing set may be downloaded; ``$ONESHOT_OFFLINE`` prevents every download.

    Raises:
        OptionError: The name or the domain is unknown, or the size or the normalisation does not fit the set.
        DataError: The set is missing, incomplete or damaged, or ``root`` is no folder; the message names the folder and
            the source.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: must be one of {', '.join(SPLITS)}")
    if name not in SOURCES:
        raise OptionError(f"setting 'data.name' is {name!r}: must be one of {', '.join(SOURCES)}")
    domains.check_left_out(name, left_out)
    _check_size(name, image_size)
    check_normalization(name, normalization)
    place, download = data_root(root), download and not offline()
    if name == "digits":
        return _digits(split, image_size)
    if name == "imagefolder":
        return open_folders(place, split, image_size)
    if root and not place.is_dir():  # a mistyped folder is not made and filled
        raise DataError(f"setting 'data.root' is {root!r}: no such folder; must exist, also for a download of {name!r}")
    domain = texts = None
    if name in domains.GROUPS:
        size = image_size or domains.GROUPS[name].image_size
        labels, domain, read = domains.open_group(
            name, split, place, image_size=size, left_out=left_out, download=download
        )
    elif name in tables.TABLES:
        labels, domain, rows = tables.open_centres(split, place, download=download)
        read = rows.__getitem__
    elif name in text.TEXTS:
        labels, texts = text.open_news(split, place, download=download)
        read = tokens_of(texts, text.tokens)
    else:
        labels, read = torchvision_sets.open_set(name, split, place, download=download)
    return replace(bare_split(name, image_size, normalization), labels=labels, read=read, domains=domain, texts=texts)


def bare_split(name: str, image_size: int = 0, normalization: str = "half", classes: Sequence[str] = ()) -> Split:
    """Return a half of a data set without its examples: what is known of them beforehand.

    Args:
        name: One of :data:`SOURCES`.
        image_size: See :func:`open_split`.
        normalization: See :func:`open_split`.
        classes: The names of the classes of ``imagefolder``; those of other sets are known.

    Raises:
        OptionError: The size or the normalisation does not fit the set.
    """
    _check_size(name, image_size)
    check_normalization(name, normalization)
    if name == "imagefolder":
        return replace(bare_pixels((3, image_size), len(classes)), classes=tuple(map(composed, classes)))
    if name in tables.TABLES:
        return replace(bare_rows(tables.FEATURES, 2), classes=tables.CLASSES)
    if name in text.TEXTS:
        read = tokens_of((), text.tokens)
        hashed = unchanged(NO_LABELS, read, num_classes=len(text.CLASSES), shape=(1, 1, text.LENGTH))
        return replace(hashed, texts=(), classes=text.CLASSES)
    if name in domains.GROUPS:
        group = domains.GROUPS[name]
        return replace(bare_pixels((3, image_size or group.image_size), group.num_classes), classes=group.classes)
    if name == "digits":
        return bare_pixels((1, image_size or 16), 10)
    known = torchvision_sets.KNOWN[name]
    opened = bare_pixels((known.channels, image_size or known.image_size), known.num_classes)
    opened = replace(opened, augmentation=known.augmentation, classes=known.classes)
    return opened if normalization == "half" else replace(opened, normalization=Normalization(known.mean, known.std))


def open_folders(root: Path, split: str, image_size: int, classes: Sequence[str] = (), group: str = "") -> Split:
    """Open a half of ``imagefolder``; the arguments and errors are those of :func:`.folders.open_images`.

    ``group`` is the expression of :func:`.folders.groups_of`, which may fit no name of the test half; empty: each image
    is its own.
    """
    _check_size("imagefolder", image_size)
    labels, names, read, files = folders.open_images(root, split, image_size, classes)
    opened = pixels(labels, read, num_classes=len(names), shape=(3, image_size))
    groups = folders.groups_of(files, group, fits_none=split == "test") if group else None
    if group and groups is None:
        place = root / split
        log_once(WARNING, f"{place} has no name that {group!r} fits (data.group): intervals of scores count its images")
    return replace(opened, classes=names, files=files, groups=groups)


def data_root(root: str = "") -> Path:
    """Return the folder of the data sets: ``root``, else ``ONESHOT_DATA``, else one in the user's cache."""
    return expand_user(root or os.environ.get("ONESHOT_DATA", "") or "~/.cache/oneshot-fl/data")


def check_normalization(name: str, normalization: str) -> None:
    """Refuse the mean and deviation of a data set for which none are published.

    Raises:
        OptionError: The normalisation is unknown, or the data set has none of its own.
    """
    if normalization not in NORMALIZATIONS:
        allowed = ", ".join(NORMALIZATIONS)
        raise OptionError(f"setting 'data.normalization' is {normalization!r}: must be one of {allowed}")
    if normalization != "half" and name not in torchvision_sets.KNOWN:
        raise OptionError(
            f"setting 'data.normalization' is {normalization!r} with 'data.name' {name!r}: must be 'half'; only "
            f"{', '.join(torchvision_sets.KNOWN)} have a published mean and deviation"
        )


def _check_size(name: str, image_size: int) -> None:
    allowed = "0 (the data set's own) or greater"
    if name in SIZELESS:
        allowed = f"at least 1 for {name!r}"
    elif name in IMAGELESS:
        allowed = f"0 for {name!r}, whose examples are not images"
    fits = image_size == 0 if name in IMAGELESS else image_size >= (name in SIZELESS)
    if not fits:
        raise OptionError(f"setting 'data.image-size' is {image_size}: must be {allowed}")


def _digits(split: str, image_size: int) -> Split:
    """Scikit-learn's embedded digits: 1797 images of 8x8 with values 0 to 16; the last 500 are the test half."""
    rows = slice(0, DIGITS_TRAIN) if split == "train" else slice(DIGITS_TRAIN, None)
    images, labels = (tensor[rows] for tensor in _digit_tensors())
    return replace(bare_split("digits", image_size), labels=labels.clone(), read=images.__getitem__)


@functools.cache
def _digit_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    # scikit-learn's own file: to import the package for its loader takes every process of a run two seconds.
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    rows = np.loadtxt(Path(package) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels = np.rint(rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return torch.from_numpy(pixels)[:, None], torch.from_numpy(rows[:, 64]).long()
