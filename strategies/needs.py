"""What a job must have before a method starts on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import OptionError
from .method import METHODS, Need

if TYPE_CHECKING:
    from .method import Job, Method


def check_needs(method: Method, job: Job) -> None:
    """Refuse a job that lacks what the method needs.

    Raises:
        OptionError: Names the method, the need and the clients, or the shape, that do not meet it.
    """
    if Need.SIDES_OF_FOUR in method.needs and any(side % 4 for side in job.input_shape[1:]):
        raise OptionError(
            f"the images' shape is {tuple(job.input_shape)}: method {method.name!r} needs that "
            f"{Need.SIDES_OF_FOUR.value}. Choose another size or another method: "
            f"{', '.join(_without(Need.SIDES_OF_FOUR))}"
        )
    if Need.SAME_ARCHITECTURE in method.needs:
        others = [f"{u.client} ({u.architecture})" for u in job.uploads if u.architecture != job.student]
        if others:
            raise OptionError(
                f"method {method.name!r} needs one architecture for all, {job.student!r}; different are "
                f"{', '.join(others)}. Choose another method: {', '.join(_without(Need.SAME_ARCHITECTURE))}"
            )
    if Need.PROXY_IMAGES in method.needs:
        _check_proxy(method, job)
    if Need.LABEL_COUNTS in method.needs:
        silent = [u.client for u in job.uploads if u.label_counts is None]
        if silent:
            raise OptionError(
                f"method {method.name!r} needs label counts, which these clients did not send: {', '.join(silent)}. "
                f"Choose another method: {', '.join(_without(Need.LABEL_COUNTS))}"
            )


def _check_proxy(method: Method, job: Job) -> None:
    shape = tuple(job.input_shape)
    found, fits = "none", False
    if job.proxy is not None:
        found = f"images of shape {tuple(job.proxy.shape)}, {job.proxy.dtype}"
        fits = len(job.proxy) > 1 and tuple(job.proxy.shape[1:]) == shape and str(job.proxy.dtype) == "torch.uint8"
    if not fits:
        raise OptionError(
            f"method {method.name!r} needs that {Need.PROXY_IMAGES.value}; here it holds {found}: allowed are at "
            f"least 2 of shape {shape}, uint8. Choose another method: {', '.join(_without(Need.PROXY_IMAGES))}"
        )


def _without(need: Need) -> list[str]:
    return [name for name in METHODS if need not in METHODS[name].needs]
