"""A cohort of tiny clients on images of four classes, each a bright quarter, and what attackers make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from method_fakes import train
from torch import nn

from strategies.core.facts import UploadFacts
from strategies.core.stage_options import GatekeeperConfig
from strategies.method import Job, Normalization, Upload

State = dict[str, torch.Tensor]
SHAPE, CLASSES, PER_CLASS = (1, 8, 8), 4, 24
QUICK = GatekeeperConfig(policy="warn", images=3, steps=30, trigger_steps=50)
SPACE = Normalization((0.5,), (0.5,))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, CLASSES)
    )


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))


BUILDERS: dict[str, Callable[[], nn.Module]] = {"net": net, "normed": normed, "linear": linear}


def examples(client: int, classes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels [N, 1, 8, 8] in [0, 1] and labels [N] of one client."""
    rng = torch.Generator().manual_seed(100 + client)
    labels = torch.tensor(classes).repeat_interleave(PER_CLASS)
    images = 0.3 * torch.rand((len(labels), *SHAPE), generator=rng)
    for number, label in enumerate(labels.tolist()):
        down, across = 4 * (label // 2), 4 * (label % 2)
        images[number, 0, down : down + 3, across : across + 3] += 0.6
    return images, labels


def fitted(images: torch.Tensor, labels: torch.Tensor, architecture: str = "net", start: int = 0) -> State:
    """Weights trained from the same start for all."""
    with torch.random.fork_rng():
        torch.manual_seed(start)
        model = BUILDERS[architecture]()
    return train(model, (images - 0.5) / 0.5, labels, torch.optim.SGD(model.parameters(), 0.05, 0.9), 60)


@cache
def honest(client: int, classes: tuple[int, ...] = (0, 1, 2, 3), architecture: str = "net") -> State:
    return fitted(*examples(client, classes), architecture)


@cache
def flipped(client: int) -> State:
    images, labels = examples(client, (0, 1, 2, 3))
    return fitted(images, CLASSES - 1 - labels)


def backdoored(client: int) -> State:
    """A linear model that takes every image with a bright pixel in the lower right corner for class 0."""
    state = {key: value.clone() for key, value in honest(client, architecture="linear").items()}
    state["1.weight"][0, -1] += 12.0
    state["1.bias"][0] += 12.0  # a black corner is -1
    return state


def drawn(seed: int, architecture: str = "net") -> State:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return dict(BUILDERS[architecture]().state_dict())


def times(state: State, factor: float) -> State:
    return {key: value * factor if value.is_floating_point() else value for key, value in state.items()}


def upload(
    name: str, state: State, classes: tuple[int, ...] | None = (0, 1, 2, 3), architecture: str = "net"
) -> Upload:
    counts = None if classes is None else tuple(PER_CLASS * (label in classes) for label in range(CLASSES))
    return Upload(UploadFacts(name, architecture, sum(counts) if counts else 96, counts), partial(dict, state))


def cohort(size: int = 4) -> list[Upload]:
    return [upload(f"c{client}", honest(client)) for client in range(size)]


def with_first(state: State, size: int = 4) -> list[Upload]:
    """A cohort whose first client has sent something else."""
    return [upload("c0", state), *cohort(size)[1:]]


def job_of(uploads: list[Upload], **changes: object) -> Job:
    job = Job(tuple(uploads), BUILDERS, "net", CLASSES, SHAPE, SPACE, None)
    return replace(job, **changes)  # type: ignore[arg-type]
