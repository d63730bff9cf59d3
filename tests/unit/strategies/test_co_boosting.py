from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import TINY, UPLOADS, Book, check_resume, run, same, telling, tiny_job
from torch import Tensor

from strategies.combiners.combiners import name_of
from strategies.combiners.outcomes import build_ensemble
from strategies.combiners.tally_pool import build_tally_teacher
from strategies.method import Outcome, Silent, Upload
from strategies.methods.co_boosting import METHOD, CoBoostingConfig, CoBoostingServer, fit
from strategies.teacher.ensemble import Ensemble

SMALL = CoBoostingConfig(**TINY, schedule="constant", reweighting_step=0.05)
GRADIENT = "strategies.methods.co_boosting.weighted_mean_gradient"
THIRDS = torch.full((3,), 1 / 3)


def final(outcome: Outcome) -> Tensor:
    return outcome.ensemble.weights["weights"]


def test_outcome_has_the_student_and_the_ensemble_with_the_last_weights() -> None:
    book = Book(keep=True)
    outcome = fit(tiny_job(SMALL), book)
    assert outcome.student is not None
    assert outcome.ensemble.clients == ("c0", "c1", "c2")
    assert torch.equal(final(outcome), book.snapshots[-1].state["modules"]["weights"]["weights"])
    combiner = build_ensemble(tiny_job(SMALL), outcome.ensemble).combiner
    assert torch.equal(combiner.get_buffer("weights"), final(outcome))


@pytest.mark.parametrize(
    ("data", "most", "sizes"),
    [("earlier", 0, [6, 5, 5, 2]), ("all", 0, [6, 5, 5, 2, 5, 5, 5, 3]), ("all", 1, [6, 5, 5])],
)
def test_weights_see_each_image_of_the_pool_once_per_epoch_or_the_first_batches(
    data: str, most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spy(weights: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        assert logits.shape == (3, len(labels), 3)
        seen.append(len(labels))
        return torch.zeros(3)

    monkeypatch.setattr(GRADIENT, spy)
    config = replace(SMALL, reweighting_data=data, perturbation="none", steps_per_epoch=most)
    outcome = run(METHOD, config)
    assert seen == sizes
    assert torch.equal(final(outcome), THIRDS)
    assert len(outcome.images) == 6  # those of the last epoch
    seen.clear()
    run(METHOD, replace(config, pool_augmentation="flip"))  # which asks the clients anew
    assert seen == sizes


def test_weights_of_the_text_see_moved_images_of_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    perturb = CoBoostingServer.perturb

    def spy(self: CoBoostingServer, inputs: Tensor, rng: torch.Generator) -> Tensor:
        moved.append(perturb(self, inputs, rng))
        return moved[-1]

    seen: list[Tensor] = []
    monkeypatch.setattr(CoBoostingServer, "perturb", spy)
    ask = Ensemble.member_logits

    def asked(self: Ensemble, x: Tensor, *rest: Any) -> Tensor:
        seen.append(x)
        return ask(self, x, *rest)

    monkeypatch.setattr(Ensemble, "member_logits", asked)
    server = CoBoostingServer(tiny_job(replace(SMALL, reweighting_data="perturbed")), Silent())
    server.stage.pool.add(images=torch.rand(6, 2, 8, 8), labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    seen.clear()
    list(server.judgements(0))
    assert moved
    assert all(any(torch.equal(image, x) for x in seen) for image in moved)


MUTE = tuple(telling(upload, label_counts=None) for upload in UPLOADS)


@pytest.mark.parametrize("uploads", [UPLOADS, MUTE], ids=["told", "silent"])
def test_weights_of_tallys_pool_are_learned_and_resumed(uploads: tuple[Upload, ...]) -> None:
    config = replace(SMALL, perturbation="none")
    job = replace(tiny_job(config), teacher="tally", uploads=uploads)
    check_resume(METHOD, job)
    outcome = fit(job, Silent())
    assert outcome.ensemble.combiner == name_of(build_tally_teacher(tiny_job(config, uploads=uploads))[1])
    assert outcome.ensemble.weights.keys() >= {"counts", "weights"}
    assert not torch.equal(final(outcome), THIRDS)
    build_ensemble(tiny_job(config), outcome.ensemble)
    assert not same(outcome, run(METHOD, config))
