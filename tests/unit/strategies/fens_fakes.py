"""What the tests of FENS share: three tiny clients that answer in this process, and can be made to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from method_fakes import BUILDERS, SHAPE, UPLOADS, ClientsHere

from strategies.client.fens import HoldoutRequest, LocalFens, respond
from strategies.core.clients import Answer, Question
from strategies.method import Job, Normalization, Outcome, Progress, Silent
from strategies.methods.fens import METHOD, FensConfig

RUN, CLASSES = "a" * 32, 3
TINY = FensConfig(
    aggregator="per-class", rounds=6, local_steps=2, batch_size=4, client_lr=0.5, server_lr=0.05, precision="float32"
)


def examples(client: str, count: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """The held examples of one client."""
    rng = torch.Generator().manual_seed(int(client[1:]) + 50)
    return torch.randn(count, *SHAPE, generator=rng), torch.randint(0, CLASSES, (count,), generator=rng)


def fens_job(config: FensConfig = TINY, *, clients: tuple[str, ...] = ("c0", "c1", "c2"), seed: int = 0) -> Job:
    uploads = tuple(upload for upload in UPLOADS if upload.client in clients)
    return Job(uploads, BUILDERS, "narrow", CLASSES, SHAPE, Normalization((0.5,) * 2, (0.5,) * 2), config, seed=seed)


@dataclass
class DirectClients(ClientsHere):
    """The clients of a run, each in this process with a folder of its own.

    Attributes:
        folder: Where they keep their logits.
        names: Who is connected.
        away: Round -> who does not answer in it.
        limit: The largest ensemble that a client accepts, MiB.
        asked: Every question: who, step, bytes of its arrays.
        offered: The facts of every offer of the ensemble.
    """

    folder: Path
    names: tuple[str, ...] = ("c0", "c1", "c2")
    away: Mapping[int, set[str]] = field(default_factory=dict)
    limit: float = 0.0
    common: dict[str, Any] = field(default_factory=lambda: {"run-id": RUN, "seed": 0})
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    offered: list[Mapping[str, Any]] = field(default_factory=list)
    held: Callable[[str], tuple[torch.Tensor, torch.Tensor]] = examples
    gone: set[str] = field(default_factory=set)

    def local(self, name: str) -> LocalFens:
        def build(architecture: str, _: HoldoutRequest) -> torch.nn.Module:
            return BUILDERS[architecture]()

        return LocalFens(
            name, lambda _: self.held(name), build, state_dir=str(self.folder), max_ensemble_mib=self.limit
        )

    def answers(self, questions: Question | Mapping[str, Question], phase: str) -> Iterator[Answer]:  # noqa: ARG002
        for name in sorted(set(self.names) - self.gone):
            question = questions if isinstance(questions, Question) else questions.get(name)
            if question is None or name in self.away.get(int(question.facts.get("round", 0)), set()):
                continue
            size = sum(array.nbytes for array in question.arrays.values())
            self.asked.append((name, str(question.facts["step"]), size))
            if question.facts["step"] == "offer":
                self.offered.append(question.facts)
            facts, arrays = respond({**self.common, **question.facts}, question.arrays, self.local(name))
            if "error" in facts:
                self.gone.add(name)
                self.refused.append((name, f"{name}: {facts['error']}"))
            else:
                yield Answer(name, facts, arrays)

    def steps(self, step: str) -> list[str]:
        """Who was asked for a step, in order."""
        return [name for name, asked, _ in self.asked if asked == step]


def fitted(clients: DirectClients, job: Job | None = None, progress: Progress | None = None) -> Outcome:
    job = job or fens_job()
    return METHOD.client_phase.fit(job, progress or Silent(), clients)


def weights(outcome: Outcome) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.numpy() for name, value in outcome.ensemble.weights.items()}


def same(one: Outcome, other: Outcome) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def changed(answer: Answer, **facts: Any) -> Answer:
    return replace(answer, facts={**answer.facts, **facts})
