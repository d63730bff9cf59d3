"""The head of a model card as the Hugging Face Hub reads it: YAML between two lines of dashes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from fl_app.data import TABLE_FORMS
from server_app.report.evaluation import Row
from server_app.settings.choices import Choice
from strategies.core.kinds import holds_images
from strategies.core.options import is_own
from strategies.method import Job

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


def front_matter(method: Choice, job: Job, info: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the lines before a model card.

    Args:
        method: The server method.
        job: Its job.
        info: The content of run.json.
        rows: The result table, whose last row is the method's own result.

    Returns:
        ``---``, one entry per line with its value in JSON, which YAML contains, and ``---``.
    """
    data = str(info.get("settings", {}).get("data.name", ""))
    named = bool(data) and data not in _NO_NAMES and not is_own(data)
    task = _task(job.input_shape)
    scores = (
        [{"type": "accuracy", "name": "accuracy on held-out examples, %", "value": rows[-1].accuracy}] if rows else []
    )
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
        "metrics": ["accuracy"],
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
