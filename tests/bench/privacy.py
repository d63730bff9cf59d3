"""Accuracy per epsilon on the digits, of clients that train privately: ``python tests/bench/privacy.py``.

Clients and server stage run in this process, by the settings of conf/privacy-digits.toml, with the app's own
functions. Every finished cell is in the file of results, so that a run that was cut off goes on where it was; at the
end the table is printed: mean and sample standard deviation over the seeds, in %.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from measure import say

from client_app.node import Asked, Node
from client_app.work import trained_model
from server_app.settings.build import build_job, held_out
from server_app.settings.held_out import HeldOut
from server_app.settings.read import Settings, known_options, read_settings
from server_app.settings.text import merge_settings
from strategies.combiners.outcomes import load_model
from strategies.core.facts import UploadFacts
from strategies.method import Job, Silent, Upload

CONF = Path(__file__).resolve().parents[2] / "conf" / "privacy-digits.toml"
CLIENTS = 5


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure accuracy per epsilon on the digits.")
    parser.add_argument("--out", type=Path, default=Path("privacy.jsonl"), help="file of results, added to")
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, ...")
    parser.add_argument("--epsilons", default="1,2,4,8,16,0", help="comma-separated; 0 stands for infinity")
    parser.add_argument("--alphas", default="0.3,100", help="of the Dirichlet law; 100 is close to iid")
    parser.add_argument("--methods", default="fedavg,fedens,dense")
    parser.add_argument("--seed-from", type=int, default=0, help="the first seed; tune on others than the table's")
    parser.add_argument("--set", default="", help='further settings, as of --run-config: "client.lr=0.5"')
    return parser.parse_args()


def settings_of(given: argparse.Namespace, method: str, seed: int, epsilon: float, alpha: float) -> Settings:
    """Return the settings of one cell; without privacy, clients train as in the main job."""
    kinds = {option.key: option.kind for option in known_options()}
    private = merge_settings([str(CONF), given.set] if given.set else [str(CONF)], kinds)
    flat = private if epsilon else {}
    cell: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "privacy.epsilon": epsilon,
        "data.alpha": alpha,
        "threads": 1,
    }
    return read_settings({**flat, **cell, "compute": "in-process", "device": "cpu"})


def uploads_of(settings: Settings, place: Path) -> tuple[Upload, ...]:
    """Let every client train, and return what it sends."""
    config, uploads = settings.app, []
    config = replace(config, client=replace(config.client, state_dir=str(place)))
    for partition_id in range(CLIENTS):
        node = Node.of({"partition-id": partition_id, "num-partitions": CLIENTS}, config)
        trained, state = trained_model(config, node, Asked("0" * 32, 1, config.seed), {})
        assert trained is not None
        uploads.append(
            Upload(UploadFacts(node.client, trained.architecture, trained.num_examples), partial(dict, state))
        )
    return tuple(uploads)


def score_of(settings: Settings, uploads: tuple[Upload, ...]) -> float:
    """Return the accuracy of a method on uploads, in %."""
    images, split = held_out(settings)
    job: Job = replace(build_job(settings, split, None), uploads=uploads)
    return HeldOut(images.data, images.normalization).accuracy(load_model(settings.method.fit(job, Silent()), job))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: alpha and method down, epsilon across."""
    epsilons = sorted({row["epsilon"] for row in rows}, key=lambda epsilon: epsilon or float("inf"))
    heads = " | ".join(f"{epsilon:g}" if epsilon else "infinity" for epsilon in epsilons)
    lines = [f"| alpha | method | {heads} |", "|---|---|" + "---|" * len(epsilons)]
    for alpha, method in dict.fromkeys((row["alpha"], row["method"]) for row in rows):
        texts = []
        for epsilon in epsilons:
            where = (alpha, method, epsilon)
            found = [row["accuracy"] for row in rows if (row["alpha"], row["method"], row["epsilon"]) == where]
            spread = f" ± {stdev(found):.1f}" if len(found) > 1 else ""
            texts.append(f"{fmean(found):.1f}{spread}" if found else "")
        lines.append(f"| {alpha:g} | {method} | {' | '.join(texts)} |")
    return lines


def main() -> None:
    """Run every cell that is not in the file yet, and print the table."""
    given = arguments()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    methods = given.methods.split(",")
    for seed in range(given.seed_from, given.seed_from + given.seeds):
        for alpha in map(float, given.alphas.split(",")):
            for epsilon in map(float, given.epsilons.split(",")):
                facts = {"seed": seed, "alpha": alpha, "epsilon": epsilon}
                if any({key: row[key] for key in facts} == facts for row in rows):
                    continue
                with tempfile.TemporaryDirectory() as place:
                    uploads = uploads_of(settings_of(given, methods[0], seed, epsilon, alpha), Path(place))
                # All at once: a second training would not have the same noise.
                scores = {name: score_of(settings_of(given, name, seed, epsilon, alpha), uploads) for name in methods}
                found = [{**facts, "method": name, "accuracy": score} for name, score in scores.items()]
                rows += found
                with given.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
                say(f"{facts}: {scores}")
    for line in table(rows):
        say(line)


if __name__ == "__main__":
    main()
