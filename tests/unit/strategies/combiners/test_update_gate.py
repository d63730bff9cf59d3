"""The gate of updates: whose span an image lies in, and what a pool does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import Book, check_resume, model_of, train
from scipy.special import logsumexp
from torch import Tensor, nn

from strategies.combiners.opinion_pools import OpinionPool, center_logits
from strategies.combiners.outcomes import build_ensemble
from strategies.combiners.update_gate import GatedPool, Spans, find_spans, gate_pool, residual
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator, seeded_torch
from strategies.distillation.learner import Learner
from strategies.distillation.spanned import DIRECTIONS, Objective
from strategies.method import Job, Normalization, Upload
from strategies.methods.tally import METHOD, TallyConfig

SHAPE, CLASSES, SEED = (1, 6, 6), 6, 5
OWN = ((0, 1), (2, 3), (4, 5))  # the classes of three clients
EXAMPLES = 30


def chain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, CLASSES)
    )


@cache
def images_of(label: int, seed: int) -> Tensor:
    """Noisy copies of the class's own pattern, which has more in common with the others than not."""
    pattern = torch.randn(SHAPE, generator=generator(0, "pattern", label))
    pattern = pattern + 1.5 * torch.randn(SHAPE, generator=generator(0, "common"))
    return pattern + 0.3 * torch.randn(EXAMPLES, *SHAPE, generator=generator(seed, "noise", label))


@cache
def trained(client: int, builder: Any = chain, seed: int = SEED) -> Mapping[str, Tensor]:
    with seeded_torch(seed, "init", "net"):
        model = builder()
    inputs = torch.cat([images_of(label, client) for label in OWN[client]])
    labels = torch.tensor(OWN[client]).repeat_interleave(EXAMPLES)
    return train(model, inputs, labels, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 30)


def upload(client: int, state: Mapping[str, Tensor]) -> Upload:
    counts = tuple(EXAMPLES * (label in OWN[client]) for label in range(CLASSES))
    return Upload(UploadFacts(f"c{client}", "net", 2 * EXAMPLES, counts), lambda: dict(state))


def job_of(builder: Any = chain, **changes: Any) -> Job:
    uploads = tuple(upload(client, trained(client, builder)) for client in range(3))
    space = Normalization((0.5,), (0.5,))
    return replace(
        Job(uploads, {"net": builder}, "net", CLASSES, SHAPE, space, TallyConfig(), seed=9, clients_seed=SEED),
        **changes,
    )


def pool_of(job: Job, **changes: Any) -> OpinionPool:
    return OpinionPool("log", torch.tensor([one.label_counts for one in job.uploads]).float(), **changes)


def gate_of(job: Job, pool: OpinionPool | None = None) -> GatedPool:
    found = gate_pool(job, pool or pool_of(job))
    assert isinstance(found, GatedPool), found
    return found


SCALES, BIAS = torch.tensor([0.5, 2.0]), torch.tensor([0.1, -0.2, 0.0])


def by_hand(power: float = 1.0, **changes: Any) -> GatedPool:
    """Two members whose spans are the two axes of images of two pixels."""
    counts = torch.tensor([[8.0, 2.0, 0.0], [0.0, 6.0, 0.0]])
    pool = OpinionPool("log", counts, scales=SCALES, bias=BIAS, **changes)
    return GatedPool(pool, torch.eye(2)[:, None], torch.tensor([power]), nn.Flatten())


IMAGE = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)


def test_density_falls_with_the_part_of_the_image_outside_the_span() -> None:
    left = torch.tensor([1 - 9 / 25, 1 - 16 / 25])
    for power in (1.0, 3.0):
        found = by_hand(power).densities(IMAGE)[:, 0]
        torch.testing.assert_close(found, power * (left.min() / left).log())
    torch.testing.assert_close(by_hand(0.0).densities(IMAGE), torch.zeros(2, 1))


def test_pool_has_the_shares_of_the_image_and_the_density_of_each_class() -> None:
    gate = by_hand()
    z = torch.randn(2, 1, 3, generator=generator(3, "z"))
    density = torch.tensor([(1 - 16 / 25) / (1 - 9 / 25), 1.0])
    opinions, evidence = gate.opinions(z).exp() + 1e-4, center_logits(z)
    wanted = []
    for c in range(2):
        mass = [float(gate.counts[k, c] / gate.counts[:, c].sum() * density[k]) for k in range(2)]
        terms = [mass[k] / sum(mass) * (opinions[k, 0, c].log() + SCALES[k] * evidence[k, 0, c]) for k in range(2)]
        wanted.append(torch.stack(terms).sum() + BIAS[c] + torch.tensor(sum(mass)).log())
    found = gate(z, IMAGE)[0]
    torch.testing.assert_close(found[:2], torch.stack(wanted))
    assert float(found[2]) < float(found[:2].min()) - 9  # a class without holders comes last


@pytest.mark.parametrize("builder", [chain, convolutional])
def test_gate_finds_the_client_of_a_class_where_the_pool_does_not(builder: Any) -> None:
    job = job_of(builder)
    fresh = torch.cat([images_of(label, 99) for label in range(CLASSES)])
    labels = torch.arange(CLASSES).repeat_interleave(EXAMPLES)
    pool = pool_of(job)
    gate = gate_of(job, pool)
    with torch.no_grad():
        logits = torch.stack([model_of(one, job.builders)(fresh) for one in job.uploads])
        right = (gate.densities(fresh).argmax(0) == labels // 2).float().mean()
        plain, gated = ((made.argmax(1) == labels).float().mean() for made in (pool(logits), gate(logits, fresh)))
    assert float(right) > 0.95
    assert float(gated) > 0.95
    assert float(plain) < float(gated) - 0.05


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clients_seed": None}, "not known"),
        ({"clients_seed": None, "start": chain().state_dict()}, "started from are not known"),
        ({"clients_seed": SEED + 1}, "c0 did not start from the weights of the others"),
        ({"uploads": (*job_of().uploads[:2], upload(2, trained(2, chain, 77)))}, "c2 did not start"),
        ({"uploads": (replace(job_of().uploads[0], facts=UploadFacts("c0", "other")),)}, "one architecture"),
    ],
)
def test_reason_why_there_is_no_gate(changes: dict[str, Any], reason: str) -> None:
    job = job_of(**changes)
    found = gate_pool(job, OpinionPool("log", torch.ones(len(job.uploads), CLASSES)))
    assert isinstance(found, str)
    assert reason in found


def test_tally_distils_the_gated_pool_and_says_where_there_is_none() -> None:
    book = Book()
    config = TallyConfig(epochs=1, images=8, batch_size=4, layers=0, probes=8, gate="updates")
    job = job_of(config=config)
    outcome = METHOD.fit(job, book)
    assert book.notes == []
    assert outcome.ensemble.combiner == "gated-log-pool"
    fresh = torch.cat([images_of(label, 99) for label in range(CLASSES)])
    labels = torch.arange(CLASSES).repeat_interleave(EXAMPLES)
    right = build_ensemble(job, outcome.ensemble)(fresh).argmax(1) == labels
    assert float(right.float().mean()) > 0.9

    unknown = METHOD.fit(replace(job, clients_seed=None), book)
    assert unknown.ensemble.combiner == "log-pool"
    assert book.notes == ["the clients' updates do not gate: the weights that the clients started from are not known"]


@pytest.mark.slow
def test_tally_reads_spanned_images_beside_the_noise_and_says_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[Mapping[str, Tensor]] = []
    book = Book()
    learn = Learner.learn

    def watched(self: Learner, table: Mapping[str, Tensor], *rest: Any, **more: Any) -> float:
        tables.append(table)
        return learn(self, table, *rest, **more)

    monkeypatch.setattr(Learner, "learn", watched)
    config = TallyConfig(epochs=1, images=8, batch_size=4, layers=0, probes=8, spanned=11)
    job = job_of(convolutional, config=config)
    METHOD.fit(job, book)
    assert book.notes == []
    METHOD.fit(replace(job, clients_seed=None), book)
    assert book.notes == ["no images in the spans of updates: the weights that the clients started from are not known"]
    with_them, without = tables
    assert [len(table["images"]) for table in tables] == [8 + 11, 8]
    assert torch.equal(with_them["images"][:8], without["images"])
    images, logits = with_them["images"], with_them["logits"]
    spans = find_spans(job, [True] * 3, share=DIRECTIONS)
    assert isinstance(spans, Spans)
    outside = residual(spans.below((images / 255 - 0.5) / 0.5), spans.bases).amin(0)
    assert float(outside[8:].mean()) < 0.5 * float(outside[:8].mean())
    torch.testing.assert_close(logits[:8], without["logits"])
    monkeypatch.undo()
    check_resume(METHOD, replace(job, config=replace(config, epochs=3)))


def of_two_directions(client: int) -> dict[str, Tensor]:
    """The start, and an update of the first linear layer in two directions."""
    with seeded_torch(SEED, "init", "net"):
        found, rng = dict(convolutional().state_dict()), generator(client, "update")
    found["3.weight"] = found["3.weight"] + torch.randn(20, 2, generator=rng) @ torch.randn(2, 144, generator=rng).abs()
    found["0.weight"] = found["0.weight"] + 0.1 * torch.randn(found["0.weight"].shape, generator=rng)
    return found


def test_objective_is_the_sum_of_both_residuals_and_the_classes_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.teacher.merged.ALIKE", -1.0)  # any updates will do
    job = job_of(convolutional, uploads=tuple(upload(k, of_two_directions(k)) for k in range(3)))
    spans, labels = find_spans(job, [True] * 3), torch.tensor([0, 2, 1, 1])
    assert isinstance(spans, Spans), spans
    pixels = torch.randint(0, 256, (4, *SHAPE), generator=generator(3, "noise")) / 255
    client, start = convolutional(), convolutional()
    client.load_state_dict(of_two_directions(2))
    with seeded_torch(SEED, "init", "net"):
        start.load_state_dict(convolutional().state_dict())
    with torch.no_grad():
        found, inputs = Objective(job, spans, 2)(pixels, labels), (pixels - 0.5) / 0.5
        logits = client(inputs).double().numpy()
        features = [net[:3](inputs).double().numpy() for net in (start, client)]  # type: ignore[index]
    rows = np.linalg.svd((client[3].weight - start[3].weight).detach().double().numpy())[2][:2]  # type: ignore[index]
    ratios = [1 - ((a @ rows.T) ** 2).sum(1) / (a**2).sum(1) for a in features]
    ce = logsumexp(logits, axis=1) - logits[np.arange(4), labels.numpy()]
    assert float(found) == pytest.approx(np.log(ratios).sum() + 0.1 * ce.sum(), rel=1e-4)
