"""FedGen's terms in local training: against numpy, by hand, and through the update of a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import equal
from torch import nn

from strategies.client.corrections import LocalUpdate
from strategies.client.generated import GeneratedExamples
from strategies.client.round_state import RoundState
from strategies.core.errors import UploadError
from strategies.core.seeds import generator
from strategies.distillation.generator_spec import GeneratorSpec

State = dict[str, torch.Tensor]

SHAPE, CLASSES = (1, 8, 8), 4
SPEC = GeneratorSpec("features", "normal", 5, CLASSES, 6, SHAPE, 6, 0.7, 20)
IMAGES = replace(SPEC, level="images", noise="uniform")
INPUTS, LABELS = torch.linspace(-1, 1, 4 * 64).view(4, *SHAPE), torch.tensor([0, 2, 2, 0])
COUNTS = (7, 0, 9, 0)
PINNED = 0.0026643  # the mean way of a parameter in three steps of SGD


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 4)
        )


def weights_of(spec: GeneratorSpec, features: int = 9) -> State:
    """Weights of a generator whose running statistics are not the initial ones."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        made = spec.build(features)
        made(torch.randn(30, spec.latent), torch.arange(30) % spec.classes)
    return {name: value.clone() for name, value in made.state_dict().items()}


def terms(model: nn.Module, spec: GeneratorSpec = SPEC, **changes: Any) -> GeneratedExamples:
    said = {"seed": 5, **spec.as_config()}
    more: dict[str, Any] = {"client": "alice", "server_round": 3, "label_counts": COUNTS, **changes}
    return GeneratedExamples(model, said, weights_of(spec), **more)


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))  # type: ignore[no-any-return]


def draws(spec: GeneratorSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The labels y~ of the first penalty, their examples, and those of the batch."""
    made = spec.build(9)
    made.load_state_dict(weights_of(spec))
    made.eval()
    rng = generator(5, "generated", "alice", 3)
    drawn = torch.randint(spec.classes, (spec.batch,), generator=rng)
    draw = torch.randn if spec.noise == "normal" else torch.rand
    with torch.no_grad():
        first = made(draw(spec.batch, spec.latent, generator=rng), drawn)
        return drawn, first, made(draw(len(LABELS), spec.latent, generator=rng), LABELS)


def test_penalty_is_numpy_s() -> None:
    model = net()
    logits = model(INPUTS)
    found = terms(model).penalty(model, logits, LABELS)
    drawn, own, others = (part.double().numpy() for part in draws(SPEC))
    weight, bias = (value.detach().double().numpy() for value in model[6].parameters())  # type: ignore[index]
    classified = -log_softmax(own @ weight.T + bias)[np.arange(6), drawn.astype(int)].mean()
    target, mine = log_softmax(others @ weight.T + bias), log_softmax(logits.detach().double().numpy())
    divergence = (np.exp(target) * (target - mine)).sum(1).mean()
    assert found.item() == pytest.approx(6 / 4 * 0.7 * classified + 0.7 * divergence, rel=1e-5)
    assert divergence > 0.01


def test_same_seed_same_bits_and_every_client_and_round_draws_its_own() -> None:
    model = net().eval()
    torch.manual_seed(1)
    state = torch.get_rng_state()

    def value(**changes: Any) -> float:
        return terms(model, **changes).penalty(model, model(INPUTS), LABELS).item()

    assert value() == value()
    assert len({value(), value(client="bob"), value(server_round=4)}) == 3
    assert torch.equal(torch.get_rng_state(), state)


# Through the update of a client, and refusals.


def trained(sent: dict[str, State], said: dict[str, Any], *, client: str = "alice") -> State:
    """Three steps of a client by the rules of a request."""
    model = net()
    sent = {"arrays": net().state_dict(), **sent}
    update = LocalUpdate(model, said, sent, memory=RoundState(None, client), label_counts=COUNTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model.train()(INPUTS)
        (nn.functional.cross_entropy(logits, LABELS) + update.penalty(model, logits, LABELS)).backward()
        optimizer.step()
        update.step(0.1)
    return update.finish(model)[0]["arrays"]


@pytest.mark.parametrize("spec", [SPEC, IMAGES], ids=["features", "images"])
def test_shared_generator_changes_local_training(spec: GeneratorSpec) -> None:
    said = {"server-round": 2, "seed": 1}
    plain = trained({}, said)
    with_it = trained({"generator": weights_of(spec)}, {**said, **spec.as_config()})
    assert not equal(plain, with_it)
    assert equal(with_it, trained({"generator": weights_of(spec)}, {**said, **spec.as_config()}))


def test_local_training_gives_the_pinned_value() -> None:
    found, start = trained({"generator": weights_of(SPEC)}, {"server-round": 2, "seed": 1, **SPEC.as_config()}), net()
    moved = [(found[name] - value).abs().flatten() for name, value in start.named_parameters()]
    assert torch.cat(moved).mean().item() == pytest.approx(PINNED, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generator-classes": 5}, "the server's generator has 5 classes, this client's last layer has 4"),
        ({"generator-width": 8}, "other names or shapes than its description"),
        ({"generator-width": 7}, "cannot be built: .*even"),
        ({"generator-latent": 6}, "other names or shapes"),
        ({"generator-level": "images", "generator-image-height": 10}, "cannot be built: .*multiples of 4"),
        ({"generator-level": "images"}, "other names or shapes"),
        ({"generator-level": "pixels"}, "generator-level is 'pixels'"),
    ],
)
def test_generator_that_does_not_fit_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UploadError, match=reason):
        trained({"generator": weights_of(SPEC)}, {"server-round": 2, **SPEC.as_config(), **change})
