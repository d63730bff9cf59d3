"""Data sets of several domains: the same classes in different styles, one domain left out for testing.

Both are from Co-Boosting's experiments with feature shift (Dai et al., ICLR 2024, Tables 13 and 14). The training half
is all domains except the one left out, in order. The test half is the domain left out; no client holds an image of it.
Grey images are repeated over three channels, and all images are resized to one size.

``domain-digits``: MNIST, SVHN (both in torchvision's layout), and MNIST-M and the synthetic digits of Ganin et al.
(JMLR 2016). Each keeps its published halves, so the test is the test half of the domain left out.
``pacs``: Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017; it has no halves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from strategies.core.errors import DataError, OptionError

from . import torchvision_sets
from .folders import Read, classes_in, open_classes, reader
from .preprocessing import resize

# root, split, image size, download -> labels, int64 [N], and a function positions [B] -> uint8 [B, 1 or 3, h, w]
Open = Callable[[Path, str, int, bool], tuple[torch.Tensor, Read]]

DIGITS = tuple(map(str, range(10)))
THINGS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
GANIN = "Get it from http://yaroslav.ganin.net (Ganin et al., JMLR 2016)"


@dataclass(frozen=True)
class Group:
    """Domains with the same classes.

    Attributes:
        classes: Their names, in the order of their numbers; empty where numbers are their names.
        image_size: Height and width that the papers use, in pixels; 0 if they name none.
        domains: The function that opens each domain, by name; clients get the domains in this order.
    """

    num_classes: int
    image_size: int
    domains: Mapping[str, Open]
    classes: tuple[str, ...] = ()


def open_group(
    name: str, split: str, root: Path, *, image_size: int, left_out: str, download: bool
) -> tuple[torch.Tensor, torch.Tensor, Read]:
    """Open one half of a data set of several domains.

    Args:
        name: A key of :data:`GROUPS`.
        split: ``"train"`` or ``"test"``.
        image_size: Height and width of the result, in pixels.

    Returns:
        The labels, int64 [N], the number of each image's domain among those of this half, int64 [N], and a function
        positions [B] -> uint8 [B, 3, size, size].

    Raises:
        OptionError: The domain is unknown.
        DataError: A domain is missing, incomplete or damaged; the message names its source.
    """
    check_left_out(name, left_out)
    chosen = [key for key in GROUPS[name].domains if (key == left_out) == (split == "test")]
    opened = [GROUPS[name].domains[key](root, split, image_size, download) for key in chosen]
    sizes = [len(labels) for labels, _ in opened]
    starts = [0, *itertools.accumulate(sizes)]
    domain = torch.repeat_interleave(torch.tensor(sizes))

    def read(positions: torch.Tensor) -> torch.Tensor:
        images = torch.empty((len(positions), 3, image_size, image_size), dtype=torch.uint8)
        for number, (_, read_one) in enumerate(opened):
            own = domain[positions] == number
            stored = read_one(positions[own] - starts[number])
            images[own] = resize(stored, image_size).expand(-1, 3, -1, -1)
        return images

    return torch.cat([labels for labels, _ in opened]), domain, read


def check_left_out(name: str, left_out: str) -> None:
    """Refuse a domain that the data set does not have.

    Raises:
        OptionError: Names the setting, its value and the possible ones.
    """
    if name in GROUPS and left_out not in GROUPS[name].domains:
        raise OptionError(
            f"setting 'data.left-out' is {left_out!r}: must be one of {', '.join(GROUPS[name].domains)} where "
            f"'data.name' is {name!r}"
        )
    if name not in GROUPS and left_out:
        raise OptionError(
            f"setting 'data.left-out' is {left_out!r}: must be '' where 'data.name' is {name!r}, which has no domains; "
            f"{', '.join(GROUPS)} have them"
        )


def _torchvision(name: str) -> Open:
    return lambda root, split, _, download: torchvision_sets.open_set(name, split, root, download=download)


def _mnist_m(root: Path, split: str, size: int, _: bool) -> tuple[torch.Tensor, Read]:
    """Open folders of classes, or the published files ``mnist_m_train/*.png`` and ``mnist_m_train_labels.txt``."""
    place = root / "MNIST-M"
    if (listed := place / f"mnist_m_{split}_labels.txt").exists():
        return _listed(listed, place / f"mnist_m_{split}", size)
    return _classes(
        place / split,
        DIGITS,
        size,
        get=f"{GANIN}; mnist_m_{split}/ with mnist_m_{split}_labels.txt beside it works as well",
    )


def _syn(root: Path, split: str, size: int, _: bool) -> tuple[torch.Tensor, Read]:
    get = f"{GANIN}, published as two matrices, and write every image into the folder of its digit"
    return _classes(root / "SYN" / split, DIGITS, size, get=get)


def _pacs(domain: str) -> Open:
    get = "Get it from the authors (Li et al., ICCV 2017, https://domaingeneralization.github.io)"
    return lambda root, _, size, __: _classes(root / "PACS" / domain, THINGS, size, get=get)


def _classes(folder: Path, wanted: tuple[str, ...], size: int, *, get: str) -> tuple[torch.Tensor, Read]:
    if not folder.is_dir():
        raise DataError(f"no images in {folder}/<class> under data.root. {get}, or set data.root to its folder")
    present = classes_in(folder).keys()
    if present != set(wanted):
        wrong = ", ".join(sorted(present ^ set(wanted)))
        raise DataError(
            f"folder {folder} under data.root has the wrong classes (missing or unexpected: {wrong}): must be "
            f"{', '.join(wanted)}"
        )
    return open_classes(folder, size, sorted(wanted))[:2]


def _listed(listed: Path, folder: Path, size: int) -> tuple[torch.Tensor, Read]:
    """Open a list of lines ``<image> <label>`` and the folder of its images."""
    try:
        rows = [line.split() for line in listed.read_text().splitlines() if line.strip()]
        files, labels = [str(folder / name) for name, _ in rows], torch.tensor([int(label) for _, label in rows])
    except (OSError, ValueError) as error:
        raise DataError(
            f"list {listed} under data.root is damaged: {error}; a line must be '<image> <label>'"
        ) from error
    if not len(labels) or labels.min() < 0 or labels.max() > 9:
        found = f"labels from {labels.min()} to {labels.max()}" if len(labels) else "no labels"
        raise DataError(f"file {listed} under data.root has {found}: must be 0 to 9")
    return labels, reader(files, size)


GROUPS: Mapping[str, Group] = {
    "domain-digits": Group(
        10,
        32,
        {"mnist": _torchvision("mnist"), "mnist-m": _mnist_m, "svhn": _torchvision("svhn"), "syn": _syn},
    ),
    "pacs": Group(
        len(THINGS),
        0,
        {domain: _pacs(domain) for domain in ("photo", "art_painting", "cartoon", "sketch")},
        THINGS,
    ),
}
