"""Runs in rounds: what each reached round by round, and which of them differ in nothing but the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from server_app.compare.sources import data_of
from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings
from server_app.settings.settled import FREE_ON_RESUME
from strategies.core.errors import OptionError
from strategies.core.options import Scalar
from strategies.rounds.config import OWN_LR, IterativeConfig
from strategies.run.retired import RETIRED
from strategies.run.run_folder import RunFolder
from strategies.run.stage import kept_round

# Settings that tell two runs of one setting apart, or say where a run works and not what it computes.
NEUTRAL = frozenset({*FREE_ON_RESUME, "seed", "uploads", "device", "threads", "iterative.checkpoint-every"})
# What all strategies of 'iterative' share; its other options are those of one strategy or a few.
SHARED = ("rounds", "fraction", "lr-decay", "evaluate-every")
OF_STRATEGIES: Mapping[str, Sequence[str]] = {
    "server-lr": tuple(OWN_LR),
    "mu": ("fedprox",),
    "dyn-alpha": ("feddyn",),
    "stc-density": ("stc",),
}

Flat = Mapping[str, Scalar]


@dataclass(frozen=True)
class Tested:
    """A round whose model was tested: its number from 1, the accuracy in %, and MiB per client, both ways, so far."""

    number: int
    accuracy: float
    mib: float


@dataclass(frozen=True)
class RoundsRun:
    """A run in rounds, finished or not.

    Attributes:
        path: Its folder.
        seed: Its seed.
        method: What combines and refines its rounds, as people name it.
        shared: Its settings that are not the method's alone.
        own: The other ones, those of its strategy and its refiner.
        tested: At least one round.
        done: Rounds that it has done.
        planned: Rounds that it was to do.
        refinement_s: Mean wall seconds that a round's refinement took; None if nothing was refined.
        arithmetic_s: The part of them that the method itself took, without copies and waiting.
        server_s: Wall seconds of the server in all rounds; None if the run is unfinished or was resumed, for they are
            those of one process.
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

    @property
    def last(self) -> float:
        """The accuracy after the last tested round, in %."""
        return self.tested[-1].accuracy

    @property
    def best(self) -> float:
        """The highest accuracy of all tested rounds, in %."""
        return max(test.accuracy for test in self.tested)

    def first_at(self, target: float) -> Tested | None:
        """Return the first tested round that reaches an accuracy in %; None if none does."""
        return next((test for test in self.tested if test.accuracy >= target), None)


@dataclass(frozen=True)
class Setting:
    """Runs that differ in nothing but the seed.

    Attributes:
        name: The method, and the settings in which it differs from others.
        runs: In the order of their seeds.
    """

    name: str
    runs: tuple[RoundsRun, ...]


def read_runs(paths: Sequence[Path]) -> tuple[str | None, list[RoundsRun]]:
    """Read runs, and return their data set (None: another project's) with them.

    Raises:
        OptionError: One is no run in rounds, one is named twice, or their data sets differ.
        StoreError: One is no run folder, or is damaged.
    """
    return data_of(paths), [_read(path) for path in paths]


def _read(path: Path) -> RoundsRun:
    with RunFolder.open(path, write=False) as folder:
        info, result, metrics = folder.info, folder.result() or {}, folder.round(max(1, kept_round(folder))).metrics()
    rows = [row for row in metrics if "mib_per_client" in row]
    tested = [Tested(row["epoch"], row["accuracy"], row["mib_per_client"]) for row in rows if "accuracy" in row]
    if not tested:
        raise OptionError(
            f"{path} has no accuracy of a round with its clients: must be runs in rounds (method 'iterative', or "
            "another that asks its clients again and again) with at least one tested round"
        )
    name, stored = info["method"], info.get("settings")
    flat = {**RETIRED, **default_settings(), **stored} if isinstance(stored, dict) else {}
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
    )


def _plain_facts(info: Mapping[str, Any]) -> Flat:
    """Return what a run of another project, which has none of the app's settings, says of its strategy and refiner."""
    tables = ("base", *CHOICES)
    facts = {**info.get("config", {}), **{key: info[key] for key in info if key.partition(".")[0] in tables}}
    return {k: v for k, v in facts.items() if isinstance(v, Scalar) and k != "checkpoint-every"}


def _mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = [float(row[key]) for row in rows if key in row]
    return fmean(found) if found else None


def _split(name: str, flat: Flat) -> tuple[str, Flat, Flat]:
    """Return how people name a run's method, the settings that are not its alone, and those that are."""
    told = {key: value for key, value in flat.items() if key not in NEUTRAL and key != "method"}
    shared = {key: value for key, value in told.items() if key.partition(".")[0] not in CHOICES}
    own = {key: value for key, value in told.items() if key.startswith(f"{name}.")}
    if name != "iterative":
        return CHOICES[name].title, shared, own
    strategy, refiner = str(own.pop("iterative.strategy")), str(own.pop("iterative.refiner"))
    shared |= {key: own.pop(key) for key in [f"iterative.{option}" for option in SHARED]}
    used = {key for key in own if strategy in OF_STRATEGIES.get(key.partition(".")[2], (strategy,))}
    told = {key: value for key, value in told.items() if key in used or key.startswith(f"{refiner}.")}
    return IterativeConfig(strategy=strategy, refiner=refiner).label, shared, told


def settings_of(runs: Sequence[RoundsRun]) -> list[Setting]:
    """Return runs as settings, in the order in which these first come.

    A name tells what is not the same in all runs; of options of one strategy or refiner, in all runs of these.

    Raises:
        OptionError: Two runs have the same settings and the same seed, so that one repeats nothing.
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
    return [
        Setting(_name(members[0], runs), tuple(sorted(members, key=lambda run: run.seed)))
        for members in groups.values()
    ]


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
