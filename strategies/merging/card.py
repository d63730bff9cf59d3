"""The model card of merged models: their names, the accuracies, and the code that loads the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.fingerprint import weights_sha256
from ..core.options import flatten
from ..method import METHODS, Job, Outcome
from ..run.ensembles import FOLDER_NAME
from ..run.run_folder import STUDENT_FILE


def write_card(
    method: str,
    job: Job,
    outcome: Outcome,
    *,
    makers: Mapping[str, str],
    scores: Mapping[str, Mapping[str, Any]],
    reported: Mapping[str, object] | None = None,
) -> str:
    """Return the card of a merge, or of a run in a Flower project, as Markdown.

    Args:
        makers: Architecture -> the import name of what builds it, ``module:attribute``; may lack some.
        scores: Those of :meth:`.merge.Result.evaluate`, by ``student`` and ``ensemble``; may be empty.
        reported: Scores that a project's own code and its clients returned, by their names; None for none.
    """
    title, source = METHODS[method].titled(job.config), METHODS[method].source
    clients = ", ".join(upload.client for upload in job.uploads)
    options = [f"- `{key}` = {value!r}" for key, value in flatten(job.config, method).items()]
    architectures = ", ".join(sorted({upload.architecture for upload in job.uploads}))
    return "\n".join(
        [
            f"# {title}: {len(job.uploads)} models merged",
            "",
            f"Merged from {clients} with {title} ({source}). No model's owner gave examples for it.",
            "",
            *_results(outcome, scores),
            *(f"- {name} = {value}" for name, value in (reported or {}).items()),
            "",
            f"Architectures: {architectures}. Seed: {job.seed}.",
            *(_examples(job) if job.num_classes else ["Input and output are those of the merged models."]),
            "",
            "## Load, in this folder",
            "",
            "```python",
            *_code(job, outcome, makers),
            "```",
            "",
            "## Options",
            "",
            *(options or ["None."]),
            "",
            "## Limits",
            "",
            "The models may contain what they learned from their owners' examples, and so may these.",
            "",
        ]
    )


def _examples(job: Job) -> list[str]:
    mean, std = job.normalization.mean, job.normalization.std
    return [
        f"Input: {tuple(job.input_shape)}, normalised with mean {tuple(mean)} and deviation {tuple(std)} of pixels",
        f"in [0, 1]. Output: logits of {job.num_classes} classes.",
    ]


def _results(outcome: Outcome, scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = {}
    if outcome.student is not None:
        found["student"] = f"one model, `{STUDENT_FILE}`, sha256 {weights_sha256(outcome.student)}"
    if outcome.ensemble is not None:
        found["ensemble"] = f"an ensemble of {len(outcome.ensemble.clients)} models, `{FOLDER_NAME}/`"
    return [f"- {what}{_accuracy(scores[name]) if name in scores else ''}" for name, what in found.items()]


def _accuracy(found: Mapping[str, Any]) -> str:
    score = found["scores"]["accuracy"]
    return f", accuracy {found['accuracy']:.2f} % (95 % within {100 * score['low']:.1f} to {100 * score['high']:.1f})"


def _code(job: Job, outcome: Outcome, makers: Mapping[str, str]) -> list[str]:
    """Return the lines that load the results; a builder without an import name stands as a comment."""
    names = {job.student} if outcome.student is not None else set()
    names |= {upload.architecture for upload in job.uploads} if outcome.ensemble is not None else set()
    known = {name: makers[name].partition(":") for name in sorted(names) if name in makers}
    lines = sorted({f"from {module} import {attribute.partition('.')[0]}" for module, _, attribute in known.values()})
    build = {name: attribute for name, (_, _, attribute) in known.items()}
    for name in sorted(names - set(known)):
        build[name] = "".join(letter if letter.isalnum() else "_" for letter in name)
        lines.append(f"# {build[name]} stands for the callable that returns your untrained module")
    if outcome.student is not None:
        lines = ["from safetensors.torch import load_file", *lines]
    if outcome.ensemble is not None:
        lines = ["from oneshot_fl import load_ensemble_module", *lines]
    lines.append("")
    if outcome.student is not None:
        lines += [f"student = {build[job.student]}()", f'student.load_state_dict(load_file("{STUDENT_FILE}"))',
                  "student.eval()"]  # fmt: skip
    if outcome.ensemble is not None:
        models = ", ".join(f"{name!r}: {build[name]}" for name in sorted({up.architecture for up in job.uploads}))
        lines.append(f'ensemble = load_ensemble_module(".", {{{models}}})')
    return lines
