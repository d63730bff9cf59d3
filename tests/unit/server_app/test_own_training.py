"""Runs of models that are no classifiers: trained and scored by functions of the user's own."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import completed, replayed
from safetensors.numpy import load_file
from sklearn.datasets import load_diabetes, load_linnerud

from client_app.node import Node
from fl_app.config import AppConfig
from fl_app.models.regression import Regression
from fl_app.node_policy import NodePolicy
from fl_app.project import own_training, scores_in
from server_app.export.exporting import stored_models
from server_app.settings import build
from server_app.settings.read import read_settings
from strategies import RegressionSums, ridge_regression
from strategies.core.errors import OptionError, UploadError
from strategies.core.options import Scalar
from strategies.core.seeds import initial_torch
from strategies.merging.merge import merge

CODE = """
import math
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes, load_linnerud
from torch import nn
from torch.utils.data import DataLoader


def diabetes(split):
    rows, targets = load_diabetes(return_X_y=True)
    part = slice(0, 342) if split == "train" else slice(342, None)
    return (20 * rows[part]).astype("float32"), (targets[part, None] - 152) / 77


def net(input_shape):
    return nn.Sequential(nn.Linear(input_shape[0], 16), nn.ReLU(), nn.Linear(16, 1))


def fit(model, data, loss_of, batch_size=32, lr=0.02, epochs=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in DataLoader(data, batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
    return loss.item()


def train(model, data, config, seed, device):
    squares = lambda rows, targets: nn.functional.mse_loss(model(rows.to(device)), targets.to(device))
    loss = fit(model, data, squares, config.batch_size, config.lr)
    with Path("trained").open("a") as log:
        log.write(f"{len(data)} {seed}\\n")
    return {"loss": loss}


class Diverged(Exception):
    pass


def train_and_exit(model, data):
    raise SystemExit(3)


def train_to_a_net(model, data) -> nn.Module | list:
    return model


def train_to_what_is_said(model, data) -> dict[str, float] | None:
    return {}


def train_a_copy(model, data):
    return {}


def train_and_return_it(model, data):
    return model


def train_and_say_words(model, data):
    return {"loss": "low"}


def train_and_diverge(model, data):
    raise Diverged("at step 3")


def evaluate_to_nothing(model, data):
    return {"mae": math.nan}


def evaluate(model, data):
    rows, targets = data.tensors
    wrong = model(rows) - targets
    return {"mae": wrong.abs().mean(), "r2": 1 - (wrong**2).sum() / ((targets - targets.mean()) ** 2).sum()}


def evaluate_oddly(model, data):
    return {**evaluate(model, data), "ratio": math.inf}


def labels(split):
    draws = torch.Generator().manual_seed(len(split))
    rows = torch.randn(200, 6, generator=draws)
    return rows, (rows[:, :3] + rows[:, 3:] > 0).float()


def train_labels(model, data):
    entropy = nn.functional.binary_cross_entropy_with_logits
    fit(model, data, lambda rows, targets: entropy(model(rows[:, :, None, None]), targets), epochs=10)


def hamming(model, data):
    rows, targets = data.tensors
    return {"right": ((model(rows[:, :, None, None]) > 0) == (targets > 0)).float().mean()}


def linnerud(split):
    rows, targets = load_linnerud(return_X_y=True)
    part = slice(0, 15) if split == "train" else slice(15, None)
    return rows[part].astype("float32"), targets[part]


def autoencoder(input_shape):
    size = input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.Linear(8, size), nn.Unflatten(1, input_shape))


def train_autoencoder(model, data):
    fit(model, data, lambda images, _: nn.functional.mse_loss(model(images), images), 16)


def error(model, data):
    images, _ = data.tensors
    return {"error": nn.functional.mse_loss(model(images), images)}
"""
OWN: dict[str, Scalar] = {
    "method": "fedavg", "data__name": "own_models:diabetes", "model__name": "own_models:net", "client__lr": 0.01,
    "model__train": "own_models:train", "model__evaluate": "own_models:evaluate", "data__proxy": 0.0,
}  # fmt: skip
SOLVER = "oneshot_fl.fl_app.models.regression"
REGRESSION: dict[str, Scalar] = {
    "data__name": "own_models:linnerud", "model__name": f"{SOLVER}:Regression", "model__train": f"{SOLVER}:train",
    "model__evaluate": f"{SOLVER}:evaluate",
}  # fmt: skip
ALONE = f"does not merge the weights of '{SOLVER}:Regression', which are means over a client's examples"
CLIENTS = ("client-000", "client-001", "client-002")


@pytest.fixture(autouse=True)
def code(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "own_models.py").write_text(CODE)
    yield
    sys.modules.pop("own_models", None)


def uploads_of(run: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the weights of the clients of a run, and their numbers of examples."""
    rows = [json.loads(line) for line in (run / "uploads.jsonl").read_text().splitlines()]
    sizes = {row["client"]: row["num_examples"] for row in rows}
    return [load_file(run / "uploads" / f"{name}.safetensors") for name in CLIENTS], [sizes[name] for name in CLIENTS]


def predicted(state: dict[str, Any], rows: Any) -> Any:
    """Return what a net of ``own_models`` predicts, by numpy."""
    hidden = np.maximum(rows @ state["0.weight"].T + state["0.bias"], 0)
    return hidden @ state["2.weight"].T + state["2.bias"]


def test_a_regression_is_averaged_exactly_scored_by_its_own_metrics_and_replayed(oneshot: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result, log = completed(oneshot("run", **OWN, evaluate__on="both", run_dir=str(run)))
    assert "Metrics of the clients' training, round 1" in log
    assert "evaluation: batch 4 of 4" in log  # three clients and their average

    states, sizes = uploads_of(run)
    student = load_file(run / "student.safetensors")
    shares = np.array(sizes) / sum(sizes)
    for key, value in student.items():
        average = sum(share * state[key].astype(np.float64) for share, state in zip(shares, states, strict=True))
        assert np.allclose(value, average, rtol=0, atol=1e-6)
    rows, targets = load_diabetes(return_X_y=True)
    rows, targets = 20 * rows[342:], (targets[342:, None] - 152) / 77
    table = {row["name"]: row["scores"] for row in result["table"]}
    assert (result["metric"], result["accuracy"]) == ("mae", None)
    for name, state in [*zip(CLIENTS, states, strict=True), (result["table"][-1]["name"], student)]:
        wrong = predicted(state, rows) - targets
        assert table[name]["mae"]["value"] == pytest.approx(np.abs(wrong).mean(), abs=1e-5)
        r2 = 1 - (wrong**2).sum() / ((targets - targets.mean()) ** 2).sum()
        assert table[name]["r2"]["value"] == pytest.approx(r2, abs=1e-5)

    clients = result["evaluation"]["clients"]
    assert [client["client"] for client in clients] == [*CLIENTS]
    assert all(set(client["own"]) == set(client["result"]) == {"mae", "r2"} for client in clients)
    assert all(client["own"] != client["result"] for client in clients)
    weights = [client["examples"] for client in clients]
    mean = np.average([client["result"]["mae"] for client in clients], weights=weights)
    assert result["evaluation"]["pooled"]["result"]["mae"] == pytest.approx(mean, abs=1e-6)
    page = (run / "report.html").read_text()
    assert all(text in page for text in ("mae on held-out examples", "weighted by their examples", *CLIENTS))
    assert "own_models:diabetes · split dirichlet over sizes, alpha 0.3 · 3 clients" in page
    assert f"oneshot compare {run} --methods fedavg,ties,tsv" in page
    assert f"oneshot replay {run} --method ties" in page
    assert "finish" not in page
    assert "those of the clients&#39; own training" in page or "own training" in (run / "model_card.md").read_text()

    ties = replayed(run, "ties")
    with initial_torch(0, "own_models:net"):
        start = sys.modules["own_models"].net((10, 1, 1)).state_dict()
    tensors = [{key: torch.from_numpy(value) for key, value in state.items()} for state in states]
    merged = merge(dict(zip(CLIENTS, tensors, strict=True)), "ties", start=start).outcome.student
    found = load_file(Path(ties["run_dir"]) / "student.safetensors")
    assert all(np.array_equal(found[key], value.numpy()) for key, value in merged.items())
    assert [row["name"] for row in ties["table"]][-2:] == ["FedAvg (one shot)", "TIES"]
    with pytest.raises(OptionError, match="no logits of classes, which an export needs: load student.safetensors"):
        stored_models(run)
    with pytest.raises(OptionError, match="must be one of fedavg, task-arithmetic, ties, dare, tsv"):
        replayed(run, "fedens")


@pytest.mark.usefixtures("ran")
def test_the_clients_score_several_results_by_their_own_metrics(oneshot: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result, _ = completed(oneshot("run", **OWN, metric="r2", evaluate__on="clients", run_dir=str(run)))
    assert result["metric"] == result["evaluation"]["metric"] == "r2"
    assert result["table"][-1]["scores"]["mae"]["value"] == result["evaluation"]["pooled"]["result"]["mae"]

    compared, _ = completed(oneshot("compare", run, "--methods", "fedavg,ties", "--on", "clients"))
    scored = {row["method"]: row["evaluation"]["clients"] for row in compared["results"]}
    assert [row["result"] for row in scored["fedavg"]] == [row["result"] for row in result["evaluation"]["clients"]]
    assert [row["result"] for row in scored["ties"]] != [row["result"] for row in scored["fedavg"]]


def test_a_head_of_several_labels_learns_them(oneshot: Any) -> None:
    own = {"data__name": "own_models:labels", "model__name": "mlp", "model__train": "own_models:train_labels"}
    result, log = completed(oneshot("run", **{**OWN, **own, "model__evaluate": "own_models:hamming"}))
    assert "Metrics of the clients' training" not in log

    assert result["table"][-1]["scores"]["right"]["value"] > 0.85  # 0.5 by chance
    states, _ = uploads_of(Path(result["run_dir"]))
    assert all(state[list(state)[-1]].shape[0] == 3 for state in states)


def test_numbers_in_the_hospitals_tables_are_learned(oneshot: Any, tmp_path: Path) -> None:
    frame = load_diabetes(as_frame=True).frame
    tables = tmp_path / "tables"
    (tables / "train").mkdir(parents=True)
    for number, name in enumerate(("north", "south", "west")):
        frame[:342][number::3].to_csv(tables / "train" / f"{name}.csv", index=False)
    frame[342:].to_csv(tables / "test.csv", index=False)
    columns = [f"[columns.{name}]\ndeviation = 0.05\n" for name in frame.columns if name != "target"]
    (tables / "schema.toml").write_text("\n".join(columns))
    own = {"data__name": "csv", "data__root": str(tables), "data__label": "target", "data__partition": "domains"}
    result, _ = completed(oneshot("run", **{**OWN, **own}))

    held = frame[342:].to_numpy()
    wrong = predicted(load_file(Path(result["run_dir"]) / "student.safetensors"), held[:, :-1] / 0.05) - held[:, -1:]
    assert result["scores"]["mae"]["value"] == pytest.approx(np.abs(wrong).mean(), rel=1e-5)
    _, sizes = uploads_of(Path(result["run_dir"]))
    assert sizes == [114, 114, 114]
    of_all = {"model__name": f"{SOLVER}:Regression", "model__train": f"{SOLVER}:train", "client__weight_decay": 0.01}
    result, _ = completed(oneshot("run", **{**OWN, **own, **of_all, "model__evaluate": f"{SOLVER}:evaluate"}))
    rows, numbers = frame[:342].to_numpy()[:, :-1] / 0.05, frame[:342].to_numpy()[:, -1]
    around = rows - rows.mean(0)
    strength = 0.01 * (around**2).sum() / 10
    weight = np.linalg.solve(around.T @ around + strength * np.eye(10), around.T @ numbers)
    wrong = numbers.mean() + (held[:, :-1] / 0.05 - rows.mean(0)) @ weight - held[:, -1]
    assert result["scores"]["mae"]["value"] == pytest.approx(np.abs(wrong).mean(), rel=1e-6)
    refused = oneshot("run", **{**OWN, **own, "model__train": "", "model__evaluate": ""})[1]
    assert "has no classes: if column 'target' holds numbers, 'model.train' must name a function" in refused["error"]


def test_a_ridge_regression_is_that_of_all_examples_in_one_place(oneshot: Any) -> None:
    """Of three targets at once, whatever the clients have; for the page's command."""
    own = {**REGRESSION, "client__weight_decay": 0.1, "data__alpha": 5.0, "fedavg__bn_buffers": "first"}
    result, _ = completed(oneshot("run", **{**OWN, **own}))

    rows, targets = load_linnerud(return_X_y=True)
    rows, targets, held, wanted = rows[:15], targets[:15], rows[15:], targets[15:]
    mean, middle = rows.mean(0), targets.mean(0)
    scatter = (rows - mean).T @ (rows - mean)
    strength = 0.1 * np.trace(scatter) / 3
    weight = np.linalg.solve(scatter + strength * np.eye(3), (rows - mean).T @ (targets - middle))
    wrong = middle + (held - mean) @ weight - wanted
    r2 = 1 - (wrong**2).sum(0) / ((wanted - wanted.mean(0)) ** 2).sum(0)
    found = {name: score["value"] for name, score in result["scores"].items()}
    assert found["mae"] == pytest.approx(np.abs(wrong).mean(), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt((wrong**2).mean()), rel=1e-6)
    assert found["r2"] == pytest.approx(r2.mean(), rel=1e-5)
    assert result["metric"] == "r2"
    stored = load_file(Path(result["run_dir"]) / "student.safetensors")
    model = Regression(3, (3, 1, 1))
    model.load_state_dict({name: torch.from_numpy(each) for name, each in stored.items()})
    np.testing.assert_allclose(model.solve()[0].T.numpy(), weight, rtol=1e-6)
    pooled = ridge_regression([RegressionSums.of(*map(torch.from_numpy, (rows, targets)))], 0.1)
    np.testing.assert_allclose(model.solve()[1].numpy(), pooled.bias.numpy(), rtol=1e-6)

    run = Path(result["run_dir"])
    page = (run / "report.html").read_text()
    assert "oneshot run" in page
    assert not any(command in page for command in ("oneshot replay", "oneshot compare"))
    with pytest.raises(OptionError, match=f"method 'ties' {ALONE}"):
        replayed(run, "ties")
    assert f"method 'ties' {ALONE}" in oneshot("compare", run, "--methods", "fedavg,ties")[1]["error"]


def test_an_autoencoder_learns_the_images_of_a_named_data_set(oneshot: Any) -> None:
    own = {"data__name": "digits", "model__name": "own_models:autoencoder", "model__evaluate": "own_models:error"}
    result, _ = completed(oneshot("run", **{**OWN, **own, "model__train": "own_models:train_autoencoder"}))

    rows = [json.loads(line) for line in (Path(result["run_dir"]) / "uploads.jsonl").read_text().splitlines()]
    assert all(row.get("label_counts") is None for row in rows)
    assert 0 < result["table"][-1]["scores"]["error"]["value"] < 0.5  # of pixels in [-1, 1]


MUST = ": must train the model that it gets, in place, and return None"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "tally"}, "setting 'method' is 'tally': must be one of fedavg, task-arithmetic, ties, dare, tsv"),
        ({"method": "fisher"}, "setting 'method' is 'fisher': must be one of fedavg"),
        ({"method": "iterative"}, "setting 'method' is 'iterative': must be one of fedavg"),
        ({"finish": "ridge"}, "setting 'finish' is 'ridge': must be 'none' with 'model.train'"),
        ({"attack__kind": "label-flip", "attack__clients": "client-000"}, "setting 'attack.kind' is"),
        ({"gatekeeper__policy": "report"}, "setting 'gatekeeper.policy' is 'report'"),
        ({"model__evaluate": "", "evaluate__on": "server"}, "'model.evaluate' must name a function"),
        ({"model__train": ""}, "setting 'model.evaluate' is 'own_models:evaluate': must be ''"),
        ({"model__train": "own_models:nothing"}, "module 'own_models' has no 'nothing'"),
        ({"model__evaluate": "own_models:hamming"}, "model.evaluate 'own_models:hamming' fails"),
        ({"model__train": "own_models:train_to_a_net"}, f"by its annotation{MUST}"),
        ({"metric": "r3"}, "setting 'metric' is 'r3': must be one of mae, r2, which model.evaluate"),
        *(({**REGRESSION, "method": name}, f"'{name}' {ALONE}") for name in ("task-arithmetic", "ties", "dare", "tsv")),
        ({**REGRESSION, "fedavg__weights": "uniform"}, "'fedavg.weights' is 'uniform': must be 'examples' with"),
        ({**REGRESSION, "model__name": "mlp"}, "TypeError: model is Sequential: 'model.name' must be "),
        ({**REGRESSION, "data__name": "digits"}, "data has 256 features and 1 targets per example: must have 256 and"),
        ({"metric": "r2", "model__train": "", "model__evaluate": ""}, "setting 'metric' is 'r2': must be one of 'acc"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_before_a_client_trains(
    oneshot: Any, tmp_path: Path, changes: dict[str, Scalar], said: str
) -> None:
    status, result, _ = oneshot("run", **{**OWN, **changes})

    assert status == 1
    assert said in result["error"]
    assert not (tmp_path / "trained").exists()


def test_a_metric_that_is_not_finite_is_left_out_and_named(oneshot: Any) -> None:
    """Once, with the names of the models; another metric heads the tables where the setting names it."""
    own = {**OWN, "model__evaluate": "own_models:evaluate_oddly", "metric": "r2"}
    result, log = completed(oneshot("run", **own))

    (line,) = (line for line in log.splitlines() if "returns ratio inf: left out" in line)
    assert "model.evaluate 'own_models:evaluate_oddly' returns" in line
    assert line.endswith("(client-000, client-001, client-002, FedAvg (one shot))")
    assert set(result["scores"]) == {"mae", "r2"}
    assert result["metric"] == "r2"


def test_settings_are_checked_with_each_half_of_the_data_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened, real = list[str](), build.open_half
    monkeypatch.setattr(build, "open_half", lambda settings, half: opened.append(half) or real(settings, half))
    build.check_before_start(read_settings({key.replace("__", "."): value for key, value in OWN.items()}), 3)
    assert opened == ["test", "train"]


def test_a_deployed_node_keeps_its_folders_where_a_module_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = NodePolicy.of({"read": "/data", "architectures": "absent:net"}, deployed=True)
    config = AppConfig.from_settings({"model.name": "absent:net"})
    with pytest.raises(UploadError, match="architecture 'absent:net' cannot be read on this node; its log has the rea"):
        Node.of({"client": "a"}, config, policy)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("train_and_return_it", f"returns Sequential{MUST}"),
        ("train_and_say_words", f"returns {{'loss': 'low'}}{MUST}"),
        ("train_and_diverge", "fails: Diverged: at step 3"),
        ("train_and_exit", "fails: SystemExit: 3"),
    ],
)
def test_a_training_that_goes_wrong_is_told_in_one_line(oneshot: Any, function: str, said: str) -> None:
    status, result, log = oneshot("run", **{**OWN, "model__train": f"own_models:{function}"})

    assert status == 1
    assert f"client-000, client-001, client-002: model.train 'own_models:{function}' {said}" in result["error"]
    assert "Traceback" not in log


def test_a_training_that_changes_no_weight_is_warned_of(oneshot: Any) -> None:
    _, log = completed(oneshot("run", **{**OWN, "model__train": "own_models:train_a_copy"}))
    assert "client-001: own_models:train_a_copy changed no weight: must train the model that it gets, in place" in log
    own_training("own_models:train_to_what_is_said")  # whose annotation permits it
    assert "changed no weight" not in oneshot("run", **OWN)[2]


@pytest.mark.parametrize("evaluate", ["own_models:evaluate_to_nothing", ""])
def test_a_run_without_a_finite_score_has_its_result_and_no_table(oneshot: Any, evaluate: str) -> None:
    result, _ = completed(oneshot("run", **{**OWN, "model__evaluate": evaluate}))

    assert result["table"] == []
    assert (Path(result["run_dir"]) / "student.safetensors").exists()


def test_scores_that_are_no_numbers_by_name_are_refused() -> None:
    for found in ("hello", {}, {"mae": "small"}, {"accuracy": 101, "mae": math.nan}):
        with pytest.raises(OptionError, match="must return the accuracy"):
            scores_in(found, "f", print)


def test_a_deployed_node_runs_only_the_functions_that_it_lists() -> None:
    facts = {"read": "/data", "architectures": "own_models:net, own_models:train"}
    policy = NodePolicy.of(facts, deployed=True)
    policy.check_code("model.train", "own_models:train")
    with pytest.raises(UploadError, match="'model.evaluate' is 'own_models:evaluate': must be among this node's"):
        policy.check_code("model.evaluate", "own_models:evaluate")
    NodePolicy().check_code("model.train", "anything:else")  # of the run's own user
