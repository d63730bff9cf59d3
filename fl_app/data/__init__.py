"""Data of the app: sources by name, their division among clients, and what happens to pixels before a model.

A server reads a whole set, a client opens the training half and decodes its own part of it::

    split = open_split("cifar10", "train")
    parts = partition(split.labels.numpy(), spec, num_clients=5, num_classes=split.num_classes, seed=0)
    mine = split.take(parts[2])
"""

from .partitions import LAWS, PartitionSpec, label_counts, partition
from .preprocessing import AUGMENTATIONS, augment, normalize
from .sources import SOURCES, ImageData, Normalization, Source, Split, data_root, load, open_split

__all__ = [
    "AUGMENTATIONS",
    "LAWS",
    "SOURCES",
    "ImageData",
    "Normalization",
    "PartitionSpec",
    "Source",
    "Split",
    "augment",
    "data_root",
    "label_counts",
    "load",
    "normalize",
    "open_split",
    "partition",
]
