"""The code that loads a result: of this app's architectures, of a user's own, or of another project's models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fl_app.models import ARCHITECTURES, is_users
from fl_app.models.feature_heads import FeatureHead
from fl_app.models.features import FeatureFunction
from fl_app.models.huggingface import is_folder
from server_app.report.drawing import COLOURS, new_figure, short
from strategies.core.facts import CLASSIFIER, SUFFIXES, holds_images, is_head, kind_of
from strategies.core.fingerprint import short_fingerprint as short_name
from strategies.method import Job
from strategies.run.stage import StageReport
from strategies.teacher.copies import build_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The report on a head of a frozen backbone: its part of the model card, and the plot of the choice of its penalty.


PENALTIES = ("lambda", "shrinkage")
LEFT_OUT = "left_out_error"
Metrics = Sequence[Mapping[str, Any]]


def functions_in(job: Job, names: Iterable[str]) -> list[FeatureFunction]:
    """Return the feature functions of the heads among some architectures, in the order of the names."""
    built = (job.builders[name]() for name in sorted(set(names)) if is_head(name))
    return [head.function for head in built if isinstance(head, FeatureHead)]


def features_section(job: Job, names: Iterable[str], metrics: Metrics) -> str:
    """Return the model card's section on the backbones of a result; empty without one."""
    functions = functions_in(job, names)
    if not functions:
        return ""
    trained = any(kind_of(upload.architecture) == CLASSIFIER for upload in job.uploads)
    return "\n## Features\n\n" + "".join(map(_described, functions)) + _head_line(metrics, trained=trained)


def _head_line(metrics: Metrics, *, trained: bool) -> str:
    """Return how the server found a head from sums; empty where clients trained it."""
    chosen = [f"{row[f'chosen_{name}']:g} ({name})" for row in metrics for name in PENALTIES if f"chosen_{name}" in row]
    drawn = [row["drawn"] for row in metrics if "drawn" in row]
    if drawn:
        return f"- Head: trained on {drawn[-1]:,} features, drawn from the clients' Gaussians.\n"
    if trained and not chosen:
        return ""
    return f"- Penalty: {chosen[-1] if chosen else 'fixed by the noise'}.\n"


def _described(function: FeatureFunction) -> str:
    backbone, texts = function.backbone, function.backbone.texts
    reads = f"{function.side} pixels a side" if texts is None else f"the first {texts.length} tokens of a text"
    reads = f"rows of {backbone.columns} columns" if backbone.columns else reads
    fields = ", ".join(f"{name} {value}" for name, value in function.fields.items())
    return f"""- Backbone: {backbone.name}, frozen, {reads}, {function.features} features. Its
  licence and its training data are those of its makers, and every figure here rests on them.
- Fingerprint {short_name(function.fingerprint)}: {fields}.
"""


def plot_choice(metrics: Metrics) -> Figure | None:
    """Draw the left-out error over the penalty, and of every client at the chosen one; None where none was left out."""
    curve = [(row[name], row[LEFT_OUT]) for row in metrics for name in PENALTIES if name in row and LEFT_OUT in row]
    clients = [(row["client"], row[LEFT_OUT]) for row in metrics if "client" in row and LEFT_OUT in row]
    if not curve or not clients:
        return None
    figure, over = new_figure(8.0, max(4.0, 1.2 + 0.2 * len(clients)))
    over.remove()
    over, by_client = figure.subplots(1, 2)
    _draw_curve(over, curve, next(name for row in metrics for name in PENALTIES if name in row))
    by_client.barh(range(len(clients)), [error for _, error in clients], color=COLOURS["client"])
    names = [short(name) for name, _ in clients]
    by_client.set_yticks(range(len(clients)), names, fontsize="small")
    by_client.invert_yaxis()
    by_client.set_xlabel("left-out error per example")
    by_client.set_title("Each client under the head of the others")
    return figure


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, float]], name: str) -> None:
    axes.plot(*zip(*curve, strict=True), marker="o", color=COLOURS["student"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(name)
    axes.set_ylabel("left-out error per example")
    axes.set_title("Choice by leaving clients out")


_OF_FEATURES = (
    "from oneshot_fl.fl_app.models.features import FeatureFunction",
    "from oneshot_fl.fl_app.models.features_config import FeaturesConfig",
)


def load_code(report: StageReport) -> str:
    """Return the code that loads the result: the student, the ensemble, or both."""
    student, ensemble = report.outcome.student is not None, report.outcome.ensemble is not None
    codes = [_load_student(report.job)] if student else []
    codes += [_load_ensemble(report.job, name="ensemble" if student else "model")] if ensemble else []
    return "\n\n".join(codes)


def _load_student(job: Job) -> str:
    name, use = job.student, ""
    imports: Sequence[str] = ["from oneshot_fl.fl_app.models import build"]
    shape = f"num_classes={job.num_classes}, input_shape={job.input_shape}{_pixels_of(job, [name])}"
    built = f"build({name!r}, {shape})"
    if functions := functions_in(job, [name]):
        imports = ["from oneshot_fl.fl_app.models.feature_heads import FeatureHead", *_OF_FEATURES]
        built = f"FeatureHead({functions[0]!r}, {job.num_classes})"
        if functions[0].backbone.texts is not None:
            use = "\ntokens = model.function.backbone.texts.tokens  # model(tokens(texts)): their logits"
    elif (project := _of_project(job, {name})) is not None:
        imports, built = project[0], f"{project[1][name]}()"
    return f"""{_lines(["from safetensors.torch import load_file", "", *imports])}

model = {built}
model.load_state_dict(load_file("student.safetensors"))
model.eval(){use}"""


def _load_ensemble(job: Job, *, name: str) -> str:
    members = [upload.architecture for upload in job.uploads]
    names, kind = {member.partition("+")[0] for member in members}, kind_of(members[0])
    of_zoo = f"{job.num_classes}, {job.input_shape}"
    own = ", own=[" + ", ".join(map(repr, found)) + "]" if (found := sorted(filter(is_users, names))) else ""
    own += _pixels_of(job, names)
    imports: Sequence[str] = ["from oneshot_fl.fl_app.models import builders"]
    built = f"builders({of_zoo}{own})"
    if (project := _of_project(job, names)) is not None:
        imports = project[0]
        built = "{" + ", ".join(f"{each!r}: {project[1][each]}" for each in sorted(names)) + "}"
    elif kind in SUFFIXES:
        later = getattr(build_module(job.builders[members[0]]), "later", ())
        imports = ["from oneshot_fl.fl_app.models.uploaded import uploaded_builders"]
        built = f"uploaded_builders({kind!r}, {of_zoo}{own}{f', blocks={len(later)}' if later else ''})"
    elif functions := functions_in(job, members):
        imports = [*_OF_FEATURES, "from oneshot_fl.fl_app.models.uploaded import model_builders"]
        built = f"model_builders({of_zoo}, {sorted(set(members))}, {functions[0]!r})"
    return f"""{_lines(["from oneshot_fl import load_ensemble_module", *imports])}

{name} = load_ensemble_module(".", {built})"""


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def _pixels_of(job: Job, names: Iterable[str]) -> str:
    """Return the argument by which a folder's model learns how its images are normalised; empty where none needs it."""
    pixels = (tuple(job.normalization.mean), tuple(job.normalization.std))
    return f", normalization={pixels}" if holds_images(job.input_shape) and any(map(is_folder, names)) else ""


def _of_project(job: Job, names: Collection[str]) -> tuple[list[str], Mapping[str, str]] | None:
    """Return the lines that import another project's builders, and architecture -> its builder's name.

    None for architectures of this app and of settings.
    """
    if any(name in ARCHITECTURES or is_users(name) or kind_of(name) != CLASSIFIER for name in names):
        return None
    found = {name: getattr(job.builders.get(name), "__qualname__", "") for name in sorted(names)}
    if not all(found.values()):  # a head of features, or a builder without a name
        return None
    modules = [(job.builders[name].__module__, known.partition(".")[0]) for name, known in found.items()]
    return sorted({f"from {module} import {known}" for module, known in modules}), found
