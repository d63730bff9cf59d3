"""The settings of the data set and of its division."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.core.errors import OptionError
from strategies.core.options import check, option

from .domains import check_left_out
from .halves import HALVES
from .partitions import LAWS, PartitionSpec
from .sources import DOMAINED, IMAGELESS, NORMALIZATIONS, SOURCES, check_normalization


@dataclass(frozen=True)
class DataConfig:
    """The data set, and how it is divided among the clients."""

    name: str = option("digits", "data set", choices=SOURCES)
    root: str = option("", "folder of the data sets; empty: $ONESHOT_DATA, else the user's cache folder")
    image_size: int = option(0, "height and width in pixels; 0 = the data set's own", low=0, high=512)
    normalization: str = option(
        "half", "input space: mean and deviation 0.5 per channel, or those of the data set", choices=NORMALIZATIONS
    )
    law: str = option("dirichlet-classes", "law that divides the training set", choices=tuple(LAWS))
    alpha: float = option(0.3, "concentration of the Dirichlet laws; smaller is more skewed", above=0.0)
    classes_per_client: int = option(2, "classes per client of the laws 'classes' and 'classes-p1'", low=1)
    sigma: float = option(0.0, "sigma of the log-normal client sizes; 0 = equal sizes", low=0.0)
    copies: float = option(10.0, "how often the law 'dirichlet-overlap' hands a class out", above=0.0)
    min_size: int = option(10, "examples of the smallest client under the law 'dirichlet-clients'", low=1)
    limit: int = option(0, "number of training images to use (of each domain), drawn by the seed; 0 = all", low=0)
    left_out: str = option("", "the domain to test on, for a data set of domains")
    proxy: float = option(
        0.0, "share of the training images that no client gets and the server may use without labels", low=0.0, high=0.9
    )
    proxy_name: str = option("", "data set whose training images the server uses without labels, in place of a share")
    proxy_limit: int = option(0, "largest number of images of data.proxy-name, drawn by the seed; 0 = all", low=0)
    held_out: str = option(
        "all", "held-out examples that score: all, the half to choose by, or the half to report on", choices=HALVES
    )

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        check(self, "data")
        self.partition_spec()
        check_left_out(self.name, self.left_out)
        check_normalization(self.name, self.normalization)
        if self.law == "domains" and self.name not in DOMAINED:
            raise OptionError(
                f"setting 'data.law' is 'domains' and 'data.name' {self.name!r}: must be a data set of domains, one of "
                f"{', '.join(DOMAINED)}"
            )
        self._check_proxy()

    def _check_proxy(self) -> None:
        # Only images replace images, and a set of domains would have to leave one out.
        others = () if self.name in IMAGELESS else SOURCES
        allowed = [name for name in others if name not in (self.name, *DOMAINED, *IMAGELESS)]
        if self.proxy_name and self.proxy_name not in allowed:
            raise OptionError(
                f"setting 'data.proxy-name' is {self.proxy_name!r}: must be one of {', '.join([*allowed, repr('')])} "
                f"where 'data.name' is {self.name!r}"
            )
        if self.proxy_name and self.proxy:
            raise OptionError(
                f"settings 'data.proxy' ({self.proxy}) and 'data.proxy-name' ({self.proxy_name!r}) exclude each other: "
                "set one of them"
            )
        if self.proxy_limit and not self.proxy_name:
            raise OptionError(
                f"setting 'data.proxy-limit' is {self.proxy_limit}: must be 0 where 'data.proxy-name' names no data "
                "set; 'data.proxy' is a share"
            )

    def partition_spec(self) -> PartitionSpec:
        """Return the law of the division with its settings."""
        return PartitionSpec(
            law=self.law,
            alpha=self.alpha,
            classes_per_client=self.classes_per_client,
            sigma=self.sigma,
            copies=self.copies,
            min_size=self.min_size,
        )
