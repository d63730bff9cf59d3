"""The inputs that a job must have before a method starts on it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError, shorten_list
from ..core.facts import CLASSIFIER, STATISTICS, base_of, holds_images, is_head, kind_of
from ..method import GIVEN, METHODS, TEACHERS, EnsembleSpec, Job, Method, Need
from .builders import builders_of_kind

if TYPE_CHECKING:
    import torch

# Combiners that no gradient passes through.
WITHOUT_GRADIENT = frozenset({"voting", "open-set"})

# The needs of methods that make or change images.
IMAGES_ONLY = frozenset({Need.IMAGES, Need.SIDES_OF_FOUR})


# What a client uploads in place of a classifier -> in words.
UPLOADED = {
    STATISTICS: "sums of features",
    "open-set": "a classifier with one more output, for unknown classes",
    "prototypes": "an encoder with a parameter 'prototypes'",
    "cvae": "a decoder of images",
    "block": "blocks of a model, in this app's form",
}
# What a client measures for a merge of weights -> the function that does it.
MEASURED_BY = {"fisher": "fisher_diagonal", "gram": "gram_matrices"}


def list_demands(method: Method, job: Job) -> list[str]:
    """Return in words what each client must send beyond a stock reply of Flower's, for a line before any trains."""
    plan, found = method.plan(job.config), list[str]()
    if method.uploads != CLASSIFIER:
        found.append(UPLOADED.get(method.uploads, method.uploads))
    if Need.LABEL_COUNTS in method.all_needs(job.config) and job.teacher is None:
        found.append("its label counts (oneshot_fl.client.upload_facts(label_counts=[...]))")
    if plan.asks.sums:
        found.append(f"what oneshot_fl.client.measures.{MEASURED_BY[plan.asks.sums]}() measures, beside its weights")
    return found


def check_needs(method: Method, job: Job) -> None:
    """Refuse a job that lacks an input of the method.

    Raises:
        OptionError: Names the method, the need and the clients, or the shape, that do not meet it.
    """
    _check_kind(method, job)
    if job.means_of_examples and not method.averages_weights:
        raise OptionError(
            f"method {method.name!r} does not merge the weights of {job.student!r}, which are means over a client's "
            f"examples: only their average is that of all examples. Choose another method: {list_fitting_methods(job)}"
        )
    _check_teacher(method, job)
    missing = method.needs & _lacking(job)
    _check_examples(method, job)
    if Need.IMAGE_GRADIENTS in missing:
        check_gradients(job, f"method {method.name!r}", f"Choose another method: {list_fitting_methods(job)}")
    if Need.SIDES_OF_FOUR in missing:
        channels, height, width = job.input_shape
        order = ", which must be (channels, height, width)" if width <= 4 < min(channels, height) else ""
        raise OptionError(
            f"the images' shape is {tuple(job.input_shape)}{order}: method {method.name!r} needs that "
            f"{Need.SIDES_OF_FOUR.value}. Choose another size or another method: {list_fitting_methods(job)}"
        )
    if Need.SAME_ARCHITECTURE in missing:
        base = base_of(job.student)
        others = [f"{u.client} ({u.architecture})" for u in job.uploads if base_of(u.architecture) != base]
        raise OptionError(
            f"method {method.name!r} needs one architecture for all, {job.student!r}; different are "
            f"{', '.join(others)}. Choose another method: {list_fitting_methods(job)}"
        )
    if Need.COMMON_START in missing:
        raise OptionError(
            f"method {method.name!r} needs that {Need.COMMON_START.value}: give them as start= of merge() or as "
            f"initial_arrays of strategy.start(). Choose another method: {list_fitting_methods(job)}"
        )
    if Need.PROXY_IMAGES in missing:
        given: Any = job.proxy
        kind = "none" if given is None else type(given).__name__
        found = f"images of shape {tuple(given.shape)}, {given.dtype}" if hasattr(given, "dtype") else kind
        raise OptionError(
            f"method {method.name!r} needs that {Need.PROXY_IMAGES.value}; here it holds {found}: must be at least "
            f"2 of shape {tuple(job.input_shape)}, {' or '.join(_proxy_kinds(job))}. Choose another method: "
            f"{list_fitting_methods(job)}"
        )
    if method.check is not None:
        method.check(job)
    if Need.LABEL_COUNTS in method.all_needs(job.config) and job.teacher is None:  # which brings its own combiner
        silent = [u.client for u in job.uploads if u.label_counts is None]
        if silent:
            raise OptionError(
                f"method {method.name!r} needs label counts, which these clients did not send: {', '.join(silent)}. "
                "Their ClientApp sends them with oneshot_fl.client.upload_facts(label_counts=[...]). "
                f"Choose another method: {list_fitting_methods(job)}"
            )


def check_gradients(job: Job, who: str, remedy: str) -> None:
    """Refuse heads on a frozen backbone where images are made.

    Args:
        job: Its uploads may be missing.

    Raises:
        OptionError: A client's model, or the student, is such a head.
    """
    if Need.IMAGE_GRADIENTS in _lacking(job):
        heads = sorted({u.architecture for u in job.uploads if _on_features(u.architecture)} or {job.student})
        raise OptionError(
            f"{shorten_list(heads)} reads features of a frozen backbone, through which no gradient reaches the images: "
            f"{who} makes images by that gradient. {remedy}"
        )


def _on_features(architecture: str) -> bool:
    return is_head(architecture) or kind_of(architecture) == STATISTICS


def _check_kind(method: Method, job: Job) -> None:
    """Refuse uploads of another kind than the method works on."""
    builders = builders_of_kind(job.builders, method.uploads)
    wrong = {
        f"{upload.client} ({upload.architecture})": kind_of(upload.architecture)
        for upload in job.uploads
        if upload.architecture not in builders and kind_of(upload.architecture) != method.uploads
    }
    if wrong:
        kinds = " and ".join(repr(kind) for kind in sorted(set(wrong.values())))
        raise OptionError(
            f"method {method.name!r} works on uploads of kind {method.uploads!r}; of kind {kinds} are those of "
            f"{shorten_list(list(wrong))}. Choose another method: {list_fitting_methods(job)}"
        )


def _check_teacher(method: Method, job: Job) -> None:
    if job.teacher is None:
        return
    if isinstance(job.teacher, EnsembleSpec):
        kind, named = GIVEN, job.teacher.combiner
    elif job.teacher in TEACHERS:
        kind = named = job.teacher
        TEACHERS[named].check(job, "teacher")
    else:
        raise OptionError(f"teacher is {job.teacher!r}: must be {', '.join(map(repr, TEACHERS))} or None")
    if kind not in method.teachers:
        raise OptionError(
            f"method {method.name!r} does not distil an ensemble that it is given ({named!r}). Choose another method: "
            f"{', '.join(name for name in METHODS if kind in METHODS[name].teachers)}"
        )
    if named in WITHOUT_GRADIENT and IMAGES_ONLY & method.needs:
        raise OptionError(
            f"method {method.name!r} makes images by the ensemble's gradient, and {named!r} has none: "
            "must be another aggregator, or a method that learns from real images"
        )


def _check_examples(method: Method, job: Job) -> None:
    """Refuse a method that makes or changes images if the examples are not images."""
    if holds_images(job.input_shape):
        return
    shape = tuple(job.input_shape)
    if method.needs & IMAGES_ONLY:
        raise OptionError(
            f"the examples' shape is {shape}: method {method.name!r} needs that {Need.IMAGES.value}. Choose another "
            f"method: {list_fitting_methods(job)}"
        )
    if (augmentation := getattr(job.config, "augmentation", "none")) != "none":
        raise OptionError(
            f"setting '{method.name}.augmentation' is {augmentation!r}: must be 'none' for examples of "
            f"shape {shape}, which are not images"
        )


def _proxy_kinds(job: Job) -> tuple[str, ...]:
    return ("uint8", "float32 in [0, 1]") if holds_images(job.input_shape) else ("float32", "int64")


def _fit_as_proxy(examples: torch.Tensor | None, job: Job) -> bool:
    import torch

    if not isinstance(examples, torch.Tensor):
        return False
    kind = str(examples.dtype).removeprefix("torch.")
    if kind == "float32" and holds_images(job.input_shape) and bool(((examples >= 0) & (examples <= 1)).all()):
        kind = "float32 in [0, 1]"
    same_shape = tuple(examples.shape[1:]) == tuple(job.input_shape)
    return len(examples) > 1 and same_shape and kind in _proxy_kinds(job)


def check_labelled(examples: torch.Tensor, job: Job) -> None:
    """Refuse labelled examples that are not stored as the proxy must be.

    Raises:
        OptionError: Their shape, type or range is another.
    """
    if not _fit_as_proxy(examples, job):
        raise OptionError(
            f"labelled has {examples.dtype} {list(examples.shape)}: must be at least 2 examples of shape "
            f"{tuple(job.input_shape)}, {' or '.join(_proxy_kinds(job))}, not yet normalised"
        )


def list_fitting_methods(job: Job) -> str:
    """Name the methods that, as they are by default, would take a job, for the end of an error line."""
    return ", ".join(find_fitting_methods(job)) or "none takes all of these uploads; train them as one of them needs"


def check_alone(method: Method, job: Job) -> None:
    """Refuse a job that lacks an input of the method, or that the method cannot do without clients in reach.

    Raises:
        OptionError: See :func:`check_needs`; or the method's own reason.
    """
    check_needs(method, job)
    if method.client_phase is not None:
        method.client_phase.check_alone(job)


def find_fitting_methods(job: Job) -> list[str]:
    """Return the methods that, as they are by default and without clients in reach, would take a job.

    In rounds these are refiners, elsewhere all but those that are made for rounds.
    """
    # Before the first upload, clients send what the models are: other methods need other clients.
    kinds = {kind_of(upload.architecture) for upload in job.uploads} or {kind_of(job.student)}
    lacking = _lacking(job)

    def fits(method: Method) -> bool:
        config = method.config()
        if method.all_needs(config) & lacking or not kinds <= {method.uploads}:
            return False
        if not (job.num_classes or method.any_model):
            return False
        if job.means_of_examples and not method.averages_weights:
            return False
        if method.in_rounds.draws_by_round and not job.refines:
            return False
        if job.refines and (method.kind != "student" or method.client_phase is not None):
            return False
        try:
            if method.check is not None and job.student in job.builders:
                method.check(replace(job, config=config))
            if method.client_phase is not None:
                method.client_phase.check_alone(replace(job, config=config))
        except OptionError:
            return False
        return True

    return [name for name, method in METHODS.items() if fits(method)]


def _lacking(job: Job) -> set[Need]:
    """Return the needs that a job is known not to meet; the facts of uploads are unknown without them."""
    images = holds_images(job.input_shape)
    met = {
        Need.SAME_ARCHITECTURE: {base_of(upload.architecture) for upload in job.uploads} <= {base_of(job.student)},
        Need.COMMON_START: job.clients_seed is not None,
        Need.LABEL_COUNTS: all(upload.label_counts is not None for upload in job.uploads),
        Need.IMAGES: images,
        Need.SIDES_OF_FOUR: images and not any(side % 4 for side in job.input_shape[1:]),
        Need.IMAGE_GRADIENTS: not any(map(_on_features, [job.student, *(u.architecture for u in job.uploads)])),
        Need.PROXY_IMAGES: _fit_as_proxy(job.proxy, job),
        Need.EXACT_SUMS: True,  # the settings alone show it, before any client has spent its budget
    }
    return {need for need in Need if not met[need]}
