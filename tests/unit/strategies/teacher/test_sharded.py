"""Members in shards of this process, against the same members in one ensemble."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import BUILDERS, SHAPE, TINY, UPLOADS, Book, tiny_job, upload
from torch import Tensor

from strategies.combiners.combiners import Weighted
from strategies.method import METHODS
from strategies.teacher import calls
from strategies.teacher.batchnorm import batchnorm_loss, keeps_statistics
from strategies.teacher.calls import KEPT
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.heads import penultimate_features
from strategies.teacher.shard import HeldShard, divide_evenly
from strategies.teacher.sharded import LoadedShard, ShardedMembers

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NARROW = tuple(upload(k, "narrow") for k in (0, 2, 4, 6))
IMAGES = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(5))


class LocalShard:
    """A shard in this process, which computes when its result is waited for."""

    def __init__(self, held: HeldShard) -> None:
        self.held = held

    def forward(self, images: Any, request: Any) -> Any:
        return lambda: self.held.forward(images, request)

    def backward(self, ticket: int, logits: Any, watched: Any) -> Any:
        return lambda: self.held.backward(ticket, logits, watched)


def local_shards(uploads: Any, shards: int, *, fold: bool = True, precision: str = "float32") -> list[LoadedShard]:
    """Load uploads into shards of this process."""
    parts = []
    for part in divide_evenly(len(uploads), shards):
        held = HeldShard(BUILDERS, device="cpu", fold=fold, precision=precision)
        for each in uploads[part]:
            held.add(each)
        parts.append(LoadedShard(LocalShard(held), part.stop - part.start, held.close()))
    return parts


class Here:
    """The shards of a job, in this process; remembers what it held."""

    def __init__(self, uploads: Any, shards: int) -> None:
        self.uploads, self.shards = {upload.client: upload for upload in uploads}, shards
        self.held: list[ShardedMembers] = []

    def hold(self, clients: Any, *, fold: bool, precision: str) -> ShardedMembers:
        chosen = [self.uploads[client] for client in clients]
        parts = local_shards(chosen, self.shards, fold=fold, precision=precision)
        self.held.append(ShardedMembers(parts))
        return self.held[-1]


def pair(uploads: Any, shards: int, **how: Any) -> tuple[Ensemble, Ensemble]:
    """The same uploads in one ensemble and in shards, under unequal weights."""
    weights = [0.2 + 0.1 * k for k in range(len(uploads))]
    one = Ensemble.from_uploads(uploads, BUILDERS, Weighted(weights), **how)
    parts = local_shards(uploads, shards, **how)
    return one, Ensemble(ShardedMembers(parts), Weighted(weights))


def seen(model: Ensemble, look: Any, x: Tensor = IMAGES) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, a loss of them and of what ``look`` sees, and its gradient to the images."""
    x = x.clone().requires_grad_()
    with look(model.members) as watched:
        logits = model(x)
        extra = watched()
        loss = logits.square().mean() + (0.0 if extra is None else extra.sum())
        (gradient,) = torch.autograd.grad(loss, x)
    return logits, loss, gradient


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("shards", [1, 2, 3, 9])
def test_shards_of_any_number_give_logits_and_gradients_of_one_ensemble(shards: int, precision: str) -> None:
    one, sharded = pair(UPLOADS, shards, fold=precision == "float32", precision=precision)
    assert len(sharded.members) == 3
    assert keeps_statistics(sharded.members)  # though one of the three has none
    torch.testing.assert_close(sharded.member_logits(IMAGES), one.member_logits(IMAGES), **CLOSE)
    for ours, theirs in zip(seen(sharded, batchnorm_loss), seen(one, batchnorm_loss), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    part = slice(1, 3)
    torch.testing.assert_close(sharded.member_logits(IMAGES, part), one.member_logits(IMAGES, part), **CLOSE)
    torch.testing.assert_close(sharded.member_logits(IMAGES, slice(1, 2))[0], one.member_logits(IMAGES)[1], **CLOSE)


@pytest.mark.parametrize("look", [batchnorm_loss, penultimate_features])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kept", [KEPT, 1])  # of one, the backward pass runs the other members again
def test_watched_shards_give_the_loss_and_gradients_of_one_ensemble(
    shards: int, look: Any, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "KEPT", kept)
    one, sharded = pair(NARROW, shards, fold=False)
    ours, theirs = seen(sharded, look), seen(one, look)
    assert float((theirs[1] - theirs[0].square().mean()).detach().abs()) > 1e-3
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


def test_watching_ends_with_its_block_and_without_gradients_there_is_no_loss() -> None:
    _, sharded = pair(NARROW, 2, fold=False)
    with batchnorm_loss(sharded.members) as loss:
        with torch.no_grad():
            sharded(IMAGES)
        assert float(loss().detach()) == 0
        sharded(IMAGES)
        sharded(IMAGES)
        twice = float(loss().detach())
        sharded(IMAGES)
        assert float(loss().detach()) == pytest.approx(twice / 2)
    with batchnorm_loss(sharded.members) as loss:
        assert float(loss().detach()) == 0


# The sum of gradients over shards rounds otherwise. What turns last bits into whole steps is left out here: signs of
# gradients, images rounded to 8 bits, and much of Adam's first steps, which are signs as well.
SMOOTH = {"perturbation": "l2", "pool_precision": "float32", "optimize_noise": False, "generator_lr": 1e-4}
METHODS_WITH_MEMBERS: dict[str, Any] = {
    "co-boosting": TINY | SMOOTH,
    "dense": TINY,
    "f-dafl": TINY,
    "f-adi": {"epochs": 2, "inversion_steps": 2, "synthesis_batch_size": 6, "batch_size": 5},
    "feddf": {"epochs": 2, "batch_size": 5},
    "fedkd": {"epochs": 2, "batch_size": 5},
    "fed-et": {"epochs": 2, "batch_size": 5},
    "intactofl": {"epochs": 2, "generator_steps": 2, "batch_size": 5, "synthesis_batch_size": 6, "latent": 8},
    "tally": {"epochs": 2, "images": 12, "batch_size": 5, "probes": 8, "counts": "tempered"},
    "flboost": {"iterations": 2, "batch_size": 6, "latent": 8, "student_steps": 2, "student_lr": 0.01},
    "fed-gen": {"level": "images", "iterations": 2, "batch_size": 6, "latent": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS_WITH_MEMBERS)
def test_a_method_with_shards_ends_as_without(name: str) -> None:
    method = METHODS[name]
    job = tiny_job(method.config(**METHODS_WITH_MEMBERS[name]), uploads=NARROW)
    shards, here, there = Here(NARROW, 2), Book(), Book()
    expected = method.fit(job, here)
    found = method.fit(replace(job, shards=shards), there)
    assert len(shards.held) == 1
    assert shards.held[0].moved
    assert len(there.rows) == len(here.rows)
    for ours, theirs in zip(there.rows, here.rows, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    for state in ("student", "memory"):
        theirs = getattr(expected, state) or {}
        for key, value in (getattr(found, state) or {}).items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-4, msg=f"{state} {key}")
