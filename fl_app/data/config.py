"""The settings of the data set and of its division."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strategies.core.errors import OptionError
from strategies.core.options import ANYWHERE, OWN_FORM, REPLAY, is_own, listed, option

from .domains import check_left_out
from .partitions import PartitionSpec
from .sources import DOMAINED, IMAGELESS, NORMALIZATIONS, SOURCES, check_normalization
from .split import HALVES
from .table_files import TABLE_FORMS

MOST_CLASSES = 2**16


@dataclass(frozen=True)
class DataConfig(PartitionSpec):
    """The data set, and how it is divided among the clients."""

    name: str = option(
        "digits", "data set", choices=(*SOURCES, *TABLE_FORMS, OWN_FORM),
        never_private={"heart-disease": "each row is standardised by the client's other rows, without noise"},
    )  # fmt: skip
    root: str = option(
        "", "folder of the data sets; empty: $ONESHOT_DATA, else the user's cache folder", path=True, free=ANYWHERE
    )
    image_size: int = option(0, "height and width in pixels; 0 = the data set's own", low=0, high=512)
    normalization: str = option(
        "half", "input space: mean and deviation 0.5 per channel, or those of the data set", choices=NORMALIZATIONS
    )
    limit: int = option(0, "number of training images to use (of each domain), drawn by the seed; 0 = all", low=0)
    left_out: str = option("", "the domain to test on, for a data set of domains")
    classes: str = option(
        "",
        "imagefolder: all classes in order, divided by commas; a client may lack some; empty: the names of its folders",
    )
    proxy: float = option(
        0.0, "share of the training images that no client gets and the server may use without labels", low=0.0,
        high=0.9, free=(REPLAY,),
    )  # fmt: skip
    proxy_name: str = option(
        "", "data set whose training images the server uses without labels, in place of a share", free=(REPLAY,)
    )
    proxy_limit: int = option(
        0, "largest number of images of data.proxy-name, drawn by the seed; 0 = all", low=0, free=(REPLAY,)
    )
    proxy_file: str = option(
        "", "safetensors file with images that the server uses without labels, such as those of another run",
        path=True, free=(REPLAY,),
    )  # fmt: skip
    held_out: str = option(
        "all", "held-out examples that score: all, the half to choose by, or the half to report on", choices=HALVES,
        free=(REPLAY,),
    )  # fmt: skip
    num_classes: int = option(
        0, "classes of a data set of your own code; 0 = as many as its labels show", low=0, high=MOST_CLASSES
    )
    label: str = option("", "csv, parquet: column of the classes, or with model.train of numbers")
    client: str = option(
        "", "csv, parquet: column that names the client of a row; empty: a file per client, or one client"
    )
    group: str = option(
        "", "what belongs together, such as a patient's examples, which no share of a client's examples cuts: csv, "
        "parquet: a column; imagefolder: a regular expression with one group, for a file's path below its class",
    )  # fmt: skip
    schema_sha256: str = option("", "csv, parquet: sha256 of the schema that all clients must have; empty: any")

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        super().__post_init__()
        check_left_out(self.name, self.left_out)
        check_normalization(self.name, self.normalization)
        if self.partition == "domains" and not (self.own or self.name in (*DOMAINED, *TABLE_FORMS)):
            raise OptionError(
                f"setting 'data.partition' is 'domains' and 'data.name' {self.name!r}: must be a data set of domains, "
                f"one of {', '.join((*DOMAINED, *TABLE_FORMS))}, or {OWN_FORM}"
            )
        self._check_classes()
        self._check_proxy()
        self._check_tables()
        self._check_group()

    @property
    def own(self) -> bool:
        """Whether the data set is one of the user's own code."""
        return is_own(self.name)

    @property
    def tables(self) -> bool:
        """Whether the data set is tables of one's own in files."""
        return self.name in TABLE_FORMS

    @property
    def imageless(self) -> bool:
        """Whether the examples are no images; those of one's own code show it when they are read."""
        return self.name in IMAGELESS or self.tables

    def check_holders(self, *, by_client: bool) -> None:
        """Refuse a division of examples that lie with their clients already.

        Raises:
            OptionError: The partition is another than 'domains'.
        """
        if by_client and self.partition != "domains":
            raise OptionError(
                f"setting 'data.partition' is {self.partition!r}: must be 'domains' where 'data.name' is {self.name!r}"
                ", which says what each client holds"
            )

    def _check_classes(self) -> None:
        names = listed(self.classes)
        if self.classes and self.name != "imagefolder":
            raise OptionError(
                f"setting 'data.classes' is {self.classes!r}: must be '' unless 'data.name' is 'imagefolder'"
            )
        if self.classes and (not 2 <= len(names) <= MOST_CLASSES or len(set(names)) < len(names)):
            raise OptionError(
                f"setting 'data.classes' is {self.classes[:200]!r}: must be 2 to {MOST_CLASSES} different names"
            )

    def _check_group(self) -> None:
        if not self.group or self.tables:
            return
        if self.name != "imagefolder":
            forms = ", ".join(map(repr, (*TABLE_FORMS, "imagefolder")))
            raise OptionError(
                f"setting 'data.group' is {self.group!r}: must be '' unless 'data.name' is one of {forms}"
            )
        try:
            groups = re.compile(self.group).groups
        except re.error as error:
            raise OptionError(
                f"setting 'data.group' is {self.group!r}: must be a regular expression, but {error}"
            ) from error
        if groups != 1:
            raise OptionError(
                f"setting 'data.group' is {self.group!r}, which has {groups} groups in parentheses: must have one, "
                "such as '(.+)_' for the part of a name before the last underscore"
            )

    def _check_tables(self) -> None:
        for key, value in (("label", self.label), ("client", self.client), ("schema-sha256", self.schema_sha256)):
            if value and not self.tables:
                forms = " or ".join(map(repr, TABLE_FORMS))
                raise OptionError(f"setting 'data.{key}' is {value!r}: must be '' unless 'data.name' is {forms}")
        if self.tables and not self.label:
            raise OptionError(
                f"setting 'data.label' is '': must name the column of the classes, or numbers, with 'data.name' "
                f"{self.name!r}"
            )
        if self.tables and self.image_size:
            raise OptionError(
                f"setting 'data.image-size' is {self.image_size}: must be 0 with 'data.name' {self.name!r}"
            )
        if self.num_classes and not self.own:
            raise OptionError(
                f"setting 'data.num-classes' is {self.num_classes}: must be 0 unless 'data.name' is {OWN_FORM}"
            )

    def _check_proxy(self) -> None:
        # Only images replace images, and a set of domains would have to leave one out.
        others = () if self.imageless else SOURCES
        allowed = [name for name in others if name not in (self.name, *DOMAINED, *IMAGELESS)]
        if self.proxy_name and self.proxy_name not in allowed:
            raise OptionError(
                f"setting 'data.proxy-name' is {self.proxy_name!r}: must be one of {', '.join([*allowed, repr('')])} "
                f"where 'data.name' is {self.name!r}"
            )
        named = {"data.proxy": self.proxy, "data.proxy-name": self.proxy_name, "data.proxy-file": self.proxy_file}
        if len(given := [f"{key!r} ({value!r})" for key, value in named.items() if value]) > 1:
            raise OptionError(f"settings {' and '.join(given)} exclude each other: set one of them")
        if self.proxy_limit and not self.proxy_name:
            raise OptionError(
                f"setting 'data.proxy-limit' is {self.proxy_limit}: must be 0 where 'data.proxy-name' names no data "
                "set; 'data.proxy' is a share"
            )
