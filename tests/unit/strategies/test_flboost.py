"""What FLBoost ends with, starts from and remembers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flboost_fakes import COUNTS, SHAPE, SMALL, B, C, State, Z, job, net, student, weights
from flower_fakes import equal
from method_fakes import Book, telling
from torch import Tensor, nn

from strategies.compute.in_process import InProcess
from strategies.core.errors import OneShotError, OptionError
from strategies.core.seeds import generator as rng
from strategies.core.seeds import seeded_torch
from strategies.distillation.generators import ConditionalGenerator
from strategies.distillation.matched import draw_labels
from strategies.merging.merge import merge
from strategies.method import Job, Outcome, Silent
from strategies.methods.flboost import METHOD, FlBoostConfig
from strategies.run.run_folder import RunFolder
from strategies.run.stage import run_stage
from strategies.uploads.checks import check_outputs


def test_outcome_is_the_model_the_generator_times_and_images() -> None:
    outcome = METHOD.fit(job(), Silent())
    assert student(outcome).keys() == net().state_dict().keys()
    assert outcome.memory.keys() == ConditionalGenerator(Z, C, SHAPE).state_dict().keys()
    assert set(outcome.timings) == {"synthesis", "distillation"}
    assert all(seconds > 0 for seconds in outcome.timings.values())
    assert outcome.images.shape == (B, *SHAPE)
    assert outcome.images.dtype == torch.uint8


def mute(given: Job) -> Job:
    return replace(given, uploads=tuple(telling(upload, label_counts=None) for upload in given.uploads))


@pytest.mark.parametrize("level", ["images", "features"])
def test_model_learns_from_tallys_pool_where_that_is_the_teacher(level: str) -> None:
    given = job(replace(SMALL, level=level), teacher="tally")
    told, again, silent = (METHOD.fit(one, Silent()) for one in (given, given, mute(given)))
    assert equal(student(told), student(again))
    assert not equal(student(told), student(METHOD.fit(replace(given, teacher=None), Silent())))
    assert not equal(student(told), student(silent))


def test_generator_of_silent_clients_is_trained_by_estimated_shares() -> None:
    given, rows = mute(job(replace(SMALL, student_lr=1e-9), teacher="tally")), Book()
    estimated = METHOD.fit(given, rows)
    assert not any("note" in row for row in rows.rows)
    assert not equal(estimated.memory, METHOD.fit(replace(given, teacher=None), Silent()).memory)
    # The pool that the model learns from does not reach the generator's own losses: counts from the clients do.
    plain = METHOD.fit(job(replace(SMALL, student_lr=1e-9)), Silent())
    pooled = METHOD.fit(job(replace(SMALL, student_lr=1e-9), teacher="tally"), Silent())
    for name, value in plain.memory.items():
        torch.testing.assert_close(pooled.memory[name], value, rtol=1e-3, atol=1e-4)


# FLBoost's loop, against a plain one that is written from the algorithm.


class PlainGenerator(nn.Module):
    """Table 5a, or the release's form of it, with torch's layers, from the weights of a generator's state."""

    def __init__(self, state: State, *, as_printed: bool) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(Z, 256), nn.Linear(C, 256)
        layers: list[nn.Module] = [nn.BatchNorm2d(128)]
        for width in (128, 64):
            block = [nn.Conv2d(128, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.2)]
            layers += [*block, nn.Upsample(scale_factor=2)] if as_printed else [nn.Upsample(scale_factor=2), *block]
        layers += [nn.Conv2d(64, 1, 3, padding=1), nn.Tanh()]
        self.rest = nn.Sequential(*layers, *([] if as_printed else [nn.BatchNorm2d(1, affine=False)]))
        self.load_state_dict(dict(zip(self.state_dict(), state.values(), strict=True)))

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.cat([self.l1(noise), self.l2(F.one_hot(labels, C).to(noise))], dim=1)
        made: Tensor = self.rest(hidden.view(-1, 128, 2, 2))
        return made


def diversity(noise: Tensor, images: Tensor) -> Tensor:
    apart = [
        ((noise[i] - noise[j]) ** 2).mean() * (images[i] - images[j]).abs().mean() for i in range(B) for j in range(B)
    ]
    return torch.exp(-torch.stack(apart).mean())


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(sm first || sm second) per sample."""
    return F.kl_div(torch.log_softmax(second, 1), torch.log_softmax(first, 1), reduction="none", log_target=True).sum(1)


def plain_loop(given: Job, variant: str) -> tuple[State, State]:
    """The two variants as the table of the algorithm has them; lr .1 and .01 times .5^t, weight decay 1e-3."""
    assert given.start is not None
    assert given.memory is not None
    model, clients = net(), [net() for _ in given.uploads]
    model.load_state_dict(given.start)
    for client, upload in zip(clients, given.uploads, strict=True):
        client.load_state_dict(upload.read())
        client.eval()
    made = PlainGenerator(given.memory, as_printed=variant == "paper")
    decay = 0.5 ** (given.server_round - 1)
    opt_d = torch.optim.SGD(model.parameters(), 0.1 * decay, weight_decay=1e-3)
    opt_g = torch.optim.Adam(made.parameters(), 0.01 * decay)
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    how = "independent" if variant == "paper" else "fixed"
    all_labels = draw_labels(counts.sum(0).long().tolist(), 2 * B, how, rng(0, "flboost", given.server_round, "labels"))
    members = range(len(clients))
    for i in range(2):
        z = torch.randn(B, Z, generator=rng(0, "flboost", given.server_round, "iteration", i))
        y = all_labels[i * B : (i + 1) * B]
        a = (counts / counts.sum(0))[:, y]
        made.train()
        model.eval()
        for group in [list(members)] if variant == "paper" else [[k] for k in members]:
            x = made(z, y)
            s, f = model(x), {k: clients[k](x) for k in group}
            if variant == "paper":
                loss = -sum((a[k] * kl(s, f[k])).mean() for k in group)
                loss = loss + sum((a[k] * F.cross_entropy(f[k], y, reduction="none")).mean() for k in group)
                loss = loss + diversity(z, x)
            else:
                k = group[0]
                loss = -(a[k] * (s - f[k].detach()).abs().mean(1)).mean()
                loss = loss + F.cross_entropy(f[k], y) * a[k].mean() + diversity(z, x) / len(clients)
            opt_g.zero_grad()
            loss.backward()
            opt_g.step()
        made.eval()
        model.train()
        for _ in range(5):
            with torch.no_grad():
                x = made(z, y)
                answers = [client(x) for client in clients]
            if variant == "paper":
                s = model(x)
                loss = sum((a[k] * kl(s, answers[k])).mean() for k in members)
            else:
                target = sum(a[k][:, None] * torch.softmax(answers[k], 1) for k in members)
                loss = (-torch.log_softmax(model(x), 1) * target).mean()
            opt_d.zero_grad()
            loss.backward()
            opt_d.step()
    return model.state_dict(), made.state_dict()


@pytest.mark.usefixtures("wide_generators")
@pytest.mark.parametrize("variant", ["paper", "published-code"])
def test_loop_equals_a_plain_one_written_from_the_algorithm(variant: str) -> None:
    torch.set_default_dtype(torch.float64)  # Adam's first steps are signs of gradients, rounded or not
    try:
        with seeded_torch(0, "memory"):
            memory = ConditionalGenerator(Z, C, SHAPE, variant).state_dict()
        config = FlBoostConfig.preset(variant, iterations=2, batch_size=B, latent=Z, lr_decay=0.5)
        given = job(config, memory=memory, server_round=3)
        ours = METHOD.fit(given, Silent())
        model, made = plain_loop(given, variant)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in model.items():
        torch.testing.assert_close(student(ours)[name], value, rtol=0, atol=1e-5, msg=name)
    for mine, theirs in zip(ours.memory.values(), made.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)  # Adam's steps of 0.01 divide by small gradients
    assert not equal(student(ours), given.start or {})


# What FLBoost's options change, and which do not go together.


SWITCHES: dict[str, Any] = {
    "iterations": 3, "generator_steps": 2, "student_steps": 3, "batch_size": 7, "latent": 6, "generator_lr": 0.02,
    "generator_precision": "bfloat16", "student_lr": 0.05, "weight_decay": 0.1, "adversarial_weight": 0.0,
    "ce_weight": 0.0, "diversity_weight": 0.0, "discrepancy": "kl", "generator_step": "joint", "ce_form": "batch-mean",
    "student_divergence": "student-first", "per_class": True, "labels": "uniform", "label_draw": "independent",
    "weights": "uniform", "ensemble": "logits", "augmentation": "crop-flip", "level": "features",
    "generator": "paper",
}  # fmt: skip


@cache
def usual(iterations: int) -> Outcome:
    return METHOD.fit(job(replace(SMALL, iterations=iterations)), Silent())


@pytest.mark.parametrize("name", list(SWITCHES))
def test_every_option_changes_the_result(name: str) -> None:
    # Most show after one iteration.
    assert not all(
        equal(
            student(usual(iterations)),
            student(METHOD.fit(job(replace(SMALL, **{"iterations": iterations, name: SWITCHES[name]})), Silent())),
        )
        for iterations in dict.fromkeys((1, SMALL.iterations))
    )


@pytest.mark.parametrize("option", [{"labels": "uniform"}, {"weights": "uniform"}])
def test_equal_counts_are_as_good_as_none(option: dict[str, Any]) -> None:
    given = job()
    given = replace(given, uploads=tuple(telling(u, label_counts=(5,) * C) for u in given.uploads))
    plain, switched = (METHOD.fit(replace(given, config=c), Silent()) for c in (SMALL, replace(SMALL, **option)))
    assert equal(student(plain), student(switched))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adversarial_weight": 0.0, "ce_weight": 0.0, "diversity_weight": 0.0}, "are all 0: must be at least one"),
        ({"generator_width": 7}, "'server.generator-width' is 7: must be an even number"),
        ({"level": "features", "augmentation": "crop-flip"}, "must be 'none', or the level 'images'"),
        ({"ce_form": "mean-output"}, "'flboost.generator-step' 'per-client': must be 'joint'"),
        ({"discrepancy": "l2"}, "'flboost.discrepancy' is 'l2'"),
        ({"batch_size": 1}, "'flboost.batch-size' is 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FlBoostConfig(**changes)


def test_student_that_one_accepted_upload_made_nan_is_no_result(tmp_path: Path) -> None:
    huge = {key: value * 5e36 if key.startswith("6.") else value for key, value in weights(2).items()}
    check_outputs("net", huge, net, SHAPE)
    one = job()
    spoilt = replace(one, start=None, uploads=(*one.uploads[:2], replace(one.uploads[2], read=lambda: huge)))
    said = r"^method 'flboost' ended with NaN or Inf in tensor '0\.weight' of the student: must be finite"

    with RunFolder.create(tmp_path / "run", {}) as run, pytest.raises(OneShotError, match=said):
        run_stage(METHOD, spoilt, InProcess(), run.round(), log=lambda _: None)
    with pytest.raises(OneShotError, match=said):
        merge([upload.read() for upload in spoilt.uploads], "flboost", model=net, num_classes=C, input_shape=SHAPE)
