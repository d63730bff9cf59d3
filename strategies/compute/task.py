"""A method and its job as they travel to an actor."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..method import METHODS, Job, Method, Upload
from .by_value import dumps
from .packing import pack, unpack


@dataclass(frozen=True)
class Task:
    """A method and its job as they travel; uploads follow one by one.

    Attributes:
        name: The method's name.
        method: A pickle of it; None if the name is enough, since it is in METHODS.
        job: The job without uploads and without what follows.
        builders: Architecture name -> pickle.
        config: A pickle.
        observer: A pickle; of None if there is none.
        start: The job's start weights, packed.
        proxy: The job's proxy images, packed.
        labelled: The job's labelled images, packed.
        teacher: The job's teacher, packed.
    """

    name: str
    method: bytes | None
    job: Job
    builders: Mapping[str, bytes]
    config: bytes
    observer: bytes
    start: Any
    proxy: Any
    labelled: Any
    teacher: Any

    @classmethod
    def of(cls, method: Method, job: Job, cloudpickle: Any) -> Task:
        """Pickle what the user wrote.

        Args:
            method: The method.
            job: Its job; the uploads are left out.
            cloudpickle: The pickler, ``ray.cloudpickle``.

        Raises:
            ComputeError: Something cannot be pickled; names it.
        """
        known = method.name in METHODS and METHODS[method.name] is method
        return cls(
            name=method.name,
            method=None if known else dumps(f"method {method.name!r}", method, cloudpickle),
            # The actor sees only the GPU that Ray gave it, whatever its number is.
            job=replace(
                job,
                uploads=(),
                builders={},
                config=None,
                observer=None,
                start=None,
                proxy=None,
                labelled=None,
                teacher=None,
                device="cuda" if job.device.startswith("cuda") else job.device,
            ),
            builders={
                name: dumps(f"the builder of architecture {name!r}", builder, cloudpickle)
                for name, builder in job.builders.items()
            },
            config=dumps("the method's config", job.config, cloudpickle),
            observer=dumps("the observer", job.observer, cloudpickle),
            start=pack(job.start),
            proxy=pack(job.proxy),
            labelled=pack(job.labelled),
            teacher=pack(job.teacher),
        )

    def open(self, uploads: Sequence[Upload]) -> tuple[Method, Job]:
        """Return the method and the job, complete again.

        Args:
            uploads: In the order of client names.
        """
        method = METHODS[self.name] if self.method is None else _loads(self.method)
        job = replace(
            self.job,
            uploads=tuple(uploads),
            builders={name: _loads(builder) for name, builder in self.builders.items()},
            config=_loads(self.config),
            observer=_loads(self.observer),
            start=unpack(self.start),
            proxy=unpack(self.proxy),
            labelled=unpack(self.labelled),
            teacher=unpack(self.teacher),
        )
        return method, job


def _loads(pickled: bytes) -> Any:
    # The pickle comes from our own driver, over Ray's own channel.
    return pickle.loads(pickled)  # noqa: S301
