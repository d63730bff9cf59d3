"""Folders of images: ``<class>/<image>`` below one folder, and the data set of two such folders.

The set is ``<root>/train/<class>/*`` and ``<root>/test/<class>/*``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from strategies.core.errors import DataError

from .preprocessing import resize

Read = Callable[[torch.Tensor], torch.Tensor]


def open_images(root: Path, split: str, image_size: int) -> tuple[torch.Tensor, int, Read]:
    """Find the images of one half; reading decodes them as RGB and stretches them to squares.

    Args:
        root: The folder that holds ``train`` and ``test``; classes are numbered in the order of their names.
        split: ``"train"`` or ``"test"``.
        image_size: Height and width of the result, in pixels.

    Returns:
        The labels, int64 [N], the number of classes, and a function positions [B] -> uint8 [B, 3, size, size].

    Raises:
        DataError: The layout is wrong, a class is not in both halves, or a class has no images.
    """
    _check_layout(root)
    labels, classes, read = open_classes(root / split, image_size)
    return labels, len(classes), read


def open_classes(folder: Path, image_size: int) -> tuple[torch.Tensor, tuple[str, ...], Read]:
    """Find the images of a folder of classes.

    Args:
        folder: Holds ``<class>/<image>``; classes are numbered in the order of their names.
        image_size: Height and width of the result, in pixels.

    Returns:
        The labels, int64 [N], the names of the classes, and a function as in :func:`reader`.

    Raises:
        DataError: The folder has no class, or a class has no images.
    """
    from fl_app.vision import torchvision

    try:
        found = torchvision.datasets.ImageFolder(str(folder))
    except OSError as error:
        raise DataError(f"folder {folder} under data.root has a class without images: {error}") from error
    return torch.tensor(found.targets), tuple(found.classes), reader([file for file, _ in found.samples], image_size)


def reader(files: Sequence[str], image_size: int) -> Read:
    """Return a function positions [B] -> uint8 [B, 3, size, size] that decodes only the files at these positions."""
    from fl_app.vision import torchvision

    load = torchvision.datasets.folder.default_loader

    def read(positions: torch.Tensor) -> torch.Tensor:
        images = torch.empty((len(positions), 3, image_size, image_size), dtype=torch.uint8)
        for row, position in enumerate(positions.tolist()):
            images[row] = _decode(files[position], load, image_size)
        return images

    return read


def _decode(file: str, load: Callable[[str], object], image_size: int) -> torch.Tensor:
    try:
        pixels = np.array(load(file), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError) as error:
        # Pillow names a broken PNG a SyntaxError.
        raise DataError(f"image {file} under data.root cannot be decoded: {error}") from error
    return resize(torch.from_numpy(pixels).permute(2, 0, 1)[None], image_size)[0]


def _check_layout(root: Path) -> None:
    for half in ("train", "test"):
        if not (root / half).is_dir():
            raise DataError(
                f"data set 'imagefolder' (data.name) needs {root / half}/<class>/<image>, which does not exist: set "
                "data.root to a folder that holds train/ and test/"
            )
    train, test = ({entry.name for entry in (root / half).iterdir() if entry.is_dir()} for half in ("train", "test"))
    if not train:
        raise DataError(
            f"folder {root / 'train'} under data.root has no class folders: its layout must be train/<class>/<image>"
        )
    for here, there, missing in (("train", "test", train - test), ("test", "train", test - train)):
        if missing:
            raise DataError(
                f"data.root {root} has the class folders {', '.join(sorted(missing))} in {here}/ and not in {there}/: "
                "both must have the same classes"
            )
