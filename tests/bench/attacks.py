"""What each attack costs each method, with and without the gatekeeper: ``python tests/bench/attacks.py``.

Five clients on digits, of whom the first attacks. Uploads are trained once per seed and attack with the client app's
own functions, in this process; every method then runs on them as a replay, with the settings of ``conf/short.toml``.
Every cell is a JSON file in ``$ATTACKS_DIR`` (else ``./attacks``), so that a measurement that was cut off goes on.
Fewer: ``ATTACKS_KINDS=none,scale ATTACKS_METHODS=fedavg,dense ATTACKS_SEEDS=0,1``. Other clients, in a folder of their
own: ``ATTACKS_SETTINGS="data.alpha=0.1"``. FENS, whose aggregator its clients
would train, is given a static form, the weighted mean.

Tally, with the label counts that clients upload and, as ``tally-silent``, with those that it reads off their models,
has defences of its own (:data:`DEFENCES`): ``ATTACKS_METHODS=tally,tally-silent``, fewer by
``ATTACKS_DEFENCES=off,cap``. Its table has the student's accuracy and the ensemble's; the row ``none`` is what a
defence costs honest clients.
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
from safetensors.torch import load_file

from client_app.node import Asked, Node
from client_app.told_counts import told_counts
from client_app.work import trained_model
from fl_app.attacks import KINDS
from fl_app.config import AppConfig
from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from server_app.settings.read import default_settings, known_options
from server_app.settings.text import merge_settings
from strategies.core.errors import OneShotError
from strategies.core.facts import UploadFacts
from strategies.core.options import Scalar
from strategies.run.files import read_json, write_json
from strategies.run.journal import duration
from strategies.run.run_folder import RunFolder

METHODS = (
    "fedavg",
    "fedavg-merged",
    "fedens",
    "dw-fedens",
    "label-count-ensemble",
    "dense",
    "co-boosting",
    "f-dafl",
    "fens",
)
CLIENTS, ATTACKER, SHAPE = 5, "client-000", (1, 16, 16)
TALLY = ("tally", "tally-silent")
# Name -> method, and the settings that make it another.
VARIANTS: dict[str, tuple[str, dict[str, Scalar]]] = {
    "tally-silent": ("tally", {"tally.counts": "noise-rows"}),
    "fedavg-merged": ("fedavg", {"fedavg.linear": "merged"}),
    "fens": ("fens", {"fens.aggregator": "weighted"}),
}
DEFENCES: dict[str, dict[str, Scalar]] = {
    "off": {},
    "exclude": {"gatekeeper.policy": "exclude"},
    "cap": {"tally.cap-examples": True},
    "tempered": {"tally.counts": "tempered"},
    "agreement": {"tally.agreement": 0.3},
    "all": {"tally.cap-examples": True, "tally.counts": "tempered", "tally.agreement": 0.3},
}
SHORT = Path(__file__).resolve().parents[2] / "conf" / "short.toml"


@dataclass(frozen=True)
class Cell:
    """One method on the uploads of one attack, with one seed and one defence."""

    attack: str
    seed: int
    method: str
    defence: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.attack}-{self.seed}-{self.method}-{self.defence}"

    @property
    def settings(self) -> dict[str, Scalar]:
        """The settings that it adds to ``conf/short.toml``."""
        return {**DEFENCES[self.defence], **VARIANTS.get(self.method, ("", {}))[1]}


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
            counts = told_counts(trained.label_counts, app.client)
            run.round(1).accept(UploadFacts(node.client, trained.architecture, trained.num_examples, counts), state)
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
    began = time.monotonic()
    method = VARIANTS.get(cell.method, (cell.method, {}))[0]
    result = replay_run(Request(run, method, {**short, **cell.settings}, folder=target), log=lambda _: None)
    found = {
        "attack": cell.attack,
        "seed": cell.seed,
        "method": cell.method,
        "defence": cell.defence,
        "accuracy": result["accuracy"],
        "ensemble": next((row["accuracy"] for row in result["table"] if row["name"] == "Tally ensemble"), None),
        "left_out": left_out(target) if method == "tally" else [],
        "success": result.get("attack", {}).get("success"),
        "quarantined": result.get("gatekeeper", {}).get("quarantined", []),
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(kept, found)
    shutil.rmtree(target)
    return found


def left_out(folder: Path) -> list[str]:
    """Return the members of a replay's ensemble that have no weight in its opinion pool."""
    members = read_json(folder / "ensemble" / "ensemble.json")["members"]
    weights = load_file(folder / "ensemble" / "combiner.safetensors")["weights"].tolist()
    return [member["client"] for member, weight in zip(members, weights, strict=True) if not weight]


def defences_of(method: str) -> list[str]:
    """Return the defences that change anything in a method."""
    known = list(DEFENCES) if method in TALLY else ["off", "exclude"]
    silent = ("tempered", "all") if method == "tally-silent" else ()
    return [name for name in chosen("ATTACKS_DEFENCES", known) if name in known and name not in silent]


def chosen(variable: str, allowed: Sequence[str]) -> list[str]:
    """Return the comma-separated words of an environment variable, or all possible ones if it is unset."""
    return [word for word in os.environ.get(variable, ",".join(allowed)).split(",") if word]


def attacks() -> None:
    """Measure every cell that has no file, and print the table."""
    folder = Path(os.environ.get("ATTACKS_DIR", "attacks"))
    folder.mkdir(parents=True, exist_ok=True)
    kinds, methods = chosen("ATTACKS_KINDS", list(KINDS)), chosen("ATTACKS_METHODS", METHODS)
    seeds = [int(word) for word in chosen("ATTACKS_SEEDS", ["0", "1", "2"])]
    pairs = [(method, defence) for method in methods for defence in defences_of(method)]
    cells = [Cell(kind, seed, *pair) for seed, kind, pair in itertools.product(seeds, kinds, pairs)]
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
    others = [method for method in methods if method not in TALLY]
    tables = [table(rows, others)] if others else []
    tables += [tally_table(rows, method) for method in methods if method in TALLY]
    text = "\n\n".join("\n".join(lines) for lines in tables)
    (folder / "table.md").write_text(text + "\n")
    write_json(folder / "attacks.json", rows)
    say(text)


def table(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> list[str]:
    """Return a markdown table: per attack and method the mean accuracy clean, attacked, and with the gatekeeper."""

    def of(key: str, attack: str, method: str, defence: str) -> str:
        return mean([row[key] for row in rows if at(row) == (attack, method, defence)])

    lines = [
        "| attack | method | clean | attacked | with `exclude` | success | success with `exclude` | caught | false |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for attack in dict.fromkeys(row["attack"] for row in rows):
        for method in methods:
            judged = [row for row in rows if at(row) == (attack, method, "exclude")]
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


def tally_table(rows: Sequence[dict[str, Any]], method: str) -> list[str]:
    """Return a markdown table of one way to run Tally: student / ensemble, per attack and defence.

    Behind it, where a defence leaves clients out: how often the attacker, and how many others in all.
    """
    defences = [name for name in DEFENCES if any(row["method"] == method and row["defence"] == name for row in rows)]
    lines = [f"| {method} | {' | '.join(defences)} |", f"|---|{'---|' * len(defences)}"]
    for attack in dict.fromkeys(row["attack"] for row in rows if row["method"] == method):
        cells = []
        for defence in defences:
            mine = [row for row in rows if at(row) == (attack, method, defence)]
            out = [row["left_out"] + row["quarantined"] for row in mine]
            caught = sum(ATTACKER in names for names in out) if attack != "none" else 0
            others = sum(map(len, out)) - caught
            said = f" ({caught} of {len(mine)}; {others})" if any(out) else ""
            cells.append(f"{mean([r['accuracy'] for r in mine])} / {mean([r['ensemble'] for r in mine])}{said}")
        lines.append(f"| {attack} | {' | '.join(cells)} |")
    return lines


def at(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return which attack, method and defence a row is of."""
    return row["attack"], row["method"], row["defence"]


def mean(values: Sequence[float | None]) -> str:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.1f}" if known else "-"


if __name__ == "__main__":
    attacks()
