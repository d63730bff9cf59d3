"""Measures what each of four hospitals gains by joining, scored on its own patients: Fed-Heart-Disease.

    PYTHONPATH=tests/bench:. python tests/bench/heart_disease.py --root DATA --out docs/results/heart_disease.json

Every complete row of the four centres takes part, and each centre keeps 34 % of each diagnosis from training. The
server has no example. A draw shuffles the rows of each centre, and so chooses other test patients. A second call goes
on with what is missing. ``docs/lab/heart-disease.svg`` shows the gain of FedAvg, drawn anew by every call.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from feature_tables import DOCS
from matplotlib import rc_context
from measure import say
from run_tables import CENTRES as NAMES
from tally_plot import STYLE
from torch import nn
from typer.testing import CliRunner

from fl_app.data.tables import CENTRES, CLASSES, FEATURES, read_centre, standardized
from fl_app.models.backbones import Backbone
from server_app.cli import cli
from server_app.report.client_scores import plot_clients
from server_app.settings.text import toml_table
from strategies.core.seeds import derive_seed
from strategies.run.files import write_json
from strategies.scores.exchange import OWN, RESULT

DRAWS = 3
SCORES = ("accuracy", "balanced-accuracy", "auroc")
COMMON: dict[str, Any] = {
    "metric": "auroc", "data.name": "csv", "data.label": "diagnosis", "data.client": "centre", "device": "cpu",
    "data.partition": "domains", "evaluate.on": "clients", "client.test-share": 0.34,
}  # fmt: skip
# As conf/fens-table14-heart.toml has it.
TRAINED: dict[str, Any] = {
    "model.name": "logistic", "client.epochs": 50, "client.batch-size": 4, "client.optimizer": "adam",
    "client.lr": 0.001, "client.clip": 0.0, "client.init": "different",
}  # fmt: skip
FENS: dict[str, Any] = {
    "preset": "published", "fens.aggregator": "per-class", "fens.rounds": 50, "fens.local-steps": 5,
    "fens.batch-size": 2, "fens.client-lr": 0.1, "fens.server-lr": 0.1, "fens.holdout-per-class": True,
}  # fmt: skip
SUMS: dict[str, Any] = {"features.backbone": "heart_disease:columns"}
LONG = " (500 epochs)"
CONVERGED: dict[str, Any] = {**TRAINED, "client.epochs": 500}
MODELS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedens": {"method": "fedens"},
    "fens": {"method": "fens", **FENS},
    "label-count-ensemble": {"method": "label-count-ensemble"},
}
WAYS: dict[str, dict[str, Any]] = {
    **{way: {**own, **TRAINED} for way, own in MODELS.items()},
    **{f"{way}{LONG}": {**MODELS[way], **CONVERGED} for way in ("fedavg", "fedens")},
    "ridge": {"method": "ridge", **SUMS},
    "lda": {"method": "lda", **SUMS},
    "fedpft": {"method": "fedpft", **SUMS},
}


class WithConstant(nn.Module):
    """A row's columns and a constant, which keeps the row's length known when features are scaled to norm 1."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [B, F, 1, 1] to [B, F + 1]; the constant is as long as a standardised row."""
        return nn.functional.pad(rows.flatten(1), (0, 1), value=FEATURES**0.5)


def columns() -> Backbone:
    """Return the backbone of this page's sums."""
    return Backbone("columns and a constant", FEATURES + 1, WithConstant, columns=FEATURES)


def write_tables(source: Path, folder: Path, draw: int) -> None:
    """Write all rows, each standardised by its centre's, in the draw's order, and the schema."""
    import pandas as pd

    names = [f"x{number}" for number in range(FEATURES)]
    parts = []
    for centre in CENTRES:
        labels, rows = read_centre(source / "heart-disease" / f"processed.{centre}.data")
        part = pd.DataFrame(standardized(rows, rows), columns=names)
        part["diagnosis"], part["centre"] = np.array(CLASSES)[labels], centre
        parts.append(part.sample(frac=1.0, random_state=derive_seed(0, "draw", centre, draw) % 2**32))
    pd.concat(parts).to_csv(folder / "train.csv", index=False)
    schema = "".join(f"[columns.{name}]\n" for name in names)
    (folder / "schema.toml").write_text(f"classes = {json.dumps(CLASSES)}\n\n{schema}")


def measure(way: str, draw: int, source: Path) -> dict[str, Any]:
    """Run a way once with no example on the server; return the scores of each centre and of all patients."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tables(source, folder, draw)
        os.environ |= {"ONESHOT_PROJECT": str(Path(__file__).parent)}
        os.environ |= {"ONESHOT_RUNS": str(folder / "runs"), "ONESHOT_CLIENT_STATE": str(folder / "clients")}
        settings: dict[str, Any] = {**COMMON, **WAYS[way], "seed": draw, "data.root": place}
        (folder / "settings.toml").write_text(toml_table(settings))
        words = ["run", "--local", "--clients", "4", "--format", "json", "--set", str(folder / "settings.toml")]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
    result = json.loads(done.stdout.splitlines()[-1])
    if "evaluation" not in result:
        raise RuntimeError(result)
    found = result["evaluation"]
    centres = {
        centre: {
            "examples": client["examples"],
            "own": client["own"] and {score: client["own"].get(score) for score in SCORES},
            "result": {score: client["scores"].get(score) for score in SCORES},
            "gain": client["gain"],
            "confusion": client["confusion"],
        }
        for centre, client in zip(sorted(CENTRES), found["clients"], strict=True)
    }  # fmt: skip
    pooled = {score: found["described"]["result"]["scores"].get(score) for score in SCORES}
    return {"way": way, "draw": draw, "centres": centres, "pooled": pooled}


def draw_gains(rows: Sequence[dict[str, Any]], way: str = "fedavg") -> None:
    """Draw each centre's own model, a way's result, and the gain's interval, means of the draws."""
    clients = []
    for centre, name in NAMES.items():
        found = [row["centres"][centre] for row in rows if row["way"] == way]
        if any(each["gain"] is None for each in found):  # no AUROC without a healthy test patient
            continue
        own = fmean(each["own"]["auroc"] for each in found)
        result = fmean(each["result"]["auroc"]["value"] for each in found)
        gain = {end: fmean(each["gain"][end] for each in found) for end in ("low", "high")}
        clients.append({"client": name, OWN: {"auroc": own}, RESULT: {"auroc": result}, "gain": gain})
    with rc_context(STYLE):
        figure = plot_clients({"clients": clients, "metric": "auroc"})
        figure.axes[0].set_title("What each hospital gains by one-shot FedAvg")
        figure.savefig(DOCS / "lab" / "heart-disease.svg", metadata={"Date": None})


def main() -> None:
    """Measure every way and draw that the file lacks, and write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of heart-disease/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    known = {(row["way"], row["draw"]) for row in rows}
    for draw, way in product(range(DRAWS), given.ways.split(",")):
        if (way, draw) in known:
            continue
        rows.append(measure(way, draw, given.root))
        say(f"{way}, draw {draw}: {rows[-1]['pooled']}")
        write_json(given.out, {"torch": torch.__version__, "rows": rows})
    draw_gains(rows)


if __name__ == "__main__":
    main()
