"""Data sets of plain files that torchvision does not know: found on disk, or downloaded whole and checked."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from strategies.core.errors import DataError


@dataclass(frozen=True)
class Remote:
    """A published file: where it is, and the md5 of its bytes."""

    url: str
    md5: str


def obtain(name: str, folder: Path, files: Mapping[str, Remote], *, download: bool) -> None:
    """See to it that files are in a folder, downloading those that are not; copies that are there stay as they are.

    Args:
        name: The data set, for the error.
        folder: Where its files are kept, a folder in ``data.root``.
        files: File name -> what is published.
        download: Whether they may be downloaded.

    Raises:
        DataError: A file is not there and cannot be downloaded, or what was downloaded has another md5.
    """
    missing = {file: remote for file, remote in files.items() if not (folder / file).exists()}
    reason = "downloading is switched off"
    if missing and download:
        try:
            return _download(folder, missing)
        except (OSError, RuntimeError, HTTPException) as error:
            reason = f"it could not be downloaded: {error}"
    if missing:
        raise DataError(
            f"data set {name!r} lacks {', '.join(missing)} in {folder} (in data.root) and {reason}. Get "
            f"{', '.join(remote.url for remote in missing.values())} where there is a network and copy it to {folder}, "
            f"or set data.root to the folder that holds {folder.name}"
        )
    return None


def _download(folder: Path, files: Mapping[str, Remote]) -> None:
    """Download beside the targets and move every file there whole, for other processes may do so at once."""
    from fl_app.vision import torchvision

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as aside:
        for file, remote in files.items():
            torchvision.datasets.utils.download_url(remote.url, aside, filename=file, md5=remote.md5)
            (Path(aside) / file).replace(folder / file)
