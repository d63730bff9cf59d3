"""The mean and the deviation of known data sets' pixels, which their papers and codes have published."""

from __future__ import annotations

from collections.abc import Mapping

Numbers = tuple[float, ...]

# Data set -> mean and standard deviation of its training pixels in [0, 1], per channel, at their own size.
PIXELS: Mapping[str, tuple[Numbers, Numbers]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
