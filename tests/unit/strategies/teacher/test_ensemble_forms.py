from collections.abc import Callable

import pytest
import torch
from forward_backward import answers
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.method import Upload
from strategies.teacher import calls as module
from strategies.teacher.calls import StackedMembers, recompute_backward
from strategies.teacher.ensemble import Ensemble


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9 * width, 3),
    )


BUILDERS: dict[str, Callable[[], nn.Module]] = {"narrow": lambda: net(4), "wide": lambda: net(6)}


def uploads() -> list[Upload]:
    def upload(number: int) -> Upload:
        name = "wide" if number % 3 == 1 else "narrow"
        torch.manual_seed(number)
        model = BUILDERS[name]()
        nn.init.normal_(model[1].running_mean, std=0.2)  # type: ignore[index]
        nn.init.uniform_(model[1].running_var, 0.5, 2.0)  # type: ignore[index]
        return Upload(UploadFacts(f"c{number}", name), model.state_dict)

    return [upload(number) for number in range(5)]


def ensemble(**changes: object) -> Ensemble:
    return Ensemble.from_uploads(uploads(), BUILDERS, Mean(), **changes)  # type: ignore[arg-type]


@pytest.fixture
def images() -> Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", ["loop", "auto", "stacked"])
def test_recomputed_members_give_the_same_bits(form: str, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(ensemble(form=form).member_logits, images)
    monkeypatch.setattr(module, "recompute_backward", lambda *_: pytest.fail("all of them fit"))
    answers(ensemble(form="loop").member_logits, images)
    monkeypatch.undo()
    again: list[Tensor] = []
    monkeypatch.setattr(module, "recompute_backward", lambda call, x: again.append(x) or recompute_backward(call, x))
    monkeypatch.setattr(module, "KEPT", 3)  # as many as the larger kind has, so that the groups stay as they were
    for ours, theirs in zip(answers(ensemble(form=form).member_logits, images), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(again) == (2 if form == "loop" else 1)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("most", [1, 2, 10])
def test_stacked_members_equal_the_loop(fold: bool, most: int, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", most)
    model = ensemble(form="stacked", fold=fold)
    assert len(model._together) == {1: 5, 2: 3, 10: 2}[most]
    model.member_logits(images)
    assert all(isinstance(call, StackedMembers) and call._works for _, call in model._together)
    for ours, theirs in zip(
        answers(model.member_logits, images), answers(ensemble(fold=fold).member_logits, images), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
