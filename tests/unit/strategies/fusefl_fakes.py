"""What the tests of FuseFL share: a model of two blocks, and clients whose answers are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from method_fakes import ClientsHere
from torch import nn

from strategies.core.clients import Answer, Question
from strategies.method import Job
from strategies.statistics.gaussians import Gaussians


class First(nn.Conv2d):
    """Three maps of images 1 x 8 x 8, which a second block and a classifier of four classes follow."""

    def __init__(self) -> None:
        super().__init__(1, 3, 3)
        self.later = (nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(108, 5), nn.Tanh()), nn.Linear(5, 4))


@dataclass
class Answering(ClientsHere):
    """The clients of a job: their answers are drawn, from their names and the question.

    Attributes:
        job: The job.
        asked: The questions, with their phases.
    """

    job: Job
    asked: list[tuple[str, Question]] = field(default_factory=list)

    def answers(self, questions: Question, phase: str) -> Iterator[Answer]:
        self.asked.append((phase, questions))
        for upload in self.job.uploads:
            yield self.answer(upload.client, int(questions.facts["stage"]))

    def answer(self, client: str, stage: int) -> Answer:
        """Return what a client answers: its second block and classifier, or Gaussians of fused features."""
        members, rng = len(self.job.uploads), np.random.default_rng([int(client[1:]), stage])
        if stage > 2:
            rows, labels = torch.from_numpy(rng.uniform(-1, 1, (20, 5))), torch.arange(20) % 4
            told = Gaussians.of(rows + labels[:, None], labels, 4)
            moments = {"means": told.means.float(), "covariances": told.covariances.float(), "counts": told.counts}
            return Answer(client, {"stage": stage}, {name: value.numpy() for name, value in moments.items()})
        shapes: dict[str, tuple[int, ...]] = {
            "adapter.weight": (3, 3 * members, 1, 1), "adapter.bias": (3,), "block.2.weight": (5, 108),
            "block.2.bias": (5,), "classifier.weight": (4, 5), "classifier.bias": (4,),
        }  # fmt: skip
        arrays = {name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
        return Answer(client, {"stage": stage}, arrays)
