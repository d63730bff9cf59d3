"""An evaluation on clients' own examples: three in memory, one that refuses, and one that answers falsely."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import ClientsHere
from torch import nn

from strategies.client.evaluation import LocalEvaluation, OwnExamples, respond
from strategies.client.holdout import halve, held_out, split_test
from strategies.core.clients import Answer, Question
from strategies.core.errors import UploadError
from strategies.core.facts import UploadFacts, default_normalization
from strategies.method import METHODS, EnsembleSpec, Job, Outcome, Upload
from strategies.scores.exchange import (
    CHOICE,
    FEDAVG,
    OWN,
    RESULT,
    Evaluation,
    ask,
    models_to_score,
    question_of,
    result_name,
)
from strategies.scores.sums import Answers
from strategies.scores.values import scores_of

SHAPE, RUN = (4, 1, 1), "0" * 32


def linear() -> Any:
    """Return a linear classifier of rows."""
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), head=nn.Linear(4, 3)))


def net(seed: int) -> Any:
    """Return a net with weights of its own."""
    torch.manual_seed(seed)
    return linear()


NAMES = ("a", "b", "c")
MODELS = {name: net(seed) for seed, name in enumerate(NAMES)}
STUDENT = net(7)


def examples(name: str, count: int = 25) -> OwnExamples:
    """Return a client's rows."""
    rng = torch.Generator().manual_seed(NAMES.index(name))
    return OwnExamples(torch.randn(count, *SHAPE, generator=rng), torch.randint(0, 3, (count,), generator=rng), 3)


def local(name: str, place: Path, **more: Any) -> LocalEvaluation:
    """Return a client's side."""
    known: dict[str, Any] = {"examples": lambda facts: examples(name), "build": lambda _: linear()}
    own = {"own": lambda facts: MODELS[name]}
    return LocalEvaluation(**{"client": name, "state_dir": str(place / name), **known, **own, **more})


def job() -> Job:
    """Return the server's job."""
    uploads = tuple(
        Upload(UploadFacts(name, "net"), partial(dict, model.state_dict())) for name, model in MODELS.items()
    )
    return Job(
        uploads, {"net": linear}, "net", num_classes=3, input_shape=SHAPE, normalization=default_normalization(SHAPE),
        config=METHODS["fedens"].config(), seed=0, clients_seed=0, threads=1,
    )  # fmt: skip


@dataclass
class Party(ClientsHere):
    """What a client's ``change`` returns arrives in place of its arrays."""

    locals: list[LocalEvaluation]
    change: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        return dict(self.refused)

    def answers(self, questions: Question, phase: str) -> Iterator[Answer]:  # noqa: ARG002
        for side in self.locals:
            if side.refusal:
                self.refused.append((side.client, side.refusal))
                continue
            facts, arrays = respond({**questions.facts, "run-id": RUN}, questions.arrays, side)
            changed = self.change.get(side.client, dict)(dict(arrays))
            yield Answer(side.client, {**facts}, changed)


def evaluated(party: Party, outcome: Outcome | None = None, **more: Outcome) -> Evaluation:
    """Ask the clients about a result."""
    models = {RESULT: outcome or Outcome(student=STUDENT.state_dict()), **more}
    asked = question_of(models, job())
    return ask(party, asked, wanted=NAMES, why=lambda name: party.reasons.get(name, "no answer"))[RESULT]


def test_sums_of_clients_are_the_scores_on_all_their_examples(tmp_path: Path) -> None:
    average = Outcome(student=net(9).state_dict())
    found = evaluated(Party([local(name, tmp_path) for name in NAMES]), **{FEDAVG: average})

    assert [client.client for client in found.clients] == list(NAMES)
    assert not found.refused
    data = [examples(name) for name in NAMES]
    rows, labels = torch.cat([each.inputs for each in data]), torch.cat([each.labels for each in data])
    with torch.no_grad():
        whole = Answers.of(STUDENT(rows), labels).sums()
    pooled = found.pooled(RESULT)
    assert np.array_equal(pooled.confusion, whole.confusion)
    assert pooled.loss == whole.loss
    assert scores_of(pooled)["accuracy"] == scores_of(whole)["accuracy"]
    for client, each in zip(found.clients, data, strict=True):
        with torch.no_grad():
            own = Answers.of(MODELS[client.client](each.inputs), each.labels)
        assert client.sums[OWN].correct == own.sums().correct
        assert set(client.pairs) == {OWN, FEDAVG}


def test_fedavg_beside_results_follows_its_options() -> None:
    known = job()
    uploads = tuple(replace(each, facts=replace(each.facts, num_examples=n)) for n, each in enumerate(known.uploads, 1))
    known, own = replace(known, uploads=uploads), Outcome(student=STUDENT.state_dict())
    weight = {name: model.head.weight for name, model in MODELS.items()}

    usual = models_to_score(METHODS["fedens"], known, [own])
    equal = models_to_score(METHODS["fedens"], known, [own], METHODS["fedavg"].config(weights="uniform"))

    assert list(usual) == [RESULT, FEDAVG]
    student = [found[FEDAVG].student["head.weight"] for found in (usual, equal)]
    torch.testing.assert_close(student[0], (weight["a"] + 2 * weight["b"] + 3 * weight["c"]).detach() / 6)
    torch.testing.assert_close(student[1], (weight["a"] + weight["b"] + weight["c"]).detach() / 3)
    assert list(models_to_score(METHODS["fedavg"], known, [own])) == [RESULT]  # it is FedAvg itself
    assert list(models_to_score(METHODS["ridge"], known, [own])) == [RESULT]  # sums have no average


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_an_ensemble_is_scored_as_the_server_builds_it(tmp_path: Path, precision: str) -> None:
    spec = EnsembleSpec(NAMES, "weighted", {"weights": torch.tensor([1.0, 2.0, 1.0])}, precision=precision)
    found = evaluated(Party([local("a", tmp_path)]), Outcome(ensemble=spec))

    from strategies.combiners.outcomes import build_ensemble

    data = examples("a")
    with torch.no_grad():
        here = Answers.of(build_ensemble(job(), spec)(data.inputs), data.labels).sums()
    assert np.array_equal(found.clients[0].sums[RESULT].confusion, here.confusion)
    assert found.refused == {"b": "no answer", "c": "no answer"}


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: {**arrays, "result/count": -arrays["result/count"]},
        lambda arrays: {**arrays, "result/count": arrays["result/count"] + 2**62},
        lambda arrays: {**arrays, "own/confusion": arrays["own/confusion"].T + 1},
        lambda arrays: {**arrays, "result-own/discordant": arrays["result-own/discordant"][:2]},
        lambda arrays: {**arrays, "other/count": arrays["own/count"]},
        lambda arrays: {key: value for key, value in arrays.items() if not key.startswith("result/")},
        lambda arrays: {**arrays, "result/loss": arrays["result/loss"] * np.nan},
    ],
)  # fmt: skip
def test_a_hostile_and_a_refusing_client_move_only_their_own_rows(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    honest = evaluated(Party([local("c", tmp_path / "honest")]))
    sides = [local("a", tmp_path), local("b", tmp_path, refusal="this node takes no part"), local("c", tmp_path)]
    found = evaluated(Party(sides, {"a": change}))

    assert [client.client for client in found.clients] == ["c"]
    assert found.refused["b"] == "this node takes no part"
    assert "evaluation of" in found.refused["a"]
    assert "\n" not in found.refused["a"]
    mine, theirs = found.pooled(RESULT), honest.pooled(RESULT)
    assert np.array_equal(mine.confusion, theirs.confusion)


def test_several_results_are_scored_in_one_exchange_and_a_false_answer_moves_its_own_row_alone(tmp_path: Path) -> None:
    names = [result_name(number) for number in range(3)]
    outcomes = [Outcome(student=net(seed).state_dict()) for seed in (7, 8, 9)]
    asked = question_of(dict(zip(names, outcomes, strict=True)), job())

    def together(change: Mapping[str, Any]) -> dict[str, Evaluation]:
        place = tmp_path / str(len(change))
        party = Party([local(name, place) for name in NAMES], change)
        return ask(party, asked, wanted=NAMES, why=lambda name: party.reasons[name])

    def of_half(name: str, half: int) -> dict[str, Any]:
        data = examples(name)
        part = halve(data.labels.numpy(), client=name)[half]
        return {"examples": lambda _: replace(data, inputs=data.inputs[part], labels=data.labels[part])}

    def of_client(found: Evaluation, name: str) -> list[Any]:
        (row,) = (client for client in found.clients if client.client == name)
        return [row.sums[RESULT].loss, row.pairs[OWN].discordant.tolist(), row.sums[OWN].correct]

    honest = together({})
    for name, outcome in zip(names, outcomes, strict=True):
        for half, model in enumerate((RESULT, CHOICE)):
            sides = [local(each, tmp_path / f"{name}-{half}", **of_half(each, half)) for each in NAMES]
            alone = evaluated(Party(sides), outcome)
            if model == RESULT:
                assert [of_client(honest[name], each) for each in NAMES] == [of_client(alone, each) for each in NAMES]
            pooled = [found.pooled(of) for found, of in ((honest[name], model), (alone, RESULT))]
            assert pooled[0] is not None
            assert pooled[1] is not None
            assert np.array_equal(pooled[0].confusion, pooled[1].confusion)
            assert (pooled[0].loss, pooled[0].within) == (pooled[1].loss, pooled[1].within)

    def without_the_last(arrays: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in arrays.items() if not key.startswith(names[2])}

    false = together({NAMES[0]: without_the_last})
    for name in names:
        assert list(false[name].refused) == [NAMES[0]]
        assert "lacks 'result.2'" in false[name].refused[NAMES[0]]
        assert [of_client(false[name], each) for each in NAMES[1:]] == [
            of_client(honest[name], each) for each in NAMES[1:]
        ]


def test_a_client_repeats_its_answer_and_gives_no_third_one(tmp_path: Path) -> None:
    drawn = list[int]()

    def counted(facts: Mapping[str, Any]) -> OwnExamples:
        drawn.append(len(drawn))
        return examples("a", 25 + len(drawn))  # a patient more each time

    side = local("a", tmp_path, examples=counted)
    questions = [question_of({RESULT: Outcome(student=net(seed).state_dict())}, job()) for seed in (1, 1, 2, 3)]

    def answered(question: Question) -> Any:
        return respond({**question.facts, "run-id": RUN}, question.arrays, side)

    first, second, other = map(answered, questions[:3])
    assert first[0] == second[0]
    assert all(np.array_equal(first[1][key], second[1][key]) for key in first[1])
    assert int(other[1]["result/count"][0]) == int(first[1]["result/count"][0]) + 1
    with pytest.raises(UploadError, match="answered 2 evaluations"):
        answered(questions[3])


def test_a_client_keeps_to_its_limits(tmp_path: Path) -> None:
    asked = question_of({RESULT: Outcome(student=STUDENT.state_dict())}, job())
    facts = {**asked.facts, "run-id": RUN}
    for more, line in (
        ({"min_examples": 26}, "at least 26"),
        ({"max_mib": 1e-6}, "at most 1e-06 MiB"),
        ({"examples": lambda _: replace(examples("a"), classes=("x", "y", "z"))}, "classes"),
    ):
        with pytest.raises(UploadError, match=line):
            respond(facts, asked.arrays, local("a", tmp_path, **more))
    several = question_of(dict.fromkeys(map(result_name, range(2)), Outcome(student=STUDENT.state_dict())), job())
    for least, line in ((12, ""), (13, "at least 26")):  # a half of 25 has 12
        with nullcontext() if not line else pytest.raises(UploadError, match=line):
            respond(
                {**several.facts, "run-id": RUN}, several.arrays, local("b", tmp_path / str(least), min_examples=least)
            )
    _, arrays = respond(facts, asked.arrays, local("a", tmp_path, share="accuracy"))
    assert {key: value.size for key, value in arrays.items()} == {
        "own/count": 2, "result/count": 2, "result-own/discordant": 2,
    }  # fmt: skip
    confusion = evaluated(Party([local("b", tmp_path, share="confusion")])).clients[0]
    assert scores_of(confusion.sums[RESULT]).keys() == {"accuracy", "balanced-accuracy", "macro-f1"}


def test_test_examples_are_stratified_nested_and_leave_every_class_for_training() -> None:
    labels = np.array([0] * 40 + [1] * 5 + [2])
    train, test = split_test(labels, client="a", share=0.1)
    assert sorted([*train, *test]) == list(range(46))
    assert np.bincount(labels[test], minlength=3).tolist() == [4, 1, 0]
    assert set(test) <= set(split_test(labels, client="a", share=0.3)[1])
    assert not np.array_equal(test, split_test(labels, client="b", share=0.1)[1])
    assert not len(split_test(labels, client="a", share=0.0)[1])


def test_halves_of_test_examples_share_every_class_and_cut_no_group() -> None:
    labels = np.repeat([0, 1, 2], [11, 4, 1])
    halves = halve(labels, client="a")
    assert sorted(np.concatenate(halves).tolist()) == list(range(16))
    counts = np.array([np.bincount(labels[half], minlength=3) for half in halves])
    assert (abs(counts[0] - counts[1]) <= 1).all()
    assert [len(half) for half in halves] == [8, 8]
    assert not np.array_equal(halve(labels, client="b")[0], halves[0])
    groups = np.arange(16) // 3
    first, second = halve(labels, client="a", groups=groups)
    assert not set(groups[first]) & set(groups[second])
    assert len(second)


@pytest.mark.parametrize("seed", range(20))
def test_no_group_is_cut_and_no_class_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, labels = rng.integers(0, 12, 60), rng.integers(0, 3, 60)
    train, test = split_test(labels, client="a", share=0.3, groups=groups)
    assert not set(groups[train]) & set(groups[test])
    assert set(labels[train]) == set(labels)
    assert sorted([*train, *test]) == list(range(60))
    for per_class in (None, labels[train]):
        kept, held = held_out(len(train), client="a", seed=seed, share=0.5, labels=per_class, groups=groups[train])
        assert not set(groups[train][kept]) & set(groups[train][held])
        assert sorted([*kept, *held]) == list(range(len(train)))
        assert len(held)
