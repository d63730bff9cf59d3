"""A last layer that is solved from the clients' sums, before they train and after the merge; and rows by counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_fakes import SIDE, accuracy, app_clients, app_settings, app_strategy, failing
from flower_fakes import FakeGrid, equal
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from sklearn.linear_model import Ridge
from torch import nn

from fl_app.data import clients_share, normalize, open_split
from fl_app.models import build
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import Settings
from strategies.client.measures import sum_inputs
from strategies.core.errors import OptionError, QuorumError
from strategies.flower.one_shot import OneShot
from strategies.flower.run import RunOptions
from strategies.method import METHODS
from strategies.run.run_folder import RunFolder
from strategies.statistics.heads import LAMBDAS

pytestmark = pytest.mark.usefixtures("in_a_run")

CLIENTS = 4
SETTINGS: dict[str, Any] = {
    "method": "fedavg", "data__partition": "dirichlet-classes", "data__alpha": 0.1, "data__limit": 400,
    "client__epochs": 3, "client__batch_size": 10, "client__lr": 0.01,
}  # fmt: skip


def settings_of(**changes: Any) -> Settings:
    return app_settings(**{**SETTINGS, **changes})


def clients(settings: Settings, wrong: Callable[[Message], Message] | None = None, phase: int = 0) -> FakeGrid:
    return app_clients(settings, CLIENTS, wrong, kind="train.head", phase=phase)


def run(folder: Path, **changes: Any) -> tuple[OneShot, list[str]]:
    settings = settings_of(**changes)
    strategy, grid = app_strategy(settings, folder), clients(settings)
    strategy.start(grid, timeout=60.0)
    return strategy, [message.metadata.message_type for message in grid.asked]


def student(strategy: OneShot) -> dict[str, torch.Tensor]:
    found = strategy.report.outcome.student
    assert found is not None
    return found


def test_average_of_clients_with_few_classes_gains_from_a_last_layer_solved_anew(tmp_path: Path) -> None:
    plain, asked = run(tmp_path / "plain")
    start, asked_first = run(tmp_path / "start", start="ridge")
    finish, asked_last = run(tmp_path / "finish", finish="ridge")
    both, asked_twice = run(tmp_path / "both", start="ridge", finish="ridge")

    head, train = ["train.head"] * CLIENTS, ["train"] * CLIENTS
    assert (asked, asked_first, asked_last, asked_twice) == (train, head + train, train + head, head + train + head)
    before, *after = (accuracy(each.outcome, 300) for each in (plain, finish, both))
    assert all(one > before + 0.3 for one in after), (before, after)
    # Only the last layer is made anew at the end.
    changed = {name for name, value in student(finish).items() if not torch.equal(value, student(plain)[name])}
    assert changed == {"fc3.weight", "fc3.bias"}
    # What the clients began with is stored for replays, and moved, it is not the result.
    began = RunFolder.open(tmp_path / "start", write=False).start()
    assert not torch.equal(began["fc3.weight"], student(start)["fc3.weight"])


def test_solved_layer_is_ridge_regression_on_the_examples_of_all_clients(tmp_path: Path) -> None:
    run(tmp_path / "run", start="ridge", client__epochs=1)
    began = RunFolder.open(tmp_path / "run", write=False).start()
    assert began is not None
    model = build("lenet5", num_classes=10, input_shape=(1, SIDE, SIDE))
    model.load_state_dict(began)
    split, rows = open_split("digits", "train", image_size=SIDE), list[torch.Tensor]()
    data = split.take(clients_share(split, seed=0, limit=400))
    layer = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].detach()))
    model.eval()(normalize(data.images, *split.normalization))
    features, targets = rows[0].double().numpy(), np.eye(10)[data.labels.numpy()]

    def distance(penalty: float) -> float:
        strength = penalty * np.trace(np.cov(features.T, bias=True)) * len(features) / features.shape[1]
        found = Ridge(alpha=strength).fit(features, targets).coef_
        own = layer.weight.detach().double().numpy()
        return float(np.linalg.norm(own - found) / np.linalg.norm(own))

    assert min(map(distance, LAMBDAS)) < 1e-3


def test_run_resumes_at_its_last_exchange_and_its_replays_need_no_client(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", start="ridge", finish="ridge")
    settings = settings_of(start="ridge", finish="ridge", min_uploads=CLIENTS)
    with pytest.raises(QuorumError, match="finish: 3 usable answers .*can be resumed"):
        app_strategy(settings, tmp_path / "run").start(clients(settings, failing, phase=1), timeout=60.0)
    again, grid = app_strategy(settings, tmp_path / "run"), clients(settings)
    again.start(grid, timeout=60.0)
    assert [message.metadata.message_type for message in grid.asked] == ["train.head"] * CLIENTS
    assert equal(student(again), student(whole))

    replayed = app_strategy(settings, tmp_path / "unused").replay(tmp_path / "run", target=tmp_path / "replay")
    assert equal(replayed.state_dict(), student(whole))
    ties = settings_of(method="ties", start="ridge", finish="ridge")
    with pytest.raises(OptionError, match="'finish' is 'ridge'.*other weights"):
        app_strategy(ties, tmp_path / "unused").replay(tmp_path / "run", target=tmp_path / "ties")
    by_counts = settings_of(method="ties", start="ridge", finish="counts")
    app_strategy(by_counts, tmp_path / "unused").replay(tmp_path / "run", target=tmp_path / "counts")


def test_rows_by_counts_are_each_class_s_mean_over_the_clients_that_have_it(tmp_path: Path) -> None:
    strategy, asked = run(tmp_path / "run", finish="counts", client__epochs=1)

    assert asked == ["train"] * CLIENTS
    uploads = strategy.report.job.uploads
    counts = np.array([upload.label_counts for upload in uploads], float)
    for name in ("fc3.weight", "fc3.bias"):
        rows = np.stack([upload.read()[name].double().numpy() for upload in uploads])
        for label in range(10):
            if counts[:, label].sum():
                wanted = np.average(rows[:, label], axis=0, weights=counts[:, label])
                np.testing.assert_allclose(student(strategy)[name][label].numpy(), wanted, rtol=1e-5, atol=1e-7)


def lying(**arrays: np.ndarray[Any, Any]) -> Callable[[Message], Message]:
    model = build("lenet5", num_classes=10, input_shape=(1, SIDE, SIDE))
    honest = sum_inputs(model, [(torch.rand(20, 1, SIDE, SIDE), torch.arange(20) % 10)], 10)
    sent = {**{name: value.numpy() for name, value in honest.items()}, **arrays}

    def answer(message: Message) -> Message:
        record = ArrayRecord({name: Array(value) for name, value in sent.items()})
        answered = ConfigRecord({"client": "client-001"})
        return Message(RecordDict({"answer": answered, "arrays": record}), reply_to=message)

    return answer


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"counts": np.zeros(10, np.int64)}, "positive sum"),
        ({"gram": np.zeros(84 * 85 // 2, np.float32)}, "trace 0"),
        ({"gram": np.full(84 * 85 // 2, np.nan, np.float32)}, "NaN"),
        ({"sums": np.full((10, 84), 1e6, np.float32)}, "eigenvalue"),
        ({"sums": np.zeros((10, 83), np.float32)}, "shape"),
    ],
)
def test_sums_that_no_examples_have_are_refused_and_the_others_suffice(
    tmp_path: Path, arrays: dict[str, Any], reason: str
) -> None:
    settings = settings_of(start="ridge", client__epochs=1, data__limit=100)
    app_strategy(settings, tmp_path / "run").start(clients(settings, lying(**arrays)), timeout=60.0)

    lines = RunFolder.open(tmp_path / "run", write=False).round(1).refused()
    assert [line["client"] for line in lines] == ["client-001"]
    assert reason in lines[0]["reason"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish": "ridge", "method": "fedens"}, "ends with an ensemble"),
        ({"start": "ridge", "method": "fedcvae-ens"}, "trains no classifiers"),
        ({"start": "ridge", "client__init": "different"}, "client.init"),
        ({"finish": "ridge", "method": "iterative"}, "iterative"),
        ({"start": "ridge", "privacy__epsilon": 1.0}, "privacy"),
        ({"finish": "counts", "method": "dense", "dense__rounds": 2}, "2 rounds"),
    ],
)
def test_settings_without_a_meaning_are_refused_before_a_client_works(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    def begin() -> None:
        settings = settings_of(**changes)
        check_needs_of_settings(settings)
        app_strategy(settings, tmp_path / "run")

    with pytest.raises(OptionError, match=reason):
        begin()


def test_model_without_a_bias_has_no_layer_to_solve() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))

    with pytest.raises(OptionError, match="no bias"):
        OneShot(METHODS["fedavg"], net, num_classes=3, input_shape=(1, 4, 4), options=RunOptions(start="ridge"))
