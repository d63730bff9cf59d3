from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from client_fakes import RUN, State, dotted, sent_by
from flower_fakes import equal
from torch import nn

from client_app.fens import FensClient
from client_app.iterating import local_round
from client_app.keeping import Trained
from client_app.node import Node, TrainRequest
from client_app.tasks import TASKS
from client_app.training import private as private_training
from client_app.training.local import Training
from client_app.training.private import PrivacyPlan, plan_privacy, train
from client_app.work import prepare_upload
from fl_app.config import AppConfig, ClientConfig
from fl_app.data import ImageData, Normalization
from fl_app.models import build
from fl_app.privacy import PrivacyConfig
from strategies.client.fens import HoldoutRequest
from strategies.core.errors import OptionError, UploadError
from strategies.core.options import flatten

NO_NOISE = pytest.mark.usefixtures("no_noise")
PLAIN = ClientConfig(epochs=1, batch_size=4, lr=0.5, momentum=0.0, share_label_counts=False)
HALF = Normalization((0.5,), (0.5,))


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_training, "system_normal", lambda *shape: torch.zeros(shape, dtype=torch.float64))


def linear_data(count: int = 4, features: int = 3) -> ImageData:
    rows = torch.randn(count, features, 1, 1, generator=torch.Generator().manual_seed(1))
    return ImageData(10 * rows, torch.arange(count) % 2)


def linear_model(features: int = 3) -> nn.Module:
    layer = nn.Linear(features, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(2.0 * features).reshape(2, features) / 10)
        layer.bias.copy_(torch.tensor([0.2, -0.1]))
    return nn.Sequential(nn.Flatten(), layer)


def fit(model: nn.Module, data: ImageData, config: ClientConfig = PLAIN, **privacy: float) -> float:
    budget = PrivacyConfig(**{"epsilon": 3.0, "clip": 1.0, **privacy})
    return train(model, Training(data, config, HALF), budget)


@NO_NOISE
def test_one_example_when_it_is_taken_away_changes_the_sum_by_no_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_training, "plan_privacy", lambda *_: PrivacyPlan(0.5, 1, 2, 3.0, 1.0))

    def moved(data: ImageData, kept: list[float]) -> torch.Tensor:
        monkeypatch.setattr(private_training, "system_uniform", lambda _: torch.tensor(kept, dtype=torch.float64))
        model = linear_model()
        fit(model, data, replace(PLAIN, batch_size=2, steps=1), clip=0.7)  # q = 1/2
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    data = linear_data()
    whole, without, none = moved(data, [0.1] * 4), moved(data, [0.1, 0.1, 0.1, 0.9]), moved(data, [0.9] * 4)

    assert float((whole - without).norm()) == pytest.approx(0.5 * 0.7 / 2, rel=1e-3)  # lr * C / L: it was clipped
    start = torch.cat([p.detach().flatten() for p in linear_model().parameters()])
    assert torch.equal(none, start)  # an empty batch moves nothing but by its noise


@NO_NOISE
@pytest.mark.parametrize("huge", [float("inf"), float("nan"), 3e38])
def test_an_example_whose_gradient_is_no_number_adds_no_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch, huge: float
) -> None:
    data, model, without = linear_data(), linear_model(), linear_model()
    data.images[3] = huge
    monkeypatch.setattr(private_training, "plan_privacy", lambda *_: PrivacyPlan(1.0, 1, 4, 3.0, 1.0))

    fit(model, data, clip=0.7)
    fit(without, ImageData(data.images[:3], data.labels[:3]), clip=0.7)

    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), without.parameters(), strict=True)])
    assert float(moved.detach().norm()) <= 0.5 * 0.7 / 4 * 1.001  # lr * C / L


def test_noise_is_that_of_the_plan_times_the_clipping_norm_over_the_mean_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_training, "plan_privacy", lambda *_: PrivacyPlan(0.5, 1, 2, 3.0, 1.0))
    monkeypatch.setattr(
        private_training, "system_uniform", lambda count: torch.full((count,), 0.9, dtype=torch.float64)
    )
    monkeypatch.setattr(private_training, "system_normal", lambda *shape: torch.ones(shape, dtype=torch.float64))
    model, start = linear_model(), linear_model()

    fit(model, linear_data(), clip=0.25)

    for after, before in zip(model.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(before - after, torch.full_like(before, 0.5 * 3.0 * 0.25 / 2))


@pytest.mark.slow
def test_noise_when_the_budget_grows_is_less_and_the_spent_part_stays_within_it() -> None:
    config = replace(PLAIN, epochs=5, batch_size=32)

    plans = [plan_privacy(PrivacyConfig(epsilon), config, 200) for epsilon in (0.5, 1.0, 3.0)]

    noises = [plan.noise for plan in plans]
    assert noises == sorted(noises, reverse=True)
    assert len(set(noises)) == 3
    for plan, budget in zip(plans, (0.5, 1.0, 3.0), strict=True):
        assert 0.95 * budget < plan.epsilon <= budget
        assert (plan.rate, plan.steps, plan.batch) == (0.16, 35, 32)
    assert plan_privacy(PrivacyConfig(3.0), replace(config, epochs=20), 200).noise > noises[2]  # more steps
    assert plan_privacy(PrivacyConfig(3.0), config, 2000).noise < noises[2]  # each example in fewer of them
    assert plan_privacy(PrivacyConfig(3.0), replace(config, batch_size=64), 20).rate == 1.0


def test_spending_when_every_example_is_in_every_batch_is_that_of_the_gaussian_mechanism() -> None:
    plan = plan_privacy(PrivacyConfig(2.0, 1e-5), replace(PLAIN, epochs=9, batch_size=50), 50)

    # Renyi: T a / (2 sigma^2); Mironov 2017, Proposition 3 is the looser way from there to epsilon.
    orders = np.linspace(1.01, 200, 20_000)
    bound = (9 * orders / (2 * plan.noise**2) + np.log(1e5) / (orders - 1)).min()
    assert plan.steps == 9
    assert plan.epsilon <= bound
    assert plan.epsilon > 0.75 * bound


def test_a_budget_of_a_tenth_has_noise_and_the_spending_of_mironov_s_sum() -> None:
    plan = plan_privacy(PrivacyConfig(0.1, 1e-5), replace(PLAIN, epochs=2, batch_size=32), 400)

    # Mironov, Talwar, Zhang 2019, section 3.3, for whole orders a, and the conversion of Canonne et al. 2020.
    spent = []
    for a in range(2, 1025):
        k = torch.arange(a + 1, dtype=torch.float64)
        terms = [torch.tensor(a + 1.0).double(), k + 1, a - k + 1]
        binomial = torch.lgamma(terms[0]) - torch.lgamma(terms[1]) - torch.lgamma(terms[2])
        powers = k * math.log(plan.rate) + (a - k) * math.log1p(-plan.rate)
        renyi = float(torch.logsumexp(binomial + powers + k * (k - 1) / (2 * plan.noise**2), 0)) / (a - 1)
        spent.append(plan.steps * renyi + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1))
    assert (plan.rate, plan.steps) == (0.08, 26)
    assert plan.epsilon <= 0.1
    assert min(spent) <= plan.epsilon <= 1.01 * min(spent)


class OwnNet(nn.Module):
    """A net of a user's own: its parts that are ``used`` answer, and a function reads the weights of another."""

    def __init__(self, part: nn.Module, *, used: bool = True, spec: bool = False) -> None:
        super().__init__()
        self.part, self.last, self.used, self.spec = part, nn.Linear(9, 2), used, spec

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x) if self.used else x
        x = (x[0] if isinstance(x, tuple) else x).flatten(1)
        return nn.functional.linear(x, self.last.weight) if self.spec else cast("torch.Tensor", self.last(x))


def own_data() -> ImageData:
    return ImageData(torch.randn(12, 1, 3, 3), torch.arange(12) % 2)


def test_a_model_of_one_s_own_with_a_part_that_does_not_answer_trains_the_others() -> None:
    model, data = OwnNet(nn.Linear(9, 9), used=False), own_data()
    before = model.last.weight.detach().clone()

    fit(model, data, replace(PLAIN, epochs=2, batch_size=12))

    assert not torch.equal(model.last.weight, before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OwnNet(nn.Sequential(nn.Flatten(2), nn.Flatten(0, 1), nn.LSTM(9, 9))), "TypeError"),
        (OwnNet(nn.InstanceNorm2d(1, affine=True, track_running_stats=True)), "trainable layer with buffers"),
        (OwnNet(nn.Flatten(), spec=True), "a function reads a layer's weights"),
    ],
)
def test_a_model_whose_gradients_of_single_examples_are_missed_is_refused_in_one_line(
    model: nn.Module, reason: str
) -> None:
    with pytest.raises(
        UploadError, match=f"^privacy.epsilon: opacus cannot compute the per-sample gradients .*: .*{reason}"
    ):
        fit(model, own_data(), replace(PLAIN, batch_size=12))


class Centred(nn.Module):
    """Subtracts the running mean of its examples, in a buffer that is overwritten or replaced."""

    def __init__(self, *, replaced: bool, above: float = -1.0) -> None:
        super().__init__()
        self.replaced, self.above = replaced, above
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        if bool((x > self.above).any()):
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.mean = mean if self.replaced else self.mean.copy_(mean)
        return x - self.mean


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        (nn.InstanceNorm2d(1, track_running_stats=True), "running_mean"),
        (Centred(replaced=False), "mean"),
        (Centred(replaced=True), "mean"),
        (Centred(replaced=True, above=1.0), "mean"),  # a random example has no such pixel
    ],
)
def test_a_model_with_statistics_of_its_examples_is_refused_because_they_would_be_sent_without_noise(
    part: nn.Module, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = own_data()
    data.images[:, 0, 0, 0] = 2.0
    if not (isinstance(part, Centred) and part.above > 0):
        monkeypatch.delattr(private_training, "_private_gradient")  # refused before the first step
    with pytest.raises(UploadError, match=f"training changes the model's buffer 'part.{changed}', which gets no noise"):
        fit(OwnNet(part), data)


def private(**more: Any) -> AppConfig:
    small: dict[str, Any] = {
        "client.epochs": 2, "client.batch-size": 32, "data.limit": 120, "data.partition": "iid", "privacy.epsilon": 3.0,
        "client.share-label-counts": False,
    }  # fmt: skip
    return AppConfig.from_settings({**small, **dotted(more)})


def sent(config: AppConfig, **asked: Any) -> tuple[Trained, State]:
    return sent_by(1, config, **{"run_id": RUN, **asked})


def test_a_private_client_reports_its_spent_budget_neither_loss_nor_accuracy_and_is_never_the_same_twice(
    tmp_path: Path,
) -> None:
    trained, state = sent(private(client__state_dir=str(tmp_path / "a")))
    other = sent(private(client__state_dir=str(tmp_path / "b")))[1]

    assert trained.epsilon is not None
    assert 2.5 < trained.epsilon <= 3.0
    assert trained.facts.num_examples == 40
    assert (trained.loss != trained.loss, trained.accuracy != trained.accuracy) == (True, True)
    assert state.keys() == build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict().keys()
    assert all(torch.isfinite(value).all() for value in state.values())
    assert not equal(state, other)  # the same seed, the same examples


def test_an_upload_when_it_is_asked_for_again_is_sent_again_and_spends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = private(client__state_dir=str(tmp_path))
    first = sent(config)
    monkeypatch.setattr(private_training, "_private_gradient", None)

    again = sent(config)

    assert equal(again[1], first[1])
    assert again[0].epsilon == first[0].epsilon
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UploadError, match="cannot be read: training again would spend the privacy twice"):
        sent(config)


def refuse(*_: object) -> None:
    raise OSError("No space left")


DISKS: dict[str, Callable[[Path, Any, pytest.MonkeyPatch], object]] = {
    "cannot be read: training again would spend the privacy twice": lambda folder, close, patch: close(folder.parent),
    "cannot be kept, so it is not sent": lambda *given: given[2].setattr("client_app.keeping.KeptModel.save", refuse),
    "privacy ledger cannot be written, so nothing is sent": lambda folder, close, patch: folder.write_text(""),
}


@pytest.mark.parametrize("line", DISKS)
def test_an_upload_that_the_disk_may_have_or_does_not_take_is_not_sent(
    tmp_path: Path, close: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    DISKS[line](tmp_path / "state", close, monkeypatch)

    with pytest.raises(UploadError, match=line):
        sent(private(client__state_dir=str(tmp_path / "state")))


def test_a_private_training_of_many_steps_learns(tmp_path: Path) -> None:
    rows = torch.cat([torch.randn(100, 3, 1, 1) + 2, torch.randn(100, 3, 1, 1) - 2])
    data, model = ImageData(rows, torch.arange(200) // 100), linear_model()

    spent = fit(model, data, replace(PLAIN, epochs=10, batch_size=50), epsilon=3.0)

    right = (model(rows).argmax(1) == data.labels).float().mean()
    assert spent <= 3.0
    assert float(right) > 0.95
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


@NO_NOISE
@pytest.mark.parametrize(
    ("architecture", "classes", "shape", "clip"),
    [
        ("lenet5", 10, (1, 16, 16), 0.05),
        ("cnn1", 10, (3, 32, 32), 0.05),
        ("cnn5", 10, (3, 32, 32), 0.05),
        ("cnn-torch", 10, (3, 32, 32), 0.05),
        *(("logistic", 2, (13, 1, 1), clip) for clip in (0.05, 1.0, 1e6)),
        ("mlp", 2, (13, 1, 1), 0.05),
        ("text-bag", 4, (1, 1, 12), 0.05),
    ],
)
def test_gradients_of_single_examples_are_those_of_the_examples_one_by_one(
    architecture: str, classes: int, shape: tuple[int, int, int], clip: float
) -> None:
    torch.manual_seed(0)
    model, alone = (build(architecture, num_classes=classes, input_shape=shape) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    inputs = torch.randint(0, 9, (3, *shape)) if architecture == "text-bag" else torch.randn(3, *shape)
    data = ImageData(inputs, torch.tensor([0, 1, 1]))
    sums = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    for k in range(3):
        loss = nn.functional.cross_entropy(alone(inputs[k : k + 1]), data.labels[k : k + 1])
        gradients = torch.autograd.grad(loss, list(alone.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, clip / float(norm))

    fit(model, data, replace(PLAIN, lr=3.0), clip=clip)  # lr / L = 1

    for after, before, total in zip(model.parameters(), alone.parameters(), sums, strict=True):
        torch.testing.assert_close(before - after, total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"task": "open-set"}, "task 'open-set'"),
        ({"task": "prototypes"}, "task 'prototypes'"),
        ({"task": "cvae"}, "task 'cvae'"),
        ({"server_round": 2}, "a second round of uploads"),
        ({"server_round": 0}, "a second round of uploads"),
        ({"holdout": 0.1}, "answers on held-out examples"),
        ({"calibrate": True}, "the ranges of activations, for INT8"),
        ({"run_id": ""}, "an upload to a run without an id"),
    ],
)
def test_a_question_when_its_answer_is_outside_the_guarantee_is_refused(how: dict[str, Any], what: str) -> None:
    with pytest.raises(UploadError) as caught:
        sent(private(), **how)

    assert str(caught.value).startswith(f"the server asks for {what}")


def test_rounds_checkpoints_and_questions_of_fens_are_refused(tmp_path: Path) -> None:
    config = private()
    node = Node.of({"partition-id": 1, "num-partitions": 3}, config)

    with pytest.raises(UploadError, match="the server asks for training in rounds"):
        local_round(config, node, TrainRequest(RUN, 1, 0), {}, {"arrays": {}})
    with pytest.raises(UploadError, match="this node's checkpoint"):
        prepare_upload(config, replace(node, checkpoint=str(tmp_path / "m.pt")), TrainRequest(RUN, 1, 0), {})
    half = FensClient(dict(flatten(config)), {"partition-id": 1, "num-partitions": 3})
    with pytest.raises(UploadError, match="answers on held-out examples"):
        half.local().examples(HoldoutRequest(RUN, 0, 0.1, per_class=False, num_classes=10))


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("client.share-label-counts", True, "is True: must be False with 'privacy.epsilon' 3"),
        ("client.loss", "ldam", "is 'ldam': must be 'cross-entropy' with 'privacy.epsilon' 3"),
        ("client.sam-rho", 0.05, "is 0.05: must be 0.0 with 'privacy.epsilon' 3"),
        ("client.checkpoint", "m.pt", "is 'm.pt': must be '' with 'privacy.epsilon' 3"),
        ("data.name", "heart-disease", "is 'heart-disease': must be another with 'privacy.epsilon' 3"),
        ("attack.kind", "copy", "is 'copy': must be another with 'privacy.epsilon' 3"),
        ("attack.kind", "backdoor", "is 'backdoor': must be another with 'privacy.epsilon' 3; one example more"),
        ("attack.kind", "claim", "is 'claim': must be another with 'privacy.epsilon' 3; the claim is a multiple"),
        ("attack.kind", "claim-uniform", "is 'claim-uniform': must be another with 'privacy.epsilon' 3"),
        ("privacy.epsilon", -1.0, "a number at least 0.0"),
        ("privacy.delta", 0.0, "greater than 0.0"),
        ("privacy.clip", 0.0, "greater than 0.0"),
    ],
)
def test_settings_when_they_would_tell_more_are_refused_in_one_line(key: str, value: Any, allowed: str) -> None:
    given: dict[str, Any] = {"privacy.epsilon": 3.0, "client.share-label-counts": False}

    with pytest.raises(OptionError) as caught:
        AppConfig.from_settings({**given, key: value, **({"attack.clients": "a"} if key == "attack.kind" else {})})

    assert f"setting {key!r}" in str(caught.value)
    assert allowed in str(caught.value)
    AppConfig.from_settings({"client.loss": "ldam", "client.sam-rho": 0.05})  # without a budget all is well


def test_an_upload_when_another_process_kept_one_meanwhile_is_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, trained = private(client__state_dir=str(tmp_path)), private_training.train
    first: list[State] = []

    def slowly(*given: Any, **how: Any) -> float:
        monkeypatch.setattr("client_app.tasks.TASKS", TASKS)
        first.append(sent(config)[1])  # the restarted node is asked again while the old one's process still trains
        return trained(*given, **how)

    slow = replace(TASKS["classifier"], train_privately=slowly)
    monkeypatch.setattr("client_app.tasks.TASKS", {**TASKS, "classifier": slow})

    second = sent(config)[1]

    assert equal(second, first[0])
    assert equal(sent(config)[1], first[0])
