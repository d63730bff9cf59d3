"""The uploads weighted by their numbers of examples, as the teacher of other methods."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, TEACHERS, Job, Normalization, Upload
from strategies.uploads.needs import check_needs

SIZES = (10, 30)
TAUGHT = ("feddf", "fedkd", "f-dafl", "f-adi", "dense", "distill")


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def job(method: str = "dense") -> Job:
    states = [{"1.weight": torch.full((3, 16), k + 1.0), "1.bias": torch.arange(3.0) * k} for k in range(2)]
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "net", SIZES[k], (1, 2, 3)), lambda state=state: state)  # type: ignore[misc]
        for k, state in enumerate(states)
    )
    space = Normalization((0.5,), (0.5,))
    proxy = torch.zeros(4, 1, 4, 4, dtype=torch.uint8)
    config = METHODS[method].config()
    return Job(uploads, {"net": net}, "net", 3, (1, 4, 4), space, config, teacher="dw-fedens", proxy=proxy)


def test_teacher_is_the_mean_of_logits_weighted_by_examples() -> None:
    ensemble, _ = TEACHERS["dw-fedens"].build(job())

    found = ensemble(torch.ones(1, 1, 4, 4))

    # Members say (16, 16, 16) and (32, 33, 34), and weigh 1 to 3.
    assert found.tolist() == [[28.0, 28.75, 29.5]]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_that_need_an_ensemble_alone_take_it_and_the_others_refuse(method: str) -> None:
    if METHODS[method].uploads != "classifier":
        return
    if method in TAUGHT:
        check_needs(METHODS[method], job(method))
        return
    with pytest.raises(OptionError, match=rf"'{method}' does not distil .*'dw-fedens'.*: feddf"):
        check_needs(METHODS[method], job(method))
