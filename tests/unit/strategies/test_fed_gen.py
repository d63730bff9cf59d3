"""FedGen's server part: its losses against numpy, what it leaves, what it describe_generator, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import equal
from method_fakes import BUILDERS, SHAPE, upload
from torch import nn

from strategies.core.errors import OptionError
from strategies.distillation.consensus import CE_FORMS
from strategies.distillation.generator_spec import GeneratorSpec
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.fed_gen import METHOD, FedGenConfig, FedGenServer, describe_generator, fit
from strategies.teacher.average import weighted_mean
from strategies.uploads.needs import check_needs

State = dict[str, torch.Tensor]

SMALL = FedGenConfig(iterations=4, batch_size=6, latent=5, generator_width=8, weight_decay=0.0)
IMAGES = replace(SMALL, level="images")
UPLOADS = tuple(upload(k, "narrow") for k in range(3))
# The mean absolute value of what the generator makes after one round.
PINNED = {"features": 0.366890, "images": 0.885661}


def job(config: FedGenConfig = SMALL, *, uploads: tuple[Upload, ...] = UPLOADS, **more: Any) -> Job:
    space = Normalization((0.5, 0.4), (0.5, 0.6))
    return Job(uploads, BUILDERS, "narrow", 3, SHAPE, space, config, **more)


def made_by(memory: State, config: FedGenConfig) -> torch.Tensor:
    """What a generator makes of one batch, by whose statistics it normalises."""
    spec = GeneratorSpec.read(describe_generator(job(config)))
    found = spec.build(16)
    found.load_state_dict(memory)
    noise = torch.randn(12, spec.latent, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        examples: torch.Tensor = found.train()(noise, torch.arange(12) % 3)
    return examples


# The loss.


def by_hand(
    config: FedGenConfig, weights: np.ndarray[Any, Any]
) -> tuple[FedGenServer, dict[str, float], dict[str, float]]:
    """Return a server, its loss's terms on one batch, and what numpy makes of them from the uploads' last layers."""
    start = weighted_mean([one.read() for one in UPLOADS], [1.0, 2.0, 3.0])
    server = FedGenServer(job(config, start=start), Silent())
    noise, labels = torch.randn(6, 5, generator=torch.Generator().manual_seed(8)), torch.tensor([0, 1, 2, 2, 1, 1])
    found = {name: value.item() for name, value in server.loss(noise, labels).items()}
    made = server.generator(noise, labels).detach().double().numpy()
    z, y = noise.double().numpy(), labels.numpy()

    def logits(state: State) -> np.ndarray[Any, Any]:
        weight, bias = state["7.weight"].double().numpy(), state["7.bias"].double().numpy()
        return made @ weight.T + bias  # type: ignore[no-any-return]

    def log_sm(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return values - np.log(np.exp(values).sum(1, keepdims=True))  # type: ignore[no-any-return]

    each = [logits(one.read()) for one in UPLOADS]
    nll = np.stack([-log_sm(values)[np.arange(6), y] for values in each])
    apart = [[((a - b) ** 2).mean() for b in z] for a in z]
    differ = [[np.abs(a - b).mean() for b in made] for a in made]
    ce = {
        "per-sample": (weights[:, y] * nll).mean(1).sum(),
        "batch-mean": (weights[:, y].mean(1) * nll.mean(1)).sum(),
        "mean-output": -log_sm(sum(weights[k, y][:, None] * each[k] for k in range(3)))[np.arange(6), y].mean(),
    }
    wanted = {"ce": ce[config.ce_form], "diversity": 2.0 * np.exp(-(np.array(apart) * np.array(differ)).mean())}
    return server, found, wanted


@pytest.mark.parametrize("form", CE_FORMS)
def test_terms_are_numpy_s_with_equal_weights(form: str) -> None:
    _, found, wanted = by_hand(replace(SMALL, diversity_weight=2.0, ce_form=form), np.full((3, 3), 1 / 3))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_terms_are_numpy_s_with_weights_by_examples_of_the_class() -> None:
    counts = 1 + np.array([one.label_counts for one in UPLOADS], dtype=float)
    server, found, wanted = by_hand(replace(SMALL, weights="counts", diversity_weight=2.0), counts / counts.sum(0))
    assert found == pytest.approx(wanted, rel=1e-4)
    np.testing.assert_allclose(server.weights.numpy().sum(0), 1.0, rtol=1e-6)


# What a round leaves.


@pytest.mark.usefixtures("wide_generators")
@pytest.mark.parametrize("config", [SMALL, IMAGES], ids=["features", "images"])
def test_round_keeps_the_combined_model_and_leaves_a_generator(config: FedGenConfig) -> None:
    start = {name: value + 1 for name, value in UPLOADS[0].read().items()}
    given = {name: value.clone() for name, value in start.items()}
    outcome = fit(job(config, start=start, seed=2), Silent())
    assert equal(outcome.student, given)
    assert equal(start, given)
    assert set(outcome.timings) == {"average", "generator"}
    examples = made_by(outcome.memory, config)
    assert examples.shape == ((12, 16) if config.level == "features" else (12, *SHAPE))
    assert examples.abs().mean().item() == pytest.approx(PINNED[config.level], rel=1e-3)


def test_round_goes_on_from_the_generator_of_the_last() -> None:
    first = fit(job(), Silent()).memory
    second = fit(job(memory=first, server_round=2), Silent()).memory
    anew = fit(job(server_round=2), Silent()).memory
    assert not equal(second, anew)
    assert second["norm0.num_batches_tracked"] == 8
    assert anew["norm0.num_batches_tracked"] == 4


@pytest.mark.parametrize("config", [SMALL, IMAGES], ids=["features", "images"])
def test_same_seed_same_bits_and_rounds_draw_anew(config: FedGenConfig) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = fit(job(config), Silent()).memory
    assert torch.equal(torch.get_rng_state(), state)
    assert equal(first, fit(job(config), Silent()).memory)
    assert not equal(first, fit(job(config, seed=1), Silent()).memory)
    assert not equal(first, fit(job(config, server_round=2), Silent()).memory)


def slope(config: FedGenConfig, uploads: tuple[Upload, ...]) -> State:
    """Return the gradient of the generator's weights at its first step."""
    server = FedGenServer(job(config, uploads=uploads, start=UPLOADS[0].read()), Silent())
    noise = torch.randn(6, 5, generator=torch.Generator().manual_seed(8))
    sum(server.loss(noise, torch.tensor([0, 1, 2, 2, 1, 1])).values()).backward()  # type: ignore[union-attr]
    return {name: value.grad for name, value in server.generator.named_parameters() if value.grad is not None}


# What Adam makes of a gradient is not compared: of one that is zero but for rounding it makes a full step.
@pytest.mark.parametrize("level", ["features", "images"])
def test_order_of_the_clients_does_not_matter(level: str) -> None:
    config = replace(SMALL, level=level, weights="counts")
    first, turned = slope(config, UPLOADS), slope(config, UPLOADS[::-1])
    assert first.keys() == turned.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, turned[name], rtol=1e-3, atol=1e-5)
    assert max(value.abs().max().item() for value in first.values()) > 1e-2


OTHER: dict[str, Any] = {
    "level": "images", "iterations": 3, "batch_size": 7, "latent": 6, "generator_width": 10, "generator_lr": 0.02,
    "weight_decay": 0.1, "weights": "counts", "diversity_weight": 0.1, "noise": "uniform",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_every_option_changes_the_generator(name: str) -> None:
    usual, changed = (fit(job(config), Silent()).memory for config in (SMALL, replace(SMALL, **{name: OTHER[name]})))
    assert not equal(changed, usual)


# The description of the generator for the clients.


def test_clients_receive_the_generator_s_description_and_its_weight_of_the_round() -> None:
    config = replace(SMALL, local_batch_size=9)
    assert GeneratorSpec.read(describe_generator(job(config, server_round=2))) == GeneratorSpec(
        "features", "normal", 5, 3, 8, SHAPE, 9, pytest.approx(9.8), 20
    )
    assert METHOD.in_rounds.shares_generator is describe_generator


# Settings.


def test_generator_of_the_paper_has_its_size() -> None:
    with torch.device("meta"):
        generator = GeneratorSpec.read(describe_generator(job(FedGenConfig.preset("paper")))).build(512)
    assert sum(value.numel() for value in generator.parameters()) == pytest.approx(72e6, rel=0.01)


def without_linear() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 8), nn.Flatten())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"builders": {"narrow": without_linear}}, "has no linear layer"),
        ({"num_classes": 4}, "narrow: 16 to 3: must take .* 4 outputs"),
        ({"config": IMAGES, "input_shape": (2, 8, 10)}, r"'fed-gen.level' is 'images', .* \(2, 8, 10\): must be"),
        ({"config": IMAGES, "input_shape": (13, 1, 1)}, "multiples of 4; else set the level 'features'"),
    ],
)
def test_job_that_has_nothing_for_the_level_is_refused(change: dict[str, Any], reason: str) -> None:
    one = replace(job(), uploads=())
    check_needs(METHOD, one)
    with pytest.raises(OptionError, match=reason):
        check_needs(METHOD, replace(one, **change))
