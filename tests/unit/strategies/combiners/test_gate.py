import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_fakes import softmax
from torch import nn

from strategies.combiners.aggregator_steps import Sgd, round_steps
from strategies.combiners.combiners import build_combiner
from strategies.combiners.gate import NAMES, Gate, start_gate
from strategies.core.seeds import seeded_torch
from strategies.methods.intactofl import ExpertGate, expert_divergence
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


GATE_MEMBERS, BATCH, GATE_CLASSES = 3, 7, 4
GATE_LOGITS = RNG.normal(size=(GATE_MEMBERS, BATCH, GATE_CLASSES)).astype(np.float32) * 3
WEIGHT = RNG.normal(size=(GATE_MEMBERS, GATE_MEMBERS * GATE_CLASSES)).astype(np.float32)
BIAS = RNG.normal(size=GATE_MEMBERS).astype(np.float32)


def test_the_mixture_is_the_gate_s_mean_of_predictions_as_numpy_has_it() -> None:
    opinions = softmax(GATE_LOGITS)
    expected = np.zeros((BATCH, GATE_CLASSES))
    for i in range(BATCH):
        gate = softmax(WEIGHT @ np.concatenate([opinions[k, i] for k in range(GATE_MEMBERS)]) + BIAS)
        expected[i] = sum(gate[k] * opinions[k, i] for k in range(GATE_MEMBERS))

    combiner = ExpertGate(torch.from_numpy(WEIGHT), torch.from_numpy(BIAS))

    torch.testing.assert_close(
        combiner(torch.from_numpy(GATE_LOGITS)).exp().double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6
    )


def test_divergence_of_experts_is_jensen_shannon_s_as_numpy_has_it() -> None:
    opinions = softmax(GATE_LOGITS.astype(np.float64))
    middle = opinions.mean(0)
    expected = float((opinions * np.log(opinions / middle)).sum(-1).mean())
    assert float(expert_divergence(torch.from_numpy(GATE_LOGITS))) == pytest.approx(expected, rel=1e-5)
