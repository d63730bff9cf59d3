"""FLBoost's input space, loss and rate: ``python tests/bench/flboost_space.py --dir FOLDER --root DATA``.

The federation is that of conf/flboost-short-fmnist.toml over FedAvg, with the settings of the published code but for
four variants: the models' input space is the app's or the release's, and the student's KL is summed over the classes or
averaged. Each variant has four student rates. The rate is chosen on the selection half of the test images, with seed 1,
by the mean of rounds 11 to 20, among all that have a row. The chosen rates run with three seeds, scored on the report
half. Fewer: ``--losses mean --rates 0.1,1.0 --seeds 2,3``.

Each run is a folder, so that a measurement that was cut off goes on. ``--out`` receives the curves, and a trial with a
row there is not run again; tests/bench/feature_tables.py makes the tables of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from measure import keep, place_of, say, stored
from rivals import RESULTS, finish_run

OUT = RESULTS / "flboost_space.json"
CONF = "conf/flboost-short-fmnist.toml"
# The app's values for small models, set back to the release's.
PUBLISHED = (
    "iterative.refiner=flboost flboost.adversarial-weight=1.0 flboost.generator-step=per-client "
    "flboost.generator-steps=1 flboost.ce-form=batch-mean"
)
SPACES, LOSSES, RATES = ("half", "data-set"), ("mean", "sum"), (0.1, 1.0, 0.05, 0.01)
CLIENTS, SEEDS, CHOSEN_WITH, LATE = 100, (1, 2, 3), 1, 10  # LATE: the rounds after it choose


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        space: The models' input space, as ``data.normalization``.
        loss: The student's KL: its "mean" or its "sum" over the classes; empty for FedAvg alone.
        rate: Of the student; 0 for FedAvg alone.
        half: The test images that score.
        seed: Of the partition, the clients in each round, and the training.
    """

    space: str
    loss: str
    rate: float
    half: str
    seed: int

    @property
    def name(self) -> str:
        """Its name in file names."""
        return "-".join(f"{part}" for part in (self.space, self.loss or "fedavg", self.rate, self.half, self.seed))

    @property
    def settings(self) -> str:
        """Its settings beside the file's."""
        own = f"data.normalization={self.space} data.held-out={self.half} seed={self.seed} threads=1"
        if not self.loss:
            return own
        per_class = str(self.loss == "mean").lower()
        return f"{own} {PUBLISHED} flboost.per-class={per_class} flboost.student-lr={self.rate}"


KEY = [field.name for field in fields(Trial)]  # of a row


def choices(losses: Sequence[str], rates: Sequence[float]) -> list[Trial]:
    """Return the trials by which the rates are chosen, the release's space and loss first."""
    return [
        Trial(space, loss, rate, "selection", CHOSEN_WITH)
        for loss, rate, space in product(losses, rates, reversed(SPACES))
    ]


def reports(found: Sequence[dict[str, Any]], losses: Sequence[str], seeds: Sequence[int]) -> list[Trial]:
    """Return the trials that are reported: each variant at the rate that was chosen, and FedAvg alone."""
    chosen = {(space, loss): chosen_rate(found, space, loss) for space, loss in product(SPACES, losses)}
    return [
        Trial(space, loss, chosen.get((space, loss), 0.0), "report", seed)
        for seed, loss, space in product(seeds, ("", *losses), reversed(SPACES))
    ]


def chosen_rate(found: Sequence[dict[str, Any]], space: str, loss: str) -> float:
    """Return the rate that the selection half chooses among the measured ones; 0 if there is none."""
    own = {
        row["rate"]: late(row["curve"])
        for row in found
        if (row["space"], row["loss"], row["half"]) == (space, loss, "selection")
    }
    return max(own, key=lambda rate: own[rate], default=0.0)


def late(curve: Sequence[float]) -> float:
    """Return the mean accuracy, in %, of the rounds after :data:`LATE`."""
    return float(pd.Series(curve[LATE:], dtype=float).mean())


def measured(trial: Trial, folder: Path, root: str) -> dict[str, Any]:
    """Return a trial's row, with the accuracy in % of each round; run it if that is still to do."""
    run = folder / trial.name
    own = trial.settings + (f" data.root='{root}'" if root else "")
    finish_run(run, "--clients", str(CLIENTS), "--run-config", CONF, "--run-config", own, root=root)
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {**asdict(trial), "curve": [row["accuracy"] for row in rounds if "accuracy" in row]}


def main() -> None:
    """Measure the missing trials."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--root", default="", help="folder of the data set")
    parser.add_argument("--out", type=Path, default=OUT, help="receives the rows")
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    words = parser.parse_args()
    losses, seeds = words.losses.split(","), [int(seed) for seed in words.seeds.split(",")]

    def run(trials: Sequence[Trial]) -> None:
        known = {place_of(row, KEY) for row in stored(words.out)}
        for trial in trials:
            if place_of(asdict(trial), KEY) in known:
                continue
            row = measured(trial, words.dir, words.root)
            say(f"{trial.name}: rounds 11 to 20 {late(row['curve']):.1f}, last {row['curve'][-1]}")
            keep(words.out, [row], KEY)

    run(choices(losses, [float(rate) for rate in words.rates.split(",")]))
    run(reports(stored(words.out), losses, seeds))


if __name__ == "__main__":
    main()
