"""One page per run: a self-contained HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.report.attack_success import attack_lines
from server_app.report.communication import moved_lines
from server_app.report.gatekeeping import verdict_lines
from server_app.report.page_template import TEMPLATE
from server_app.report.privacy import privacy_lines
from server_app.settings.read import scaled_line
from strategies.core.durable import atomic_write
from strategies.run.run_folder import RunFolder
from strategies.run.stage import kept_round

PAGE_FILE = "report.html"
CLASSES_MOST = 20  # columns of the table of classes; more are in the plot alone
_TRY_NEXT = ("label-count-ensemble", "fedens", "tally")


@dataclass(frozen=True)
class Table:
    """A table of a page: the first ``texts`` columns hold texts, the others numbers."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Page:
    """The content of a page; every text is escaped.

    Attributes:
        title: The heading.
        headline: The main figure; empty for none.
        facts: Names and values.
        notes: Warnings and notes, one line each.
        tables: The tables, in this order.
        plots: Name and PNG in base64.
        code: Code that loads the result; empty for none.
        commands: Commands to try next.
    """

    title: str
    headline: str
    facts: Sequence[tuple[str, str]]
    notes: Sequence[str]
    tables: Sequence[Table]
    plots: Sequence[tuple[str, str]]
    code: str
    commands: Sequence[str]


def write_page(path: Path, page: Page) -> None:
    """Write a page as HTML.

    Raises:
        StoreError: The disk refuses.
    """
    from jinja2 import Environment  # torch needs it, a run without a page does not

    html = Environment(autoescape=True).from_string(TEMPLATE).render(page=page)
    atomic_write(path, html.encode())


def run_page(folder: RunFolder, result: Mapping[str, Any], code: str) -> Page:
    """Return the page of a finished run.

    Args:
        folder: The run folder, with its plots in ``report/``.
        result: The content of result.json.
        code: Code that loads the result.
    """
    settings, run = folder.info.get("settings", {}), shlex.quote(result["run_dir"])
    others = [name for name in _TRY_NEXT if name != result["method"]]
    return Page(
        title=f"{result['method']} on {settings.get('data.name', 'uploads')}, {result['uploads']} clients",
        headline=f"{result['accuracy']:.2f} % on held-out images",
        facts=_facts(folder.info, settings, result),
        notes=_notes(result),
        tables=[_results(result), *_classes(folder)],
        plots=[(name.removesuffix(".png").replace("_", " "), _base64(folder.path / "report" / name))
               for name in result["plots"]],
        code=code,
        commands=[f"oneshot compare {run} --methods {','.join([result['method'], *others])}",
                  f"oneshot replay {run} --method {others[0]}"],
    )  # fmt: skip


def _facts(info: Mapping[str, Any], settings: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, str]]:
    law = f"{settings.get('data.law', '')}, alpha {settings.get('data.alpha', '')}"
    student = settings.get("model.student") or settings.get("model.name", "")
    versions = ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())
    found = {
        "data": settings.get("data.name", ""), "split": law if settings else "",
        "clients": f"{result['uploads']} uploads, {result['refused']} refused", "model": student,
        "seed": result["seed"], "moved per client": "; ".join(moved_lines(result)),
        "begun": info.get("created", ""), "versions": versions, "weights": result["weights_sha256"],
        "folder": result["run_dir"], "replay of": info.get("replay-of", ""),
    }  # fmt: skip
    return [(name, str(value)) for name, value in found.items() if value != ""]


def _notes(result: Mapping[str, Any]) -> list[str]:
    scaled = [f"scaled: {scaled_line(result['scaled'])}"] if "scaled" in result else []
    refused = [f"refused: {entry['client']}, {entry['reason']}" for entry in result["refusals"]]
    own = attack_lines(result.get("attack", {})) + privacy_lines(result.get("privacy", {}))
    return [*scaled, *refused, *own, *verdict_lines(result.get("gatekeeper", {}))]


def _results(result: Mapping[str, Any]) -> Table:
    rows = [(row["name"], row["kind"], f"{row['accuracy']:.2f}") for row in result["table"]]
    return Table("Accuracy on held-out images", ("model", "kind", "%"), rows, texts=2)


def _classes(folder: RunFolder) -> list[Table]:
    """Return the table of the clients' examples per class; none if no client told them."""
    records = folder.round(kept_round(folder)).records()
    counts = {record.client: record.facts.label_counts for record in records if record.facts.label_counts}
    classes = max((len(own) for own in counts.values()), default=0)
    if not 0 < classes <= CLASSES_MOST:
        return []
    rows = [(client, *map(str, own), str(sum(own))) for client, own in counts.items()]
    return [Table("Training examples per class", ("client", *map(str, range(classes)), "all"), rows)]


def _base64(image: Path) -> str:
    return base64.b64encode(image.read_bytes()).decode()
