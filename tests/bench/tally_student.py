"""What limits Tally's student: ``python tests/bench/tally_student.py CELL FOLDER "data.name=fashion-mnist seed=0"``.

The folder has ten clients' weights, as ``tests/bench/clients.py`` writes them; the settings are those of the clients.
Tally combines them, with counts read off, and distils one student for each trial. A trial changes the images, the
temperatures, the start, or what learns. The noise and its order are those of a run; the members answer it once for all.
Every trial is a row of ``docs/results/tally_student.json``, so that a measurement that was cut off goes on. A row has
the accuracy on the two halves of the test images: the selection half chose, the report half is for the page. Its CPU
seconds are those of the student's steps, without the making of images and the members' answers. ``--trials`` names the
trials, with a semicolon between; by default all but those of ``--curves``, other numbers of images at equal steps.
``make results`` renews the tables and the plot of docs/tally.md from that file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import say, stored
from torch import Tensor, nn

from fl_app.data import partition
from server_app.settings.build import build_job, held_out
from server_app.settings.read import known_options, read_settings
from server_app.settings.server_data import open_half
from server_app.settings.text import merge_settings
from strategies.combiners.tally_teacher import tally_teacher
from strategies.combiners.update_gate import spans_of
from strategies.core.checkpoints import read_checkpoint
from strategies.core.errors import OptionError
from strategies.core.facts import Upload, UploadFacts
from strategies.core.seeds import generator
from strategies.distillation.learner import Learner
from strategies.distillation.spanned import DIRECTIONS, spanned_images
from strategies.method import Job, Silent
from strategies.run.files import write_json
from strategies.tally import OPTIMIZER, SCHEDULE, SPAN_STEPS, TallyConfig, noise_of, start_of
from strategies.teacher.ensemble import Ensemble

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "results" / "tally_student.json"
CLIENTS = 10
CANDIDATES = 4
SHORT = 4  # passes
FOREIGN = ("cifar10", "mnist")
CHOSEN = ("surest", "balanced")  # of the candidates


@dataclass(frozen=True)
class Trial:
    """One student.

    Attributes:
        images: ``"noise"``; half of it and ``"spanned"`` ones, or ``"classes"``, moved likewise by their class alone;
            of four times as much noise ``"surest"`` of each class or, as many of each class, the first ones,
            ``"balanced"``; ``"real"``: training images; or another data set's, in grey.
        epochs: Passes over them.
        kd: The temperature of the distillation loss.
        pool: The temperature of the clients' opinions in what the student learns.
        start: As Tally starts, or ``"member"``: as the client with the largest shares.
        fixed: Parameters with this word in their name do not learn; empty for none.
        count: Images in all; 0 for as many as Tally makes.
    """

    images: str = "noise"
    epochs: int = 12
    kd: float = 4.0
    pool: float = 2.0
    start: str = "average"
    fixed: str = ""
    count: int = 0


TRIALS = {
    "Tally's defaults": Trial(kd=1.0, pool=1.0),
    "distillation at 4": Trial(pool=1.0),
    "distillation at 4, the surest of four candidates": Trial("surest", pool=1.0),
    "distillation at 4, pool at 2": Trial(),
    "distillation at 4, pool at 2, the surest of four candidates": Trial("surest"),
    "distillation at 4, pool at 2, real training images": Trial("real"),
    "noise and spanned images in halves, 4 and 2": Trial("spanned"),
    "noise and spanned images in halves, 4 and 2, twice the steps": Trial("spanned", epochs=24),
    "images moved by their class alone in place of those, twice the steps": Trial("classes", epochs=24),
    "a third of the steps: noise": Trial(epochs=SHORT),
    "a third of the steps: as many of each class": Trial("balanced", SHORT),
    "a third of the steps: the surest of each class": Trial("surest", SHORT),
    "a third of the steps: photographs, CIFAR-10 in grey": Trial("cifar10", SHORT),
    "a third of the steps: digits, MNIST": Trial("mnist", SHORT),
    "a third of the steps: start at the client of most classes": Trial(epochs=SHORT, start="member"),
    "a third of the steps: convolutions stay averaged": Trial(epochs=SHORT, fixed="conv"),
    "three times the steps: distillation at 4": Trial(epochs=36, pool=1.0),
}
# How many different images a student needs, at equal steps: 3,072 of 128 images.
COUNTS = (256, 1024, 4096, 16384, 65536)
CURVES = {
    f"{kind}, {count}": Trial(kind, epochs=24 * 16384 // count, count=count)
    for kind in ("noise", "spanned", "real")
    for count in COUNTS
    if (kind, count) != ("real", COUNTS[-1])  # no data set has as many
}
KNOWN = TRIALS | CURVES


class Lab:
    """A cell's uploads and their teacher, and images with the members' answers."""

    def __init__(self, folder: Path, given: str) -> None:
        flat = merge_settings([given], {o.key: o.kind for o in known_options()})
        self.settings = read_settings({"method": "tally", "tally.counts": "noise-rows", **flat})
        halves = {half: read_settings({**flat, "data.held-out": half}) for half in ("selection", "report")}
        self.halves = {half: held_out(settings)[0] for half, settings in halves.items()}
        split = open_half(self.settings, "test")
        self.train = open_half(self.settings, "train")
        app = self.settings.app
        parts = partition(
            self.train.labels.numpy(),
            app.data.partition_spec(),
            num_clients=CLIENTS,
            num_classes=split.num_classes,
            seed=app.seed,
        )
        facts = [UploadFacts(f"client-{k:03d}", app.model.name, num_examples=len(part)) for k, part in enumerate(parts)]
        uploads = tuple(Upload(one, partial(read_checkpoint, folder / f"{one.client}.safetensors")) for one in facts)
        self.job: Job = replace(build_job(self.settings, split, None), uploads=uploads, device="cpu", threads=1)
        self.config: TallyConfig = self.job.config
        self.teacher, self.pool = tally_teacher(self.job, self.config)
        self.asked: dict[tuple[str, int], dict[str, Tensor]] = {}

    def learner(self, trial: Trial) -> Learner:
        """Return the student of a trial before its first step."""
        start = start_of(self.job, self.pool, Silent())
        if trial.start == "member":
            start = self.job.uploads[int(self.pool.shares().sum(1).argmax())].read()
        recipe = replace(self.config, epochs=trial.epochs, kd_temperature=trial.kd)
        job = replace(self.job, start=start)
        learner = Learner(job, self.teacher, recipe.distill_recipe(optimizer=OPTIMIZER, schedule=SCHEDULE))
        for name, parameter in learner.student.named_parameters():
            parameter.requires_grad_(not (trial.fixed and trial.fixed in name))
        return learner

    def ensemble(self, temperature: float) -> Ensemble:
        """Return the teacher, its clients' opinions of another temperature."""
        self.pool.temperatures.fill_(temperature)
        return self.teacher

    def answered(self, kind: str, count: int) -> dict[str, Tensor]:
        """Return a portion of images with the members' logits [N, M, C], asked once."""
        if (kind, count) not in self.asked:
            images = self.images_of(kind, count)
            self.asked[kind, count] = {"images": images, "members": self.learner(Trial()).member_logits(images)}
        return self.asked[kind, count]

    def images_of(self, kind: str, count: int) -> Tensor:
        """Return so many images, or four times as many candidates: noise, moved noise, or training images."""
        if kind in ("noise", "candidates"):
            return self.noise(count * (1 if kind == "noise" else CANDIDATES))
        if kind in ("spanned", "classes"):
            noise = self.noise(count)[: count // 2]
            return torch.cat([noise, self.moved(noise, spans=kind == "spanned")])
        there = self.train
        if kind in FOREIGN:
            root = self.settings.app.data.root
            there = open_half(read_settings({"data.name": kind, "data.root": root}), "train")
        order = torch.randperm(len(there.labels), generator=generator(self.job.seed, "bench", kind))
        images = there.take(order[:count].tolist()).images
        return images if kind == "real" else images.float().mean(1, keepdim=True).round().to(torch.uint8)

    def noise(self, count: int) -> Tensor:
        """Return the first images of Tally's noise, the same ones whatever their number."""
        most = max(count, self.config.images)
        return noise_of(replace(self.job, config=replace(self.config, images=most)))[:count]

    def moved(self, noise: Tensor, *, spans: bool) -> Tensor:
        """Return noise in the spans of the updates, or moved by the images' classes alone."""
        found = spans_of(self.job, [True] * CLIENTS, share=DIRECTIONS)
        if isinstance(found, str):
            raise OptionError(found)
        bases = found.bases if spans else torch.zeros_like(found.bases)  # outside of an empty span lies all
        rng = generator(self.job.seed, "tally", "spanned")
        examples = self.pool.examples()
        return spanned_images(self.job, replace(found, bases=bases), examples, noise, steps=SPAN_STEPS, rng=rng)

    def table(self, trial: Trial) -> dict[str, Tensor]:
        """Return the images of a trial, and the logits that its student learns."""
        count = trial.count or self.config.images
        rows = self.answered("candidates" if trial.images in CHOSEN else trial.images, count)
        logits = self.ensemble(trial.pool).combiner(rows["members"].transpose(0, 1))
        table = {"images": rows["images"], "logits": logits}
        if trial.images == "surest":
            return surest(table, count)
        if trial.images == "balanced":
            # Equally sure of all, it keeps the first of each class.
            even = torch.nn.functional.one_hot(table["logits"].argmax(1), table["logits"].shape[1]).float()
            kept = surest({**table, "logits": even, "answers": table["logits"]}, count)
            return {"images": kept["images"], "logits": kept["answers"]}
        return table

    def accuracy(self, model: nn.Module) -> dict[str, float]:
        """Return a model's accuracy on the two halves of the test images, in %."""
        return {half: images.accuracy(model) for half, images in self.halves.items()}


def surest(rows: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the rows of which a teacher is surest, in their order: of each class that it predicts equally many.

    Args:
        rows: Equally long columns, of them ``logits`` [N, C].
        count: Rows to return. There are fewer if the teacher predicts a class too seldom.
    """
    sure, predicted = torch.softmax(rows["logits"], dim=1).max(1)
    classes = rows["logits"].shape[1]
    places = [torch.nonzero(predicted == label).flatten() for label in range(classes)]
    first = [own[sure[own].argsort(descending=True, stable=True)[: count // classes]] for own in places]
    kept = torch.cat(first).sort().values
    return {name: column[kept] for name, column in rows.items()}


def measured(lab: Lab, trial: Trial) -> dict[str, Any]:
    """Return the figures of one trial."""
    table, learner = lab.table(trial), lab.learner(trial)
    began = time.process_time()
    steps = 0
    for epoch in range(trial.epochs):
        learner.learn(table, epoch)
        steps += learner.steps(table)
    seconds = time.process_time() - began
    row = {"steps": steps, "kept": len(table["images"]), "cpu_s": round(seconds, 1)}
    return row | {"student": lab.accuracy(learner.student), "ensemble": lab.accuracy(lab.ensemble(trial.pool))}


def measure(cell: str, folder: Path, given: str, names: list[str], out: Path) -> None:
    """Measure every trial of a cell that the file lacks."""
    rows = stored(out)
    known = {(row["cell"], row["trial"]) for row in rows}
    lab = Lab(folder, given)
    for name in names:
        if (cell, name) not in known:
            trial = KNOWN[name]
            row = {"cell": cell, "trial": name, **asdict(trial), **measured(lab, trial)}
            rows.append(row)
            rows.sort(key=lambda one: list(KNOWN).index(one["trial"]))
            write_json(out, {"rows": rows})
            say(f"{cell}: {name}: selection {row['student']['selection']} of {row['ensemble']['selection']}")


def main() -> None:
    """Measure the trials of a cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("cell", help="its column in the table")
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", help="key=value pairs, as for oneshot run")
    parser.add_argument("--trials", default=";".join(TRIALS))
    parser.add_argument("--curves", action="store_true", help="measure those of other numbers of images instead")
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    torch.set_num_threads(1)
    names = list(CURVES) if words.curves else words.trials.split(";")
    measure(words.cell, words.folder, words.settings, names, words.out)


if __name__ == "__main__":
    main()
