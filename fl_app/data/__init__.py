"""The app's data: sources by name, their division among clients, and the preprocessing of pixels.

A server reads a whole set. A client opens the training half and decodes its own part::

    split = open_split("cifar10", "train")
    parts = partition(split.labels.numpy(), spec, num_clients=5, num_classes=split.num_classes, seed=0)
    mine = split.take(parts[2])
"""

from strategies.core.facts import Normalization

from .domains import GROUPS
from .opening import holds_test_half, open_data, open_facts
from .partitions import PARTITIONERS, check_request, partition
from .preprocessing import AUGMENTATIONS, augment, normalize
from .proxy import clients_share, images_in, images_of, nobodys, server_share
from .sources import (
    SOURCES,
    data_root,
    open_split,
)
from .split import ImageData, Split, half_of
from .table_files import TABLE_FORMS

__all__ = [
    "AUGMENTATIONS",
    "GROUPS",
    "PARTITIONERS",
    "SOURCES",
    "TABLE_FORMS",
    "ImageData",
    "Normalization",
    "Split",
    "augment",
    "check_request",
    "clients_share",
    "data_root",
    "half_of",
    "holds_test_half",
    "images_in",
    "images_of",
    "nobodys",
    "normalize",
    "open_data",
    "open_facts",
    "open_split",
    "partition",
    "server_share",
]
