"""Members in shards of this process, against the same members in one ensemble."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from local_shards import LocalShard, local_shards
from method_fakes import BUILDERS, SHAPE, TINY, UPLOADS, Book, tiny_job, upload
from torch import Tensor

from strategies.co_boosting import CoBoostingConfig
from strategies.combiners.combiners import Weighted
from strategies.combiners.outcomes import load_model
from strategies.dense import DenseConfig
from strategies.f_adi import FAdiConfig
from strategies.f_dafl import FDaflConfig
from strategies.fed_et import FedEtConfig
from strategies.fed_gen import FedGenConfig
from strategies.feddf import FedDfConfig
from strategies.fedhydra import FedHydraConfig
from strategies.fedkd import FedKdConfig
from strategies.flboost import FlBoostConfig
from strategies.intactofl import IntactOflConfig
from strategies.method import METHODS, Job
from strategies.tally import TallyConfig
from strategies.teacher import calls
from strategies.teacher.batchnorm import batchnorm_loss, keeps_statistics
from strategies.teacher.calls import KEPT
from strategies.teacher.ensemble import Ensemble
from strategies.teacher.features import penultimate_features
from strategies.teacher.shard import HeldShard, divided
from strategies.teacher.sharded import FEATURES, STATISTICS, Request, ShardedMembers

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NARROW = tuple(upload(k, "narrow") for k in (0, 2, 4, 6))
IMAGES = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(5))


class Here:
    """The shards of a job, in this process; remembers what it held."""

    def __init__(self, uploads: Any, shards: int) -> None:
        self.uploads, self.shards = {upload.client: upload for upload in uploads}, shards
        self.held: list[ShardedMembers] = []

    def hold(self, clients: Any, *, fold: bool, precision: str) -> ShardedMembers:
        chosen = [self.uploads[client] for client in clients]
        parts = local_shards(chosen, BUILDERS, self.shards, fold=fold, precision=precision)
        self.held.append(ShardedMembers(parts))
        return self.held[-1]


def pair(uploads: Any, shards: int, **how: Any) -> tuple[Ensemble, Ensemble]:
    """The same uploads in one ensemble and in shards, under unequal weights."""
    weights = [0.2 + 0.1 * k for k in range(len(uploads))]
    one = Ensemble.from_uploads(uploads, BUILDERS, Weighted(weights), **how)
    parts = local_shards(uploads, BUILDERS, shards, **how)
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
    for look in (batchnorm_loss,):
        for ours, theirs in zip(seen(sharded, look), seen(one, look), strict=True):
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


def test_features_of_different_lengths_are_none_as_of_one_ensemble() -> None:
    for model in pair(UPLOADS, 2, fold=False):
        with penultimate_features(model.members) as features:
            model(IMAGES)
            assert features() is None


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


def test_a_backward_pass_that_comes_late_is_made_again_and_right() -> None:
    one, sharded = pair(UPLOADS, 2)
    first, second = IMAGES.clone().requires_grad_(), (IMAGES + 1).requires_grad_()
    early, late = sharded(first), sharded(second)
    for logits, x in ((early, first), (late, second)):
        (ours,) = torch.autograd.grad(logits.square().mean(), x, retain_graph=True)
        (again,) = torch.autograd.grad(logits.square().mean(), x)
        (theirs,) = torch.autograd.grad(one(x).square().mean(), x)
        torch.testing.assert_close(ours, theirs, **CLOSE)
        torch.testing.assert_close(again, theirs, **CLOSE)


def test_a_shard_keeps_one_graph_whatever_becomes_of_the_passes() -> None:
    held = HeldShard(BUILDERS, device="cpu", fold=True, precision="float32")
    for each in UPLOADS:
        held.add(each)
    held.close()
    images, kept = IMAGES.numpy(), []
    for ticket in (1, 2, 3):
        held.forward(images, Request(0, 3, "", ticket))
        assert held._kept is not None
        kept.append(weakref.ref(held._kept[2]))
        held.forward(images, Request(0, 3))  # what no backward pass follows changes nothing
        for watch in (STATISTICS, FEATURES):
            held.forward(images, Request(0, 3, watch))
    hooks = [layer for member in held._members for layer in member.modules() if layer._forward_pre_hooks]
    assert not hooks  # a pass that watched takes its hooks away
    gc.collect()
    assert [reference() is not None for reference in kept] == [False, False, True]
    logits = np.ones((3, len(IMAGES), 3), np.float32)
    assert held.backward(2, logits, None) is None
    assert held.backward(3, logits, None) is not None
    assert held._kept is None
    assert held.backward(3, logits, None) is None


def test_a_pass_without_gradients_costs_no_graph_though_its_images_want_one() -> None:
    parts = local_shards(UPLOADS, BUILDERS, 2)
    with torch.no_grad():
        ShardedMembers(parts).logits(IMAGES.clone().requires_grad_())
    assert [part.shard.held._kept for part in parts] == [None, None]  # type: ignore[attr-defined]


def test_all_shards_are_started_before_one_is_waited_for() -> None:
    order: list[str] = []

    class Slow(LocalShard):
        def forward(self, images: Any, request: Request) -> Any:
            order.append("start")
            wait = super().forward(images, request)
            return lambda: (order.append("wait"), wait())[1]

        def backward(self, ticket: int, logits: Any, watched: Any) -> Any:
            order.append("start")
            wait = super().backward(ticket, logits, watched)
            return lambda: (order.append("wait"), wait())[1]

    parts = [replace(part, shard=Slow(part.shard.held)) for part in local_shards(UPLOADS, BUILDERS, 3)]
    x = IMAGES.clone().requires_grad_()
    members = ShardedMembers(parts)
    logits = members.logits(x)
    logits.sum().backward()
    assert order == ["start"] * 3 + ["wait"] * 3 + ["start"] * 3 + ["wait"] * 3
    # Per shard images out and their gradient back; logits back and their gradients out.
    assert members.moved == 2 * 3 * IMAGES.numel() * 4 + 2 * logits.numel() * 4


def test_divided_members_are_neighbours_of_equal_shares() -> None:
    assert divided(7, 3) == [slice(0, 2), slice(2, 4), slice(4, 7)]
    assert divided(2, 5) == [slice(0, 1), slice(1, 2)]
    assert divided(0, 3) == []


# The sum of gradients over shards rounds otherwise. What turns last bits into whole steps is left out here: signs of
# gradients, images rounded to 8 bits, and much of Adam's first steps, which are signs as well.
SMOOTH = {"perturbation": "l2", "pool_precision": "float32", "optimize_noise": False, "generator_lr": 1e-4}
METHODS_WITH_MEMBERS: dict[str, Any] = {
    "co-boosting": CoBoostingConfig(**{**TINY, **SMOOTH}),
    "dense": DenseConfig(**TINY),
    "f-dafl": FDaflConfig(**TINY),
    "f-adi": FAdiConfig(epochs=2, inversion_steps=2, inversion_batch_size=6, batch_size=5),
    "feddf": FedDfConfig(epochs=2, batch_size=5),
    "fedkd": FedKdConfig(epochs=2, batch_size=5),
    "fed-et": FedEtConfig(epochs=2, batch_size=5),
    "intactofl": IntactOflConfig(epochs=2, generator_steps=2, batch_size=5, synthesis_batch_size=6, latent=8),
    "fedhydra": FedHydraConfig(**TINY, stratification_steps=2, stratification_images=2),
    "tally": TallyConfig(epochs=2, images=12, batch_size=5, probes=8, counts="tempered"),
    "flboost": FlBoostConfig(iterations=2, batch_size=6, latent=8, student_steps=2, student_lr=0.01),
    "fed-gen": FedGenConfig(level="images", iterations=2, batch_size=6, latent=8),
}


@pytest.mark.parametrize("name", METHODS_WITH_MEMBERS)
def test_a_method_with_shards_ends_as_without(name: str) -> None:
    config, method = METHODS_WITH_MEMBERS[name], METHODS[name]
    job = tiny_job(config, uploads=NARROW)
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


def test_the_ensemble_of_a_job_with_shards_is_held_by_them() -> None:
    job: Job = tiny_job(METHODS["fedens"].config())
    shards = Here(UPLOADS, 2)
    outcome = METHODS["fedens"].fit(job, Book())
    assert outcome.ensemble is not None
    model = load_model(outcome, replace(job, shards=shards))
    torch.testing.assert_close(model(IMAGES), load_model(outcome, job)(IMAGES), **CLOSE)
    assert len(shards.held) == 1
