"""How well label counts are read off uploaded weights: ``python tests/bench/revealed_counts.py RUN ...``.

Every RUN is a run folder of a simulation, whose clients' true counts follow from its settings; they need not have been
uploaded. Per run and estimator (see ``strategies/combiners/class_counts.py``) the means over clients of: the total
variation between true and estimated class shares, beside that of equal shares; Spearman's rank correlation; how often
the largest class is named. The area under the ROC curve is over all pairs of client and class; it is how often a class
that is present, with more than a fifth of an equal share, gets a larger share than an absent one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from measure import say
from torch import Tensor

from client_app.node import Asked, Node
from client_app.told_counts import equal_parts
from client_app.work import own_examples
from server_app.settings.build import build_job
from server_app.settings.read import Settings, read_settings
from server_app.settings.server_data import open_half
from strategies.combiners.class_counts import normalised
from strategies.combiners.combiners import Mean
from strategies.combiners.tally_pool import TallyPoolOptions, estimated_shares, probed
from strategies.run.run_folder import RunFolder
from strategies.run.stage import kept_round, usable_uploads
from strategies.teacher.ensemble import Ensemble

ESTIMATORS = ("noise", "rows", "noise-rows")


def true_counts(settings: Settings, clients: int) -> Tensor:
    """Return what the clients of a simulation have of each class [M, C]."""
    app = settings.app
    nodes = [Node.of({"partition-id": number, "num-partitions": clients}, app) for number in range(clients)]
    return torch.tensor([own_examples(app, node, Asked("", 1, app.seed)).label_counts for node in nodes])


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value [C]; equal values share theirs."""
    below, equal = (values[:, None] > values).sum(1), (values[:, None] == values).sum(1)
    return below + (equal - 1) / 2


def over_clients(measure: Callable[[Tensor, Tensor], float], true: Tensor, found: Tensor) -> float:
    """Return the mean of a measure of a client's true and estimated shares; clients where it says NaN do not count."""
    values = torch.tensor([measure(one, other) for one, other in zip(true, found, strict=True)])
    return float(values.nanmean())


def rank_correlation(true: Tensor, found: Tensor) -> float:
    """Return Spearman's rank correlation; NaN where all shares are equal."""
    return float(torch.corrcoef(torch.stack([ranks(true), ranks(found)]))[0, 1])


def area(present: Tensor, found: Tensor) -> float:
    """Return the share of pairs of a present and an absent class that are in the right order; a tie is half of one."""
    there, absent = found[present], found[~present]
    larger = (there[:, None] > absent).double() + 0.5 * (there[:, None] == absent).double()
    return float(larger.mean())


def measured(folder: Path) -> list[str]:
    """Return a line of a markdown table per estimator, for one run."""
    with RunFolder.open(folder, write=False) as run:
        settings, uploads = read_settings(run.info["settings"]), usable_uploads(run.round(max(1, kept_round(run))))
    job = replace(build_job(settings, open_half(settings, "test"), None), device="cpu")
    answers = probed(job, Ensemble.of_job(job, uploads, Mean()), TallyPoolOptions().probes)
    counts = true_counts(settings, len(uploads))
    true, present = normalised(counts.double()), torch.tensor([equal_parts(tuple(row)) for row in counts.tolist()]) > 0
    lines = []
    for estimator in ESTIMATORS:
        found = estimated_shares(job, answers, uploads, TallyPoolOptions(counts=estimator)).double()
        values = (
            over_clients(lambda t, f: float((t - f).abs().sum() / 2), true, found),
            over_clients(lambda t, _: float((t - 1 / len(t)).abs().sum() / 2), true, found),
            over_clients(rank_correlation, true, found),
            over_clients(lambda t, f: float(t.argmax() == f.argmax()), true, found),
            area(present, found),
        )
        cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in values]
        lines.append(f"| {folder.name} | {len(uploads)} | {estimator} | {' | '.join(cells)} |")
    return lines


def revealed(folders: list[str]) -> None:
    """Print the table, run by run."""
    say("| run | clients | estimator | total variation | equal shares | rank correlation | largest | presence |")
    say("|---|---|---|---|---|---|---|---|")
    for folder in folders:
        for line in measured(Path(folder)):
            say(line)


if __name__ == "__main__":
    revealed(sys.argv[1:])
