"""What the tests of FuseFL share: a model of two blocks, and clients whose answers are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from strategies.core.clients import Answer, Question
from strategies.core.errors import QuorumError, UploadError
from strategies.method import Job
from strategies.statistics.gaussians import Gaussians


class First(nn.Conv2d):
    """Three maps of images 1 x 8 x 8, which a second block and a classifier of four classes follow."""

    def __init__(self) -> None:
        super().__init__(1, 3, 3)
        self.later = (nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(108, 5), nn.Tanh()), nn.Linear(5, 4))


@dataclass
class Answering:
    """The clients of a job: their answers are drawn, from their names and the question.

    Attributes:
        job: The job.
        spoil: Changes an answer before the server sees it.
        asked: The questions, with their phases.
        refused: The reasons of refusals.
    """

    job: Job
    spoil: Callable[[Answer], Answer] = lambda answer: answer
    asked: list[tuple[str, Question]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mib_per_client: float = 0.0

    def ask(
        self,
        questions: Question | Mapping[str, Question],
        *,
        phase: str,
        quorum: int = 0,
        patience_s: float | None = None,  # noqa: ARG002
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> dict[str, Answer]:
        assert isinstance(questions, Question)
        self.asked.append((phase, questions))
        answers = {}
        for upload in self.job.uploads:
            answer = self.spoil(self.answer(upload.client, int(questions.facts["stage"])))
            try:
                check(answer)
                answers[answer.client] = answer
            except UploadError as error:
                self.refused.append(str(error))
        if len(answers) < quorum:
            raise QuorumError(f"{phase}: {len(answers)} usable answers, needs {quorum}")
        return answers

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
