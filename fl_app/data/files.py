"""Files of data sets: what the disk refuses, and those outside torchvision, downloaded whole and verified."""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from strategies.core.errors import DataError, OneShotError


@dataclass(frozen=True)
class Remote:
    """A published file: its address, and the md5 of its bytes."""

    url: str
    md5: str


def composed(name: str) -> str:
    """Return a name with composed letters (NFC), as keyboards write them; some machines store an accent by itself."""
    return unicodedata.normalize("NFC", name)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn a refusal of the disk, as of a folder that is closed to this user, into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OneShotError):
            raise
        raise DataError(f"{error.filename} under data.root cannot be read: {error.strerror or error}") from error


def obtain(name: str, folder: Path, files: Mapping[str, Remote], *, download: bool) -> None:
    """Download the files that a folder lacks; existing copies stay as they are.

    Raises:
        DataError: A file is missing and cannot be downloaded, or the download has another md5.
    """
    missing = {file: remote for file, remote in files.items() if not (folder / file).exists()}

    def fetch(file: str, aside: Path) -> None:
        from strategies.core.vision import torchvision

        torchvision.datasets.utils.download_url(missing[file].url, str(aside), filename=file, md5=missing[file].md5)

    for file in missing:  # one by one: those that are here stay if the next one fails
        if not (reason := why_missing(folder, [file], partial(fetch, file), download=download)):
            continue
        missing = {other: remote for other, remote in missing.items() if not (folder / other).exists()}
        raise DataError(
            f"data set {name!r} lacks {', '.join(missing)} in {folder} (in data.root) and {reason}. Get "
            f"{', '.join(remote.url for remote in missing.values())} where there is a network and copy it to {folder}, "
            f"or set data.root to the folder that holds {folder.name}"
        )


def why_missing(folder: Path, places: Sequence[str], fetch: Callable[[Path], None], *, download: bool) -> str:
    """Download what a folder lacks.

    It is downloaded beside its place and moved there whole, because other processes may download it too.

    Args:
        places: The files, or folders, that are missing.
        fetch: Downloads them into a folder.

    Returns:
        Why they are still missing; empty if they are there.
    """
    if not download:
        return "downloading is switched off"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as aside:
            fetch(Path(aside))
            for place in places:
                try:
                    (Path(aside) / place).replace(folder / place)
                except OSError:
                    # A folder cannot replace a non-empty one, which another process put there meanwhile.
                    if not (folder / place).exists():
                        raise
    except (OSError, RuntimeError, HTTPException) as error:
        return f"it could not be downloaded: {error}"
    return ""
