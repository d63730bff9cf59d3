"""The page of a finished run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.report.client_scores import client_table, confusion_tables
from server_app.report.communication import size_text
from server_app.report.gatekeeping import attack_lines, verdict_lines, verdict_table
from server_app.report.page import Page, known_facts, plots_of, software_facts
from server_app.report.tables import (
    Table,
    best_headline,
    headline,
    headline_cells,
    places_of,
    privacy_lines,
    refusal_lines,
    scale_of,
    scored_on,
    setting_line,
    titled,
    unit_of,
    unscored_lines,
    worded,
)
from server_app.settings.catalogue import to_toml
from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings, scaled_line
from strategies.core.facts import HEADLINES
from strategies.core.stage_options import NONE, RIDGE
from strategies.run.journal import duration
from strategies.run.run_folder import RunFolder
from strategies.run.stage import last_round

CLASSES_MOST = 20  # columns of the table of classes; more are in the plot alone
# Methods to try next, and what speaks for each: of the models' answers, of sums, and of weights.
_TRY_NEXT = {
    "fedens": "all models answer, and no weights are merged",
    "tally": "one model that learns from all of them",
    "dense": "one model that learns from their mean answer",
    "ridge": "the head is the same however the examples are divided",
    "lda": "the head is the same however the examples are divided",
    "fedov": "each model says how sure it is",
}
_TRY_MERGES = {
    "fedavg": "the plain average, to compare with",
    "ties": "keeps large changes, where an average cancels those of opposite signs",
    "tsv": "adds up the clients' changes, where each learned another task",
}
_REPLAYS_MOST = 3
_PLACES = ("run-dir", "resume", "uploads", "forget", "method", "seed")


def run_page(
    folder: RunFolder, result: Mapping[str, Any], code: str, fitting: Sequence[str], *, solvable: bool = False
) -> Page:
    """Return the page of a finished run.

    Args:
        fitting: The methods that take its uploads.
        solvable: Whether sums can solve the last layer of its student.
    """
    info, method = folder.info, CHOICES[result["method"]]
    settings = info.get("settings", {})
    return Page(
        kind="Replay" if "replay-of" in info else "Run",
        title=f"{method.title} on {settings.get('data.name', 'uploads')}",
        setting=run_setting(info, result),
        figures=_figures(result),
        facts=_facts(info, settings, result),
        warnings=_warnings(result),
        tables=[
            *([_results(result)] if result["table"] else []),
            *_clients(result),
            *_scores(result),
            *_classes(folder, result.get("classes", ())),
            *_bytes(result),
            *verdict_table(result.get("gatekeeper", {})),
        ],
        plots=plots_of(folder.path / "report", result["plots"]),
        code=code,
        commands=_commands(info, settings, result, fitting, solvable=solvable),
    )


def run_setting(info: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the line below the titles of a run: data, split, clients and seed."""
    clients = info.get("num-supernodes") or result["uploads"]
    return setting_line([info.get("settings", {})], [clients], [result["seed"]])


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    metric = result.get("metric", "accuracy")
    found = [headline(row, metric) for row in result["table"] if row["kind"] == "client"]
    known = [value for value in found if value is not None]
    alone = (min if metric == "log-loss" else max)(known, default=None) if metric in HEADLINES else None
    seconds = result["seconds"]
    unit = f" {unit_of(metric)}".rstrip()
    value, interval = headline_cells({"accuracy": result["accuracy"], "scores": result.get("scores", {})}, metric)
    within = "" if interval == "-" else f", 95 % within {interval}"
    figures = [(f"{value}{unit}", f"{worded(metric)} on {scored_on(result)}{within}")] if result["table"] else []
    figures += [] if alone is None else [(f"{alone:.{places_of(metric)}f}{unit}", "best client alone")]
    figures += [(str(result["uploads"]), f"uploads, {result['refused']} refused")] if result["uploads"] else []
    figures += [(size_text(result["mib_up_per_client"]), "sent per client")]
    return [*figures, (duration(seconds.get("server", 0.0)), "server stage")]


def _facts(info: Mapping[str, Any], settings: Mapping[str, Any], result: Mapping[str, Any]) -> list[tuple[str, str]]:
    models = settings.get("model.per-client") or settings.get("model.name", "")
    spent = ", ".join(f"{phase} {duration(value)}" for phase, value in result["seconds"].items())
    own = {
        "clients' models": models, "student": settings.get("model.student") or info.get("student", ""),
        "changed settings": _changed(settings), "best epoch": _best(result), "time": spent,
        "begun": info.get("created", "")[:19].replace("T", " "), "folder": result["run_dir"],
        "replay of": info.get("replay-of", ""), "weights (sha256)": result["weights_sha256"],
    }  # fmt: skip
    return [*known_facts(own), *software_facts(info)]


def _best(result: Mapping[str, Any]) -> str:
    metric = result.get("metric", "accuracy")
    best, last = (
        None if score is None else f"{score:.{places_of(metric)}f} {unit_of(metric)}".rstrip()
        for score in (best_headline(result, metric), headline(result, metric))
    )
    return "" if best in (None, last) else f"{best}, chosen on the held-out examples themselves"


def _changed(settings: Mapping[str, Any]) -> str:
    """Return the settings that differ from the app's defaults, as ``key=value`` pairs."""
    defaults = default_settings()
    changed = [key for key, value in settings.items() if key not in _PLACES and defaults.get(key, value) != value]
    return " ".join(f"{key}={to_toml(settings[key])}" for key in changed)


def _warnings(result: Mapping[str, Any]) -> list[str]:
    scaled = [f"scaled: {scaled_line(result['scaled'])}"] if "scaled" in result else []
    refused = [f"refused: {line}" for line in refusal_lines(result["refusals"])]
    own = attack_lines(result.get("attack", {})) + privacy_lines(result.get("privacy", {}))
    return [*unscored_lines(result), *scaled, *refused, *own, *verdict_lines(result.get("gatekeeper", {}))]


def _results(result: Mapping[str, Any]) -> Table:
    table, metric = result["table"], result.get("metric", "accuracy")
    rows = [(row["name"], row["kind"], *reversed(headline_cells(row, metric))) for row in table]
    bars = [min(1.0, (headline(row, metric) or 0.0) / scale_of(metric)) for row in table if metric in HEADLINES]
    return Table(
        f"{worded(metric)[0].upper()}{worded(metric)[1:]} on {scored_on(result)}",
        ("model", "kind", "95 % interval", unit_of(metric) or metric), rows, texts=2, bars=bars,
        strong=frozenset({len(rows) - 1}),
    )  # fmt: skip


def _clients(result: Mapping[str, Any]) -> list[Table]:
    """Return the tables of the scores on the clients' own examples; none where none were asked."""
    if (facts := result.get("evaluation")) is None:
        return []
    return [*client_table(facts), *confusion_tables(facts, result.get("classes", ()), CLASSES_MOST)]


def _scores(result: Mapping[str, Any]) -> list[Table]:
    """Return the table of all scores of the result, and that of its classes; none where only its accuracy is known."""
    scores, details, found = result.get("scores", {}), result.get("details", {}), []
    row = {"accuracy": result["accuracy"], "scores": scores}
    if len(scores) > 1:
        rows = [(titled(name), *headline_cells(row, name)) for name in scores]
        notes = [f"{note[0].upper()}{note[1:]}." for note in details.get("notes", ())]
        if errors := details.get("calibration-error"):
            rows.append(("calibration error", f"{errors['value']:.3f}", "-"))
            notes.append(f"A calibrated model would show a calibration error of {errors['calibrated']:.3f} here.")
        found.append(Table("Scores of the result", ("score", "value", "95 % interval"), rows, notes=notes))
    if 0 < len(classes := details.get("classes", ())) <= CLASSES_MOST:
        cells = [[each[key] for key in ("recall", "precision", "auroc")] for each in classes]
        shown = [[("-" if score is None else f"{100 * score['value']:.1f} ({100 * score['low']:.0f} to "
                   f"{100 * score['high']:.0f})") for score in scores] for scores in cells]  # fmt: skip
        rows = [(each["class"], str(each["examples"]), *texts) for each, texts in zip(classes, shown, strict=True)]
        columns = ("class", "examples", "recall, %", "precision, %", "AUROC, %")
        found.append(Table("Every class", columns, rows, notes=["In brackets 95 % intervals."]))
    return found


def _classes(folder: RunFolder, names: Sequence[str]) -> list[Table]:
    """Return the table of the clients' examples per class; none if no client reported them."""
    records = last_round(folder).records()
    counts = {record.client: record.facts.label_counts for record in records if record.facts.label_counts}
    classes = max((len(own) for own in counts.values()), default=0)
    if not 0 < classes <= CLASSES_MOST:
        return []
    clients = sorted(counts)
    rows = [(client, *map(str, counts[client]), str(sum(counts[client]))) for client in clients]
    largest = max(1, *(max(own) for own in counts.values()))
    shades = [[*(count / largest for count in counts[client]), 0.0] for client in clients]
    columns = ("client", *(names or map(str, range(classes))), "all")
    return [Table("Who held which classes", columns, rows, shades=shades,
                  notes=["Training examples per class, as the clients reported them."])]  # fmt: skip


def _bytes(result: Mapping[str, Any]) -> list[Table]:
    """Return the table of what moved per phase; none if it is unknown."""
    cost = result.get("communication")
    if cost is None:
        return []
    keys = ("mib_up_per_client", "mib_down_per_client", "mib_up", "mib_down")
    phases = [*cost["phases"].items(), *([("all", cost["total"])] if len(cost["phases"]) > 1 else [])]
    rows = [(phase, *(size_text(moved[key]) for key in keys)) for phase, moved in phases]
    columns = ("phase", "up per client", "down per client", "up in total", "down in total")
    counted = {
        "source": "The uploads were sent in another run.",
        "sizes": "The uploads count by the size of their files.",
    }
    return [Table("What moved", columns, rows, notes=[counted[cost["counted"]]] if cost["counted"] in counted else [])]


def _may_send_sums(settings: Mapping[str, Any]) -> bool:
    """Return whether a run without 'finish' may have 'finish=ridge', for which clients send sums."""
    counts = settings.get("client.share-label-counts", True), settings.get("client.label-counts-as")
    noise = settings.get("privacy.epsilon")
    return bool(settings.get("finish") == NONE and not noise and counts[0] and counts[1] != "presence")


def _commands(
    info: Mapping[str, Any],
    settings: Mapping[str, Any],
    result: Mapping[str, Any],
    fitting: Sequence[str],
    *,
    solvable: bool,
) -> list[tuple[str, str]]:
    """Return what to try next, each with a reason; only commands that the uploads of this run permit."""
    source, method = shlex.quote(info.get("replay-of", result["run_dir"])), result["method"]
    merges = (chosen := CHOICES[method].method) is not None and chosen.any_model
    reasons = {**(_TRY_MERGES if merges else {}), **_TRY_NEXT}
    others = [name for name in reasons if name != method and name in fitting]
    found = []
    if result["uploads"] and others:
        named = ",".join([*([method] if method in fitting else []), *others])
        if result["table"]:
            found.append(("Other methods on the same uploads", f"oneshot compare {source} --methods {named}"))
        for name in others[:_REPLAYS_MOST]:
            title = f"{CHOICES[name].title}: {reasons[name]}"
            found.append((title, f"oneshot replay {source} --method {name}"))
    elif not result["uploads"]:
        found.append(("How soon it reached an accuracy", f"oneshot rounds {source}"))
    if settings and not info.get("imported-from") and not settings.get("uploads"):
        again = [("The same with another seed", result["seed"] + 1, settings)]
        if merges and solvable and _may_send_sums(settings):
            why = "A last layer from the clients' sums: merged ones are poor where labels are skewed"
            again.append((why, result["seed"], {**settings, "finish": RIDGE}))
        clients = ["--clients", str(info["num-supernodes"])] if info.get("num-supernodes") else []
        for title, seed, own in again:
            changed = ["--set", text] if (text := _changed(own)) else []
            words = ["oneshot", "run", "--method", method, "--seed", str(seed), *clients, *changed]
            found.append((title, shlex.join(words)))
    return [*found, ("The runs of this folder", f"oneshot list {shlex.quote(str(Path(result['run_dir']).parent))}")]
