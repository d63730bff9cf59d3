"""Runs in rounds: the scores of each round, and the settings whose runs differ in the seed only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from server_app.compare.sources import data_of
from server_app.report.communication import tested_rounds
from server_app.settings.choices import CHOICES, options_of
from server_app.settings.read import listed_settings
from server_app.settings.settled import free_on
from strategies.core.errors import OptionError
from strategies.core.options import RESUME, Scalar
from strategies.flower.rounds.config import OWN_LR, IterativeConfig
from strategies.run.run_folder import RunFolder
from strategies.run.stage import last_round
from strategies.scores.values import LOWER_IS_BETTER

# Options that may differ between the runs of one setting: the seed, and options that do not change the computation.
NEUTRAL = free_on(RESUME) | {"seed", "uploads", "device", "threads", "iterative.checkpoint-every"}
# Options that all strategies of 'iterative' share; its other options belong to one strategy or a few.
SHARED = ("rounds", "fraction", "lr-decay", "evaluate-every")
OF_STRATEGIES: Mapping[str, Sequence[str]] = {
    "server-lr": tuple(OWN_LR),
    "mu": ("fedprox",),
    "dyn-alpha": ("feddyn",),
    "stc-density": ("stc",),
    "stc-values": ("stc",),
}

Flat = Mapping[str, Scalar]


@dataclass(frozen=True)
class Tested:
    """A tested round: its number from 1, the score in % or nats, and the MiB per client sent and received so far."""

    number: int
    score: float
    mib: float


@dataclass(frozen=True)
class RoundsRun:
    """A run in rounds, finished or not.

    Attributes:
        shared: Its settings that are not specific to the method.
        own: Its other settings, those of its strategy and its refiner.
        tested: At least one round.
        refinement_s: Mean wall seconds of a round's refinement; None without refinement.
        arithmetic_s: The method's own part of them, without copies and waiting.
        server_s: Wall seconds of the server in all rounds; None for an unfinished or resumed run, because they are
            measured in one process.
        metric: The score.
    """

    path: Path
    seed: int
    method: str
    shared: Flat
    own: Flat
    tested: tuple[Tested, ...]
    done: int
    planned: int
    refinement_s: float | None
    arithmetic_s: float | None
    server_s: float | None
    metric: str

    @property
    def last(self) -> float:
        """The score after the last tested round."""
        return self.tested[-1].score

    @property
    def best(self) -> float:
        """The best score of all tested rounds."""
        return (min if self.metric in LOWER_IS_BETTER else max)(test.score for test in self.tested)

    def first_at(self, target: float) -> Tested | None:
        """Return the first tested round that reaches a score; None if none does."""
        lower = self.metric in LOWER_IS_BETTER
        return next((each for each in self.tested if each.score == target or (each.score < target) == lower), None)


def read_runs(paths: Sequence[Path]) -> tuple[str | None, list[RoundsRun]]:
    """Return the data set of some runs (None: another project's), and the runs.

    Their scores are the headline score that all of them have recorded, else the accuracy.

    Raises:
        OptionError: A run is not in rounds, a run is named twice, or the data sets differ.
        StoreError: A folder is no run folder, or is damaged.
    """
    data, metrics = data_of(paths), {_recorded(path) for path in paths}
    metric = metrics.pop() if len(metrics) == 1 else "accuracy"
    return data, [_read(path, metric) for path in paths]


def _recorded(path: Path) -> str:
    """Return the headline score of a run's rounds; the accuracy for one of an earlier version, which has no other."""
    with RunFolder.open(path, write=False) as folder:
        metric = str((folder.info.get("settings") or {}).get("metric", "accuracy"))
        return metric if tested_rounds(last_round(folder).metrics(), metric) else "accuracy"


def _read(path: Path, metric: str) -> RoundsRun:
    with RunFolder.open(path, write=False) as folder:
        info, result, metrics = folder.info, folder.result() or {}, last_round(folder).metrics()
    rows = [row for row in metrics if "mib_per_client" in row]
    tested = [Tested(row["epoch"], row[metric], row["mib_per_client"]) for row in tested_rounds(rows, metric)]
    if not tested:
        raise OptionError(
            f"{path} has no accuracy of a round with its clients: must be a run with at least one tested round, of "
            "method 'iterative' or another that trains its clients in rounds"
        )
    name, stored = info["method"], info.get("settings")
    flat = listed_settings(stored) if isinstance(stored, dict) else {}
    method, shared, own = _split(name, flat) if flat else (CHOICES[name].title, {}, _plain_facts(info))
    done = int(rows[-1]["epoch"])
    whole = result.get("status") == "finished" and not result.get("resumed_at")
    return RoundsRun(
        path.absolute(),
        info["seed"],
        method,
        {**shared, "clients": info.get("num-supernodes") or 0},
        own,
        tuple(tested),
        done,
        int(flat.get(f"{name}.rounds", own.get("rounds", done))),
        _mean_of(rows, "refinement_s"),
        _mean_of(rows, "arithmetic_s"),
        result["seconds"].get("server") if whole else None,
        metric,
    )


def _plain_facts(info: Mapping[str, Any]) -> Flat:
    """Return the stored facts on strategy and refiner of another project's run, which lacks the app's settings."""
    tables = ("base", *CHOICES)
    facts = {**info.get("config", {}), **{key: info[key] for key in info if key.partition(".")[0] in tables}}
    return {k: v for k, v in facts.items() if isinstance(v, Scalar) and k != "checkpoint-every"}


def _mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [float(row[key]) for row in rows if key in row]
    return fmean(found) if found else None


def _split(name: str, flat: Flat) -> tuple[str, Flat, Flat]:
    """Return the title of a run's method, the settings that it shares with other methods, and its own settings."""
    compared = {key: value for key, value in flat.items() if key not in NEUTRAL and key != "method"}
    options = options_of(CHOICES)
    shared = {key: value for key, value in compared.items() if key not in options}
    own = {key: value for key, value in compared.items() if key in CHOICES[name].keys}
    if name != "iterative":
        return CHOICES[name].title, shared, own
    strategy, refiner = str(own.pop("iterative.strategy")), str(own.pop("iterative.refiner"))
    shared |= {key: own.pop(key) for key in [f"iterative.{option}" for option in SHARED]}
    used = {key for key in own if strategy in OF_STRATEGIES.get(key.partition(".")[2], (strategy,))}
    refining = options_of([refiner] if refiner in CHOICES else [])
    own = {key: value for key, value in compared.items() if key in used | refining}
    return IterativeConfig(strategy=strategy, refiner=refiner).label, shared, own


def settings_of(runs: Sequence[RoundsRun]) -> list[tuple[str, tuple[RoundsRun, ...]]]:
    """Group runs that differ in the seed only: the name of each setting, and its runs sorted by seed.

    A setting's name lists the options that differ between runs. An option of one strategy or refiner is compared among
    its own runs only.

    Raises:
        OptionError: Two runs have the same settings and the same seed.
    """
    groups: dict[Any, list[RoundsRun]] = {}
    for run in runs:
        key = (run.method, frozenset(run.shared.items()), frozenset(run.own.items()))
        for other in groups.setdefault(key, []):
            if other.seed == run.seed:
                raise OptionError(
                    f"{other.path} and {run.path} have the same settings and the same seed, {run.seed}: must be one "
                    "run per setting and seed"
                )
        groups[key].append(run)
    return [(_name(group[0], runs), tuple(sorted(group, key=lambda run: run.seed))) for group in groups.values()]


def _name(run: RoundsRun, runs: Sequence[RoundsRun]) -> str:
    alike = [other.own for other in runs if other.method == run.method]
    differing = _differing(run.shared, [other.shared for other in runs]) + _differing(run.own, alike)
    return ", ".join([run.method, *differing])


def _differing(mine: Flat, others: Sequence[Flat]) -> list[str]:
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in mine.items()
        if any(other.get(key, value) != value for other in others)
    ]
