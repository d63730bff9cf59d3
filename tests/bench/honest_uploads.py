"""What the checks of answers cost an honest upload.

Run it by ``PYTHONPATH=tests/unit/strategies/flower python tests/bench/honest_uploads.py``. It prints CPU milliseconds
of one core:

- Flower's: Flower's grid pulls the answer
- bounded: the library pulls it within its bounds
- outputs: a forward pass looks for overflowing outputs
- SGD step: the client takes one step of 64 images
"""

from __future__ import annotations

import os
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from measure import interleaved, row
from torch import nn
from wire_fakes import Link, Objects, deflated, grid_of

from fl_app.models import build
from strategies.flower.pulling import Puller
from strategies.uploads.checks import MIB
from strategies.uploads.outputs import check_outputs

INPUTS = {"lenet5": (1, 28, 28), "resnet18": (3, 32, 32)}
IMAGES, REPETITIONS = 64, 15
WIDTHS = (12, 12, 12, 12, 12)


def main() -> None:
    """Print a row per architecture."""
    torch.set_num_threads(1)
    for name in ("_run_id", "_node_id", "_task_id"):  # Flower stamps messages with the identity of its process
        setattr(TaskIdentity, name, 1)
    row(("CPU ms", "Flower's", "bounded", "outputs", "SGD step"), WIDTHS)
    for architecture, shape in INPUTS.items():
        found = measured(architecture, shape)
        row((architecture, *(f"{1000 * seconds:.1f}" for seconds in found.values())), WIDTHS)


def measured(architecture: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Return the median CPU seconds of each piece of work for one architecture."""
    builder = partial(build, architecture, num_classes=10, input_shape=shape)
    model = builder()
    state = model.state_dict()
    answer = answered(state)
    objects = deflated(answer)
    works = {
        "flower": lambda: list(grid_of(Link(answer, objects)).pull_messages(["1"])),
        "bounded": lambda: pull(answer, objects),
        "outputs": lambda: check_outputs(architecture, state, builder, shape),
        "step": partial(step, model, torch.rand(IMAGES, *shape), torch.arange(IMAGES) % 10),
    }
    return interleaved(works, REPETITIONS)


def answered(state: dict[str, torch.Tensor]) -> Message:
    """Return the answer of a node that uploads a model."""
    arrays = ArrayRecord({name: Array(value.numpy()) for name, value in state.items()})
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    question.metadata.__dict__["_src_node_id"] = 1
    return Message(RecordDict({"arrays": arrays}), reply_to=question)


def pull(answer: Message, objects: Objects) -> None:
    """Pull the answer as a run does."""
    assert Puller(grid_of(Link(answer, objects)), 1024 * MIB).pull("1") is not None


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Take one step of local training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


if __name__ == "__main__":
    main()
