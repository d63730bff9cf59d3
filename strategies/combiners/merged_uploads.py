"""The merged linear layers of a job's uploads, where the weights that their clients began from are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..core.errors import UploadError
from ..teacher.merged import began_from, linear_layers, merged_layers
from .update_gate import OTHER_START, UNKNOWN_START, start_model

if TYPE_CHECKING:
    from ..method import Job, Progress, State, Upload


def merged_uploads(
    job: Job, uploads: Sequence[Upload], weights: Sequence[float], progress: Progress, *, but: str = ""
) -> State:
    """Return the merged weights and biases of the linear layers; none, and a note why, if they cannot be merged.

    Args:
        job: Its student and its clients' start.
        uploads: Of the student's architecture; each is read once.
        weights: w_k, one for each upload.
        progress: Receives the note.
        but: The name of a weight that is not merged.
    """
    try:
        if job.clients_seed is None:  # in rounds ``start`` is the uploads' mean, from which no client started
            raise UploadError(UNKNOWN_START)
        model = start_model(job)
        start, names = model.state_dict(), [name for name in linear_layers(model) if f"{name}.weight" != but]
        return merged_layers(start, _states(uploads, start, names[:1]), names, weights)
    except UploadError as error:
        progress.record({"note": f"linear layers are averaged and not merged: {error}"})
        return {}


def _states(uploads: Sequence[Upload], start: State, first: Sequence[str]) -> Iterator[State]:
    """Yield the weights of clients whose first such layer is still like its start.

    Raises:
        UploadError: It is not; the error names the client.
    """
    for upload in uploads:
        state = upload.read()
        if not all(began_from(state[f"{name}.weight"], start[f"{name}.weight"]) for name in first):
            raise UploadError(OTHER_START.format(upload.client))
        yield state
