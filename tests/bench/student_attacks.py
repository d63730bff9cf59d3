"""What crafted and inexact updates cost Tally's student: ``python tests/bench/student_attacks.py --dir FOLDER``.

Images in the spans of the clients' updates say what the updates say, so that a hostile client, or noise, has a part in
them. The attacks are those of ``tests/bench/gate_attacks.py``, by one client of ten. Inexact uploads are of eight bits,
or each tensor has Gaussian noise of a share of its update's deviation. Counts are read off, no gate weighs, and both
students take the steps and the temperatures of conf/tally-spans.toml. ``--write`` renews the table of docs/tally.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from feature_tables import written
from federations import Federation
from gate_attacks import ATTACKS, attacked
from measure import keep, place_of, say, stored
from rivals import spread
from two_classes import DATA, PAGE, SEEDS

from server_app.settings.build import held_out
from server_app.settings.read import known_options, read_settings
from server_app.settings.text import CONF, merge_settings
from strategies.client.parameters import State
from strategies.combiners.outcomes import ensemble_of, load_model
from strategies.combiners.update_gate import start_model
from strategies.compute import InProcess
from strategies.core.errors import OptionError
from strategies.core.options import parse
from strategies.core.seeds import generator
from strategies.method import Silent
from strategies.tally import METHOD, TallyConfig
from strategies.uploads.quantization import dequantized, quantized

OUT = PAGE.parent / "results" / "student_attacks.json"
LAW, CLIENTS = "data.alpha=0.1", 10
KEY = ("data", "seed", "change", "images")  # of a row
SETTINGS = merge_settings([str(CONF / "tally-spans.toml")], {o.key: o.kind for o in known_options()})
NOISE, SPANNED = int(SETTINGS["tally.images"]), int(SETTINGS["tally.spanned"])
# Images -> the numbers of noise and of spanned ones.
STUDENTS = {"noise": (NOISE + SPANNED, 0), "noise and spanned images": (NOISE, SPANNED)}

Change = Callable[[Federation, str, State], State]  # (clients, a client's name, its weights) -> what it uploads


def noisy(share: float) -> Change:
    """Return a change that adds noise to each tensor, of a share of its update's deviation."""

    def change(found: Federation, client: str, state: State) -> State:
        start, rng = start_model(found.job).state_dict(), generator(found.job.seed, "inexact", client)
        return {
            key: value + share * (value - start[key]).std(correction=0) * torch.randn(value.shape, generator=rng)
            for key, value in sorted(state.items())  # a file's order of tensors differs from process to process
        }

    return change


# What all uploads undergo.
INEXACT: dict[str, Change] = {
    "eight bits": lambda _, __, state: dequantized(quantized(state)),
    "noise of a tenth of the update": noisy(0.1),
    "noise as large as the update": noisy(1.0),
}
CHANGES = (*[attack for attack in ATTACKS if "away" not in attack], *INEXACT)


def changed(folder: Path, text: str, change: str) -> Federation:
    """Return the clients of a division, of whom the first attacks, or whose uploads are inexact."""
    if change not in INEXACT:
        return attacked(folder, text, CLIENTS, change)
    found = attacked(folder, text, CLIENTS, "none")
    states = [INEXACT[change](found, upload.client, upload.read()) for upload in found.job.uploads]
    uploads = zip(found.job.uploads, states, strict=True)
    return found.with_uploads([replace(one, read=partial(dict, state)) for one, state in uploads])


def scores(found: Federation, images: str) -> dict[str, float]:
    """Return the accuracy in % of a student on the report half, and of its ensemble."""
    noise, spanned = STUDENTS[images]
    own = {"tally.counts": "noise-rows", "tally.images": noise, "tally.spanned": spanned}
    job = replace(found.job, config=parse(TallyConfig, {**SETTINGS, **own}, METHOD.name), threads=1)
    outcome = InProcess().run(METHOD, job, Spanned())
    assert outcome.ensemble is not None  # Tally has one
    report = held_out(read_settings({**found.settings.flat, "data.held-out": "report"}))[0]
    models = {"student": load_model(outcome, job), "ensemble": ensemble_of(job, outcome.ensemble)}
    return {name: report.accuracy(model) for name, model in models.items()}


class Spanned(Silent):
    """Refuses a student that gets no images in spans: it would have fewer images, and take fewer steps."""

    def record(self, facts: Mapping[str, Any]) -> None:
        """Look for the note that there are no spans."""
        if "no images in the spans" in str(facts.get("note", "")):
            raise OptionError(str(facts["note"]))


def measured(folder: Path, root: str, places: Iterable[tuple[str, int, str]], out: Path) -> None:
    """Score the students of a data set, a seed and a change that have no row yet."""
    known = {place_of(row, KEY) for row in stored(out)}
    for name, seed, change in places:
        missing = [images for images in STUDENTS if (name, seed, change, images) not in known]
        if not missing:
            continue
        text = f"{DATA[name]}{LAW} client.epochs=20 seed={seed} threads=1 data.root={root}"
        found = changed(folder / f"{name}-{seed}", text, change)
        for images in missing:
            row = {"data": name, "seed": seed, "change": change, "images": images, **scores(found, images)}
            keep(out, [row], KEY)
            say(f"{name}, seed {seed}, {change}, {images}: {row['student']} of {row['ensemble']}")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a row for each change: the ensembles, and the two students."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    titles = [f"{name}, {what}" for name in data for what in ("ensemble", *STUDENTS)]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for change in CHANGES:
        cells = [
            cell
            for name in data
            for cell in _cells([row for row in rows if (row["data"], row["change"]) == (name, change)])
        ]
        lines.append(f"| {change} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    values = [[row["ensemble"] for row in rows if row["images"] == next(iter(STUDENTS))]]
    values += [[row["student"] for row in rows if row["images"] == images] for images in STUDENTS]
    return [spread(pd.Series(own, dtype=float)) for own in values]


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, default=Path("student-attacks"))
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument("--data", default=",".join(DATA), help="names, separated by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="likewise")
    parser.add_argument("--changes", default=";".join(CHANGES), help="names, separated by semicolons")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write", action="store_true", help="renew the page's table from the results")
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.write:
        PAGE.write_text(written(PAGE.read_text(), "student_attacks", table(stored(words.out))))
    else:
        places = product(words.data.split(","), map(int, words.seeds.split(",")), words.changes.split(";"))
        measured(words.dir, words.root, places, words.out)


if __name__ == "__main__":
    main()
