"""Projects in the forms of Flower's examples, with the strategy changed and nothing else."""

from __future__ import annotations

import io
import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import (
    CLASSES,
    ONE_THREAD,
    SHAPE,
    TINY,
    Client,
    FakeGrid,
    answering,
    equal,
    failing,
    net,
    records,
    stock,
    strategy,
    weights,
)
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Result
from torch import Tensor, nn

from strategies import (
    METHODS,
    Dense,
    DenseConfig,
    FedDF,
    FedENS,
    FedOV,
    Fens,
    FisherMerging,
    FLBoost,
    Iterative,
    IterativeConfig,
    LabelCountEnsemble,
    Normalization,
    OneShotFedAvg,
    Refiner,
    load_ensemble_module,
)
from strategies.client import answer_question, upload_facts
from strategies.client.measures import sum_inputs
from strategies.core.durable import read_json
from strategies.core.errors import OptionError, QuorumError
from strategies.core.options import preset_of
from strategies.method import Job, Outcome, Progress
from strategies.run import runs_folder, trial
from strategies.run.results import list_runs
from strategies.run.run_folder import RunFolder
from strategies.uploads.forms import Form

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


def reporting(seed: int, scores: Mapping[str, Any], **metrics: Any) -> Client:
    """A client that sends weights with some numbers, and scores when it is asked for them."""

    def answer(message: Message) -> Message:
        trains = message.metadata.message_type == MessageType.TRAIN
        return Message(records(weights(seed), **metrics) if trains else records(None, **scores), reply_to=message)

    return answer


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


def test_commands_in_another_flower_app_keep_their_runs_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inside := tmp_path / "project" / "notebooks").mkdir(parents=True)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(inside)
    assert runs_folder() == inside / "runs"
    (tmp_path / "project" / "pyproject.toml").write_text(PROJECT)
    assert runs_folder() == tmp_path / "state" / "oneshot-fl" / "runs"
    (tmp_path / "project" / "pyproject.toml").write_text(PROJECT.replace('"project"', '"oneshot-fl"'))
    assert runs_folder() == inside / "runs"


def test_the_cost_is_said_before_a_client_trains(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps, the time of a trial that ends early, the memory, and what is shorter."""
    monkeypatch.setattr(trial, "TRIAL_S", 0.2)
    heard: list[str] = []

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 160), nn.ReLU(), nn.Linear(160, CLASSES))

    def client(message: Message) -> Message:
        heard.extend(said)
        raise KeyboardInterrupt

    config = DenseConfig(**{**TINY, "epochs": 100_000})
    run = strategy(Dense, tmp_path / "run", model=build, config=config)
    with pytest.raises(KeyboardInterrupt):
        run.start(FakeGrid({1: client, 2: client}))  # type: ignore[arg-type]
    (line,) = [each for each in heard if "server stage will take" in each]
    found = re.search(r"take 100000 epochs, about (?:(\d+) h )?(\d+) (?:min|s).*, at least 0.0 GiB of memory", line)
    assert found is not None
    assert "preset='quick' is shorter, with" in line


@pytest.mark.parametrize("name", [name for name, each in METHODS.items() if hasattr(each.config(), "epochs")])
def test_what_makes_a_stage_shorter_is_there(name: str) -> None:
    """The line names a call of the method's config that works."""
    kind = METHODS[name].config
    job = replace(strategy(OneShotFedAvg, None).job, config=preset_of(kind, "quick"))
    call = trial.what_is_shorter(METHODS[name], job).partition("config=")[2].replace("...", "epochs=1")
    assert eval(call, {kind.__name__: kind}).epochs == 1  # noqa: S307  the line's own code


def test_a_trial_without_reports_ends_in_any_thread_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's simulation runs a ServerApp in a thread of its own, which no signal reaches."""
    monkeypatch.setattr(trial, "LIMIT_S", 0.1)

    def fit(job: Job, progress: Progress) -> Outcome:
        while True:
            torch.zeros(9).sum()

    method, job = replace(METHODS["fedavg"], fit=fit), strategy(OneShotFedAvg, None).job
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trial.trial_stage, method, job).result(30.0) == (None, 0)


def test_scores_are_logged_and_kept_as_flower_does(tmp_path: Path, said: list[str]) -> None:
    run = strategy(OneShotFedAvg, tmp_path / "run", fraction_evaluate=1.0)
    result = run.start(
        FakeGrid({k: reporting(k, {"eval_acc": 0.75}, train_loss=0.25) for k in (1, 2)}),  # type: ignore[arg-type]
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

    def client(seed: int) -> Client:
        metrics = MetricRecord({"rows": 10 * seed, "loss": float(seed)})
        return answering(RecordDict({"m": ArrayRecord(weights(seed)), "metrics": metrics}))

    def worst(contents: list[RecordDict], weight: str) -> MetricRecord:
        assert all(weight in content["metrics"] for content in contents)
        return MetricRecord({"worst_loss": max(float(content["metrics"]["loss"]) for content in contents)})

    run = strategy(
        OneShotFedAvg, tmp_path / "run", fraction_train=0.5, min_train_nodes=3, min_available_nodes=8,
        weighted_by_key="rows", arrayrecord_key="weights", configrecord_key="settings", train_metrics_aggr_fn=worst,
    )  # fmt: skip
    grid = FakeGrid({seed: client(seed) for seed in range(1, 9)}, joins={8: 5})
    result = run.start(grid, ArrayRecord(weights(5)), train_config=ConfigRecord({"lr": 0.1}))  # type: ignore[arg-type]
    assert [sorted(message.content) for message in grid.asked] == [["settings", "weights"]] * 4
    assert grid.asked[0].content["settings"]["lr"] == 0.1
    seeds = grid.of_type()
    assert result.train_metrics_clientapp == {1: {"worst_loss": float(max(seeds))}}
    with RunFolder.open(tmp_path / "run", write=False) as folder:
        assert sorted(record.facts.num_examples for record in folder.round(1).records()) == [10 * n for n in seeds]


@pytest.mark.parametrize("kind", [OneShotFedAvg, Iterative, FLBoost])
@pytest.mark.parametrize(("reported", "found"), [("epsilon", "max-epsilon"), ("max_epsilon", "max_epsilon")])
def test_a_mean_of_epsilons_is_never_reported(tmp_path: Path, kind: Any, reported: str, found: str) -> None:
    more: dict[Any, dict[str, Any]] = {
        OneShotFedAvg: {"fraction_evaluate": 1.0},
        Iterative: {"config": IterativeConfig(rounds=1)},
        FLBoost: {"base": FedAvg(), "proxy": torch.zeros(4, *SHAPE, dtype=torch.uint8),
                  "refiner": Refiner.of("feddf", epochs=1)},
    }  # fmt: skip
    lists = kind is OneShotFedAvg  # rounds report single numbers
    said: dict[int, dict[str, Any]] = {seed: {reported: float(seed), "steps": 5.0} for seed in (1, 3)}
    for seed, told in said.items():
        told.update({"epsilon-by-class": [float(seed), 4.0 - seed]} if lists else {})
    run: Any = strategy(kind, tmp_path / "run", **more[kind])
    result = run.start(FakeGrid({seed: reporting(seed, told, **told) for seed, told in said.items()}), num_rounds=1)
    wanted = {1: {found: 3.0, "steps": 5.0, **({"max-epsilon-by-class": [3.0, 3.0]} if lists else {})}}
    assert result.train_metrics_clientapp == wanted
    assert result.evaluate_metrics_clientapp == ({} if kind is Iterative else wanted)


def test_lists_are_averaged_and_what_has_no_mean_or_no_place_is_said(tmp_path: Path, said: list[str]) -> None:
    def client(seed: int) -> Client:
        own: dict[str, Any] = {f"only-{seed}": 1.0, "loss": math.nan, "recall": [0.0, float(seed)]}
        content = records(weights(seed), num_examples=seed, **own)
        content["momentum"] = ArrayRecord({"a": torch.zeros(1)})
        return answering(content)

    run = strategy(OneShotFedAvg, tmp_path / "run").start(FakeGrid({1: client(1), 2: client(3)}))  # type: ignore[arg-type]
    assert run.train_metrics_clientapp == {1: {"recall": [0.0, 2.5]}}
    [without] = [line for line in said if "no mean" in line]
    assert all(name in without for name in ("loss", "only-1", "only-3"))
    assert any("'momentum'" in line for line in said)


RAY = (
    "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'\x1b[36mray::ClientAppActor.run()\x1b[39m (pid=7)\n"
    '  File "task.py", line 9, in train\n    lr = config["lr"]\nKeyError: \'lr\'\n\nThe above exception was the direct '
    "cause of the following exception:\n\nray::ClientAppActor.run()\nflwr.clientapp.client_app.ClientAppException: \n"
    "Exception ClientAppException occurred. Message: 'lr''>"
)


LINEAR = partial(nn.Linear, 6, 3)
NAMELESS = ArrayRecord([value.numpy() for value in LINEAR().state_dict().values()])
OF_TWO_CLASSES = upload_facts(client="north", architecture="model", classes=["ill", "well"])
OF_LINEAR = {"model": LINEAR, "num_classes": 3, "input_shape": (6,)}


@pytest.mark.parametrize(
    ("client", "settings", "line"),
    [
        (failing(RAY), {}, "KeyError: 'lr'"),
        (failing("<class 'ValueError'>:<'no rows'>"), {}, "ValueError: no rows"),
        (failing("<class 'KeyError'>:<''fitins.parameters''>"), {}, "NumPyClient.*former API.*@app.train"),
        (
            failing(RAY.replace("'lr'", "'secaggplus_configs'")),
            {},
            "secaggplus_mod.*SecAggPlusWorkflow.*without this mod",
        ),
        (stock(1), {"min_available_nodes": 3}, "only 2 of min_available_nodes=3 nodes connected"),
        (
            answering(RecordDict({**records(None), "arrays": NAMELESS})),
            OF_LINEAR,
            r"not expected 0, 1; must have the model's names, as ArrayRecord\(model.sta",
        ),
        (
            answering(records(LINEAR().state_dict(), facts=OF_TWO_CLASSES)),
            OF_LINEAR,
            r"north: upload.classes has 2 names: must be 3",
        ),
    ],
)
def test_a_run_without_usable_answers_says_why_and_names_foreign_apps(
    tmp_path: Path, client: Client, settings: dict[str, Any], line: str
) -> None:
    run = strategy(OneShotFedAvg, tmp_path / "run", **settings)
    start = ArrayRecord(settings["model"]().state_dict()) if "model" in settings else None
    with pytest.raises(QuorumError, match=line):
        run.start(FakeGrid({1: client, 2: client}), start, timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "settings", "wrong", "right"),
    [
        (OneShotFedAvg, {}, "option", "OneShotFedAvg asks every client for one model, and it has no rounds"),
        (FedENS, {}, "student", "FedENS"),
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


def test_methods_that_need_other_clients_are_not_recommended(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Choose another method: ") as refusal:
        strategy(FedDF, tmp_path / "run")
    named = str(refusal.value).partition("Choose another method: ")[2].split(", ")
    assert "dense" in named
    assert {METHODS[name].uploads for name in named} == {"classifier"}
    assert {"fed-gen", "flboost", "fusefl", "fens"}.isdisjoint(named)  # in rounds, or with the app's clients alone


class Mlp(nn.Module):
    """Reads rows [B, 6], and ends as its project likes."""

    def __init__(self, outputs: int, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(6, outputs), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


class Texts(nn.Module):
    """Reads tokens [B, 5] under their names alone, and returns an object."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.embed, self.head, self.named = nn.Embedding(9, 4), nn.Linear(4, 3), named

    def forward(self, batch: Any) -> Any:
        tokens = batch["input_ids"] if self.named else batch
        return SimpleNamespace(loss=None, logits=self.head(self.embed(tokens).mean(1)))


class Padded(Texts):
    """Reads as a model of Hugging Face does: a mask of the tokens is a second input, all ones by default."""

    config = SimpleNamespace(pad_token_id=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        words = self.embed(input_ids) * mask[..., None]
        return SimpleNamespace(logits=self.head(words.sum(1) / mask.sum(1, keepdim=True)))


def test_an_ensemble_of_texts_reads_no_padding(tmp_path: Path) -> None:
    build = partial(Padded, False)
    models = [build(), build()]
    run = strategy(FedENS, tmp_path / "run", model=build, num_classes=3, input_shape=(1, 1, 5))
    run.start(uploading(models))  # type: ignore[arg-type]
    whole = torch.tensor([[3, 4, 5]])
    padded = nn.functional.pad(whole, (0, 2)).view(1, 1, 1, 5)
    logits = torch.stack([model(whole).logits for model in models]).mean(0)
    torch.testing.assert_close(run.outcome(padded).log_softmax(1), logits.log_softmax(1), atol=1e-5, rtol=1e-5)
    member = Form("tokens", "found").adapt(models[0])
    seen = torch.ones(1, 5, dtype=torch.int64)
    torch.testing.assert_close(member(padded, seen), member(padded, attention_mask=seen))


class Series(nn.Module):
    """Reads sequences [B, 7, 5], as a head on a speech encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(7, 4, 1), nn.Flatten(), nn.Linear(20, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def sigmoid_logits(x: Tensor) -> Tensor:
    return torch.stack([torch.zeros(len(x)), x[:, 0]], dim=1)


ROWS, TOKENS, SERIES = torch.randn(4, 6), torch.randint(9, (4, 5)), torch.randn(4, 7, 5)
FORMS: list[tuple[Any, Any, int, Tensor, Callable[[Any], Tensor], str]] = [
    *(
        (partial(Mlp, outputs, end), shape, max(outputs, 2), ROWS, lambda m, logits=logits: logits(m.layer(ROWS)), line)
        for outputs, end, shape, logits, line in (
            (3, lambda z: z, (6,), lambda z: z, "rows"),
            (1, lambda z: z, (6, 1, 1), sigmoid_logits, "one logit"),
            (1, torch.sigmoid, (6, 1, 1), sigmoid_logits, "one probability"),
            (1, lambda z: torch.sigmoid(z).squeeze(1), (6, 1, 1), sigmoid_logits, "one probability"),
            (3, lambda z: z.softmax(1), (6, 1, 1), lambda z: z.log_softmax(1), "probabilities"),
            (3, torch.sigmoid, (6, 1, 1), lambda z: z, "probability per class"),
            (3, lambda z: (z, z.sum()), (6, 1, 1), lambda z: z, "larger output"),
            (3, lambda z: {"logits": z}, (6, 1, 1), lambda z: z, "larger output"),
        )
    ),
    (partial(Texts, named=False), (1, 1, 5), 3, TOKENS, lambda m: m(TOKENS).logits, "tokens"),
    (partial(Texts, named=True), (1, 1, 5), 3, TOKENS, lambda m: m({"input_ids": TOKENS}).logits, "a dict"),
    (Series, (1, 7, 5), 3, SERIES, lambda m: m(SERIES), "sequences [B, L, D]"),
]


@pytest.mark.parametrize(("build", "shape", "classes", "examples", "logits_of", "line"), FORMS)
def test_forms_of_examples_and_outputs_are_recognised(
    tmp_path: Path,
    said: list[str],
    build: Any,
    shape: Any,
    classes: int,
    examples: Tensor,
    logits_of: Callable[[Any], Tensor],
    line: str,
) -> None:
    """An ensemble predicts by the members' true logits, in this process and loaded from the disk."""
    models = [build(), build()]
    run = strategy(FedENS, tmp_path / "run", model=build, num_classes=classes, input_shape=shape)
    result = run.start(uploading(models), ArrayRecord(build().state_dict()))  # type: ignore[arg-type]
    assert sum(line in each for each in said if each.startswith("model ")) == 1
    logits = torch.stack([logits_of(model) for model in models]).mean(0)
    loaded = load_ensemble_module(tmp_path / "run", {"model": build})
    for ensemble in (run.outcome, loaded):
        found = ensemble(examples.view(4, *(*shape, 1, 1)[:3]))
        torch.testing.assert_close(found.log_softmax(1), logits.log_softmax(1), atol=1e-4, rtol=1e-4)
    build().load_state_dict(result.arrays.to_torch_state_dict())


def renamed(state: Mapping[str, Tensor], names: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return the arrays that travel, under their names there."""
    return {sent: value for name, value in state.items() if (sent := names(name)) is not None}


def uploading(models: Sequence[nn.Module], names: Callable[[str], str | None] = str) -> FakeGrid:
    """A grid whose stock clients send these models; ``names`` says under which name an array travels, if any."""

    states = [renamed(model.state_dict(), names) for model in models]
    return FakeGrid({number: answering(records(state)) for number, state in enumerate(states, 1)})


def averaging(run_dir: Path, model: Callable[[], nn.Module] = LINEAR) -> OneShotFedAvg:
    return OneShotFedAvg(model, run_dir=run_dir, compute="in-process")


def test_an_average_asks_for_no_classes_and_no_logits(tmp_path: Path, said: list[str]) -> None:
    """An autoencoder, whose outputs are a picture and two vectors, is averaged."""
    build = partial(Mlp, 6, lambda z: (z, z.mean(), z.var()))
    models = [build(), build()]
    result = averaging(tmp_path / "run", build).start(uploading(models), ArrayRecord(build().state_dict()))  # type: ignore[arg-type]
    assert not any("classes are not named" in line for line in said)
    mean = (models[0].layer.weight + models[1].layer.weight) / 2
    torch.testing.assert_close(result.arrays.to_torch_state_dict()["layer.weight"], mean.detach())
    with pytest.raises(OptionError, match="needs num_classes and input_shape"):
        FedENS(build, run_dir=tmp_path / "other")


class Pretrained(nn.Module):
    """A frozen body that every party loads alike, under a head."""

    def __init__(self, drawn: bool = False) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 3))
        if not drawn:
            nn.init.constant_(self.body.weight, 0.5)
            nn.init.constant_(self.body.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads(self.body(x.flatten(1)))
        return found


PARTS: dict[str, Callable[[str], str | None]] = {
    "a part by its own names": lambda name: name if name.startswith("heads") else None,
    "the state dict of a submodule": lambda name: name.removeprefix("heads.") if name.startswith("heads") else None,
    "in what wraps the model": lambda name: f"_module.{name}",
    "a list of arrays": lambda name: str(list(Pretrained().state_dict()).index(name)),
}


@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("kind", [OneShotFedAvg, FedENS])
def test_a_part_of_the_arrays_is_an_upload(tmp_path: Path, kind: Any, names: Callable[[str], str | None]) -> None:
    models = [Pretrained(), Pretrained()]
    start = renamed(Pretrained().state_dict(), names)
    scored: list[int] = []
    run = strategy(kind, tmp_path / "run", model=Pretrained, num_classes=3, input_shape=(6, 1, 1))
    result = run.start(
        uploading(models, names),  # type: ignore[arg-type]
        ArrayRecord(start),
        evaluate_fn=lambda number, arrays: scored.append(number),
    )
    arrays = result.arrays.to_torch_state_dict()
    assert list(arrays) == list(start)
    mean = {name: (value + models[1].state_dict()[name]) / 2 for name, value in models[0].state_dict().items()}
    torch.testing.assert_close(arrays, type(arrays)(renamed(mean, names)))
    assert scored == [0, 1]
    rows = torch.randn(4, 6, 1, 1)
    expected = torch.stack([model(rows) for model in models]).mean(0)  # of linear heads: the mean model's, too
    torch.testing.assert_close(run.outcome(rows), expected)


@pytest.mark.parametrize(
    ("drawn", "arrays", "line"),
    [
        (True, {"heads.0.weight": torch.zeros(3, 5), "heads.0.bias": torch.zeros(3)}, "draws others anew: body.weight"),
        (False, {"heads.0.weight": torch.zeros(4, 5), "heads.0.bias": torch.zeros(4)}, "heads.0.bias is .*expected is"),
        (False, {"tail.weight": torch.zeros(3, 5)}, "not expected tail.weight"),
    ],
)
def test_arrays_that_are_no_part_are_refused_before_a_client_trains(
    tmp_path: Path, drawn: bool, arrays: dict[str, Tensor], line: str
) -> None:
    grid, build = uploading([Pretrained()] * 2), partial(Pretrained, drawn)
    run = strategy(OneShotFedAvg, tmp_path / "run", model=build)
    with pytest.raises(OptionError, match=f"^initial_arrays .*{line}"):
        run.start(grid, ArrayRecord(arrays))  # type: ignore[arg-type]
    assert grid.asked == []


@pytest.mark.parametrize("around", [False, True], ids=["Iterative", "FLBoost"])
@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_rounds_train_a_part_of_the_arrays(tmp_path: Path, names: Callable[[str], str | None], around: bool) -> None:
    """Requests and the result have the part alone, the clients' mean; the others stay as they are, bit by bit."""

    def build() -> nn.Module:
        found = Pretrained()
        found.body.requires_grad_(requires_grad=False)
        return found

    models, scored = [build(), build()], list[set[str]]()
    start, grid = renamed(build().state_dict(), names), uploading(models, names)
    settings = {"num_classes": 3, "input_shape": (6, 1, 1), "run_dir": tmp_path / "run", "options": ONE_THREAD}
    run: Any = Iterative(build, config=IterativeConfig(rounds=2), **settings)
    if around:
        run = FLBoost(build, base=FedAvg(), compute="in-process", refiner=Refiner.of("feddf", epochs=1),
                      proxy=torch.zeros(4, 6, 1, 1), **settings)  # fmt: skip

    def score(_: int, arrays: ArrayRecord) -> MetricRecord:
        scored.append(set(arrays))
        return MetricRecord({"accuracy": 0.5})

    result = run.start(grid, ArrayRecord(start), num_rounds=2, evaluate_fn=score)
    assert scored == [set(start)] * 3
    assert all(set(message.content["arrays"]) == set(start) for message in grid.asked)
    arrays = result.arrays.to_torch_state_dict()
    assert list(arrays) == list(start)
    if not around:
        mean = {name: (value + models[1].state_dict()[name]) / 2 for name, value in models[0].state_dict().items()}
        torch.testing.assert_close(dict(arrays), renamed(mean, names))
    body = "body.weight"
    assert equal({body: run.outcome.state_dict()[body]}, {body: build().state_dict()[body]})


def test_a_refiner_that_would_train_what_no_client_gets_is_refused(tmp_path: Path) -> None:
    names = PARTS["a part by its own names"]
    grid = uploading([Pretrained()] * 2, names)
    run = strategy(FLBoost, tmp_path / "run", model=Pretrained, base=FedAvg(), num_classes=3, input_shape=(6, 1, 1),
                   refiner=Refiner.of("feddf", epochs=1), proxy=torch.zeros(4, 6, 1, 1))  # fmt: skip
    start = renamed(Pretrained().state_dict(), names)
    with pytest.raises(OptionError, match="the refiner would train others too: body.bias, body.weight.*requires_grad_"):
        run.start(grid, ArrayRecord(start))  # type: ignore[arg-type]
    assert grid.asked == []


def test_replies_of_another_precision_are_averaged(tmp_path: Path) -> None:
    """One client replies in half precision, to send less, another in double."""
    models = [nn.Linear(6, 3).half(), nn.Linear(6, 3).double(), nn.Linear(6, 3)]
    result = averaging(tmp_path / "run").start(uploading(models), ArrayRecord(nn.Linear(6, 3).state_dict()))  # type: ignore[arg-type]
    found = result.arrays.to_torch_state_dict()
    for name in ("weight", "bias"):
        mean = sum(model.state_dict()[name].double() for model in models) / 3
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), mean, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("cast", [torch.Tensor.float, torch.Tensor.double, torch.Tensor.int])
def test_counters_of_another_type_are_taken_where_they_are_whole(tmp_path: Path, cast: Any) -> None:
    """As of a client that casts its whole state dict."""
    start = nn.BatchNorm1d(3).state_dict()

    def replies(counter: torch.Tensor) -> FakeGrid:
        return FakeGrid(dict.fromkeys((1, 2), answering(records({**start, "num_batches_tracked": counter}))))

    run = averaging(tmp_path / "run", partial(nn.BatchNorm1d, 3))
    result = run.start(replies(cast(torch.tensor(7))), ArrayRecord(start))
    found = result.arrays.to_torch_state_dict()["num_batches_tracked"]
    assert (found.dtype, found.item()) == (torch.int64, 7)
    for wrong in (torch.tensor(7.5), torch.tensor(1e30)):
        run = averaging(tmp_path / f"run-{wrong}", partial(nn.BatchNorm1d, 3))
        with pytest.raises(QuorumError, match=r"is float32\[\], expected is int64\[\], whole numbers"):
            run.start(replies(wrong), ArrayRecord(start))


def test_clients_that_did_not_train_or_sent_one_model_are_named(tmp_path: Path, said: list[str]) -> None:
    start, other = nn.Linear(6, 3), nn.Linear(6, 3)
    averaging(tmp_path / "run").start(uploading([start, other, other]), ArrayRecord(start.state_dict()))  # type: ignore[arg-type]
    (untrained,) = [line for line in said if "weights are those that it was sent" in line]
    (equal,) = [line for line in said if "are equal: must be" in line]
    assert not set(re.findall("anonymous-[0-9a-f]{12}", untrained)) & set(re.findall("anonymous-[0-9a-f]{12}", equal))


def test_arrays_that_are_no_record_are_refused(tmp_path: Path) -> None:
    run = strategy(OneShotFedAvg, tmp_path / "run")
    with pytest.raises(
        OptionError, match=r"initial_arrays is OrderedDict: must be ArrayRecord\(model.state_dict\(\)\)"
    ):
        run.start(TWO, nn.Linear(6, 3).state_dict())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [OneShotFedAvg, FedENS])
def test_arrays_of_double_precision_without_names_fit_a_linear_layer(
    tmp_path: Path, said: list[str], kind: Any
) -> None:
    """As the coefficients and intercepts of a scikit-learn model, whose precision requests and the result have."""
    draw = np.random.default_rng(0)
    fitted = [[draw.normal(size=(3, 6)), draw.normal(size=3)] for _ in range(2)]

    sent = [RecordDict({**records(None), "arrays": ArrayRecord(arrays)}) for arrays in fitted]
    grid = FakeGrid({number: answering(content) for number, content in enumerate(sent, 1)})
    run = strategy(kind, tmp_path / "run", model=LINEAR, num_classes=3, input_shape=(6,))
    found = run.start(grid, ArrayRecord([np.zeros((3, 6)), np.zeros(3)])).arrays.to_numpy_ndarrays()  # type: ignore[arg-type]
    assert [array.dtype for array in grid.asked[0].content["arrays"].values()] == ["float64"] * 2
    assert any("float64 in messages, and float32 in model" in line for line in said)
    for place, array in enumerate(found):
        assert array.dtype == np.float64
        np.testing.assert_allclose(array, (fitted[0][place] + fitted[1][place]) / 2, rtol=1e-6)


def own_loop(base: Any) -> Any:
    """A project's strategy that has a loop of its own, and stands on a class of the library."""

    class Own(base):  # type: ignore[misc]
        def start(self, grid: Any, arrays: ArrayRecord, num_rounds: int = 3) -> Result:
            result = Result()
            for number in range(1, num_rounds + 1):
                asked = self.configure_train(number, arrays, ConfigRecord({"lr": 0.1}), grid)
                combined, metrics = self.aggregate_train(number, grid.send_and_receive(asked, timeout=5.0))
                result.arrays = arrays = combined or arrays
                if metrics is not None:
                    result.train_metrics_clientapp[number] = metrics
            self.close()
            return result

    return Own


@pytest.mark.parametrize("kind", [OneShotFedAvg, FedENS])
def test_a_loop_of_the_project_s_own_asks_once_and_has_the_result(tmp_path: Path, said: list[str], kind: Any) -> None:
    names = PARTS["the state dict of a submodule"]
    models = [Pretrained() for _ in range(4)]
    start = renamed(Pretrained().state_dict(), names)

    states = [renamed(model.state_dict(), names) for model in models]
    grid = FakeGrid({number: answering(records(state, train_loss=0.5)) for number, state in enumerate(states)})
    run: Any = strategy(own_loop(kind), tmp_path / "run", model=Pretrained, num_classes=3, input_shape=(6, 1, 1),
                        fraction_train=0.5)  # fmt: skip
    result = run.start(grid, ArrayRecord(start))
    assert len(grid.of_type()) == 2
    assert sum("asks no client" in line for line in said) == 2
    assert result.train_metrics_clientapp == {1: {"train_loss": 0.5}}
    asked = [models[node].heads[0].weight for node in grid.of_type()]  # type: ignore[index]
    arrays = result.arrays.to_torch_state_dict()
    assert list(arrays) == list(start)
    torch.testing.assert_close(arrays["0.weight"], (asked[0] + asked[1]).detach() / 2)


@pytest.mark.parametrize(
    ("kind", "demand"),
    [
        (LabelCountEnsemble, r"label counts .*upload_facts"),
        (FisherMerging, "fisher_diagonal"),
        (FedOV, "one more output"),
    ],
)
def test_what_a_stock_reply_lacks_is_said_before_a_client_trains(
    tmp_path: Path, said: list[str], kind: Any, demand: str
) -> None:
    heard: list[str] = []

    def client(message: Message) -> Message:
        heard.extend(said)
        return Message(records(weights(1)), reply_to=message)

    with pytest.raises(OptionError):
        strategy(kind, tmp_path / "run").start(FakeGrid({1: client, 2: client}))  # type: ignore[arg-type]
    assert any(re.search(f"every client must send .*{demand}", line) for line in heard)


def test_a_clientapp_without_the_lines_of_fens_is_refused_before_it_trains(tmp_path: Path) -> None:
    def client(message: Message) -> Message:
        asked = message.metadata.message_type
        reason = f"ValueError: No train function registered with name '{asked.partition('.')[2]}'"
        return failing(reason)(message) if asked != MessageType.TRAIN else stock(1)(message)  # type: ignore[return-value]

    grid = FakeGrid({1: client, 2: client})
    with pytest.raises(OptionError, match=r"'fens' asks clients again.*must have the line .*client.fens.serve"):
        strategy(Fens, tmp_path / "run").start(grid)  # type: ignore[arg-type]
    assert grid.of_type() == []


@pytest.mark.parametrize("setting", ["start", "finish"])
@pytest.mark.parametrize("has", [False, True], ids=["stock", "with-the-function"])
def test_a_last_layer_of_ridge_needs_a_function_of_the_clientapp_and_works_with_it(
    tmp_path: Path, setting: str, has: bool
) -> None:
    def client(seed: int) -> Client:
        def answer(message: Message) -> Message:
            if message.metadata.message_type == MessageType.TRAIN:
                said = {"upload": upload_facts(client=f"c{seed}", architecture="model")}
                return Message(RecordDict({**records(weights(seed)), **said}), reply_to=message)
            if not has:
                return failing("ValueError: No train function registered with name 'head'")(message)  # type: ignore[return-value]
            model = net()
            if arrays := message.content.array_records.get("arrays"):
                model.load_state_dict(arrays.to_torch_state_dict())
            examples = torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(seed))
            batches = [(examples, torch.arange(40) % CLASSES)]
            return answer_question(message, {"client": f"c{seed}"}, ArrayRecord(sum_inputs(model, batches, CLASSES)))

        return answer

    grid, options = FakeGrid({1: client(1), 2: client(2)}), replace(ONE_THREAD, **{setting: "ridge"})
    asked = strategy(OneShotFedAvg, tmp_path / "run", options=options)
    if has:
        result = asked.start(grid, ArrayRecord(weights(1)))  # type: ignore[arg-type]
        assert len(grid.of_type()) == 2
        assert len(result.arrays) == len(weights(1))
        return
    with pytest.raises(OptionError, match=f"{setting}='ridge' asks clients for sums.*must have a function @app.train"):
        asked.start(grid, ArrayRecord(weights(1)))  # type: ignore[arg-type]
    assert grid.of_type() == []


@pytest.mark.parametrize("kind", [OneShotFedAvg, Iterative])
@pytest.mark.parametrize("around", [DifferentialPrivacyServerSideFixedClipping, FedAvg])
def test_noise_that_the_run_folder_would_lack_is_refused_before_a_client_trains(
    tmp_path: Path, kind: Any, around: Any
) -> None:
    grid, inside = FakeGrid({1: stock(1), 2: stock(2)}), strategy(kind, tmp_path / "run")
    if around is FedAvg:
        list(inside.configure_train(1, ArrayRecord(weights(1)), ConfigRecord(), grid))
        return
    line = f"DifferentialPrivacyServerSideFixedClipping around {kind.__name__} adds its noise to result.arrays alone"
    with pytest.raises(OptionError, match=line):
        around(inside, 1.0, 1.0, 2).start(grid, ArrayRecord(weights(1)), num_rounds=1)
    assert grid.of_type() == []


def test_a_legacy_clientapp_ends_rounds_in_the_first_and_is_named(tmp_path: Path) -> None:
    grid = FakeGrid({1: failing("KeyError: 'fitins.parameters'"), 2: failing("KeyError: 'fitins.parameters'")})
    with pytest.raises(QuorumError, match="round 1: 0 usable answers.*NumPyClient.*must be a ClientApp with"):
        Iterative(net, run_dir=tmp_path / "run", options=ONE_THREAD).start(grid)  # type: ignore[arg-type]
    assert len(grid.asked) == 2


def test_lora_factors_are_a_part(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
        for parameter in net.parameters():
            nn.init.constant_(parameter, 0.25)
        config = peft.LoraConfig(r=2, target_modules=["1"], modules_to_save=["3"], init_lora_weights=False)
        found: nn.Module = peft.get_peft_model(net, config)
        return found

    models = [build(), build()]
    states = [peft.get_peft_model_state_dict(model) for model in models]
    grid = FakeGrid({number: answering(records(state)) for number, state in enumerate(states, 1)})
    run = strategy(FedENS, tmp_path / "run", model=build, num_classes=3, input_shape=(6, 1, 1))
    result = run.start(grid, ArrayRecord(peft.get_peft_model_state_dict(build())))  # type: ignore[arg-type]
    assert set(result.arrays) == set(states[0])
    rows = torch.randn(4, 6, 1, 1)
    torch.testing.assert_close(run.outcome(rows), torch.stack([model.eval()(rows) for model in models]).mean(0))
