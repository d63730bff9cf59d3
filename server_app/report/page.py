"""A page that holds a whole result: a self-contained HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.report.tables import Table
from strategies.core.durable import atomic_write
from strategies.core.errors import StoreError
from strategies.core.facts import HEADLINES
from strategies.core.places import expand_user

if TYPE_CHECKING:
    from jinja2 import Template

# The template of a page; a Python file, because Flower's bundle of an app carries no HTML.


_STYLE = """\
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #dde3e9; --ground: #ffffff; --card:
  #f5f7fa;
  --accent: #2f5f9e; --shade: 53 102 168; --warn: #8a4b08; --warn-ground: #fff6e8; --warn-line: #f0c98d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9ef; --soft: #9db0c0; --line: #33404d; --ground: #141a21;
  --card: #1c242d; --accent: #8fb7ea; --shade: 110 160 225; --warn: #f3c27c; --warn-ground: #2b2214; --warn-line:
  #6b4f22; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; color: var(--ink);
  background: var(--ground); margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 66rem; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1.5rem; }
.kind { font-size: .8rem; letter-spacing: .12em; text-transform: uppercase; color: var(--accent); font-weight: 600;
  margin: 0; }
h1 { font-size: clamp(1.6rem, 4vw, 2.3rem); line-height: 1.2; margin: .35rem 0 .3rem; overflow-wrap: anywhere; }
.setting { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0 0; padding: 0; list-style: none; }
.figures li { flex: 1 1 8.5rem; background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .8rem 1rem; }
.figures b { display: block; font-size: 1.35rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.figures li:first-child { flex-grow: 2; border-color: var(--accent); }
.figures li:first-child b { color: var(--accent); font-size: 1.9rem; }
.figures span, .note, figcaption { color: var(--soft); font-size: .9rem; }
.note { margin: .5rem 0 0; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .3rem 1.5rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.warnings { background: var(--warn-ground); border: 1px solid var(--warn-line); border-radius: .6rem; margin: 0;
  padding: .8rem 1rem .8rem 2.2rem; overflow-wrap: anywhere; }
.warnings li::marker { color: var(--warn); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: min(34rem, 100%); }
th, td { text-align: left; padding: .38rem .8rem; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-size: .85rem; font-weight: 600; color: var(--soft); white-space: nowrap; }
td:first-child { white-space: nowrap; } td.number, th.number { text-align: right; white-space: nowrap; }
tr.strong td { font-weight: 650; }
td.shaded { background: rgb(var(--shade) / calc(var(--share) * .7)); padding: .38rem .55rem; border-bottom-color:
  var(--ground); }
table.bars { width: 100%; } td.bar { width: 50%; min-width: 7rem; } td.bar i { display: block; height: .75rem;
  margin-top: .42rem; border-radius: .2rem;
  background: rgb(var(--shade) / .55); } tr.strong td.bar i { background: rgb(var(--shade)); }
figure { margin: 0 0 2rem; }
figure div { overflow-x: auto; border: 1px solid var(--line); border-radius: .6rem; background: #ffffff; padding:
  .6rem; }
img { display: block; width: 100%; height: auto; max-width: 60rem; margin: 0 auto; }
figcaption { margin-top: .5rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; overflow-x:
  auto;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0 0 .4rem; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; color: var(--soft); font-size:
  .85rem; }
@media (max-width: 36rem) { body { padding: 1.25rem 1rem 3rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .6rem; } .figures li { flex-basis: 40%; padding: .6rem .8rem; }
  .figures li:first-child { flex-basis: 100%; } img { min-width: 36rem; } table { font-size: .85rem; }
  th, td { padding: .35rem .4rem; } td:first-child { white-space: normal; } td.bar { min-width: 4rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #ccc; --ground: #fff; --card: #fff;
  --accent: #1d4f91;
  --shade: 53 102 168; --warn: #8a4b08; --warn-ground: #fff; --warn-line: #999; }
  body { max-width: none; padding: 0; font-size: 10pt; } figure, table, pre, .figures li { break-inside: avoid; }
  h2, h3 { break-after: avoid; } pre { white-space: pre-wrap; } .wide, figure div { overflow: visible; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""

_TABLE = """\
{% macro shown(table) %}<h2>{{ table.heading }}</h2>
<div class="wide"><table{% if table.bars %} class="bars"{% endif %}>
<thead><tr>{% for column in table.columns %}<th scope="col"{% if loop.index > table.texts %} class="number"{% endif %}>\
{{ column }}</th>{% endfor %}{% if table.bars %}<th></th>{% endif %}</tr></thead>
<tbody>
{% for row in table.rows %}{% set place = loop.index0 %}<tr{% if place in table.strong %} class="strong"{% endif %}>\
{% for cell in row %}{% set number = loop.index0 - table.texts %}\
<td{% if number >= 0 %} class="number{% if table.shades %} shaded" \
style="--share: {{ '%.3f' % table.shades[place][number] }}{% endif %}"{% endif %}>{{ cell }}</td>{% endfor %}\
{% if table.bars %}<td class="bar"><i style="width: {{ '%.1f' % (100 * table.bars[place]) }}%"></i></td>{% endif %}</tr>
{% endfor %}</tbody>
</table></div>
{% if table.notes %}<p class="note">{{ table.notes | join(" ") }}</p>
{% endif %}{% endmacro %}"""

TEMPLATE = (
    _TABLE
    + """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
"""
    + _STYLE
    + """\
</style>
</head>
<body>
<header>
<p class="kind">{{ page.kind }}</p>
<h1>{{ page.title }}</h1>
{% if page.setting %}<p class="setting">{{ page.setting }}</p>
{% endif %}{% if page.figures %}<ul class="figures">
{% for figure, meaning in page.figures %}<li><b>{{ figure }}</b> <span>{{ meaning }}</span></li>
{% endfor %}</ul>
{% endif %}</header>
{% if page.warnings %}<h2>Warnings and notes</h2>
<ul class="warnings">
{% for warning in page.warnings %}<li>{{ warning }}</li>
{% endfor %}</ul>
{% endif %}{% for table in page.tables[:1] %}{{ shown(table) }}{% endfor %}\
{% if page.plots %}<h2>Plots</h2>
{% for plot in page.plots %}<figure><div><img alt="{{ plot.name }}" src="data:image/png;base64,{{ plot.image }}"></div>
{% if plot.caption %}<figcaption>{{ plot.caption }}</figcaption>
{% endif %}</figure>
{% endfor %}{% endif %}{% for table in page.tables[1:] %}{{ shown(table) }}{% endfor %}\
{% if page.facts %}<h2>What ran</h2>
<dl>
{% for name, value in page.facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% endif %}{% if page.code %}<h2>Load the result</h2>
<p>After <code>pip install oneshot-fl</code>, in the run's folder:</p>
<pre>{{ page.code }}</pre>
{% endif %}{% if page.commands %}<h2>Try next</h2>
{% for purpose, command in page.commands %}<h3>{{ purpose }}</h3>
<pre class="command">{{ command }}</pre>
{% endfor %}{% endif %}<footer>Made by oneshot-fl. This file holds all of it: no network, no other file.</footer>
</body>
</html>
"""
)


PAGE_FILE = "report.html"
# Below a plot: what it shows, for readers who have not seen one before.
CAPTIONS = {
    **dict.fromkeys(HEADLINES, "Every model on the same examples; a line is a 95 % interval."),
    "labels": "Who held which classes: the training examples of each client, by class.",
    "server_curve": "The score while the server works. Held-out examples choose nothing: the last epoch is the result.",
    "clients": "What each client gains on its own examples: from its own model to the result.",
    "confusion": "How many examples of each true class the result takes for which class.",
    "recall": "The share of each class that the result finds, with its 95 % interval.",
    "reliability": "How often the result is right where it is how confident; a calibrated model lies on the line.",
    "communication": "The score over what a client sent and received.",
    "client_weights": "How much each client's model counts in the resulting ensemble.",
    "choice": "How the penalty of the head was chosen.",
    "synthetic_images": "Images that the server made for training; none is a client's.",
    "gatekeeper": "How far each upload is from the others, by measure. Far values make an upload suspect.",
    "comparison": "Mean score per method; a whisker is one sample standard deviation, a dot a single result.",
    "cost": "The score over the CPU time of the server stage.",
    "learning_curves": "The score round by round: the mean over the seeds, in a band of one sample standard deviation.",
}


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
        setting: The line below it: data, split, clients and seed.
        figures: Main figures with their meaning, the first one large.
        code: Code that loads the result; empty for none.
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
    # Names of files and classes may be no UTF-8.
    atomic_write(path, _template().render(page=page).encode(errors="backslashreplace"))


@cache
def _template() -> Template:
    from jinja2 import Environment  # torch needs it, a run without a page does not

    return Environment(autoescape=True).from_string(TEMPLATE)


def report_folder(out: Path | None, facts: str) -> Path | None:
    """Return the folder that ``--out`` names for a report, new or with the facts file of an earlier one.

    Raises:
        StoreError: The folder holds something else.
    """
    if out is None:
        return None
    folder = expand_user(out).absolute()
    if folder.exists() and not (folder.is_dir() and ((folder / facts).exists() or not any(folder.iterdir()))):
        raise StoreError(f"{folder}: holds no {facts}; --out must be a new folder, or one with {facts}")
    return folder


def plots_of(folder: Path, names: Sequence[str]) -> list[Plot]:
    """Return the plots of a folder, given their files; empty names are left out."""
    files = [folder / name for name in names if name]
    return [
        Plot(file.stem.replace("_", " "), base64.b64encode(file.read_bytes()).decode(), CAPTIONS.get(file.stem, ""))
        for file in files
    ]


def software_facts(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts on the software of a run, given its run.json: the commit and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())
    return known_facts({"commit": info.get("commit", ""), "versions": versions})


def known_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return facts as texts, without the empty ones."""
    return [(name, str(value)) for name, value in facts.items() if value not in ("", None)]
