"""FAFI's fusion against loops over samples in numpy, its options, and the kind of its uploads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import telling
from torch import nn

from strategies.combiners.combiners import build_combiner
from strategies.combiners.outcomes import load_model
from strategies.combiners.prototypes import Prototypes
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.core.kinds import base_of, kind_of
from strategies.core.seeds import generator
from strategies.fafi import METHOD, NOISE_IMAGES, FafiConfig, fit, noise_direction
from strategies.method import METHODS, Job, Normalization, Silent, Upload
from strategies.uploads.accepted import accepted_of
from strategies.uploads.needs import check_needs

Floats = np.ndarray[Any, np.dtype[np.float64]]
CLASSES, FEATURES = 3, 5


class Encoder(nn.Module):
    """Three logits and five features, of images 1 x 4 x 4."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, FEATURES), nn.BatchNorm1d(5) if norm else nn.Tanh())
        self.prototypes = nn.Parameter(torch.randn(CLASSES, FEATURES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.encoder(images)
        return torch.cat([nn.functional.normalize(features) @ self.prototypes.T, features], 1)


def normed() -> nn.Module:
    return Encoder(norm=True)


BUILDERS = {"net": nn.Identity, "net+prototypes": Encoder, "normed+prototypes": normed}


def upload(k: int, name: str = "net+prototypes") -> Upload:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        state = {key: value.clone() for key, value in BUILDERS[name]().state_dict().items()}
    return Upload(UploadFacts(f"c{k}", name, 10 * (k + 1)), lambda: state)


def job(*uploads: Upload, student: str = "net", **options: str) -> Job:
    space = Normalization((0.5,), (0.5,))
    return Job(uploads, BUILDERS, student, CLASSES, (1, 4, 4), space, FafiConfig(**options))


def features_of(each: Upload, images: torch.Tensor) -> Floats:
    state = {key: value.double().numpy() for key, value in each.read().items()}
    found: Floats = np.tanh(images.double().flatten(1).numpy() @ state["encoder.1.weight"].T + state["encoder.1.bias"])
    return found


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


def predicted(one: Job, images: torch.Tensor, informative: list[Floats] | None = None) -> Floats:
    """Return ``h / ||h|| . P`` [B, C], sample by sample; ``informative`` has a_k(x) [B] per client."""
    features = [features_of(each, images) for each in one.uploads]
    prototypes = sum(each.read()["prototypes"].double().numpy() for each in one.uploads) / len(one.uploads)
    scores = np.zeros((len(images), CLASSES))
    for sample in range(len(images)):
        fused = np.zeros(FEATURES)
        for k, each in enumerate(one.uploads):
            weight = float(each.num_examples or 0) if informative is None else informative[k][sample]
            fused += weight * features[k][sample]
        for c in range(CLASSES):
            scores[sample, c] = fused @ prototypes[c] / np.sqrt(fused @ fused)
    return scores


def test_fusion_by_size_equals_a_loop_over_samples() -> None:
    one, images = job(*map(upload, range(3))), torch.randn(20, 1, 4, 4)

    model = load_model(fit(one, Silent()), one)

    np.testing.assert_allclose(model(images).numpy(), predicted(one, images), rtol=1e-4, atol=1e-5)


def test_only_fusion_by_noise_depends_on_the_seed() -> None:
    assert METHOD.draws(FafiConfig(fusion="noise"))
    assert not METHOD.draws(FafiConfig())


def test_fusion_by_noise_weighs_by_the_mean_distance_from_noise() -> None:
    one, images = job(*map(upload, range(3)), fusion="noise"), torch.randn(20, 1, 4, 4)
    noise = torch.randn(NOISE_IMAGES, 1, 4, 4, generator=generator(one.seed, "fafi", "noise"))
    informative = []
    for each in one.uploads:
        own, strange = features_of(each, images), features_of(each, noise)
        informative.append(np.array([np.mean([1 - cosine(row, other) for other in strange]) for row in own]))

    model = load_model(fit(one, Silent()), one)

    np.testing.assert_allclose(model(images).numpy(), predicted(one, images, informative), rtol=1e-4, atol=1e-5)
    plain = load_model(fit(job(*one.uploads), Silent()), one)
    assert not torch.allclose(model(images), plain(images), atol=1e-3)


def test_informativeness_when_averaged_over_clients_leaves_the_plain_sum() -> None:
    one, images = job(*map(upload, range(4))), torch.randn(30, 1, 4, 4)
    equal = [np.ones(30) for _ in one.uploads]
    for seed in range(3):
        noise = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
        each = [
            np.array([1 - cosine(*pair) for pair in zip(features_of(u, images), features_of(u, noise), strict=True)])
            for u in one.uploads
        ]
        averaged = [np.mean(each, axis=0)] * len(each)

        np.testing.assert_allclose(predicted(one, images, averaged), predicted(one, images, equal), rtol=1e-9)


def test_client_that_does_not_tell_its_examples_makes_all_weigh_the_same() -> None:
    told = list(map(upload, range(3)))
    silent = job(told[0], telling(told[1], num_examples=None), told[2])

    weights = fit(silent, Silent()).ensemble.weights["weights"]  # type: ignore[union-attr]

    assert weights.tolist() == [1.0, 1.0, 1.0]


def test_predictions_by_test_batch_depend_on_the_other_images_and_by_default_do_not() -> None:
    uploads = [upload(k, "normed+prototypes") for k in range(2)]
    images = torch.randn(8, 1, 4, 4)
    one = job(*uploads, student="normed")
    running = load_model(fit(one, Silent()), one)
    batch = load_model(fit(replace(one, config=FafiConfig(bn="test-batch")), Silent()), one)

    torch.testing.assert_close(running(images)[:3], running(images[:3]))
    assert not torch.allclose(batch(images)[:3], batch(images[:3]), atol=1e-3)
    # Equal to members in training mode.
    members = []
    for each in uploads:
        member = normed()
        member.load_state_dict(each.read())
        members.append(member.train()(images))
    torch.testing.assert_close(batch(images), batch.combiner(torch.stack(members)))  # type: ignore[operator]


def test_noise_by_test_batch_is_normalised_by_its_own_batch() -> None:
    one = job(upload(0, "normed+prototypes"), student="normed", fusion="noise")

    running = noise_direction(one, one.uploads[0])
    batch = noise_direction(replace(one, config=FafiConfig(fusion="noise", bn="test-batch")), one.uploads[0])

    assert float(batch.norm()) < 0.3  # features of mean 0 point everywhere
    assert not torch.allclose(running, batch, atol=1e-3)


def test_mark_is_that_of_results_by_test_batch() -> None:
    assert METHOD.titled(FafiConfig()) == "FAFI"
    assert METHOD.titled(FafiConfig(bn="test-batch")) == "FAFI (transductive)"
    assert METHODS["fedov"].titled(METHODS["fedov"].config()) == "FedOV"


def test_combiner_when_rebuilt_from_its_tensors_gives_the_same_bits() -> None:
    outputs = torch.randn(2, 7, CLASSES + FEATURES)
    combiner = Prototypes(
        torch.randn(CLASSES, FEATURES), torch.tensor([1.0, 3.0]), torch.randn(2, FEATURES), torch.tensor(True)
    )

    again = build_combiner("prototypes", dict(combiner.state_dict()))

    assert torch.equal(again(outputs), combiner(outputs))
    assert again.batch_statistics
    assert not Prototypes(torch.ones(1, 2), torch.ones(1)).batch_statistics


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0]])
def test_combiner_refuses_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weights per member are .*: must be from 0, and not all zero"):
        Prototypes(torch.ones(3, 2), torch.tensor(weights))


def test_combiner_refuses_noise_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"directions of noise are \[2, 3\]: must be \[M, F\]"):
        Prototypes(torch.ones(3, 2), torch.ones(2), torch.ones(2, 3))


def test_upload_without_prototypes_is_refused_by_name() -> None:
    bare = Upload(UploadFacts("c9", "net+prototypes", 10), lambda: {"weight": torch.zeros(2, 2)})

    with pytest.raises(OptionError, match=r"a tensor 'prototypes' of shape \(3, features\); the upload of c9 has none"):
        fit(job(upload(0), bare), Silent())


def test_architectures_of_encoders_must_be_the_student_s() -> None:
    check_needs(METHOD, job(upload(0), upload(1)))

    with pytest.raises(OptionError, match=r"needs one architecture for all, 'net'; different are c1 \(normed\+"):
        check_needs(METHOD, job(upload(0), upload(1, "normed+prototypes")))


def test_student_may_be_named_like_the_encoders_themselves() -> None:
    named = job(upload(0), upload(1), student="net+prototypes")
    check_needs(METHOD, named)

    with pytest.raises(OptionError, match=r"needs one architecture for all, 'net\+prototypes'; different are c1 \(nor"):
        check_needs(METHOD, replace(named, uploads=(upload(0), upload(1, "normed+prototypes"))))


def test_name_of_an_encoder_tells_its_kind_and_its_classifier() -> None:
    assert kind_of("lenet5+prototypes") == "prototypes"
    assert [base_of(name) for name in ("a+prototypes", "a+unknown", "a", "statistics")] == ["a", "a", "a", "statistics"]
    assert set(accepted_of(BUILDERS, "net")) == {"net", "net+prototypes"}
