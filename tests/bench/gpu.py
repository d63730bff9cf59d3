"""What stacks and graphs are worth on a GPU: ``tests/bench/gpu.py --out docs/results/gpu.json``.

A pass of ten or thirty teachers, with and without the gradient to the images, and a step of the student; called one
kernel after another, and replayed as one graph. Milliseconds of wall time, the fastest of three runs of thirty calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import keep, say
from rivals import RESULTS
from torch import Tensor

from fl_app.models import build
from strategies.combiners.combiners import Mean
from strategies.core.gpu import Graphed, sgd
from strategies.distillation.distill import Distillation
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.frozen import simplified

OUT = RESULTS / "gpu.json"
MODELS = {"lenet5": (1, 28, 28), "cnn5": (3, 32, 32)}
BATCH, MEMBERS, FORMS = 128, (10, 30), ("loop", "stacked")
WARM, CALLS, RUNS = 6, 30, 3
KEY = ("device", "model", "work", "members", "form")


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Return the wall time of a call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(WARM):
        call()
    taken = []
    for _ in range(RUNS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait()
        taken.append(time.perf_counter() - begin)
    return round(1e3 * min(taken) / CALLS, 2)


def works(model: str, images: Tensor) -> Iterator[tuple[dict[str, Any], Callable[[Tensor], Tensor]]]:
    """Yield the row of each piece of work, as far as it is known, and its function of the images."""
    shape = MODELS[model]
    for members, form in ((members, form) for members in MEMBERS for form in FORMS):
        torch.manual_seed(0)
        nets = [build(model, num_classes=10, input_shape=shape).eval() for _ in range(members)]
        moved = [simplified(net).to(images.device) for net in nets]
        teacher = Ensemble(moved, Mean(), form=form, kinds=[model] * members)
        facts = {"members": members, "form": form}

        @torch.no_grad()
        def forward(x: Tensor, teacher: Ensemble = teacher) -> Tensor:
            logits: Tensor = teacher(x)
            return logits

        def gradient(x: Tensor, teacher: Ensemble = teacher) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(teacher(x).square().sum(), x)[0]

        yield {"work": "forward", **facts}, forward
        yield {"work": "gradient to images", **facts}, gradient
    student = build(model, num_classes=10, input_shape=shape).to(images.device)
    training = Distillation(student, sgd(student.parameters(), 0.01, 0.9), clip=10.0)
    answers = torch.randn(len(images), 10, device=images.device)
    yield {"work": "student's step", "members": 1, "form": ""}, lambda x: training._stepped(x, answers)


def main() -> None:
    """Measure, and store a row per piece of work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    words = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    for model in words.models.split(","):
        images = torch.randn(BATCH, *MODELS[model], device=device)
        for facts, function in works(model, images):
            graph = Graphed(function, device)
            plain, replayed = (milliseconds(partial(call, images), device) for call in (function, graph))
            row = {"device": name, "model": model, **facts, "plain_ms": plain, "graph_ms": replayed}
            say(" ".join(f"{value}" for value in row.values()))
            keep(words.out, [row], KEY)


if __name__ == "__main__":
    main()
