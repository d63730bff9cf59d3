"""A page that holds a whole result: a self-contained HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_app.report.page_template import TEMPLATE
from strategies.core.durable import atomic_write

PAGE_FILE = "report.html"
# Below a plot: what it shows, for readers who have not seen one before.
CAPTIONS = {
    "accuracy": "Accuracy of every client's own model, of the baselines, and of the result, all on the same held-out "
    "images.",
    "labels": "Who held which classes: the training examples of each client, by class.",
    "server_curve": "Accuracy while the server works. Held-out images choose nothing: the last epoch is the result.",
    "communication": "Accuracy over what a client sent and received.",
    "client_weights": "How much each client's model counts in the resulting ensemble.",
    "choice": "How the penalty of the head was chosen.",
    "synthetic_images": "Images that the server made for training; none is a client's.",
    "gatekeeper": "How far each upload is from the others, by measure. Far values make an upload suspect.",
    "comparison": "Mean accuracy per method; a whisker is one sample standard deviation, a dot a single result.",
    "cost": "Accuracy over the CPU time of the server stage.",
    "learning_curves": "Accuracy round by round: the mean over the seeds, in a band of one sample standard deviation.",
}


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        heading: Its heading.
        columns: Names of the columns.
        rows: A text per column each.
        texts: The number of leading columns that hold texts; the others hold numbers.
        shades: Of every row the shares in 0 to 1 by which its cells of numbers are shaded; empty for none.
        bars: Of every row the share in 0 to 1 of a bar behind its last number; empty for none.
        strong: The rows in bold type.
        note: A sentence below the table.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    shades: Sequence[Sequence[float]] = ()
    bars: Sequence[float] = ()
    strong: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A plot of a page: its name, its PNG in base64, and what it shows."""

    name: str
    image: str
    caption: str


@dataclass(frozen=True)
class Page:
    """The content of a page; every text is escaped.

    Attributes:
        kind: What the page reports: ``"Run"``.
        title: The heading.
        setting: The line below it: data, split, clients and seed.
        figures: Main figures with their meaning, the first one large.
        facts: Names and values.
        warnings: Warnings and notes, one line each.
        tables: The tables, in this order.
        plots: The plots, in this order.
        code: Code that loads the result; empty for none.
        commands: Commands to try next, each with its purpose.
    """

    kind: str
    title: str
    setting: str = ""
    figures: Sequence[tuple[str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = field(default=())
    code: str = ""
    commands: Sequence[tuple[str, str]] = ()


def write_page(path: Path, page: Page) -> None:
    """Write a page as HTML.

    Raises:
        StoreError: The disk refuses.
    """
    from jinja2 import Environment  # torch needs it, a run without a page does not

    html = Environment(autoescape=True).from_string(TEMPLATE).render(page=page)
    atomic_write(path, html.encode())


def plots_of(folder: Path, names: Sequence[str]) -> list[Plot]:
    """Return the plots of a folder, given their files; empty names are left out."""
    return [_plot(folder / name) for name in names if name]


def _plot(file: Path) -> Plot:
    image = base64.b64encode(file.read_bytes()).decode()
    return Plot(file.stem.replace("_", " "), image, CAPTIONS.get(file.stem, ""))


def software_facts(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts on the software of a run, given its run.json: the commit and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())
    return known_facts({"commit": info.get("commit", ""), "versions": versions})


def known_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return facts as texts, without the empty ones."""
    return [(name, str(value)) for name, value in facts.items() if value not in ("", None)]
