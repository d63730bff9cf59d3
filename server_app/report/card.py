"""The model card of a result: where it comes from, its scores, and the code that loads it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from fl_app.data import TABLE_FORMS
from fl_app.models import ARCHITECTURES, is_users
from fl_app.models.feature_heads import FeatureHead
from fl_app.models.features import FeatureFunction
from fl_app.models.huggingface import is_folder
from server_app.report.evaluation import Row
from server_app.report.gatekeeping import verdict_table
from server_app.report.plots import PENALTIES
from server_app.report.tables import Table, headline_cells, titled
from server_app.settings.choices import Choice
from strategies.core.facts import CLASSIFIER, SUFFIXES, Normalization, holds_images, is_head, kind_of
from strategies.core.fingerprint import short_fingerprint as short_name
from strategies.core.options import is_own
from strategies.core.seeds import build_module
from strategies.method import Job
from strategies.run.stage import StageReport


def model_card(method: Choice, report: StageReport, rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Return the model card: the weights, their origin, and the code that loads them."""
    outcome, job = report.outcome, report.job
    results = ["one model"] if outcome.student is not None else []
    results += [f"an ensemble of {len(outcome.ensemble.clients)} models"] if outcome.ensemble is not None else []
    own = {job.student} if outcome.student is not None else set()
    own |= {upload.architecture for upload in job.uploads} if outcome.ensemble is not None else set()
    options = "\n".join(f"- `{key}` = {value!r}" for key, value in sorted(facts.get("options", {}).items()))
    notes = "".join(f"{note[0].upper()}{note[1:]}.\n" for note in facts.get("notes", ()))
    verdicts = "".join(f"\n## {table.markdown()}" for table in verdict_table(facts.get("gatekeeper", {})))
    how = f"one-shot federated learning from {len(job.uploads)} uploads" if job.uploads else "rounds of training"
    return f"""# {method.title}: {", and ".join(results)}

Made by {how}, with {method.titled(job.config)} ({method.source}).
Data: {facts.get("setting") or "unknown"}.
Architecture: {", ".join(sorted(own))}.
{_form_of(job, facts.get("classes", ()))}
Weights (sha256): {facts["weights_sha256"]}. Seed: {job.seed}.

## Scores{f" on {facts.get('where', 'held-out examples')}" if rows else ""}

{_score_table(rows)}
{_intervals(rows)}{features_section(job, own, facts.get("metrics", ()))}{verdicts}
## Load

After `pip install oneshot-fl`, in this folder:

```python
{load_code(report)}
```

## Options

{options}

## Limits

The server never saw a client's data. This model may still contain what a client's model learned from its data.
{"The scores hold for examples like those that they are counted on." if rows else "Nobody knows yet how good it is."}
{notes}"""


def _score_table(rows: Sequence[Row]) -> str:
    """Return the scores of all rows as a table in Markdown; without rows a sentence."""
    if not rows:
        return "None."
    cells = [[headline_cells(row.as_json(), name)[0] for name in row.scores] for row in rows]
    lines = [(row.name, row.kind, *texts) for row, texts in zip(rows, cells, strict=True)]
    return Table("", ("name", "kind", *map(titled, rows[-1].scores)), lines, texts=2).markdown().strip()


def _intervals(rows: Sequence[Row]) -> str:
    """Return the intervals of the result's scores, its calibration and its notes, as lines of a card."""
    if not rows:
        return ""
    found = [(name, headline_cells(rows[-1].as_json(), name)[1]) for name in rows[-1].scores]
    known = ", ".join(f"{titled(name)} {interval}" for name, interval in found if interval != "-")
    lines = [f"95 % intervals of the result: {known}."] if known else []
    if errors := rows[-1].details.get("calibration-error"):
        lines.append(
            f"Calibration error {errors['value']:.3f}; a calibrated model would show {errors['calibrated']:.3f}."
        )
    lines += [f"{note[0].upper()}{note[1:]}." for note in rows[-1].details.get("notes", ())]
    return "".join(f"\n{line}\n" for line in lines)


def _form_of(job: Job, classes: Sequence[str]) -> str:
    if not job.num_classes:  # a model of any kind
        return "Input and output: those of the clients' own training."
    return f"Input: {_input_of(job)}. Output: logits of {job.num_classes} classes{_names_of(classes)}."


def _names_of(classes: Sequence[str]) -> str:
    """Return the classes in the order of the logits; empty if they have no names."""
    return f": {', '.join(f'{number} {name}' for number, name in enumerate(classes))}" if classes else ""


def _input_of(job: Job) -> str:
    if given := as_given(job.input_shape, job.normalization):
        return f"{'images' if holds_images(job.input_shape) else 'examples'} of shape {job.input_shape}, {given}"
    mean, std = job.normalization.mean, job.normalization.std
    return f"""images of shape {job.input_shape} with pixels in [0, 1], normalised with mean {mean} and
standard deviation {std}"""


def as_given(input_shape: tuple[int, int, int], normalization: Normalization | None) -> str:
    """Say how models take examples that nothing normalises; empty where images are normalised.

    Args:
        input_shape: Of one example.
        normalization: Of images; None for rows and texts.
    """
    if not holds_images(input_shape):
        return "as the data set gives them"
    same = normalization == Normalization.identity(input_shape[0])
    return "as the data set gives them, bytes divided by 255" if same else ""


# The head of a model card as the Hugging Face Hub reads it: YAML between two lines of dashes.


# The data sets that the Hub has, by its names.
ON_HUB = {
    "mnist": "ylecun/mnist",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "svhn": "ufldl-stanford/svhn",
    "ag-news": "fancyzhx/ag_news",
}
_NO_NAMES = (*TABLE_FORMS, "imagefolder")  # forms of data, which name no data set


def front_matter(method: Choice, job: Job, info: Mapping[str, Any], rows: Sequence[Row], where: str) -> str:
    """Return the lines before a model card.

    Args:
        where: What the scores are counted on, :func:`.tables.scored_on`.

    Returns:
        ``---``, one entry per line with its value in JSON, which YAML contains, and ``---``.
    """
    data = str(info.get("settings", {}).get("data.name", ""))
    named = bool(data) and data not in _NO_NAMES and not is_own(data)
    task = _task(job.input_shape) if job.num_classes else "other"
    scores = [
        {"type": name, "name": f"{name} on {where}", "value": score["value"]}
        for name, score in (rows[-1].scores.items() if rows else ())
    ]
    of_data = (
        {"type": ON_HUB.get(data, data), "name": data} if named else {"type": "own", "name": "the clients' own data"}
    )
    facts: dict[str, Any] = {
        "license": "other",
        "license_name": "chosen-by-the-owners-of-the-data",
        "library_name": "oneshot-fl",
        "pipeline_tag": task,
        "tags": ["federated-learning", "one-shot-federated-learning", "flower", method.name],
        **({"datasets": [ON_HUB[data]]} if data in ON_HUB else {}),
        "metrics": list(rows[-1].scores) if rows else [],
        "version": _version(),
        "date": str(info.get("created", ""))[:10],
        "model-index": [
            {"name": method.title, "results": [{"task": {"type": task}, "dataset": of_data, "metrics": scores}]}
        ],
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items() if value]
    return "\n".join(["---", *lines, "---", "", ""])


def _task(input_shape: tuple[int, int, int]) -> str:
    if holds_images(input_shape):
        return "image-classification"
    return "text-classification" if input_shape[2] > 1 else "tabular-classification"


def _version() -> str:
    try:
        return metadata.version("oneshot-fl")
    except metadata.PackageNotFoundError:  # a node may have the app from Flower alone
        return ""


def functions_in(job: Job, names: Iterable[str]) -> list[FeatureFunction]:
    """Return the feature functions of the heads among some architectures, in the order of the names."""
    built = (job.builders[name]() for name in sorted(set(names)) if is_head(name))
    return [head.function for head in built if isinstance(head, FeatureHead)]


def features_section(job: Job, names: Iterable[str], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the model card's section on the backbones of a result; empty without one."""
    functions = functions_in(job, names)
    if not functions:
        return ""
    trained = any(kind_of(upload.architecture) == CLASSIFIER for upload in job.uploads)
    return "\n## Features\n\n" + "".join(map(_described, functions)) + _head_line(metrics, trained=trained)


def _head_line(metrics: Sequence[Mapping[str, Any]], *, trained: bool) -> str:
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
    classes, builder = job.num_classes, job.builders[name]
    if not classes:  # the job of a model of any kind has none, its builder has
        classes = (
            builder.keywords["num_classes"] if isinstance(builder, partial) else getattr(builder, "num_classes", 0)
        )
    shape = f"num_classes={classes}, input_shape={job.input_shape}{_pixels_of(job, [name])}"
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
