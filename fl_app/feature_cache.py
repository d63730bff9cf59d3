"""A user's cache of features on the own disk: a later run with another penalty, projection or budget reads them.

A file holds the backbone's raw features of one list of examples, and their digest behind them. Its name is a digest of
the feature function before the projection and of the examples. The folder and its files are open to this user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from fl_app.data import ImageData, Normalization, normalize
from fl_app.data.preprocessing import check_pixels
from fl_app.models.features import Extractor, FeatureFunction
from strategies.core.durable import MIB
from strategies.core.places import make_private
from strategies.core.scan import LOG

SUFFIX, UNFINISHED = ".npy", ".tmp"
DAY = 24 * 3600.0
DIGEST_SIZE = 32  # bytes of a sha256
Rows = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class FeatureCache:
    """The files of cached features of a client, or of a server's held-out images.

    Attributes:
        folder: The folder of the files, made when the first one is written.
        most_mib: The size of all files together; the oldest are removed first; 0 for no cache.
    """

    folder: Path
    most_mib: float

    def read(self, key: str, shape: tuple[int, int]) -> Rows | None:
        """Return features [N, d] in float32, mapped from the disk; None if they are missing or damaged."""
        path = self.folder / f"{key}{SUFFIX}"
        try:
            found: Rows = np.load(path, mmap_mode="r", allow_pickle=False)
            with contextlib.suppress(OSError):  # a disk that is read-only now
                os.utime(path)
            with path.open("rb") as file:
                file.seek(-DIGEST_SIZE, os.SEEK_END)
                # A loss of power may leave zeros in some blocks.
                whole = file.read() == hashlib.sha256(found.data).digest()
        except (EOFError, OSError, ValueError):  # the first is that of an empty file, which a loss of power leaves
            return None
        return found if whole and found.shape == shape and found.dtype == np.float32 else None

    @contextlib.contextmanager
    def writing(self, key: str, shape: tuple[int, int]) -> Iterator[Writing]:
        """Yield what takes the rows of features [N, d]; they become a file of the cache if the block succeeds.

        It keeps nothing where the cache has no room for them, or the disk refuses them.
        """
        temporary = self.folder / f".{key}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
        kept = Writing(temporary)
        try:
            if 0 < 4 * shape[0] * shape[1] <= self.most_mib * MIB:
                kept.begin(shape)
            yield kept
            if kept.finish(self.folder / f"{key}{SUFFIX}"):
                self._shrink()
        finally:
            kept.close()
            with contextlib.suppress(OSError):  # a read-only disk refuses to remove even what it lacks
                temporary.unlink(missing_ok=True)

    def _shrink(self) -> None:
        """Remove the oldest files beyond the limit, and what killed processes have left."""
        now = time.time()
        for path in self.folder.glob(f".*{UNFINISHED}"):
            if _stat(path)[0] < now - DAY:
                path.unlink(missing_ok=True)
        files = sorted((*_stat(path), path) for path in self.folder.glob(f"*{SUFFIX}"))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.most_mib * MIB + len(files) * 4096:  # each file has a header
                return
            total -= size
            path.unlink(missing_ok=True)


class Writing:
    """A file of features on its way to the disk; if the disk refuses a part, nothing is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def begin(self, shape: tuple[int, int]) -> None:
        """Make a file of this user alone for rows [N, d]."""
        with self._refused():
            make_private(self.path.parent)
            self.file = os.fdopen(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
            facts = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_1_0(self.file, facts)

    def add(self, rows: torch.Tensor) -> None:
        """Append rows [B, d], float32 on the CPU."""
        if self.file is not None:
            with self._refused():
                data = rows.contiguous().numpy().tobytes()
                self._digest.update(data)
                self.file.write(data)

    def finish(self, path: Path) -> bool:
        """Close the file and give it its name; return whether that is done."""
        if self.file is None:
            return False
        with self._refused():
            self.file.write(self._digest.digest())
            self.file.close()
            self.path.replace(path)
        return self.file is not None

    def close(self) -> None:
        """Keep nothing more."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # it has a part that the disk does not take
                self.file.close()
        self.file = None

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            LOG.warning("features are not cached: %s", error)
            self.close()


def _stat(path: Path) -> tuple[float, int]:
    """Return a file's time and size; of one that another process has just removed, zeros."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0.0, 0
    return found.st_mtime, found.st_size


def key_of(function: str, images: torch.Tensor) -> str:
    """Return the name of the features of some examples."""
    digest = hashlib.sha256(function.encode())
    digest.update(f" {tuple(images.shape)} {images.dtype}".encode())
    for part in torch.split(images, 1024):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


PASS = 256  # images decoded to floats at a time
EVERY = 10.0  # seconds between two lines on the progress


@dataclass(frozen=True)
class FeatureSource:
    """Features: from the cache where they are in it, else by one pass through the backbone."""

    function: FeatureFunction
    cache: FeatureCache | None = None

    def batches(self, data: ImageData, normalization: Normalization) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield features [B, d] in float64 with labels [B]."""
        extractor = self.function.module
        labels = torch.split(data.labels, PASS)
        for rows, own in zip(self.pooled(data, normalization), labels, strict=True):
            yield extractor.finished(rows), own

    def pooled(self, data: ImageData, normalization: Normalization) -> Iterator[torch.Tensor]:
        """Yield the backbone's own features [B, d] in float32, :data:`PASS` images at a time.

        Raises:
            DataError: Images are floats outside [0, 1].
        """
        if self.function.backbone.kind == "images":
            check_pixels(data.images, "the data set")
        extractor = self.function.module
        if self.cache is None:
            yield from _extracted(extractor, data, normalization)
            return
        shape = (len(data.labels), self.function.backbone.features)
        key = key_of(self.function.raw, data.images)
        if (cached := self.cache.read(key, shape)) is not None:
            LOG.info("features of %d examples are read from the cache", len(data.labels))
            yield from (torch.from_numpy(cached[start : start + PASS].copy()) for start in range(0, shape[0], PASS))
            return
        with self.cache.writing(key, shape) as kept:
            for rows in _extracted(extractor, data, normalization):
                kept.add(rows)
                yield rows


def _extracted(extractor: Extractor, data: ImageData, normalization: Normalization) -> Iterator[torch.Tensor]:
    """Yield raw features [B, d]; the log has examples per second and the time left."""
    began = shown = time.monotonic()
    for start in range(0, len(data.labels), PASS):
        images = data.images[start : start + PASS]
        yield extractor.pooled(normalize(images, *normalization))
        done, now = start + len(images), time.monotonic()
        if now - shown > EVERY:
            rate, shown = done / (now - began), now
            left = (len(data.labels) - done) / rate
            LOG.info("features: %d of %d examples, %.0f a second, %.0f s left", done, len(data.labels), rate, left)
