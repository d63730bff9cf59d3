"""False alarms and misses of the gatekeeper on many seeds: ``python tests/bench/gatekeeper.py --dir FOLDER``.

Five clients on digits with LeNet-5, in the app's own settings. The five honest models of a seed are
trained once. Under each attack the first client is an attacker, and the other four models stay equal to the bit. Each
cohort is a JSON file in the folder, so that a measurement that was cut off goes on. ``--out`` receives all counts.

Intervals are two-sided at 95 %: Clopper and Pearson, The Use of Confidence or Fiducial Limits, Biometrika, 1934.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import say
from scipy.stats import beta

from client_app.node import Asked, Node
from client_app.told_counts import told_counts
from client_app.work import trained_model
from fl_app.attacks import KINDS
from fl_app.config import AppConfig
from fl_app.data import open_split
from fl_app.models import builders
from server_app.settings.read import default_settings
from strategies.core.facts import UploadFacts
from strategies.core.options import Scalar
from strategies.gatekeeper.config import GatekeeperConfig
from strategies.gatekeeper.inspection import inspect
from strategies.method import Job, Normalization, Upload
from strategies.run.files import read_json, write_json

CLIENTS, ATTACKER = 5, "client-000"
# The gatekeeper looks at models; a false number of examples leaves the model honest.
ATTACKS = tuple(kind for kind in KINDS if not kind.startswith("claim"))
WARN = GatekeeperConfig(policy="warn")


def upload_of(number: int, attack: str, alpha: float, seed: int) -> Upload:
    """Return the upload of a client, which trains in this process; the first one attacks."""
    attacker = ATTACKER if attack != "none" else ""
    own: dict[str, Scalar] = {"seed": seed, "data.alpha": alpha, "attack.kind": attack, "attack.clients": attacker}
    app = AppConfig.from_settings({**default_settings(), "device": "cpu", "threads": 1, **own})
    node = Node.of({"partition-id": number, "num-partitions": CLIENTS}, app)
    trained, state = trained_model(app, node, Asked("", 1, seed), {})
    assert trained is not None  # it has data
    counts = told_counts(trained.label_counts, app.client)
    return Upload(UploadFacts(node.client, trained.architecture, trained.num_examples, counts), partial(dict, state))


def job_of(uploads: Sequence[Upload], seed: int) -> Job:
    """Return the job of the server that inspects these uploads."""
    split = open_split("digits", "test")
    return Job(
        tuple(uploads),
        builders(split.num_classes, split.input_shape),
        student="lenet5",
        num_classes=split.num_classes,
        input_shape=split.input_shape,
        normalization=Normalization(*split.normalization),
        config=None,
        seed=seed,
    )


def measure(folder: Path, alphas: Sequence[float], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each cohort; those that have a file are read."""
    rows = []
    for alpha in alphas:
        for seed in seeds:
            honest: list[Upload] = []
            for attack in ATTACKS:
                kept = folder / f"{alpha}-{seed}-{attack}.json"
                if not kept.exists():
                    honest = honest or [upload_of(number, "none", alpha, seed) for number in range(CLIENTS)]
                    first = honest[0] if attack == "none" else upload_of(0, attack, alpha, seed)
                    judged = inspect(job_of([first, *honest[1:]], seed), WARN)
                    write_json(kept, {"alpha": alpha, "seed": seed, "attack": attack, **judged.as_json()})
                rows.append(read_json(kept))
    return rows


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the bounds of a share in %, after Clopper and Pearson."""
    low = beta.ppf(0.025, hits, trials - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, trials - hits) if hits < trials else 1.0
    return 100 * float(low), 100 * float(high)


def counted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the counts of each alpha and attack: missed attackers, and suspected honest clients."""
    found = []
    for alpha, attack in dict.fromkeys((row["alpha"], row["attack"]) for row in rows):
        cohorts = [row for row in rows if (row["alpha"], row["attack"]) == (alpha, attack)]
        # Of a copy and its original either may be named: their weights are equal.
        guilty = set() if attack == "none" else {ATTACKER, "client-001"} if attack == "copy" else {ATTACKER}
        suspects = [[one for one in row["clients"] if one["findings"]] for row in cohorts]
        alarms = [one for own in suspects for one in own if one["client"] not in guilty]
        caught = sum(any(one["client"] in guilty for one in own) for own in suspects)
        honest = len(cohorts) * (CLIENTS - max(1, len(guilty)) if guilty else CLIENTS)
        own = {"alpha": alpha, "attack": attack, "cohorts": len(cohorts), "honest": honest, "alarms": len(alarms)}
        own |= {"alarms %": interval(len(alarms), honest), "kinds": sorted(one["harm"] for one in alarms)}
        missed = len(cohorts) - caught
        found.append(own | ({"missed": missed, "missed %": interval(missed, len(cohorts))} if guilty else {}))
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the counts as a markdown table."""
    lines = ["| alpha | attack | missed | 95 % interval | false alarms | 95 % interval |", "|---|---|---|---|---|---|"]
    for row in found:
        missed = f"{row['missed']} of {row['cohorts']} | {shown(row['missed %'])}" if "missed" in row else "- | -"
        alarms = f"{row['alarms']} of {row['honest']} | {shown(row['alarms %'])}"
        lines.append(f"| {row['alpha']} | {row['attack']} | {missed} | {alarms} |")
    return "\n".join(lines)


def shown(bounds: Sequence[float]) -> str:
    """Return ``0.0 to 2.4 %``."""
    return f"{bounds[0]:.1f} to {bounds[1]:.1f} %"


def main(arguments: argparse.Namespace) -> None:
    """Measure every cohort that has no file, print the table, and write the counts."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    folder = Path(arguments.dir)
    folder.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    began = time.process_time()
    found = counted(measure(folder, arguments.alpha, seeds))
    say(table(found))
    say(f"{time.process_time() - began:.0f} s of CPU time")
    if arguments.out:
        write_json(Path(arguments.out), {"seeds": list(seeds), "torch": torch.__version__, "rows": found})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="folder of the cohorts' files")
    parser.add_argument("--out", default="", help="JSON file of the counts")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.3])
    parser.add_argument("--first", type=int, default=100, help="first seed")
    parser.add_argument("--seeds", type=int, default=30, help="number of seeds")
    main(parser.parse_args())
