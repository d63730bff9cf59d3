import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from strategies.aggregation.gate_steps import gate_steps
from strategies.aggregation.steps import round_steps
from strategies.aggregation.training import Sgd
from strategies.combiners.combiners import build_combiner
from strategies.combiners.gate import NAMES, Gate, mixture, start_gate
from strategies.core.errors import OptionError
from strategies.core.seeds import seeded_torch
from strategies.teacher.ensemble import Ensemble

MEMBERS, CLASSES, EXAMPLES = 3, 4, 12
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(EXAMPLES, 1, 16, 16)).astype(np.float32)
LOGITS = RNG.normal(size=(MEMBERS, EXAMPLES, CLASSES)).astype(np.float32) * 3
LABELS = RNG.integers(0, CLASSES, EXAMPLES)


def started(seed: int = 0, *, per_class: bool = False) -> dict[str, np.ndarray]:
    return start_gate(seed, members=MEMBERS, classes=CLASSES, input_shape=(1, 16, 16), per_class=per_class)


def tensors(params: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in params.items()}


def paper_gate(params: dict[str, np.ndarray], channels: int, features: int, outputs: int) -> nn.Module:
    """Return the paper's gate made of torch's own layers."""
    layers = [nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(features, 120), nn.Linear(120, 84)]
    layers.append(nn.Linear(84, outputs))
    for layer, name in zip(layers, ("conv1", "conv2", "layer1", "layer2", "layer3"), strict=True):
        layer.load_state_dict({part: torch.from_numpy(params[f"{name}_{part}"]) for part in ("weight", "bias")})
    conv1, conv2, layer1, layer2, layer3 = layers
    return nn.Sequential(
        conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        layer1, nn.ReLU(), nn.Dropout(0.5), layer2, nn.ReLU(), layer3,
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "features"), [((3, 32, 32), 400), ((1, 28, 28), 256), ((1, 16, 16), 16)])
def test_the_gate_is_the_paper_s_network_for_every_size_of_image(shape: tuple[int, ...], features: int) -> None:
    params = start_gate(0, members=MEMBERS, classes=CLASSES, input_shape=shape)
    x = torch.randn(EXAMPLES, *shape, generator=torch.Generator().manual_seed(0))
    gate = paper_gate(params, shape[0], features, MEMBERS).eval()
    expected = torch.einsum("bm,mbc->bc", gate(x).softmax(1), torch.from_numpy(LOGITS))

    torch.testing.assert_close(Gate(**tensors(params))(torch.from_numpy(LOGITS), x), expected)


def test_the_gate_of_many_classes_gives_weights_as_they_are() -> None:
    params = started(per_class=True)
    outputs = paper_gate(params, 1, 16, MEMBERS * CLASSES).eval()(torch.from_numpy(IMAGES))
    expected = (outputs.view(EXAMPLES, MEMBERS, CLASSES).transpose(0, 1) * torch.from_numpy(LOGITS)).sum(0)

    found = mixture(tensors(params), torch.from_numpy(LOGITS), torch.from_numpy(IMAGES))

    torch.testing.assert_close(found, expected)


def test_start_draws_as_torch_starts_its_layers() -> None:
    params = start_gate(0, members=20, classes=10, input_shape=(3, 32, 32))
    fan_in = {"conv1": 75, "conv2": 150, "layer1": 400, "layer2": 120, "layer3": 84}

    assert sum(value.size for value in params.values()) == 456 + 2416 + 48_120 + 10_164 + 85 * 20
    for name, value in params.items():
        bound = fan_in[name.split("_")[0]] ** -0.5
        assert value.dtype == np.float32
        assert 0.5 * bound < np.abs(value).max() <= bound * (1 + 1e-6)
        if name.endswith("weight"):
            assert np.abs(value).mean() == pytest.approx(bound / 2, rel=0.1)


def test_start_with_the_same_seed_has_the_same_bits_and_with_another_others() -> None:
    first, again, other = started(1), started(1), started(2)

    assert all(np.array_equal(first[name], again[name]) for name in NAMES)
    assert not any(np.array_equal(first[name], other[name]) for name in NAMES)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 15), (13,), (1, 16, 16, 16)])
def test_start_for_inputs_that_are_not_images_of_its_size_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="aggregator 'moe' looks at images, and the input is .*: must be at least"):
        start_gate(0, members=2, classes=3, input_shape=shape)


def test_members_in_another_order_give_the_same_mixture() -> None:
    params, order = started(), [2, 0, 1]
    moved = {**params, "layer3_weight": params["layer3_weight"][order], "layer3_bias": params["layer3_bias"][order]}
    x = torch.from_numpy(IMAGES)

    found = mixture(tensors(moved), torch.from_numpy(LOGITS[order]), x)

    torch.testing.assert_close(found, mixture(tensors(params), torch.from_numpy(LOGITS), x))


def test_one_step_is_one_of_torch_s_sgd_with_the_same_dropout() -> None:
    params = started()
    gate = paper_gate(params, 1, 16, MEMBERS).train()
    (order,) = Sgd(1, EXAMPLES, 0.5).batches(EXAMPLES, 7)
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.5)
    with seeded_torch(7, "dropout"):
        shares = gate(torch.from_numpy(IMAGES[order])).softmax(1)
    combined = torch.einsum("bm,mbc->bc", shares, torch.from_numpy(LOGITS[:, order]))
    F.cross_entropy(combined, torch.from_numpy(LABELS[order])).backward()  # type: ignore[no-untyped-call]
    optimizer.step()

    sgd = Sgd(1, EXAMPLES, 0.5)
    stepped = round_steps("moe", params, inputs=IMAGES, logits=LOGITS, labels=LABELS, sgd=sgd, seed=7)

    assert list(stepped) == list(params)
    for name, expected in zip(NAMES, gate.state_dict().values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(stepped[name]), expected)


def test_steps_have_the_same_bits_again_and_leave_everything_else_alone() -> None:
    params, state = started(), torch.get_rng_state()

    first, again, other = (
        gate_steps(params, inputs=IMAGES, logits=LOGITS, labels=LABELS, sgd=Sgd(4, 5, 0.1), seed=seed)
        for seed in (1, 1, 2)
    )

    assert all(np.array_equal(first[name], again[name]) for name in NAMES)
    assert any(not np.array_equal(first[name], other[name]) for name in NAMES)
    assert all(np.array_equal(params[name], started()[name]) for name in NAMES)
    assert torch.equal(torch.get_rng_state(), state)


def test_steps_on_images_that_tell_whom_to_believe_find_it_out() -> None:
    rng = np.random.default_rng(0)
    bright = rng.integers(0, 2, 80)
    images = (bright[:, None, None, None] * 2 - 1 + 0.1 * rng.normal(size=(80, 1, 16, 16))).astype(np.float32)
    labels = rng.integers(0, CLASSES, 80)
    right = 5 * np.eye(CLASSES, dtype=np.float32)[labels]
    wrong = np.roll(right, 1, axis=1)
    logits = np.stack([np.where(bright[:, None] == member, right, wrong) for member in (0, 1)])
    params = start_gate(0, members=2, classes=CLASSES, input_shape=(1, 16, 16))

    trained = gate_steps(params, inputs=images, logits=logits, labels=labels, sgd=Sgd(60, 40, 0.1), seed=0)

    combined = mixture(tensors(trained), torch.from_numpy(logits), torch.from_numpy(images))
    assert float((combined.argmax(1).numpy() == labels).mean()) == 1.0
    before = mixture(tensors(params), torch.from_numpy(logits), torch.from_numpy(images))
    assert float((before.argmax(1).numpy() == labels).mean()) < 0.8


def test_steps_without_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="no examples"):
        gate_steps(started(), inputs=IMAGES[:0], logits=LOGITS[:, :0], labels=LABELS[:0], sgd=Sgd(1, 2, 0.1), seed=0)


def test_a_gate_of_other_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="a gate's tensors are .*: must be conv1_weight, conv1_bias,"):
        Gate(weights=torch.ones(2))


def test_an_ensemble_hands_its_images_to_the_gate_and_passes_gradients_back_to_them() -> None:
    members = [nn.Sequential(nn.Flatten(), nn.Linear(256, CLASSES)) for _ in range(MEMBERS)]
    gate = build_combiner("moe", tensors(started()))
    ensemble = Ensemble(members, gate)
    x = torch.from_numpy(IMAGES).requires_grad_()

    combined = ensemble(x)
    combined.square().sum().backward()

    logits = ensemble.member_logits(x)
    assert torch.equal(combined, gate(logits, x))
    assert torch.equal(ensemble.combine(logits, x), combined)
    assert torch.equal(ensemble(x), combined)  # no dropout
    assert x.grad is not None
    # The way through the gate counts, beside the one through the members.
    fixed = (gate(logits, x.detach()).square().sum(),)
    (through_members,) = torch.autograd.grad(fixed, x)
    assert not torch.allclose(x.grad, through_members)
