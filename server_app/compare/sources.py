"""The runs of a comparison: whether they can be compared, which hold uploads, and their own results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.compare.cell import common_facts
from server_app.report.communication import curve_of, is_own_row
from server_app.settings.choices import CHOICES, options_of
from server_app.settings.read import default_settings, known_settings
from strategies.core.errors import OptionError
from strategies.core.options import Scalar
from strategies.run.run_folder import RunFolder, info_of
from strategies.run.stage import last_round
from strategies.run.traffic import UPLOAD_PHASE
from strategies.scores.exchange import PHASE as EVALUATION

AS_RUN = ", as run"
_HELD_OUT = "data.held-out"
# Settings that determine uploads, scores and schedules, with whole tables of them, and the exceptions in these.
_OF_RESULTS = ("data.", "model.", "client.", "attack.", "privacy.", "scale", "teacher")
_WHERE = ("data.root", "client.state-dir", "client.device")


def data_of(runs: Sequence[Path]) -> str | None:
    """Return the data set of all runs; None for another project's.

    Raises:
        OptionError: The runs cannot be compared, or one is named twice.
        StoreError: A folder is no run folder.
    """
    first, *others = [(run, info_of(run)) for run in runs]
    for run, info in others:
        for what, of in _FACTS.items():
            if of(info) != of(first[1]):
                raise OptionError(
                    f"{run} has {what} {of(info)!r}, {first[0]} has {of(first[1])!r}: all runs must have the same"
                )
    ids = [info["id"] for _, info in (first, *others)]
    if twice := [run for run, own in zip(runs, ids, strict=True) if ids.count(own) > 1]:
        raise OptionError(f"{twice[0]} is named twice: must name each run once")
    return _data_set(first[1])


def _data_set(info: Mapping[str, Any]) -> str | None:
    return info["settings"]["data.name"] if isinstance(info.get("settings"), dict) else None


_FACTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "data set": _data_set,
    "number of classes": lambda info: info.get("num-classes"),
    "input shape": lambda info: info.get("input-shape"),
}


def differing(runs: Sequence[Path], methods: Sequence[str], given: Collection[str]) -> dict[str, list[Any]]:
    """Return the settings in which the results of runs differ, with the values in the order of the runs.

    A mean over differing runs is not a mean over repetitions.

    Args:
        given: The settings that are the same for all, whatever the runs have.
    """
    stored = [_with_defaults(info_of(run)) for run in runs]
    options = options_of(methods)
    names = {name for settings in stored for name in settings if name.startswith(_OF_RESULTS) or name in options}
    found = {
        name: list(dict.fromkeys(settings.get(name) for settings in stored))
        for name in sorted(names - {*_WHERE, *given})
    }
    return {name: values for name, values in found.items() if len(values) > 1}


def with_uploads(runs: Sequence[Path]) -> list[Path]:
    """Return the runs whose uploads methods can use; a run that holds only its own result has none."""
    own = {facts["run"] for facts in own_results(runs)}
    return [run for run in runs if str(run.absolute()) not in own or _holds_uploads(run)]


def _holds_uploads(run: Path) -> bool:
    with RunFolder.open(run, write=False) as folder:
        return bool(last_round(folder).held())


def own_results(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results that no replay can repeat, of runs whose clients did more than upload once.

    Returns:
        Facts as in :func:`server_app.compare.cell.facts_of`, without those that only a cell measures. Outcomes of one
        name that differ in options of their method have these options in their names.

    Raises:
        StoreError: A file of a run folder is damaged.
    """
    found = [facts for run in runs if (facts := _own_result(run)) is not None]
    # The names of runs in rounds contain their strategy and refiner, so their options are compared among these only.
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for facts in found:
        alike.setdefault(_key(facts), []).append(facts["options"])
    return [_named(facts, alike[_key(facts)]) for facts in found]


def with_rows(runs: Sequence[Path], own: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Return the runs that have a row of the table: by their uploads, or by one of these own results."""
    uploaded, named = with_uploads(runs), {facts["run"] for facts in own}
    return [run for run in runs if run in uploaded or str(run.absolute()) in named]


def scored_alike(
    own: Sequence[Mapping[str, Any]], overrides: Mapping[str, Scalar]
) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Return the own results that were scored on the same held-out examples as cells with these settings.

    Returns:
        The results, and for each other one its name -> why it is left out.
    """
    then = {facts["run"]: _with_defaults(info_of(Path(facts["run"])))[_HELD_OUT] for facts in own}
    other = {run: value for run, value in then.items() if value != overrides.get(_HELD_OUT, value)}
    reasons = {f"{run}{AS_RUN}": f"its own result was scored with {_HELD_OUT}={value}" for run, value in other.items()}
    return [facts for facts in own if facts["run"] not in other], reasons


def _with_defaults(info: Mapping[str, Any]) -> dict[str, Any]:
    return {**default_settings(), **known_settings(info.get("settings") or {})}


def _key(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return facts["method"], *(row["name"] for row in facts["outcomes"])


def _own_result(run: Path) -> dict[str, Any] | None:
    with RunFolder.open(run, write=False) as folder:
        result, info, metrics = folder.result(), folder.info, last_round(folder).metrics()
    cost = (result or {}).get("communication", {})
    if result is None or set(cost.get("phases", ())) <= {UPLOAD_PHASE, EVALUATION}:
        return None
    rows = [row for row in result["table"] if row["kind"] != "client"]
    if not rows:  # a run of another project has no scores
        return None
    own = [dict(row) for row in rows if row is rows[-1] or is_own_row(row["name"], CHOICES[result["method"]])]
    trained = next((row for row in own if row["kind"] == "ensemble"), own[-1])
    trained["curve"] = [list(place) for place in curve_of(metrics, cost, result.get("metric", "accuracy"))]
    settings = info.get("settings", {})
    # A method that fine-tunes every round's model has its own options in the run.
    refiner = settings.get("iterative.refiner", "none")
    options = options_of(name for name in (result["method"], refiner) if name in CHOICES)
    return {
        **common_facts(run, result, info),
        **{key: result[key] for key in ("method", "seed", "run_dir")},
        "outcomes": own,
        "server_s": result["seconds"].get("server", 0.0),
        "mib_per_client": cost["total"]["mib_up_per_client"] + cost["total"]["mib_down_per_client"],
        "options": {key: value for key, value in settings.items() if key in options},
    }


def _named(facts: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add a suffix to the outcomes' names: the values in which runs of the method differ, and ", as run"."""
    values = facts["options"].items()
    differing = [str(value) for key, value in values if any(other.get(key, value) != value for other in options)]
    suffix = "".join(f", {value}" for value in differing) + AS_RUN
    return {
        **facts,
        "outcomes": [{**row, "name": row["name"] + suffix, "stored": row["name"]} for row in facts["outcomes"]],
    }
