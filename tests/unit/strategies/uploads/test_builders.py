"""Models that a method cannot use are refused before a client has worked, each in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import tiny_job
from torch import Tensor, nn

from strategies.core.errors import OptionError
from strategies.feddf import FedDfConfig
from strategies.method import Job
from strategies.uploads.builders import check_student


class Net(nn.Module):
    """A model whose outputs and modes the tests change."""

    def __init__(self, answer: Callable[[nn.Module, Tensor], Any] = lambda _, logits: logits) -> None:
        super().__init__()
        self.flat, self.last, self.answer = nn.Flatten(), nn.LazyLinear(tiny().num_classes), answer
        self.last(torch.zeros(1, SIZE))

    def forward(self, x: Tensor) -> Any:
        """Map images [B, ch, H, W] to what ``answer`` makes of the logits."""
        return self.answer(self, self.last(self.flat(x)))


def tiny() -> Job:
    return tiny_job(FedDfConfig())


SIZE = int(torch.tensor(tiny().input_shape).prod())
SHARED = Net()


def with_model(builder: Callable[[], nn.Module], **changes: Any) -> Job:
    return replace(tiny(), builders={"net": builder}, student="net", **changes)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (with_model(Net, num_classes=1), "num_classes is 1: must be at least 2; a single logit z is the pair"),
        (with_model(lambda: SHARED), "'net' is made of the same parameters each time: must be a new module"),
        (with_model(lambda: Net().requires_grad_(False)), "'net' has no parameter that requires grad: must have one"),
        (with_model(lambda: Net().half()), "'net' has 'last.weight' of float16: must be"),
        (with_model(lambda: Net(lambda _, z: {"logits": z})), "'net' returns a dict: must return logits alone"),
        (
            with_model(lambda: Net(lambda net, z: (z, z) if net.training else z)),
            "'net' in training mode returns a tuple: must return logits alone",
        ),
        (with_model(lambda: Net(lambda _, z: z[:, 1:])), "'net' maps 2 images of shape"),
    ],
)
def test_a_student_that_cannot_be_trained_is_refused(job: Job, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        check_student(job)


def test_a_model_whose_state_holds_more_than_tensors_is_refused() -> None:
    class Extra(Net):
        """Keeps a text beside its weights."""

        def get_extra_state(self) -> str:
            """Return the text."""
            return "version 2"

    with pytest.raises(OptionError, match="'net' has '_extra_state' in its state_dict: must have tensors alone"):
        check_student(with_model(Extra), trained=False)
