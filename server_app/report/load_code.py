"""The code that loads a result: of this app's architectures, of a user's own, or of another project's models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fl_app.models import ARCHITECTURES
from server_app.report.feature_heads import functions_in, load_head, load_members
from strategies.core.kinds import CLASSIFIER, SUFFIXES, kind_of
from strategies.core.options import is_own
from strategies.method import Job
from strategies.run.stage import StageReport
from strategies.teacher.copies import built


class _Project(NamedTuple):
    """The builders of another project: the lines that import them, and architecture -> the builder's name."""

    imports: str
    names: Mapping[str, str]


def load_code(report: StageReport) -> str:
    """Return the code that loads the result: the student, the ensemble, or both."""
    student, ensemble = report.outcome.student is not None, report.outcome.ensemble is not None
    codes = [_load_student(report.job, name="model")] if student else []
    codes += [_load_ensemble(report.job, name="ensemble" if student else "model")] if ensemble else []
    return "\n\n".join(codes)


def _load_student(job: Job, *, name: str) -> str:
    if functions := functions_in(job, [job.student]):
        return load_head(functions[0], job.num_classes, name=name)
    if (project := _of_project(job, {job.student})) is not None:
        return f"""{project.imports}
from safetensors.torch import load_file

{name} = {project.names[job.student]}()
{name}.load_state_dict(load_file("student.safetensors"))
{name}.eval()"""
    return f"""from safetensors.torch import load_file

from oneshot_fl.fl_app.models import build

{name} = build({job.student!r}, num_classes={job.num_classes}, input_shape={job.input_shape})
{name}.load_state_dict(load_file("student.safetensors"))
{name}.eval()"""


def _load_ensemble(job: Job, *, name: str) -> str:
    names = {upload.architecture.partition("+")[0] for upload in job.uploads}
    if (project := _of_project(job, names)) is not None:
        models = ", ".join(f"{each!r}: {project.names[each]}" for each in sorted(names))
        return f"""{project.imports}
from oneshot_fl import load_ensemble_module

{name} = load_ensemble_module(".", {{{models}}})"""
    own = ", own=[" + ", ".join(map(repr, found)) + "]" if (found := sorted(filter(is_own, names))) else ""
    if (kind := kind_of(first := job.uploads[0].architecture)) in SUFFIXES:
        own += f", blocks={len(later)}" if (later := getattr(built(job.builders[first]), "later", ())) else ""
        return f"""from oneshot_fl import load_ensemble_module
from oneshot_fl.fl_app.models.uploaded import uploaded_builders

{name} = load_ensemble_module(".", uploaded_builders({kind!r}, {job.num_classes}, {job.input_shape}{own}))"""
    members = [upload.architecture for upload in job.uploads]
    if functions := functions_in(job, members):
        return load_members(job, members, functions[0], name=name)
    return f"""from oneshot_fl import load_ensemble_module
from oneshot_fl.fl_app.models import builders

{name} = load_ensemble_module(".", builders({job.num_classes}, {job.input_shape}{own}))"""


def _of_project(job: Job, names: Collection[str]) -> _Project | None:
    """Return the code of another project's builders; None for architectures of this app and of settings."""
    if any(name in ARCHITECTURES or is_own(name) or kind_of(name) != CLASSIFIER for name in names):
        return None
    found = {name: getattr(job.builders.get(name), "__qualname__", "") for name in sorted(names)}
    if not all(found.values()):  # a head of features, or a builder without a name
        return None
    modules = [(job.builders[name].__module__, known.partition(".")[0]) for name, known in found.items()]
    return _Project("\n".join(sorted({f"from {module} import {known}" for module, known in modules})), found)
