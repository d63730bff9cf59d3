"""What each part of Tally is worth: ``python tests/bench/tally_parts.py RUN ...``.

On the stored uploads of every run, Tally runs unchanged and with one part changed. The parts are the counts, the pool,
its calibration, temperature and smoothing, the noise law, the student's start and schedule. The same teacher is then
distilled on the data set's own training images, which no server has, so that the rest of the gap does not come from the
noise. Accuracy in % on the held-out images, of the ensemble and of the student, and the calibration error of the
ensemble's probabilities (ECE, 15 bins, in points); CPU seconds of the whole stage; a line per part, the mean over the
runs. Two parts change more than
their name says: a spectrum of the noise is that of the probes too, which moves the ensemble a little; the student of
real images starts at the plain average, without a class-weighted last layer.
Every cell is a JSON file in ``$PARTS_DIR`` (else ``./tally-parts``), so that a measurement that was cut off goes on.
Fewer: ``PARTS_ONLY=counts,noise``, by the part's first word.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measure import say
from torch import Tensor, nn

from server_app.settings.build import build_job, held_out
from server_app.settings.held_out import HeldOut
from server_app.settings.read import Settings, read_settings
from server_app.settings.server_data import open_half
from strategies.combiners import noise
from strategies.combiners.outcomes import load_model
from strategies.feddf import METHOD as FEDDF
from strategies.feddf import FedDfConfig
from strategies.method import Job, Outcome, Silent
from strategies.run.files import read_json, write_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import kept_round, usable_uploads
from strategies.tally import METHOD, OPTIMIZER, SCHEDULE, TallyConfig

BINS = 15


@dataclass(frozen=True)
class Part:
    """One change.

    Attributes:
        name: The changed part, its group first.
        changes: Options of Tally.
        exponents: Of the noise's spectrum, drawn between the two; None: as they are.
        real: Whether the student learns from training images in place of noise.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    exponents: tuple[float, float] | None = None
    real: bool = False


PARTS = (
    Part("as it is"),
    Part("counts: equal for all classes", {"counts": "uniform"}),
    Part("counts: from noise", {"counts": "noise"}),
    Part("counts: from last rows", {"counts": "rows"}),
    Part("counts: from both", {"counts": "noise-rows"}),
    Part("counts: from both, not sharpened", {"counts": "noise-rows", "sharpness": 1.0}),
    Part("pool: not calibrated", {"calibrated": False}),
    Part("pool: linear", {"rule": "linear"}),
    Part("pool: linear, not calibrated", {"rule": "linear", "calibrated": False}),
    Part("pool: no prior correction", {"smoothing": 1e6}),
    Part("pool: temperature 2", {"temperature": 2.0}),
    Part("pool: temperature 4", {"temperature": 4.0}),
    Part("noise: no shapes over it", {"layers": 0}),
    Part("noise: six layers of shapes", {"layers": 6}),
    Part("noise: white, no shapes", {"layers": 0}, exponents=(0.0, 0.0)),
    Part("noise: smooth, no shapes", {"layers": 0}, exponents=(2.0, 3.0)),
    Part("noise: 2,048 images", {"images": 2048, "epochs": 96}),
    Part("noise: 65,536 images", {"images": 65536, "epochs": 3}),
    Part("noise: and 2,048 inverted images", {"inverted": 2048}),
    Part("noise: 65,536 images, and 8,192 inverted ones", {"images": 65536, "inverted": 8192}),
    Part("start: plain average", {"start": "average"}),
    Part("start: fresh", {"start": "fresh"}),
    Part("steps: a quarter", {"epochs": 3}),
    Part("steps: four times as many", {"epochs": 48}),
    Part("real training images instead of noise", real=True),
)


@contextmanager
def spectrum(exponents: tuple[float, float] | None) -> Iterator[None]:
    """Draw the noise's exponents from another range during a block."""
    usual = noise.EXPONENTS
    noise.EXPONENTS = exponents or usual
    try:
        yield
    finally:
        noise.EXPONENTS = usual


def fitted(job: Job, part: Part, real: Tensor | None) -> Outcome:
    """Return what Tally, or its teacher on real images, ends with."""
    config = TallyConfig(**part.changes)
    if not part.real:
        with spectrum(part.exponents):
            return METHOD.fit(replace(job, config=config), Silent())
    shared = {name: getattr(config, name) for name in ("epochs", "batch_size", "kd_temperature", "student_lr")}
    same = FedDfConfig(
        start="average", optimizer=OPTIMIZER, schedule=SCHEDULE, weight_decay=0.0, student_clip=0.0, **shared
    )
    return FEDDF.fit(replace(job, config=same, teacher="tally", proxy=real), Silent())


@torch.no_grad()
def calibration_error(model: nn.Module, images: HeldOut) -> float:
    """Return the expected calibration error of a model's probabilities, in points."""
    sure, right = [], []
    for inputs, labels in images.batches(torch.device("cpu")):
        top = torch.softmax(model(inputs), dim=1).max(1)
        sure.append(top.values)
        right.append((top.indices == labels).float())
    confidence, hit = torch.cat(sure), torch.cat(right)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = [(confidence[place == b] - hit[place == b]).sum().abs() for b in range(BINS)]
    return round(100 * float(torch.stack(gaps).sum()) / len(hit), 2)


def training_images(settings: Settings) -> Tensor:
    """Return as many of the data set's own images as Tally makes, or all that there are."""
    half = open_half(settings, "train")
    return half.take(list(range(min(TallyConfig().images, len(half.labels))))).images


def measured(run: Path, part: Part, folder: Path) -> dict[str, Any]:
    """Return the figures of one part on one run's uploads."""
    kept = folder / f"{run.name}-{''.join(c if c.isalnum() else '-' for c in part.name)}.json"
    if kept.exists():
        found: dict[str, Any] = read_json(kept)
        return found
    with RunFolder.open(run, write=False) as opened:
        settings = read_settings(opened.info["settings"])
        uploads = usable_uploads(opened.round(max(1, kept_round(opened))))
    images, split = held_out(settings)
    job = replace(build_job(settings, split, None), uploads=uploads, device="cpu", threads=1)
    real = training_images(settings) if part.real else None
    began = time.process_time()
    outcome = fitted(job, part, real)
    seconds = time.process_time() - began
    found = {"run": run.name, "part": part.name, "seconds": round(seconds, 1)}
    found["student"] = images.accuracy(load_model(outcome, job))
    if outcome.ensemble is not None:
        ensemble = load_model(replace(outcome, student=None), job)
        found |= {"ensemble": images.accuracy(ensemble), "error": calibration_error(ensemble, images)}
    write_json(kept, found)
    return found


def parts(runs: list[Path]) -> None:
    """Measure every cell that has no file; print the table."""
    folder = Path(os.environ.get("PARTS_DIR", "tally-parts"))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [word for word in os.environ.get("PARTS_ONLY", "").split(",") if word]
    say("| part | ensemble, % | ECE | student, % | CPU s |")
    say("|---|---:|---:|---:|---:|")
    for part in PARTS:
        if not wanted or any(part.name.startswith(word) for word in wanted):
            rows = [measured(run, part, folder) for run in runs]
            cells = [mean([row.get(key) for row in rows]) for key in ("ensemble", "error", "student", "seconds")]
            say(f"| {part.name} | {' | '.join(cells)} |")


def mean(values: list[float | None]) -> str:
    """Return a mean with its spread over the runs; a dash where nothing was measured."""
    known = [value for value in values if value is not None]
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.1f}{spread}" if known else "-"


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts([Path(argument) for argument in sys.argv[1:]])
