"""Folders of images: ``<class>/<image>`` below one folder, and the data set of two such folders.

The set is ``<root>/train/<class>/*`` and ``<root>/test/<class>/*``.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from strategies.core.checkpoints import other_kind
from strategies.core.errors import DataError, shorten_list
from strategies.core.scan import LOG, Scan, is_hidden, log_once, scan

from .files import composed
from .preprocessing import resize

# Formats that Pillow opens and cannot decode by itself, and what lies beside images and is never one.
_NO_IMAGES = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "PDF", "WMF"})
_NO_SUFFIXES = frozenset({
    ".csv", ".db", ".doc", ".docx", ".htm", ".html", ".ini", ".json", ".log", ".mat", ".md", ".npy", ".npz", ".pdf",
    ".py", ".tsv", ".txt", ".xls", ".xlsx", ".xml", ".yaml", ".yml", ".zip",
})  # fmt: skip

_WITHOUT = ", or evaluate.on to 'clients', which needs none on the server"

Read = Callable[[torch.Tensor], torch.Tensor]
SPLITS = ("train", "test")


def open_images(
    root: Path, split: str, image_size: int, classes: Sequence[str] = ()
) -> tuple[torch.Tensor, tuple[str, ...], Read, list[str]]:
    """Find the images of one half; reading decodes them as RGB and stretches them to squares.

    Args:
        root: The folder that holds ``train`` or ``test``, or both, then with the same classes.
        split: ``"train"`` or ``"test"``.
        image_size: Height and width of the result, in pixels.
        classes: The names of the classes in the order of their numbers, of which a half may lack some; empty: the
            folders' own, in the order of their names.

    Returns:
        The labels, int64 [N], the names of the classes, a function positions [B] -> uint8 [B, 3, size, size], and the
        files below the folders of their classes [N].

    Raises:
        DataError: The layout is wrong, a class is not in both halves or not among the named ones, or one has no images.
    """
    folder = root / split
    if not folder.is_dir():
        raise DataError(
            f"data set 'imagefolder' (data.name) needs {folder}/<class>/<image>, which does not exist: set data.root "
            f"to a folder that holds {split}/{_WITHOUT if split == 'test' else ''}"
        )
    classes = tuple(map(composed, classes))
    if classes:
        if unnamed := sorted(classes_in(folder).keys() - set(classes)):
            raise DataError(
                f"folder {folder} under data.root has the class folders {', '.join(unnamed)}: must be among "
                f"'data.classes', {', '.join(classes)}"
            )
    else:
        _refuse_alike(folder)
        _check_layout(root, split)
    names = classes or tuple(sorted(classes_in(folder)))
    labels, read, files = open_classes(folder, image_size, names, lacking=bool(classes))
    return labels, names, read, files


def groups_of(files: Sequence[str], pattern: str, *, fits_none: bool = False) -> torch.Tensor | None:
    """Return the number of each file's group, int64 [N]: of what the group of a regular expression finds in its name.

    Args:
        fits_none: Whether the expression may fit no file; then the files have no groups, as a table without the column.

    Raises:
        DataError: The expression does not fit a file's name.
    """
    found = [re.search(pattern, file) for file in files]
    if fits_none and not any(found):
        return None
    if strange := [file for file, match in zip(files, found, strict=True) if match is None or match[1] is None]:
        raise DataError(
            f"setting 'data.group' is {pattern!r}, which does not fit {shorten_list(strange)}: must find the group, "
            "such as the patient, in each file's path below the folder of its class"
        )
    names = [match[1] for match in found if match is not None]
    return torch.from_numpy(np.unique(names, return_inverse=True)[1])


def open_classes(
    folder: Path, image_size: int, classes: Sequence[str], *, lacking: bool = False
) -> tuple[torch.Tensor, Read, list[str]]:
    """Find the images of a folder of classes.

    Args:
        folder: Holds ``<class>/<image>``.
        image_size: Height and width of the result, in pixels.
        classes: Their names, in the order of their numbers.
        lacking: Whether a class may have no images, and no folder.

    Returns:
        The labels, int64 [N], a function as in :func:`reader`, and the files below the folders of their classes [N].

    Raises:
        DataError: The folder has no image, or a class that must have some has none.
    """
    own = classes_in(folder)
    numbers = {own.get(name, name): number for number, name in enumerate(classes)}
    found = scan(folder, lambda path: path.parent != folder and _is_image(path), deep=True)
    found = _without_links(found)
    of_class = [_class_of(path, folder) for path in found.taken]
    empty = sorted(numbers.keys() - set(of_class))
    left = f"; left out are {found.left_out}" if found.left_out else ""
    if not found.taken:
        raise DataError(f"folder {folder} under data.root holds no images: must have <class>/<image>{left}")
    if empty and not lacking:
        raise DataError(
            f"folder {folder} under data.root has a class without images, {shorten_list(empty)}: must have some of "
            f"every class, as files that Pillow reads{left}"
        )
    found.report(f"images of {len(set(of_class))} classes")
    order = sorted(range(len(of_class)), key=of_class.__getitem__)
    labels = torch.tensor([numbers[of_class[k]] for k in order])
    files = [found.taken[k] for k in order]
    below = [Path(*file.relative_to(folder).parts[1:]).as_posix() for file in files]
    return labels, reader([str(file) for file in files], image_size), below


def _class_of(path: Path, folder: Path) -> str:
    return path.relative_to(folder).parts[0]


def _without_links(found: Scan) -> Scan:
    """Return the images without those that are links to others of their class, which would count twice."""
    firsts, taken, links = dict[tuple[int, int], Path](), list[Path](), list[Path]()
    for path in found.taken:
        status = path.stat()
        first = firsts.setdefault((status.st_dev, status.st_ino), path)
        if _class_of(first, found.folder) != _class_of(path, found.folder):
            raise DataError(f"{first} and {path} are one file: must be in one class, because an image has one label")
        (taken if first is path else links).append(path)
    if links:
        log_once(
            WARNING,
            f"{found.folder}: {len(links)} links to other images of their class are left out, such as {links[0]}",
        )
    return replace(found, taken=tuple(taken))


def _refuse_alike(folder: Path) -> None:
    """Refuse class folders whose names differ in case or in spaces around them alone."""
    seen = dict[str, str]()
    for name in sorted(classes_in(folder)):
        if (other := seen.setdefault(name.strip().casefold(), name)) != name:
            raise DataError(
                f"folder {folder} under data.root has class folders {other!r} and {name!r}, whose names differ in case "
                "or spaces alone: must be one folder, or both be named in 'data.classes'"
            )


def _is_image(file: Path) -> bool:
    """Return whether a file is an image: by its suffix, and where that says nothing, by the begin of its content."""
    suffix, known = file.suffix.lower(), image_suffixes()
    if suffix in known or suffix in _NO_SUFFIXES:
        return suffix in known
    try:
        with Image.open(file) as image:
            return image.format not in _NO_IMAGES
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return False


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Return the suffixes of images that Pillow reads, in lower case, each with its dot."""
    suffixes = Image.registered_extensions()  # it loads every format of Pillow first
    return frozenset(suffix for suffix, name in suffixes.items() if name in Image.OPEN and name not in _NO_IMAGES)


def reader(files: Sequence[str], image_size: int) -> Read:
    """Return a function positions [B] -> uint8 [B, 3, size, size] that decodes only the files at these positions."""

    def read(positions: torch.Tensor) -> torch.Tensor:
        images = torch.empty((len(positions), 3, image_size, image_size), dtype=torch.uint8)
        paged = []
        for row, position in enumerate(positions.tolist()):
            images[row], pages = _decode(files[position], image_size)
            paged += [Path(files[position]).name] * (pages > 1)
        if paged:
            which = shorten_list(paged)
            LOG.warning(
                "%d of %d images have several pages, of which the first is read: %s", len(paged), len(images), which
            )
        return images

    return read


def _decode(file: str, image_size: int) -> tuple[torch.Tensor, int]:
    """Return an image, uint8 [3, size, size], upright as its EXIF orientation says, and the number of its pages."""
    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # Pillow would clip them at 255
                raise ValueError(f"its pixels have the mode {image.mode}: must have 8 bits per channel")
            pages = int(getattr(image, "n_frames", 1))
            pixels = np.array(_upright(image).convert("RGB"), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow names a broken PNG a SyntaxError.
        why = other_kind(Path(file)) or error
        raise DataError(f"image {file} under data.root cannot be decoded: {why}") from error
    return resize(torch.from_numpy(pixels).permute(2, 0, 1)[None], image_size)[0], pages


def _upright(image: Image.Image) -> Image.Image:
    """Return an image as its EXIF orientation turns it; as it is stored where the EXIF data are damaged."""
    try:
        return ImageOps.exif_transpose(image)
    except (KeyError, SyntaxError, TypeError, ValueError, ZeroDivisionError, struct.error):
        return image


def _check_layout(root: Path, split: str) -> None:
    """Refuse a half without classes, and two halves that differ in them."""
    if not classes_in(root / split):
        raise DataError(
            f"folder {root / split} under data.root has no class folders: its layout must be {split}/<class>/<image>"
        )
    if not all((root / half).is_dir() for half in SPLITS):  # a node needs no test/, a server no train/
        return
    train, test = (classes_in(root / half).keys() for half in SPLITS)
    for here, there, missing in (("train", "test", train - test), ("test", "train", test - train)):
        if missing:
            raise DataError(
                f"data.root {root} has the class folders {', '.join(sorted(missing))} in {here}/ and not in {there}/: "
                "both must have the same classes, or 'data.classes' must name them all"
            )


def classes_in(folder: Path) -> dict[str, str]:
    """Return the composed name of each folder in a folder -> its own name, without hidden ones and those of tools.

    A byte that is no UTF-8 is written out, because messages and files hold these names as text.

    Raises:
        DataError: Two names are one as composed names, or two folders are one by a link.
    """
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)]
    texts = {name: composed(name).encode(errors="backslashreplace").decode() for name in names}
    found = {text: name for name, text in texts.items()}
    places = dict[tuple[int, int], str]()
    for name in sorted(names):
        status = (folder / name).stat()
        if (other := places.setdefault((status.st_dev, status.st_ino), name)) != name:
            raise DataError(f"{folder / other} and {folder / name} are one folder, by a link: must be one class")
    if len(found) < len(names):
        twice = next(text for name, text in texts.items() if found[text] != name)
        raise DataError(f"folder {folder} under data.root has two folders of the name {twice}: must have one")
    return found
