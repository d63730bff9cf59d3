from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import drawn_upload, model_of
from torch import nn

from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.method import METHODS, Job, Normalization, Silent, Upload
from strategies.methods.fedov import FedOvConfig, OpenSet, fit
from strategies.uploads.needs import check_needs

Floats = np.ndarray[Any, np.dtype[np.float64]]


def vote(logits: Floats, voters: int) -> Floats:
    """Return summed probabilities [B, C], sample by sample and voter by voter."""
    members, batch, outputs = logits.shape
    scores = np.zeros((batch, outputs - 1))
    for sample in range(batch):
        rows = []
        for member in range(members):
            exponentials = np.exp(logits[member, sample])
            rows.append(exponentials / exponentials.sum())
        rows.sort(key=lambda row: float(row[-1]))
        for row in rows[: voters or members]:
            scores[sample] += row[:-1]
    return scores


@pytest.mark.parametrize("voters", [0, 1, 2, 4, 5, 9])
def test_vote_when_counted_one_by_one_is_the_same(voters: int) -> None:
    logits = 3 * torch.randn(5, 40, 4, generator=torch.Generator().manual_seed(voters))

    combined = OpenSet(voters)(logits)

    wanted = vote(logits.double().numpy(), voters)
    np.testing.assert_allclose(combined.exp().numpy(), wanted, rtol=1e-5)
    assert (combined.argmax(1).numpy() == wanted.argmax(1)).all()


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))  # three classes, and "unknown"


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


BUILDERS = {"net+unknown": small, "net": plain}


def upload(k: int, name: str = "net+unknown") -> Upload:
    return drawn_upload(k, name, BUILDERS)


def job(*uploads: Upload, voters: int = 0) -> Job:
    space = Normalization((0.5,), (0.5,))
    return Job(uploads, BUILDERS, "net", 3, (1, 4, 4), space, FedOvConfig(voters=voters))


@pytest.mark.parametrize("voters", [0, 2])
def test_outcome_is_the_vote_of_all_uploads(voters: int) -> None:
    one = job(*map(upload, range(4)), voters=voters)
    images = torch.randn(30, 1, 4, 4)

    model = load_model(fit(one, Silent()), one)

    logits = np.stack([model_of(each, BUILDERS)(images).detach().double().numpy() for each in one.uploads])
    np.testing.assert_allclose(model(images).exp().numpy(), vote(logits, voters), rtol=1e-4)


def test_model_without_an_output_for_unknown_is_refused() -> None:
    one = job(upload(0), upload(1, "net"))

    with pytest.raises(OptionError, match=r"the model of c1 has 3 outputs: method 'fedov' needs 4, one per class and"):
        fit(one, Silent())


def test_open_set_classifiers_are_refused_by_a_method_of_classifiers_and_others_named() -> None:
    one = replace(job(upload(0), upload(1)), config=METHODS["fedens"].config())

    with pytest.raises(OptionError, match=r"'fedens' works on .* 'classifier'; of kind 'open-set' .* method: fedov$"):
        check_needs(METHODS["fedens"], one)
