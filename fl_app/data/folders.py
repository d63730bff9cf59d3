"""A folder of images as a data set: ``<root>/train/<class>/*`` and ``<root>/test/<class>/*``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from strategies.errors import DataError

from .preprocessing import resize


def open_images(
    root: Path, split: str, image_size: int
) -> tuple[torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Find the images of one half; they are decoded as RGB and stretched to squares when they are read.

    Args:
        root: The folder that holds ``train`` and ``test``; classes are numbered in the order of their names.
        split: ``"train"`` or ``"test"``.
        image_size: Height and width of the result, in pixels.

    Returns:
        The labels, int64 [N], the number of classes, and a function positions [B] -> uint8 [B, 3, size, size].

    Raises:
        DataError: The layout is another, a class is not in both halves, or a class has no images.
    """
    _check_layout(root)
    from fl_app.vision import torchvision

    try:
        found = torchvision.datasets.ImageFolder(str(root / split))
    except OSError as error:
        raise DataError(f"folder {root / split} under data.root has a class without images: {error}") from error
    files = [file for file, _ in found.samples]

    def read(positions: torch.Tensor) -> torch.Tensor:
        images = torch.empty((len(positions), 3, image_size, image_size), dtype=torch.uint8)
        for row, position in enumerate(positions.tolist()):
            images[row] = _decode(files[position], found.loader, image_size)
        return images

    return torch.tensor(found.targets), len(found.classes), read


def _decode(file: str, loader: Callable[[str], object], image_size: int) -> torch.Tensor:
    try:
        pixels = np.array(loader(file), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError) as error:
        # Pillow names a broken PNG a SyntaxError.
        raise DataError(f"image {file} under data.root cannot be decoded: {error}") from error
    return resize(torch.from_numpy(pixels).permute(2, 0, 1)[None], image_size)[0]


def _check_layout(root: Path) -> None:
    for half in ("train", "test"):
        if not (root / half).is_dir():
            raise DataError(
                f"data set 'imagefolder' (data.name) wants {root / half}/<class>/<image>, which is not there: set "
                "data.root to a folder that holds train/ and test/"
            )
    train, test = ({entry.name for entry in (root / half).iterdir() if entry.is_dir()} for half in ("train", "test"))
    if not train:
        raise DataError(
            f"folder {root / 'train'} under data.root has no class folders: wanted is train/<class>/<image>"
        )
    for here, there, missing in (("train", "test", train - test), ("test", "train", test - train)):
        if missing:
            raise DataError(
                f"data.root {root} has the class folders {', '.join(sorted(missing))} in {here}/ and not in {there}/: "
                "wanted are the same classes in both"
            )
