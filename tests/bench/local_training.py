"""Local training against a plain PyTorch loop: CPU time of the same steps, in turns, and equal results.

The plain loop is a textbook's: default memory layout, ReLU before pooling, the allocator as it comes; the same start,
the same batches in the same order, the same optimiser, the same statistics. It is measured twice. "plain" has its
images in memory and indexes them like the shipped loop, so that only the arithmetic is compared. "loader" is fed by a
``DataLoader``, as is common. The ratios returned are the first, stricter ones.

Each loop has a process of its own, since what the allocator does is a process's affair; they take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import torch
from published_models import load_in_order, plain_cnn5, plain_lenet5
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from client_app.training.local import Training, train
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, open_split
from fl_app.models import build
from strategies.core.seeds import derive_seed, seeded_torch

BATCH_SIZES = (32, 64, 128)
HEADLINE = 128
CHANNELS = {"lenet5": 1, "cnn5": 3}
PLAIN = {"lenet5": plain_lenet5, "cnn5": plain_cnn5}
STEPS = {"lenet5": 40, "cnn5": 12}  # per turn
TURNS = 8
KINDS = ("shipped", "plain", "loader")
# Rounding grows with every step, faster where a ReLU or a pooling changes sides: the weights are compared after the
# first turn, the accuracies after the last. Of the 500 held-out digits, thirteen may change sides.
WEIGHTS_AGREE, ACCURACIES_AGREE = 1e-3, 13 / 500


Batches = Callable[[ImageData, torch.Tensor, int], Iterable[tuple[torch.Tensor, torch.Tensor]]]


def indexed(data: ImageData, order: torch.Tensor, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches by indexing the whole set."""
    for chosen in torch.split(order, batch_size):
        yield (data.images[chosen].float() / 255 - 0.5) / 0.5, data.labels[chosen]


def loaded(data: ImageData, order: torch.Tensor, batch_size: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return a loader of images that are normalised one by one, as a data set's transform does it."""
    examples = _Examples(data)
    return DataLoader(examples, batch_size=batch_size, sampler=order.tolist())


class _Examples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.data.images[index].float() / 255 - 0.5) / 0.5, self.data.labels[index]


def plain_train(
    model: nn.Module, data: ImageData, config: ClientConfig, *, seed: int, batches: Batches
) -> tuple[float, float]:
    """Train with the plain loop, in place; return the last epoch's mean loss, and accuracy in [0, 1]."""
    order_of = torch.Generator().manual_seed(derive_seed(seed, "batches"))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    model.train()
    hits, total = 0, 0.0
    for _ in range(config.epochs):
        hits, total = 0, 0.0
        order = torch.randperm(len(data.labels), generator=order_of)
        for images, labels in batches(data, order, config.batch_size):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            total += loss.item() * len(labels)
            hits += int((logits.argmax(1) == labels).sum())
    return total / len(data.labels), hits / len(data.labels)


class Side:
    """One of the loops with its model and its data."""

    def __init__(self, kind: str, name: str, batch_size: int) -> None:
        torch.set_num_threads(1)
        self.kind, self.channels = kind, CHANNELS[name]
        digits, held_out = (open_split("digits", half, image_size=32) for half in ("train", "test"))
        self.test = self._in_color(held_out.take())
        self.data = self._in_color(digits.take(torch.arange(STEPS[name] * batch_size) % len(digits.labels)))
        self.config = ClientConfig(epochs=1, batch_size=batch_size, device="cpu")
        with seeded_torch(0, "init", name):
            self.model = build(name, num_classes=10, input_shape=(self.channels, 32, 32))
        if kind != "shipped":
            self.model = load_in_order(PLAIN[name](), self.model.state_dict())

    def _in_color(self, data: ImageData) -> ImageData:
        return ImageData(data.images.expand(-1, self.channels, -1, -1).contiguous(), data.labels)

    def turn(self, seed: int) -> float:
        """Train one epoch; return its CPU seconds."""
        half = Normalization((0.5,) * self.channels, (0.5,) * self.channels)
        start = time.process_time()
        if self.kind == "shipped":
            train(self.model, Training(self.data, self.config, half, seed=seed))
        else:
            batches = indexed if self.kind == "plain" else loaded
            plain_train(self.model, self.data, self.config, seed=seed, batches=batches)
        return time.process_time() - start

    def weights(self) -> list[float]:
        """Return all weights in one list."""
        return [number for parameter in self.model.parameters() for number in parameter.flatten().tolist()]

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on the held-out digits, in [0, 1]."""
        logits = self.model.eval()((self.test.images.float() / 255 - 0.5) / 0.5)
        return float((logits.argmax(1) == self.test.labels).float().mean())


_here: list[Side] = []  # of the process of one loop


def _begin(kind: str, name: str, batch_size: int) -> None:
    _here[:] = [Side(kind, name, batch_size)]


def _ask(what: str, *given: int) -> Any:
    return getattr(_here[0], what)(*given)


def measure(
    name: str, batch_size: int, *, sides: dict[str, ProcessPoolExecutor], turns: int
) -> tuple[dict[str, float], float, float]:
    """Train one start with every loop, in turns of :data:`STEPS` steps, and compare times and results.

    Returns:
        CPU seconds per step, by kind of loop; the distance of the weights of "plain" and "shipped", relative to their
        length; and that of their accuracies, in [0, 1].

    Raises:
        AssertionError: The results differ by more than rounding does.
    """
    for kind, side in sides.items():
        side.submit(_begin, kind, name, batch_size).result()
        side.submit(_ask, "turn", 0).result()  # warms up
    ours, theirs = (torch.tensor(sides[kind].submit(_ask, "weights").result()) for kind in KINDS[:2])
    times = [[side.submit(_ask, "turn", turn).result() for side in sides.values()] for turn in range(1, turns + 1)]
    # The least of many is what the work costs; the rest is the machine's other work.
    least = [min(column) / STEPS[name] for column in zip(*times, strict=True)]
    accuracies = [sides[kind].submit(_ask, "accuracy").result() for kind in KINDS[:2]]
    weights_apart = float((ours - theirs).norm() / theirs.norm())
    accuracies_apart = abs(accuracies[0] - accuracies[1])
    assert weights_apart <= WEIGHTS_AGREE, weights_apart
    assert accuracies_apart <= ACCURACIES_AGREE, accuracies
    return dict(zip(sides, least, strict=True)), weights_apart, accuracies_apart


def main(turns: int = TURNS) -> dict[str, float]:
    """Print the table; return how many times faster the shipped loop is per model, at :data:`HEADLINE` images."""
    form = "{:<7} {:>6} {:>11} {:>9} {:>10} {:>6} {:>7} {:>14} {:>17}\n"
    head = ("model", "batch", "shipped ms", "plain ms", "loader ms", "plain", "loader", "weights apart")
    sys.stdout.write("Local training: CPU time per step, and the ratio of the plain loops to the shipped one\n")
    sys.stdout.write(form.format(*head, "accuracies apart"))
    ratios = {}
    with ExitStack() as stack:
        sides = {kind: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for kind in KINDS}
        for name in CHANNELS:
            for batch_size in BATCH_SIZES:
                seconds, weights, accuracies = measure(name, batch_size, sides=sides, turns=turns)
                slower = {kind: seconds[kind] / seconds["shipped"] for kind in KINDS[1:]}
                shown = [f"{1000 * seconds[kind]:.2f}" for kind in KINDS]
                shown += [f"{ratio:.2f}" for ratio in slower.values()]
                sys.stdout.write(form.format(name, batch_size, *shown, f"{weights:.1e}", f"{accuracies:.4f}"))
                sys.stdout.flush()
                if batch_size == HEADLINE:
                    ratios[name] = slower["plain"]
    return ratios


if __name__ == "__main__":
    main()
