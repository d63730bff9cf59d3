"""What the tests of the distilling methods share: three tiny clients, a notebook, checks that all must pass."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from strategies.core.clients import Answer
from strategies.core.errors import QuorumError, UploadError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Method, Normalization, Outcome, Silent, Snapshot, Upload
from strategies.teacher.augment import Standardize
from strategies.teacher.student import fresh_student

Array = np.ndarray[Any, Any]
SHAPE = (2, 8, 8)
# Of the methods with a generator: as small as they get, in the same arithmetic on every processor.
TINY: dict[str, Any] = {
    "epochs": 3, "generator_steps": 2, "batch_size": 5, "synthesis_batch_size": 6, "latent": 8, "student_lr": 0.1,
    "generator_lr": 0.01, "generator_precision": "float32",
}  # fmt: skip
# Another value for each option that the methods share; every one must make a difference.
OTHER: dict[str, Any] = {
    "epochs": 1, "generator_steps": 1, "generator_lr": 0.05, "generator_clip": 1e-4,
    "generator_precision": "bfloat16", "latent": 9, "optimize_noise": False, "synthesis_batch_size": 8,
    "keep_images": "last", "synthesis_augmentation": "flip", "pool_cap": 7, "pool_precision": "float32",
    "generator_reset": "never",
    "pool_augmentation": "flip", "steps_per_epoch": 1, "batch_size": 4, "kd_temperature": 2.0, "optimizer": "adam",
    "student_lr": 0.2, "weight_decay": 0.1, "schedule": "constant", "student_clip": 1e-3,
    "teacher_precision": "bfloat16",
}  # fmt: skip


def narrow() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(108, 16),
        nn.BatchNorm1d(16), nn.Linear(16, 3),
    )  # fmt: skip


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


BUILDERS = {"narrow": narrow, "wide": wide}


def upload(k: int, architecture: str) -> Upload:
    """Client k: its weights are drawn, its running statistics are not the initial ones, its logits differ by class."""
    with torch.random.fork_rng():
        torch.manual_seed(k)
        model = BUILDERS[architecture]()
        model(torch.randn(8, *SHAPE))
    state = {name: 3 * value if name.endswith("weight") else value for name, value in model.state_dict().items()}
    counts = (4 + k, 6 * k, 6 + 3 * k)
    read = lambda: {name: value.clone() for name, value in state.items()}  # noqa: E731
    return Upload(UploadFacts(f"c{k}", architecture, sum(counts), counts), read)


def model_of(upload: Upload, builders: Mapping[str, Callable[[], nn.Module]] = BUILDERS) -> nn.Module:
    """Return an upload's model, in eval mode."""
    model = builders[upload.architecture]()
    model.load_state_dict(upload.read())
    return model.eval()


def drawn_upload(
    k: int, name: str, builders: Mapping[str, Callable[[], nn.Module]], examples: int = 10, counts: Any = None
) -> Upload:
    """Client k with the weights that its model begins with."""
    with torch.random.fork_rng():
        torch.manual_seed(k)
        state = builders[name]().state_dict()
    return Upload(UploadFacts(f"c{k}", name, examples, counts), lambda: state)


def train(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int
) -> dict[str, torch.Tensor]:
    """Train on all examples at once, and return the weights."""
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def telling(upload: Upload, **facts: Any) -> Upload:
    """Return an upload whose client says something else about it."""
    return replace(upload, facts=replace(upload.facts, **facts))


UPLOADS = (upload(0, "narrow"), upload(1, "wide"), upload(2, "narrow"))
PROXY = torch.randint(0, 256, (11, *SHAPE), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)


def tiny_job(config: Any, *, seed: int = 0, uploads: tuple[Upload, ...] = UPLOADS) -> Job:
    space = Normalization((0.5, 0.4), (0.5, 0.6))
    return Job(uploads, BUILDERS, "narrow", 3, SHAPE, space, config, seed=seed, proxy=PROXY)


class Book(Silent):
    """Keeps what a run says, and a snapshot of every epoch border if told to."""

    def __init__(self, resume: Snapshot | None = None, *, keep: bool = False) -> None:
        self.snapshot, self.keep = resume, keep
        self.rows: list[Mapping[str, Any]] = []
        self.snapshots: list[Snapshot] = []
        self.reports: list[tuple[int, int]] = []

    def resume(self) -> Snapshot | None:
        return self.snapshot

    def record(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, *_: object) -> None:  # noqa: ARG002
        self.reports.append((step, total))

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        if self.keep:
            snapshot: Snapshot = pickle.loads(pickle.dumps(take()))  # noqa: S301  our own bytes
            appended = dict(self.snapshots[-1].appended) if self.snapshots else {}
            for name, rows in snapshot.appended.items():
                appended[name] = torch.cat([appended[name], rows]) if name in appended else rows
            self.snapshots.append(replace(snapshot, appended=appended))

    @property
    def notes(self) -> list[str]:
        return [row["note"] for row in self.rows if "note" in row]

    @property
    def epochs(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if "epoch" in row]


@dataclass(kw_only=True)
class ClientsHere(ABC):
    """Clients that answer in this process; ``answers`` has what they say to questions.

    Attributes:
        spoil: Changes an answer before the server sees it.
        refused: Client and reason of every refusal.
    """

    spoil: Callable[[Answer], Answer] = lambda answer: answer
    refused: list[tuple[str, str]] = field(default_factory=list)
    mib_per_client: float = 0.0

    @abstractmethod
    def answers(self, questions: Any, phase: str) -> Iterable[Answer]: ...

    def ask(
        self,
        questions: Any,
        *,
        phase: str,
        quorum: int = 0,
        patience_s: float | None = None,  # noqa: ARG002
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> dict[str, Answer]:
        found = {}
        for answer in map(self.spoil, self.answers(questions, phase)):
            try:
                check(answer)
                found[answer.client] = answer
            except UploadError as error:
                self.refused.append((answer.client, str(error)))
        if len(found) < quorum:
            raise QuorumError(f"{phase}: {len(found)} usable answers, needs {quorum}")
        return found


def weights(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Everything an outcome's models are made of, and the images it shows."""
    found = dict(outcome.student or {})
    if outcome.ensemble is not None:
        found |= {f"ensemble.{name}": value for name, value in outcome.ensemble.weights.items()}
    return found if outcome.images is None else {**found, "images": outcome.images}


def softmax(logits: Array) -> Array:
    """Return probabilities over the last dimension, by numpy."""
    powers: Array = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers


def same(one: Outcome, other: Outcome) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def close(one: Outcome, other: Outcome, atol: float = 1e-4) -> None:
    first, second = weights(one), weights(other)
    for name in first.keys() - {"images"}:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=atol, msg=name)


def run(method: Method, config: Any, *, seed: int = 0) -> Outcome:
    return method.fit(tiny_job(config, seed=seed), Silent())


def logits_of(job: Job) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the fresh student's logits [B, C] and the clients' [M, B, C] on the images as they are."""
    inputs = Standardize(job.normalization)(PROXY / 255)
    found = [model_of(upload)(inputs).detach().double().numpy() for upload in job.uploads]
    return fresh_student(job)(inputs).detach().double().numpy(), np.stack(found)


def check_resume(method: Method, job: Job) -> None:
    """A process that dies goes on from the last border of epochs: nothing may show it."""
    whole = Book(keep=True)
    expected = method.fit(job, whole)
    assert [snapshot.step for snapshot in whole.snapshots] == [1, 2, 3]
    for snapshot in (whole.snapshots[0], whole.snapshots[-1]):
        resumed = Book(snapshot)
        assert same(method.fit(job, resumed), expected), f"resumed after epoch {snapshot.step}"
        assert resumed.epochs == whole.epochs[snapshot.step :]


# Options that every method hands on with others in one recipe; DENSE tries each of them.
IN_RECIPES = frozenset({
    "kd_temperature", "optimizer", "weight_decay", "schedule", "student_clip", "generator_clip", "optimize_noise",
    "keep_images",
})  # fmt: skip


def options_to_try(config: type, *decided: str) -> list[str]:
    """Return the options of a method's config, but for those of shared recipes and ones that decide nothing here."""
    return [each.name for each in fields(config) if each.name not in IN_RECIPES.union(decided)]
