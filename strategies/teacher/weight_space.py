"""A job's uploads merged in weight space, and the start that their updates refer to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.errors import OptionError, shorten_list
from ..core.fingerprint import weights_sha256
from ..core.names import factor_of_update, is_adapter_state
from ..core.options import option
from ..method import Job, Outcome, Progress, Upload
from ..weights.adapters import Adapter, merge_adapters
from ..weights.states import Rule, mean, merge_states
from .average import recorded_weights
from .merged import resembles_start
from .student import start_model

# Said where no start is known; each way to run a method has its own argument for it.
NEEDS_START = (
    "needs the weights that every client started from: start= of merge(), initial_arrays of strategy.start(), or the "
    "seed of a run of the app"
)


@dataclass(frozen=True)
class Measure:
    """What clients measure on their examples for a merge, and send beside their weights.

    Attributes:
        function: The function of ``client.measures`` that measures it.
    """

    method: str
    function: str
    prefixes: tuple[str, ...]

    def check(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuse uploads without it.

        Raises:
            OptionError: Names the clients and the remedy.
        """
        if lacking := [
            client for client, state in states.items() if not any(n.startswith(self.prefixes) for n in state)
        ]:
            raise OptionError(
                f"method {self.method!r} weighs by what clients measure on their examples, which uploads of "
                f"{shorten_list(lacking)} lack: must be of a run with method={self.method}, or have weights with "
                f"oneshot_fl.client.measures.{self.function}() beside them"
            )


def scaling() -> Any:
    """Declare the option ``scaling``, which the methods share whose merged update is scaled."""
    return option(1.0, "factor of the merged update before it is added to the start, s", low=0.0, table="server")


def merge_in_weight_space(
    job: Job,
    progress: Progress,
    rule: Rule,
    *,
    scale: float = 1.0,
    of_updates: bool = True,
    weighs: Measure | None = None,
) -> Outcome:
    """Merge a job's uploads tensor by tensor; files are read as the tensors are needed.

    Args:
        job: Its uploads are of one architecture.
        rule: See :mod:`.weights.rules`.
        scale: s.
        of_updates: Whether the rule takes updates, for which the start must be known; else the weights themselves.
        weighs: What the clients must have measured for the rule; None for nothing.

    Raises:
        OptionError: The start is not known, a client began from another one, an upload lacks what the rule weighs by,
            or tensors cannot be merged.
    """
    begin = time.perf_counter()
    weights = recorded_weights(job, progress)
    if has_adapters(job):
        if weighs is not None:
            raise OptionError(
                f"method {weighs.method!r} weighs whole weights, and the uploads are adapters: must be a merge of "
                "their updates, such as 'fedavg' or 'ties'"
            )
        return merge_uploaded_adapters(job, progress, weights, rule, scale=scale)
    start = common_start(job) if of_updates else None
    states = {upload.client: open_weights(upload) for upload in job.uploads}
    if weighs is not None:
        weighs.check(states)
    student = merge_states(states, weights, rule, start=start, scale=scale, tick=progress.report, collect=job.collect)
    return Outcome(student=student, timings={"merge": time.perf_counter() - begin})


def has_adapters(job: Job) -> bool:
    """Say whether the uploads are LoRA adapters, whose tensors must not be merged one by one.

    Raises:
        OptionError: They hold the factors of updates in another form.
    """
    names = open_weights(job.uploads[0]).keys()
    if is_adapter_state(names):
        return True
    if factor := factor_of_update(names):
        raise OptionError(
            f"tensor {factor!r} is a factor of an update, and the mean of products is not the product of means: must "
            "be a LoRA adapter as PEFT saves it, or as get_peft_model_state_dict(model) returns it; or whole weights, "
            "as merge_and_unload() returns them"
        )
    return False


def merge_uploaded_adapters(
    job: Job, progress: Progress, weights: Sequence[float], rule: Rule = mean, *, scale: float = 1.0
) -> Outcome:
    """Merge a job's uploads where they are LoRA adapters.

    Args:
        job: Its ``start`` is the adapter that all clients started from, or the base's tensors; None: all started from
            the base, with B = 0.
        rule: See :mod:`.weights.rules`.
        scale: s.

    Returns:
        A student that is an adapter, as :meth:`.weights.adapters.Adapter.to_state` writes it.
    """
    begin = time.perf_counter()
    adapters = [Adapter.of_state(upload.client, open_weights(upload)) for upload in job.uploads]
    started = job.start is not None and is_adapter_state(job.start)
    start = Adapter.of_state("the start", job.start) if job.start is not None and started else None
    counts = [upload.label_counts for upload in job.uploads if upload.label_counts is not None]
    merged = merge_adapters(
        adapters,
        weights,
        rule,
        scale=scale,
        start=start,
        base=None if started else job.start,
        label_counts=counts if len(counts) == len(adapters) else None,
    )
    if merged.lost_share > 0.0:
        note = f"the cut of the adapter's rank loses {merged.lost_share:.2%} of the update's norm"
        progress.record({"note": note, "lost_share": merged.lost_share})
    return Outcome(student=merged.to_state(), timings={"merge": time.perf_counter() - begin})


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
