"""FLBoost's loop, against a plain one that is written from the algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from flboost_fakes import COUNTS, SHAPE, SMALL, B, C, Rows, State, Z, differ, job, net, student
from torch import Tensor, nn

from strategies.core.seeds import generator as rng
from strategies.core.seeds import seeded_torch
from strategies.distillation.generators import ConditionalGenerator
from strategies.distillation.label_draws import draw_labels
from strategies.flboost import METHOD, FlBoostConfig
from strategies.method import Job, Silent


class PlainGenerator(nn.Module):
    """Table 5a with the library's own layers, from the weights of a generator's state."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(Z, 256), nn.Linear(C, 256)
        self.rest = nn.Sequential(
            nn.BatchNorm2d(128), nn.Upsample(scale_factor=2), nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
            nn.Conv2d(64, 1, 3, padding=1), nn.Tanh(), nn.BatchNorm2d(1, affine=False),
        )  # fmt: skip
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
    """The two variants as the table of the algorithm has them; lr .1 and .01 times .998^t, weight decay 1e-3."""
    assert given.start is not None
    assert given.memory is not None
    model, clients = net(), [net() for _ in given.uploads]
    model.load_state_dict(given.start)
    for client, upload in zip(clients, given.uploads, strict=True):
        client.load_state_dict(upload.read())
        client.eval()
    made = PlainGenerator(given.memory)
    decay = 0.998 ** (given.server_round - 1)
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
            memory = ConditionalGenerator(Z, C, SHAPE).state_dict()
        config = FlBoostConfig.preset(variant, iterations=2, batch_size=B, latent=Z)
        given = job(config, memory=memory, server_round=3)
        ours = METHOD.fit(given, Silent())
        model, made = plain_loop(given, variant)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in model.items():
        torch.testing.assert_close(student(ours)[name], value, rtol=0, atol=1e-5, msg=name)
    for mine, theirs in zip(ours.memory.values(), made.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert differ(student(ours), given.start or {})


def test_adversarial_step_alone_moves_images_to_where_the_models_differ() -> None:
    config = replace(SMALL, ce_weight=0.0, diversity_weight=0.0, iterations=1, student_lr=1e-12, batch_size=16)
    for form in ("logits", "kl"):
        found = []
        for steps in (1, 12):
            rows = Rows()
            METHOD.fit(job(replace(config, discrepancy=form, generator_steps=steps, generator_step="joint")), rows)
            assert rows.rows[0].keys() == {"epoch", "generator", "adversarial", "distillation"}
            found.append(-rows.rows[0]["adversarial"])
        assert found[1] > 1.2 * found[0]  # on average over the steps


@pytest.mark.parametrize("start", ["average", "given"])
def test_student_learns_from_the_clients(start: str) -> None:
    config = replace(SMALL, iterations=8, batch_size=12, generator_step="joint")
    given = job(config) if start == "given" else job(config, start=None)
    short, long = Rows(), Rows()
    METHOD.fit(replace(given, config=replace(config, iterations=1, student_steps=1)), short)
    METHOD.fit(replace(given, config=replace(config, generator_lr=1e-6)), long)
    assert long.rows[0]["distillation"] < short.rows[0]["distillation"]
