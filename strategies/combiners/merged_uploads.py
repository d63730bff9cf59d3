"""The merged linear layers of a job's uploads, where the weights that their clients began from are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..teacher.average import repeat_tied_weights
from ..teacher.merged import linear_layers, merge_layers, resembles_start
from .update_gate import OTHER_START, UNKNOWN_START, start_model

if TYPE_CHECKING:
    from ..method import Job, Progress, State, Upload


def merge_uploads(
    job: Job, uploads: Sequence[Upload], weights: Sequence[float], progress: Progress, *, but: str = ""
) -> State:
    """Return the merged weights and biases of the linear layers; none, and a note why, if they cannot be merged.

    A note names the clients that did not start from those weights: they have no part in the merge. They are fewer than
    half, so that no single client can turn it off; otherwise there is no merge.

    Args:
        job: Its student and its clients' start.
        uploads: Of the student's architecture; each is read twice.
        weights: w_k, one for each upload.
        progress: Receives the notes.
        but: The name of a weight that is not merged.
    """
    averaged = "linear layers are averaged and not merged"
    if job.clients_seed is None:  # in rounds ``start`` is the uploads' mean, from which no client started
        progress.record({"note": f"{averaged}: {UNKNOWN_START}"})
        return {}
    model = start_model(job)
    start, names = model.state_dict(), [name for name in linear_layers(model) if f"{name}.weight" != but]
    others = [upload.client for upload in uploads if not _began_from(upload, start, names[:1])]
    if 2 * len(others) >= len(uploads):
        progress.record({"note": f"{averaged}: {OTHER_START.format(others[0])}"})
        return {}
    for client in others:
        progress.record({"note": f"linear layers are merged without {client}: {OTHER_START.format('it')}"})
    pairs = zip(uploads, weights, strict=True)
    heard = ((one.read(), weight) for one, weight in pairs if one.client not in others)
    return repeat_tied_weights(model, merge_layers(start, heard, names))


def _began_from(upload: Upload, start: State, first: Sequence[str]) -> bool:
    """Return whether a client's first such layer is still like its start."""
    state = upload.read()
    return all(resembles_start(state[f"{name}.weight"], start[f"{name}.weight"]) for name in first)
