"""Opens the configured data set: one by name, the user's own function, or tables as files."""

from __future__ import annotations

from dataclasses import replace

import torch

from strategies.core.errors import DataError
from strategies.core.options import listed

from .config import DataConfig
from .files import disk_errors
from .own import num_classes_of, open_own
from .sources import data_root, open_folders, open_split
from .split import Split, pixels, unchanged
from .table_files import open_tables, schema_of


@disk_errors()
def open_data(data: DataConfig, half: str, *, root: str | None = None, download: bool = True) -> Split:
    """Open the training or the test half of the configured data set.

    Args:
        data: The settings.
        half: ``"train"`` or ``"test"``.
        root: The folder of the data; None for that of the settings.
        download: Whether a missing set may be downloaded.

    Raises:
        OptionError: A setting does not fit the data set.
        DataError: The data set is missing, damaged or closed to this user; the error names the remedy, or the file.
    """
    place = data.root if root is None else root
    if data.own:
        return _own(data, half, place)
    if data.tables:
        folder = data_root(place)
        schema = schema_of(folder, label=data.label, sha256=data.schema_sha256)
        found = open_tables(folder, half, form=data.name, label=data.label, client=data.client, schema=schema)
        opened = unchanged(
            found.labels, found.rows.__getitem__, num_classes=len(schema.classes), shape=(schema.features, 1, 1)
        )
        return replace(opened, domains=found.holders, by_client=found.by_client, classes=tuple(schema.classes))
    if data.classes:
        return open_folders(data_root(place), half, data.image_size, listed(data.classes))
    return open_split(
        data.name,
        half,
        root=place,
        image_size=data.image_size,
        left_out=data.left_out,
        normalization=data.normalization,
        download=download,
    )


def _own(data: DataConfig, half: str, root: str) -> Split:
    found, what = open_own(data.name, half, root), f"data source {data.name!r}, {half} half,"
    classes = num_classes_of(found, data.num_classes, what)
    channels, height, width = found.examples.shape[1:]
    read = found.examples.__getitem__
    if found.examples.dtype != torch.uint8:
        if data.image_size:
            raise DataError(f"setting 'data.image-size' is {data.image_size}: must be 0 for {what} which has no pixels")
        opened = unchanged(found.labels, read, num_classes=classes, shape=(channels, height, width))
    else:
        if height != width and not data.image_size:
            raise DataError(
                f"{what} returns images of {height} x {width} pixels: must be squares, or set 'data.image-size'"
            )
        opened = pixels(found.labels, read, num_classes=classes, shape=(channels, data.image_size or height))
    return replace(opened, domains=found.holders, by_client=found.holders is not None)
