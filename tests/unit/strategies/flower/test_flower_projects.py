"""Projects in the forms of Flower's examples, with the strategy changed and nothing else."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flower_fakes import Client, FakeGrid, failing, records, stock, strategy, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_disk

from strategies import METHODS, FedDF, FedENS, Iterative, Normalization, OneShotFedAvg
from strategies.core.errors import OptionError, QuorumError
from strategies.run.files import read_json
from strategies.run.results import list_runs
from strategies.run.run_folder import RunFolder

PROJECT = """
[project]
name = "project"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "task:server"
clientapp = "task:client"
"""
TWO = FakeGrid({1: stock(1), 2: stock(2)})


def test_a_run_does_not_travel_with_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project := tmp_path / "project").mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "task.py").touch()
    monkeypatch.chdir(project)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = strategy(OneShotFedAvg, None)
    run.start(TWO)  # type: ignore[arg-type]

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(project))) as fab:
        assert sorted(fab.namelist()) == [".info/CONTENT", "pyproject.toml", "task.py"]
    assert (tmp_path / "state" / "oneshot-fl" / "runs") == run.folder.path.parent


def test_scores_are_logged_and_kept_as_flower_does(tmp_path: Path, said: list[str]) -> None:
    def client(seed: int) -> Client:
        def answer(message: Message) -> Message:
            if message.metadata.message_type == MessageType.TRAIN:
                return Message(records(weights(seed), train_loss=0.25), reply_to=message)
            return Message(records(None, eval_acc=0.75), reply_to=message)

        return answer

    run = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=1.0)
    result = run.start(
        FakeGrid({1: client(1), 2: client(2)}),  # type: ignore[arg-type]
        ArrayRecord(weights(5)),
        evaluate_fn=lambda number, _: MetricRecord({"accuracy": 0.1 + number}),
    )
    parts = {
        "train_metrics_clientapp": {"1": {"train_loss": 0.25}},
        "evaluate_metrics_clientapp": {"1": {"eval_acc": 0.75}},
        "evaluate_metrics_serverapp": {"0": {"accuracy": 0.1}, "1": {"accuracy": 1.1}},
    }
    stored, card = read_json(tmp_path / "run" / "flower_result.json"), (tmp_path / "run" / "model_card.md").read_text()
    assert {part: stored[part] for part in parts} == parts
    assert [row["status"] for row in list_runs(tmp_path)] == ["finished"]
    assert {part: {str(n): r for n, r in getattr(result, part).items()} for part in parts} == parts
    text = "\n".join(said)
    for name, value in (("train_loss", 0.25), ("eval_acc", 0.75), ("accuracy", 0.1), ("accuracy", 1.1)):
        assert f"'{name}': {value}" in text
        assert f"{name} = {value}" in card
    assert "Final results:" in text


def test_flower_s_arguments_keep_their_meaning(tmp_path: Path) -> None:
    """Four of eight nodes are asked, in records of other names, and their numbers are combined by the project."""
    asked: list[RecordDict] = []

    def client(seed: int) -> Client:
        def answer(message: Message) -> Message:
            asked.append(message.content)
            metrics = MetricRecord({"rows": 10 * seed, "loss": float(seed)})
            return Message(RecordDict({"m": ArrayRecord(weights(seed)), "metrics": metrics}), reply_to=message)

        return answer

    def worst(contents: list[RecordDict], weight: str) -> MetricRecord:
        assert all(weight in content["metrics"] for content in contents)
        return MetricRecord({"worst_loss": max(float(content["metrics"]["loss"]) for content in contents)})

    run = strategy(
        OneShotFedAvg, tmp_path / "run", fraction_train=0.5, min_train_nodes=3, min_available_nodes=8,
        weighted_by_key="rows", arrayrecord_key="weights", configrecord_key="settings", train_metrics_aggr_fn=worst,
    )  # fmt: skip
    grid = FakeGrid({seed: client(seed) for seed in range(1, 9)}, joins={8: 5})
    result = run.start(grid, ArrayRecord(weights(5)), train_config=ConfigRecord({"lr": 0.1}))  # type: ignore[arg-type]
    assert [sorted(content) for content in asked] == [["settings", "weights"]] * 4
    assert asked[0]["settings"]["lr"] == 0.1
    seeds = grid.of_type()
    assert result.train_metrics_clientapp == {1: {"worst_loss": float(max(seeds))}}
    with RunFolder.open(tmp_path / "run", write=False) as folder:
        assert sorted(record.facts.num_examples for record in folder.round(1).records()) == [10 * n for n in seeds]


def test_too_few_nodes_for_min_available_nodes_are_named_at_the_deadline(tmp_path: Path) -> None:
    run = strategy(OneShotFedAvg, tmp_path / "run", min_available_nodes=3)
    with pytest.raises(QuorumError, match="only 2 of min_available_nodes=3 nodes connected"):
        run.start(TWO, timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "argument", "instead"),
    [
        (OneShotFedAvg, {"proximal_mu": 0.1}, "train_config"),
        (OneShotFedAvg, {"fraction_fit": 0.5}, "fraction_train"),
        (OneShotFedAvg, {"fraction_train": 0.0}, "above 0"),
        (OneShotFedAvg, {"server_momentum": 0.9}, "FLBoost"),
        (OneShotFedAvg, {"train_metrics_aggr_fn": "mean"}, "function"),
        (Iterative, {"fraction_train": 0.5}, r"base=FedAvg\(fraction_train=...\)"),
        (Iterative, {"initial_parameters": 1}, "initial_arrays"),
    ],
)
def test_an_argument_without_a_place_is_refused_by_the_class_s_name(
    tmp_path: Path, kind: Any, argument: dict[str, Any], instead: str
) -> None:
    with pytest.raises(OptionError, match=f"^{kind.__name__}.*{next(iter(argument))}.*{instead}"):
        strategy(kind, tmp_path / "run", **argument)


@pytest.mark.parametrize(("reported", "found"), [("epsilon", "max-epsilon"), ("max_epsilon", "max_epsilon")])
def test_a_mean_of_epsilons_is_never_reported(tmp_path: Path, reported: str, found: str) -> None:
    def client(seed: int) -> Client:
        def answer(message: Message) -> Message:
            state = weights(seed) if message.metadata.message_type == MessageType.TRAIN else None
            return Message(records(state, **{reported: float(seed), "steps": 5.0}), reply_to=message)

        return answer

    run = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=1.0)
    result = run.start(FakeGrid({1: client(1), 2: client(3)}))  # type: ignore[arg-type]
    for metrics in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        assert metrics == {1: {found: 3.0, "steps": 5.0}}


RAY = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)\n"
    '  File "task.py", line 9, in train\n    lr = config["lr"]\nKeyError: \'lr\'\n\nThe above exception was the direct '
    "cause of the following exception:\n\nray::ClientAppActor.run()\nflwr.clientapp.client_app.ClientAppException: \n"
    "Exception ClientAppException occurred. Message: 'lr''>"
)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        (RAY, "KeyError: 'lr'"),
        ("<class 'ValueError'>:<'no rows'>", "ValueError: no rows"),
        ("<class 'KeyError'>:<''fitins.parameters''>", "NumPyClient.*former API.*@app.train"),
        (RAY.replace("'lr'", "'secaggplus_configs'"), "secaggplus_mod.*SecAggPlusWorkflow.*without this mod"),
    ],
)
def test_an_error_of_a_client_keeps_its_type_and_foreign_apps_are_named(
    tmp_path: Path, reason: str, named: str
) -> None:
    run = strategy(OneShotFedAvg, tmp_path / "run")
    with pytest.raises(QuorumError, match=named):
        run.start(FakeGrid({1: failing(reason), 2: failing(reason)}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "settings", "wrong", "right"),
    [
        (OneShotFedAvg, {}, "option", "OneShotFedAvg asks every client for one model, and it has no rounds"),
        (FedENS, {}, "student", "FedENS.*of model"),
    ],
)
def test_the_first_lines_are_true_of_the_method(
    tmp_path: Path, said: list[str], kind: Any, settings: dict[str, Any], wrong: str, right: str
) -> None:
    strategy(kind, tmp_path / "run", **settings).start(TWO, num_rounds=10)  # type: ignore[arg-type]
    before = said[: next(place for place, line in enumerate(said) if "run folder" in line)]
    assert not any(wrong in line for line in before)
    assert any(re.search(right, line) for line in before)


@pytest.mark.parametrize("given", [Normalization(0.5, 0.25), ((0.5,), [0.25]), (0.5, 0.25)])  # type: ignore[arg-type]
def test_one_mean_and_one_deviation_stand_for_every_channel(tmp_path: Path, given: Any) -> None:
    found = strategy(OneShotFedAvg, tmp_path / "run", normalization=given)
    assert found.job.normalization == Normalization((0.5,), (0.25,))


@pytest.mark.parametrize("given", [0.5, (0.5,), ("0.5", 1.0), ((0.5, 0.5), (1.0,)), (0.5, 0.0)])
def test_another_normalization_is_refused_in_one_line(tmp_path: Path, given: Any) -> None:
    with pytest.raises(OptionError, match="^normalization is "):
        strategy(OneShotFedAvg, tmp_path / "run", normalization=given)


def test_methods_that_need_other_clients_are_not_recommended(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Choose another method: ") as refusal:
        strategy(FedDF, tmp_path / "run")
    named = str(refusal.value).partition("Choose another method: ")[2].split(", ")
    assert "dense" in named
    assert {METHODS[name].uploads for name in named} == {"classifier"}
