"""What each attack costs each method, with and without the gatekeeper: ``python tests/bench/attacks.py``.

Five clients on digits, of whom the first attacks. Uploads are trained once per seed and attack with the client app's
own functions, in this process; every method then runs on them as a replay, with the settings of ``conf/short.toml``.
Every cell is a JSON file in ``$ATTACKS_DIR`` (else ``./attacks``), so that a measurement that was cut off goes on.
Fewer: ``ATTACKS_KINDS=none,scale ATTACKS_METHODS=fedavg,dense ATTACKS_SEEDS=0,1``. Other clients, in a folder of their
own: ``ATTACKS_SETTINGS="data.alpha=0.1"``. FENS, whose aggregator its clients
would train, is given a static form, the weighted mean.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import say

from client_app.node import Asked, Node
from client_app.work import trained_model
from fl_app.attacks import KINDS
from fl_app.config import AppConfig
from server_app.build import default_settings, known_options
from server_app.replay import Request, replay_run
from server_app.settings_text import merge_settings
from strategies.errors import OneShotError
from strategies.journal import duration
from strategies.options import Scalar
from strategies.store.files import read_json, write_json
from strategies.store.run_folder import RunFolder

METHODS = ("fedavg", "fedens", "dw-fedens", "label-count-ensemble", "dense", "co-boosting", "f-dafl", "fens")
CLIENTS, ATTACKER, SHAPE = 5, "client-000", (1, 16, 16)
POLICIES = ("off", "exclude")
SHORT = Path(__file__).resolve().parents[2] / "conf" / "short.toml"


@dataclass(frozen=True)
class Cell:
    """One method on the uploads of one attack, with one seed and one policy of the gatekeeper."""

    attack: str
    seed: int
    method: str
    policy: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.attack}-{self.seed}-{self.method}-{self.policy}"


def made_run(folder: Path, attack: str, seed: int) -> Path:
    """Return a run folder with the uploads of a cohort, trained here unless they are there already."""
    target = folder / f"run-{attack}-{seed}"
    if (target / "complete").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    attackers = ATTACKER if attack != "none" else ""
    own: dict[str, Scalar] = {
        "seed": seed,
        "attack.kind": attack,
        "attack.clients": attackers,
        "device": "cpu",
        "threads": 1,
    }
    kinds = {option.key: option.kind for option in known_options()}
    others = merge_settings([os.environ.get("ATTACKS_SETTINGS", "")], kinds)
    flat = {**default_settings(), "method": "fedavg", "compute": "in-process", **others, **own}
    facts = {"student": flat["model.name"], "num-classes": 10, "input-shape": list(SHAPE), "num-supernodes": CLIENTS}
    app = AppConfig.from_settings(flat)
    with RunFolder.create(target, {"method": "fedavg", "seed": seed, "settings": flat, **facts}) as run:
        for number in range(CLIENTS):
            node = Node.of({"partition-id": number, "num-partitions": CLIENTS}, app)
            trained, state = trained_model(app, node, Asked("", 1, seed), {})
            assert trained is not None  # it has data
            counts = trained.label_counts
            run.round(1).accept(
                node.client, trained.architecture, state, num_examples=trained.num_examples, label_counts=counts
            )
    (target / "complete").touch()
    return target


def measured(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return what a cell ended with: accuracy and attack success in %, and who was quarantined."""
    kept = folder / f"{cell.name}.json"
    if kept.exists():
        found: dict[str, Any] = read_json(kept)
        return found
    run, target = made_run(folder, cell.attack, cell.seed), folder / f"replay-{cell.name}"
    shutil.rmtree(target, ignore_errors=True)
    short = merge_settings([str(SHORT)], {option.key: option.kind for option in known_options()})
    static = {"fens.aggregator": "weighted"} if cell.method == "fens" else {}
    overrides = {**short, **static, "gatekeeper.policy": cell.policy}
    began = time.monotonic()
    result = replay_run(Request(run, cell.method, overrides, folder=target), log=lambda _: None)
    found = {
        "attack": cell.attack,
        "seed": cell.seed,
        "method": cell.method,
        "policy": cell.policy,
        "accuracy": result["accuracy"],
        "success": result.get("attack", {}).get("success"),
        "quarantined": result.get("gatekeeper", {}).get("quarantined", []),
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(kept, found)
    shutil.rmtree(target)
    return found


def chosen(variable: str, allowed: Sequence[str]) -> list[str]:
    """Return the comma-separated words of an environment variable, all that are allowed if it is not set."""
    return [word for word in os.environ.get(variable, ",".join(allowed)).split(",") if word]


def attacks() -> None:
    """Measure every cell that has no file, and print the table."""
    folder = Path(os.environ.get("ATTACKS_DIR", "attacks"))
    folder.mkdir(parents=True, exist_ok=True)
    kinds, methods = chosen("ATTACKS_KINDS", list(KINDS)), chosen("ATTACKS_METHODS", METHODS)
    seeds = [int(word) for word in chosen("ATTACKS_SEEDS", ["0", "1", "2"])]
    cells = [Cell(*each) for each in itertools.product(kinds, seeds, methods, POLICIES)]
    began, fresh, rows = time.monotonic(), 0, []
    open_cells = [cell for cell in cells if not (folder / f"{cell.name}.json").exists()]
    for cell in cells:
        try:
            rows.append(measured(cell, folder))
        except OneShotError as error:
            say(f"{cell.name}: {error}")
            continue
        if cell in open_cells:
            fresh += 1
            left = (time.monotonic() - began) / fresh * (len(open_cells) - fresh)
            say(f"{cell.name}: {rows[-1]['accuracy']:.1f} %, {fresh} of {len(open_cells)}, about {duration(left)} left")
    text = "\n".join(table(rows, methods))
    (folder / "table.md").write_text(text + "\n")
    write_json(folder / "attacks.json", rows)
    say(text)


def table(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[str]:
    """Return a markdown table: per attack and method the mean accuracy clean, attacked, and with the gatekeeper."""

    def of(key: str, attack: str, method: str, policy: str) -> str:
        values = [row[key] for row in rows if (row["attack"], row["method"], row["policy"]) == (attack, method, policy)]
        known = [value for value in values if value is not None]
        return f"{statistics.fmean(known):.1f}" if known else "-"

    lines = [
        "| attack | method | clean | attacked | with `exclude` | success | success with `exclude` | caught | false |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for attack in dict.fromkeys(row["attack"] for row in rows):
        for method in methods:
            judged = [r for r in rows if (r["attack"], r["method"], r["policy"]) == (attack, method, "exclude")]
            # Of a copy it matters that one of the two is left out, not which.
            guilty = (ATTACKER,) if attack != "copy" else (ATTACKER, "client-001")
            caught = sum(any(name in guilty for name in r["quarantined"]) for r in judged) if attack != "none" else 0
            false = sum(name not in guilty or attack == "none" for r in judged for name in r["quarantined"])
            cells = [
                of("accuracy", "none", method, "off"),
                of("accuracy", attack, method, "off"),
                of("accuracy", attack, method, "exclude"),
                of("success", attack, method, "off"),
                of("success", attack, method, "exclude"),
                f"{caught} of {len(judged)}" if attack != "none" else "-",
                str(false),
            ]
            lines.append(f"| {attack} | {method} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    attacks()
