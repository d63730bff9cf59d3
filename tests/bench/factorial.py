"""Teacher or images: ``python tests/bench/factorial.py --dir FOLDER RUN ...``, a run folder of uploads per seed.

Students of crossed teachers and images, at equal steps, batch, loss, optimiser and start, by method ``distill``. On the
uploads of each run, replays of Tally, Co-Boosting and DENSE make the teachers and the images first. A cell has 4,096
images: noise of Tally, the last images of the two generators, or test images of the selection half without labels. The
rest of that half chooses the optimiser, and the report half scores.

A replay goes on where it was cut off, and a cell with a row in ``--out`` is not measured again. ``--write`` measures
nothing, and renews the tables of docs/tally.md from that file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from factorial_tables import OUT, write
from measure import keep, place_of, say, stored
from torch import Tensor, nn

from fl_app.data import half_of, normalize
from fl_app.data.halves import SEED
from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from server_app.replay.teachers import stored_uploads
from server_app.settings.build import build_job
from server_app.settings.read import known_options, read_settings
from server_app.settings.server_data import open_half
from server_app.settings.text import merge_settings
from strategies.combiners.outcomes import ensemble_of, load_model
from strategies.compute import InProcess
from strategies.core.options import Scalar
from strategies.core.seeds import generator
from strategies.distill import METHOD, DistillConfig
from strategies.method import EnsembleSpec, Job, Silent
from strategies.run.run_folder import RunFolder, load_ensemble

IMAGES = 4096
# Of Co-Boosting and DENSE: those of conf/short.toml, but for more images in an epoch, so that 12 epochs make enough.
SHORT = merge_settings([str(OUT.parents[2] / "conf" / "short.toml")], {o.key: o.kind for o in known_options()})
BATCH = 352
# Teacher -> the images whose replay ended with it.
TEACHERS = {"mean": "", "learned weights": "Co-Boosting's", "Tally": "noise"}
KEY = ("data", "alpha", "seed", "teacher", "images", "steps", "optimizer", "start")  # of a row
STEPS = (800, 8000)
STARTS = ("fresh", "average")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "schedule": "one-cycle", "student_lr": 3e-3},
    "sgd": {"optimizer": "sgd", "schedule": "cosine", "student_lr": 0.01},
}
# The images -> the replay that makes them: its method, and its settings.
MADE: dict[str, tuple[str, Mapping[str, Scalar]]] = {
    "noise": ("tally", {"tally.counts": "noise-rows", "tally.images": IMAGES, "tally.epochs": 1}),
    "Co-Boosting's": ("co-boosting", SHORT | {"co-boosting.synthesis-batch-size": BATCH}),
    "DENSE's": ("dense", SHORT | {"dense.synthesis-batch-size": BATCH}),
}
REAL = "real"


@cache
def made(run: Path, folder: Path, images: str) -> Path:
    """Return the folder of the finished replay that made images."""
    method, settings = MADE[images]
    place = folder / f"{run.name}-{method}"
    given = {"threads": 1, "teacher": "method", "data.held-out": "report", "store-images": IMAGES, **settings}
    request = Request(run, method, given, resume=place if place.exists() else None, folder=place)
    begin = time.process_time()
    result = replay_run(request, log=lambda _: None)
    say(f"{place.name}: {result['accuracy']} %, {time.process_time() - begin:.0f} CPU s")
    return place


@dataclass(frozen=True)
class Uploads:
    """A run's uploads, with the teachers, the images, and the test images in their three parts.

    Attributes:
        run: The run folder.
        folder: Where the replays of it are.
    """

    run: Path
    folder: Path

    @cached_property
    def settings(self) -> dict[str, Scalar]:
        """The settings of the run, for a method that needs no images of the server."""
        with RunFolder.open(self.run, write=False) as folder:
            stored: dict[str, Scalar] = folder.info["settings"]
        return {**stored, "method": "fedens", "threads": 1, "device": "cpu", "run-dir": ""}

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Test images with their labels: those to learn from, those to choose by, and those that report."""
        split = open_half(read_settings(self.settings), "test")
        selection = half_of(split.labels, "selection")
        selection = selection[torch.randperm(len(selection), generator=generator(SEED, "factorial"))]
        positions = {REAL: selection[:IMAGES], "choose": selection[IMAGES:], "report": half_of(split.labels, "report")}
        taken = {name: split.take(where) for name, where in positions.items()}
        return {name: (data.images, data.labels) for name, data in taken.items()}

    @cached_property
    def job(self) -> Job:
        """The job of a cell, without its images and its teacher."""
        settings = read_settings(self.settings)
        job = build_job(settings, open_half(settings, "test"), None)
        return replace(job, uploads=stored_uploads(self.run), proxy=None)

    def images(self, name: str) -> Tensor:
        """Return images uint8 [4096, ch, H, W]."""
        if name == REAL:
            return self.parts[REAL][0]
        with RunFolder.open(made(self.run, self.folder, name), write=False) as folder:
            found = folder.images()
        assert found is not None
        assert len(found) == IMAGES
        return found

    def teacher(self, name: str) -> EnsembleSpec:
        """Return the ensemble of a teacher."""
        if name == "mean":
            return EnsembleSpec(tuple(upload.client for upload in self.job.uploads), "mean")
        return load_ensemble(made(self.run, self.folder, TEACHERS[name]), self.job.builders)[0]

    @cache  # noqa: B019  one object per run of uploads
    def answers(self, name: str) -> dict[str, Tensor]:
        """Return the predicted classes of a teacher, see :meth:`predicted`."""
        return self.predicted(ensemble_of(self.job, self.teacher(name)))

    @torch.no_grad()
    def predicted(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's predicted classes of the images to choose by, and of those that report."""
        answers = {}
        for name in ("choose", "report"):
            inputs = (normalize(batch, *self.job.normalization) for batch in torch.split(self.parts[name][0], 500))
            answers[name] = torch.cat([model(batch).argmax(1) for batch in inputs])
        return answers

    def share(self, one: Tensor, other: Tensor) -> float:
        """Return how often two lists of classes agree, in %."""
        return round(100 * float((one == other).double().mean()), 2)

    def cell(self, teacher: str, images: str, steps: int, optimizer: str, start: str) -> dict[str, Any]:
        """Distil once, and return the scores and the cost."""
        config = DistillConfig(steps=steps, start=start, **OPTIMIZERS[optimizer])
        job = replace(self.job, config=config, proxy=self.images(images), teacher=self.teacher(teacher))
        taught, begin = self.answers(teacher), time.process_time()
        outcome = InProcess().run(METHOD, job, Silent())
        seconds = time.process_time() - begin
        student = self.predicted(load_model(outcome, job))
        labels = {name: self.parts[name][1] for name in student}
        return {
            "data": self.settings["data.name"], "alpha": self.settings["data.alpha"], "seed": job.seed,
            "teacher": teacher, "images": images, "steps": steps, "optimizer": optimizer, "start": start,
            "student": self.share(student["report"], labels["report"]),
            "taught": self.share(taught["report"], labels["report"]),
            "agreement": self.share(student["report"], taught["report"]),
            "chosen_by": self.share(student["choose"], labels["choose"]),
            "work": dict(outcome.work), "cpu_s": round(seconds, 1),
        }  # fmt: skip


def measured(uploads: Uploads, key: tuple[str, str, int, str, str], out: Path) -> None:
    """Measure a cell that has no row yet."""
    place = (uploads.settings["data.name"], uploads.settings["data.alpha"], uploads.job.seed, *key)
    if place in {place_of(row, KEY) for row in stored(out)}:
        return
    row = uploads.cell(*key)
    keep(out, [row], KEY, images=IMAGES)
    say(f"{place}: {row['student']} % of {row['taught']}, agrees {row['agreement']}, {row['cpu_s']:.0f} CPU s")


def listed(text: str, known: tuple[str, ...]) -> list[str]:
    """Return the names in an argument, in the order of all; without any, all."""
    return [name for name in known if not text or name in text.split(",")]


def main() -> None:
    """Measure the missing cells, or renew the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("runs", type=Path, nargs="*", help="run folders of uploads")
    parser.add_argument("--dir", type=Path, help="where replays are kept")
    parser.add_argument("--images", default="", help="names, separated by commas; default: all")
    parser.add_argument("--teachers", default="", help="likewise")
    parser.add_argument("--steps", default="", help="likewise")
    parser.add_argument("--optimizers", default="", help="likewise")
    parser.add_argument("--starts", default="", help="likewise")
    parser.add_argument("--out", type=Path, default=OUT, help="receives the cells")
    parser.add_argument("--write", action="store_true", help="renew the page from --out, measure nothing")
    words = parser.parse_args()
    if words.write:
        write(words.out)
        return
    torch.set_num_threads(1)
    blocks = product(
        map(int, listed(words.steps, tuple(map(str, STEPS)))),
        listed(words.starts, STARTS),
        listed(words.optimizers, tuple(OPTIMIZERS)),
        listed(words.images, (*MADE, REAL)),
        listed(words.teachers, tuple(TEACHERS)),
    )
    cells = [(teacher, images, steps, optimizer, start) for steps, start, optimizer, images, teacher in blocks]
    for run in words.runs:
        uploads = Uploads(run.resolve(), words.dir.resolve())
        for key in cells:
            measured(uploads, key, words.out)


if __name__ == "__main__":
    main()
