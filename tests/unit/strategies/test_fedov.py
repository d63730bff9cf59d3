from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import telling
from torch import nn

from strategies.combiners.combiners import COMBINERS, build_combiner
from strategies.combiners.open_set import OpenSet
from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.core.kinds import kind_of
from strategies.fedov import METHOD, FedOvConfig, fit
from strategies.method import METHODS, Job, Normalization, Silent, Upload
from strategies.uploads.accepted import of_kind
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


def test_vote_of_one_is_that_of_the_member_to_whom_the_sample_is_least_unknown() -> None:
    sure, lost = [0.0, 5.0, -5.0], [9.0, 0.0, 12.0]  # two classes; the second member says "unknown"
    logits = torch.tensor([[lost], [sure]])

    assert OpenSet(1)(logits).argmax(1).tolist() == [1]
    assert OpenSet(0)(logits)[0].exp().tolist() == pytest.approx(vote(logits.double().numpy(), 0)[0], rel=1e-5)


def test_vote_of_members_that_are_equally_sure_takes_the_first() -> None:
    logits = torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])

    assert OpenSet(1)(logits).argmax(1).tolist() == [0]
    assert OpenSet(1)(logits.flip(0)).argmax(1).tolist() == [1]


def test_vote_of_unsure_members_is_finite() -> None:
    combined = OpenSet(0)(torch.tensor([[[0.0, 1.0, 500.0]], [[0.0, 2.0, 900.0]]]))

    assert bool(combined.isfinite().all())
    assert combined.argmax(1).tolist() == [1]


def test_voters_are_those_of_the_loaded_state() -> None:
    logits, one = torch.tensor([[[0.0, 1.0, 5.0]], [[3.0, 2.0, 0.0]]]), OpenSet(1)
    loaded = OpenSet()
    loaded.load_state_dict(one.state_dict())
    assert torch.equal(loaded(logits), one(logits))
    assert not torch.equal(loaded(logits), OpenSet()(logits))


def test_combiner_when_rebuilt_from_its_tensors_gives_the_same_bits() -> None:
    logits = torch.randn(3, 7, 5)
    combiner = OpenSet(2)

    again = build_combiner("open-set", dict(combiner.state_dict()))

    assert COMBINERS["open-set"] is OpenSet
    assert torch.equal(again(logits), combiner(logits))


@pytest.mark.parametrize("voters", [-1, [1, 2]])
def test_combiner_refuses_an_invalid_number(voters: Any) -> None:
    with pytest.raises(ValueError, match="voters is .*: must be a whole number from 0"):
        OpenSet(torch.tensor(voters))


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))  # three classes, and "unknown"


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


BUILDERS = {"net+unknown": small, "net": plain}


def upload(k: int, name: str = "net+unknown") -> Upload:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        state = {key: 3 * value for key, value in BUILDERS[name]().state_dict().items()}
    return Upload(UploadFacts(f"c{k}", name, 10), lambda: state)


def job(*uploads: Upload, voters: int = 0) -> Job:
    space = Normalization((0.5,), (0.5,))
    return Job(uploads, BUILDERS, "net", 3, (1, 4, 4), space, FedOvConfig(voters=voters))


@pytest.mark.parametrize("voters", [0, 2])
def test_outcome_is_the_vote_of_all_uploads(voters: int) -> None:
    one = job(*map(upload, range(4)), voters=voters)
    images = torch.randn(30, 1, 4, 4)

    model = load_model(fit(one, Silent()), one)

    logits = []
    for each in one.uploads:
        member = small()
        member.load_state_dict(each.read())
        logits.append(member(images).detach().double().numpy())
    np.testing.assert_allclose(model(images).exp().numpy(), vote(np.stack(logits), voters), rtol=1e-4)


def test_model_without_an_output_for_unknown_is_refused() -> None:
    one = job(upload(0), upload(1, "net"))

    with pytest.raises(OptionError, match=r"the model of c1 has 3 outputs: method 'fedov' needs 4, one per class and"):
        fit(one, Silent())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("net", "classifier"), ("net+unknown", "open-set"), ("cvae-decoder", "cvae"), ("lenet5+unknown", "open-set")],
)
def test_name_of_an_architecture_tells_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_models_of_a_kind_are_those_whose_names_say_so_or_all() -> None:
    assert set(of_kind(BUILDERS, "open-set")) == {"net+unknown"}
    assert set(of_kind(BUILDERS, "classifier")) == {"net"}
    assert set(of_kind({"mine": small}, "open-set")) == {"mine"}


def test_classifiers_are_refused_and_both_kinds_named() -> None:
    check_needs(METHOD, job(upload(0), upload(1)))

    with pytest.raises(
        OptionError, match=r"'fedov' works on uploads of kind 'open-set'; of kind 'classifier' .* c1 \("
    ):
        check_needs(METHOD, job(upload(0), upload(1, "net")))


def test_open_set_classifiers_are_refused_by_a_method_of_classifiers_and_others_named() -> None:
    one = replace(job(upload(0), upload(1)), config=METHODS["fedens"].config())

    with pytest.raises(OptionError, match=r"'fedens' works on .* 'classifier'; of kind 'open-set' .* method: fedov$"):
        check_needs(METHODS["fedens"], one)


def test_models_of_another_project_need_no_special_name() -> None:
    one = replace(job(upload(0)), builders={"mine": small}, student="mine")
    one = replace(one, uploads=tuple(telling(each, architecture="mine") for each in one.uploads))

    check_needs(METHOD, one)
    assert load_model(fit(one, Silent()), one)(torch.zeros(2, 1, 4, 4)).shape == (2, 3)


def test_config_out_of_range_names_its_key() -> None:
    with pytest.raises(OptionError, match=r"fedov\.voters"):
        FedOvConfig(voters=-1)
