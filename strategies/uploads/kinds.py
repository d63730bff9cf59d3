"""What kind an upload is of: a classifier, one with a class "unknown", or the decoder of a CVAE.

The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..method import METHODS
from .checks import some

if TYPE_CHECKING:
    from ..method import Job, Method, ModelBuilder

CLASSIFIER, OPEN_SET, CVAE = "classifier", "open-set", "cvae"


def kind_of(architecture: str) -> str:
    """Return the kind of uploads with this architecture: ``net+unknown``, ``cvae-decoder``, or any classifier."""
    if architecture.endswith("+unknown"):
        return OPEN_SET
    return CVAE if architecture == "cvae-decoder" else CLASSIFIER


def of_kind(builders: Mapping[str, ModelBuilder], kind: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a client may send; all of them where no name says that it is of this kind."""
    return {name: builder for name, builder in builders.items() if kind_of(name) == kind} or builders


def check_kind(method: Method, job: Job) -> None:
    """Refuse uploads of another kind than the method works on.

    Raises:
        OptionError: Names both kinds and the clients.
    """
    fitting = of_kind(job.builders, method.uploads)
    wrong = {
        f"{upload.client} ({upload.architecture})": kind_of(upload.architecture)
        for upload in job.uploads
        if upload.architecture not in fitting and kind_of(upload.architecture) != method.uploads
    }
    if wrong:
        kinds = " and ".join(repr(kind) for kind in sorted(set(wrong.values())))
        others = [name for name in METHODS if METHODS[name].uploads in wrong.values()]
        raise OptionError(
            f"method {method.name!r} works on uploads of kind {method.uploads!r}; of kind {kinds} are those of "
            f"{some(list(wrong))}. Choose another method: {', '.join(others)}"
        )
