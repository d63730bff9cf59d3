"""Two ways of one server stage on the same uploads, over ten seeds: ``seed_pairs.py QUESTION [LOG]``.

``cnn5``, ``resnet8``: teachers in float32 and in bfloat16, at 20 and 8 pixels a side. ``published``: the loops of
tests/reference/published_loops.py and the shipped ones, LeNet-5 at 8 pixels. A seed has its own partition, training,
start of the student and draws; the published loop draws by itself. The last lines are a table in Markdown. LOG, what
an interrupted one has printed, gives the seeds before its last one, which are not computed again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import numpy as np
import torch
from measure import cpu_seconds, say
from published_loops import Settings
from side_by_side import EPOCHS, Case, plain_state, shipped_job, shipped_server
from torch import nn

from fl_app.data.partitioners import dirichlet_over_classes
from fl_app.data.sources import open_split
from fl_app.models import build
from strategies.combiners.combiners import Mean
from strategies.combiners.tally_pool import build_tally_teacher
from strategies.core.seeds import generator, seeded_torch
from strategies.teacher.ensemble import Ensemble

SEEDS, ALPHA, T_VALUE = 10, 0.1, 2.262  # of the t distribution with nine degrees of freedom, for 95 %
PRECISIONS = ("float32", "bfloat16")
IMAGES = {"resnet8": 300}  # of the training images; else all
Images = tuple[torch.Tensor, torch.Tensor]
Cell = tuple[str, float, float, float, float]  # the case, two accuracies in per cent, CPU seconds of both
# Question -> side, clients, their epochs, the server's epochs, and its generator's steps.
CASES = {"cnn5": (20, 3, 16, 6, 6), "resnet8": (8, 3, 10, 6, 6), "published": (8, 5, 30, 12, 10)}


def digits(split: str, side: int) -> Images:
    """Return the digits, normalised [N, 1, side, side], and their classes [N]."""
    opened = open_split("digits", split, image_size=side)
    pixels = opened.read(torch.arange(len(opened.labels))).float() / 127.5 - 1
    return nn.functional.interpolate(pixels, side, mode="bilinear"), opened.labels


def uploads_of(case: Case, epochs: int, most: int | None) -> Any:
    """Return the shipped job of a case, its clients trained by SGD at rate 0.01 and momentum 0.9 in batches of 32."""
    x, labels = (part[:most] for part in digits("train", case.shape[1]))
    by_class = [np.flatnonzero(labels.numpy() == label) for label in range(10)]
    parts = dirichlet_over_classes(by_class, case.clients, np.random.default_rng(case.seed), alpha=ALPHA, sigma=0.0)
    states, counts = [], []
    for k, part in enumerate(map(torch.from_numpy, parts)):
        with seeded_torch(case.seed, "client"):
            model = case.shipped()
        optimizer, rng = torch.optim.SGD(model.parameters(), 0.01, 0.9), generator(case.seed, "training", k)
        for _ in range(epochs):
            for chosen in part[torch.randperm(len(part), generator=rng)].split(32):
                if len(chosen) > 1:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[chosen]), labels[chosen]).backward()
                    optimizer.step()
        states.append(model.state_dict())
        counts.append(tuple(labels[part].bincount(minlength=10).tolist()))
    job = shipped_job(case, states)
    facts = (replace(upload.facts, label_counts=told) for upload, told in zip(job.uploads, counts, strict=True))
    return replace(job, uploads=tuple(replace(one, facts=own) for one, own in zip(job.uploads, facts, strict=True)))


@torch.no_grad()
def accuracy(model: nn.Module, held_out: Images) -> float:
    """Return the share of right answers in per cent."""
    model.eval()
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(*(part.split(250) for part in held_out), strict=True)
    )
    return 100 * right / len(held_out[1])


def precisions(job: Any, case: Case, held_out: Images) -> Iterator[Cell]:
    """Compare teachers in float32 and in bfloat16: the ensembles, the method's, and its student."""
    if case.method == "dense":  # once for the uploads
        plain = [Ensemble.of_job(job, job.uploads, Mean(), precision=precision) for precision in PRECISIONS]
        tally = [build_tally_teacher(job, precision=precision)[0] for precision in PRECISIONS]
        yield "FedENS", *(accuracy(one, held_out) for one in plain), *(seconds_of(one, held_out) for one in plain)
        yield (
            "Tally's ensemble",
            *(accuracy(one, held_out) for one in tally),
            *(seconds_of(one, held_out) for one in tally),
        )
    servers = [
        shipped_server(case, replace(job, config=replace(job.config, teacher_precision=precision)))
        for precision in PRECISIONS
    ]
    seconds = [cpu_seconds(partial(run, server.epoch, case.settings.epochs)) for server in servers]
    yield case.method, *(accuracy(server.learner.student, held_out) for server in servers), *seconds
    if case.method == "co-boosting":
        yield "co-boosting ensemble", *(accuracy(server.teacher, held_out) for server in servers), 0.0, 0.0


def loops(job: Any, case: Case, held_out: Images) -> Iterator[Cell]:
    """Compare the published loop, which draws by itself, with the shipped one."""
    server, rng = shipped_server(case, job), torch.Generator().manual_seed(case.seed)
    state = plain_state(case, server, job)
    published = partial(EPOCHS[case.method], state, case.settings, rngs=lambda *_: rng)
    seconds = [cpu_seconds(partial(run, epoch, case.settings.epochs)) for epoch in (published, server.epoch)]
    yield case.method, accuracy(state.student, held_out), accuracy(server.learner.student, held_out), *seconds


def run(epoch: Any, count: int) -> None:
    """Go through all epochs of a stage."""
    for number in range(count):
        epoch(epoch=number)


def seconds_of(model: nn.Module, held_out: Images) -> float:
    """Return the CPU seconds of scoring an ensemble."""
    return cpu_seconds(lambda: accuracy(model, held_out))


def cells_of(log: Path) -> dict[int, dict[str, tuple[float, ...]]]:
    """Return what a log tells of each seed but its last, which may be torn."""
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for words in (line.split() for line in log.read_text().splitlines() if line.startswith("seed ")):
        found.setdefault(int(words[1]), {})[" ".join(words[2:-4])] = tuple(map(float, words[-4:]))
    found.pop(max(found, default=0), None)
    return found


def main(question: str, log: str | None = None) -> None:
    """Print every cell, then the mean difference of each case with its 95 % interval over the seeds."""
    side, clients, epochs, server_epochs, steps = CASES[question]
    model, compare = ("lenet5", loops) if question == "published" else (question, precisions)
    shape, held_out = (1, side, side), digits("test", side)
    settings = Settings(server_epochs, steps, 64, student_batch=32, generator_lr=3e-3, mu=0.1 / clients)
    builder = partial(build, model, num_classes=10, input_shape=shape)
    found: dict[str, list[tuple[float, ...]]] = {}
    known = {} if log is None else cells_of(Path(log))
    for seed in range(SEEDS):
        job = None
        for name, values in known.get(seed, {}).items():
            found.setdefault(name, []).append(values)
        if seed in known:
            continue
        for method in EPOCHS:
            case = Case(method, shape, builder, builder, clients, settings, seed, "auto")
            job = (
                uploads_of(case, epochs, IMAGES.get(question))
                if job is None
                else replace(job, config=shipped_job(case, []).config)
            )
            for name, *cells in compare(job, case, held_out):
                say(f"seed {seed} {name} " + " ".join(f"{cell:.2f}" for cell in cells))
                found.setdefault(name, []).append(tuple(cells))
    say("| | first, % | second, % | difference, points | CPU s | CPU s |\n|---|---:|---:|---:|---:|---:|")
    for name, rows in found.items():
        one, other, first_s, second_s = np.array(rows).T
        half = T_VALUE * (other - one).std(ddof=1) / len(rows) ** 0.5
        means = f"{one.mean():.1f} ± {one.std(ddof=1):.1f} | {other.mean():.1f} ± {other.std(ddof=1):.1f}"
        apart = f"{(other - one).mean():+.2f} ± {half:.2f}"
        say(f"| {name} | {means} | {apart} | {np.median(first_s):.2f} | {np.median(second_s):.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:3])
