"""A job's uploads merged in weight space, and the start that their updates refer to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..method import Outcome
from ..uploads.tensors import weights_sha256
from ..weights.states import merge_states
from .average import recorded_weights
from .merged import resembles_start
from .student import start_model

if TYPE_CHECKING:
    from torch import Tensor

    from ..method import Job, Progress, Upload
    from ..weights.states import Rule

# Said where no start is known; each way to run a method has its own argument for it.
NEEDS_START = (
    "needs the weights that every client started from: start= of merge(), initial_arrays of strategy.start(), or the "
    "seed of a run of the app"
)


def merge_in_weight_space(
    job: Job, progress: Progress, rule: Rule, *, scale: float = 1.0, of_updates: bool = True
) -> Outcome:
    """Merge a job's uploads tensor by tensor; files are read as the tensors are needed.

    Args:
        job: Its uploads are of one architecture.
        progress: Receives the tensors done.
        rule: See :mod:`.weights.rules`.
        scale: s.
        of_updates: Whether the rule takes updates, for which the start must be known; else the weights themselves.

    Raises:
        OptionError: The start is not known, a client began from another one, or tensors cannot be merged.
    """
    begin = time.perf_counter()
    start = common_start(job) if of_updates else None
    weights = recorded_weights(job, progress)
    states = {upload.client: open_weights(upload) for upload in job.uploads}
    student = merge_states(states, weights, rule, start=start, scale=scale, tick=progress.report)
    return Outcome(student=student, timings={"merge": time.perf_counter() - begin})


def open_weights(upload: Upload) -> Mapping[str, Tensor]:
    """Return an upload's weights by name, read from their file one at a time if a file holds them."""
    return upload.read() if upload.open is None else upload.open()


def common_start(job: Job) -> Mapping[str, Tensor]:
    """Return the weights that all clients of a job started from, theta_0.

    Raises:
        OptionError: They are not known, or a client started from others: it says so, or its weights are unlike them.
    """
    if job.clients_seed is None:
        raise OptionError(f"a merge of updates {NEEDS_START}")
    start = job.start if job.start is not None else start_model(job).state_dict()
    expected = weights_sha256(start) if any(upload.facts.start for upload in job.uploads) else ""
    for upload in job.uploads:
        # Where the start was drawn here, a client that does not name its own may have begun anywhere.
        if (
            upload.facts.start != expected
            if upload.facts.start
            else job.start is None and not _resembles(upload, start)
        ):
            raise OptionError(
                f"{upload.client} did not start from the weights of this run: it must start where the others do. "
                f"A merge of updates {NEEDS_START}"
            )
    return start


def _resembles(upload: Upload, start: Mapping[str, Tensor]) -> bool:
    """Return whether the largest weight of an upload is still like that of the start."""
    largest = max((value.numel() * (value.dim() > 1), name) for name, value in start.items())[1]
    own = open_weights(upload).get(largest)
    return own is not None and own.shape == start[largest].shape and resembles_start(own, start[largest])
