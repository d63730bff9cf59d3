"""Models that flatten by ``view`` or change their input: their layout, their copy, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.method import Upload
from strategies.teacher.ensemble import Ensemble


class Viewing(nn.Module):
    """The convolutions and the ``view`` of PyTorch's tutorial net, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 8, 8] to logits [B, 3]."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(x.view(-1, 4 * 9))  # type: ignore[no-any-return]


class Changing(Viewing):
    """Centres its images where they lie."""

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 8, 8] to logits [B, 3]."""
        return self.last(F.max_pool2d(self.first(x.sub_(3.0).div_(2.0)), 2).flatten(1))  # type: ignore[no-any-return]


MODELS = {"viewing": Viewing, "changing": Changing}


def images() -> Tensor:
    return torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def uploads(kind: str) -> list[Upload]:
    found = []
    for number in range(3):
        torch.manual_seed(number)
        found.append(Upload(UploadFacts(f"c{number}", kind), MODELS[kind]().state_dict))
    return found


@pytest.mark.parametrize("form", ["auto", "loop", "stacked"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("kind", list(MODELS))
def test_members_that_view_or_change_their_images_answer_as_they_do_alone(kind: str, fold: bool, form: str) -> None:
    x = images()
    alone = []
    for upload in uploads(kind):
        member = MODELS[kind]().eval()
        member.load_state_dict(upload.read())
        alone.append(member(x.clone()))
    ensemble = Ensemble.from_uploads(uploads(kind), MODELS, Mean(), fold=fold, form=form)

    torch.testing.assert_close(ensemble.member_logits(x), torch.stack(alone), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ensemble.member_logits(x, slice(1, 3)), torch.stack(alone[1:]), rtol=1e-5, atol=1e-5)
    assert torch.equal(x, images())


def test_the_gradient_reaches_images_that_a_member_changes() -> None:
    x = images().requires_grad_()

    Ensemble.from_uploads(uploads("changing"), MODELS, Mean())(x).square().sum().backward()

    assert x.grad is not None
    assert bool((x.grad != 0).any())
