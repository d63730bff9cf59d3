"""The server's side of an evaluation on the clients' own examples, after the server stage.

Each client gets one result or several, and one-shot FedAvg if there is one, and answers with the integer sums of
:mod:`.sums`: of its own model, of FedAvg and of every result. The server checks them, and adds them up.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ..combiners.outcomes import find_members
from ..core import refusals
from ..core.clients import Answer, Clients, Question
from ..core.facts import CLASSIFIER
from ..method import METHODS, Job, Method, Outcome, Silent
from ..uploads.packed import PackedMember, pack_member, to_wire
from .sums import SHARES, PairSums, Sums, unpack, unpack_pair

KIND = "evaluate"  # of the question, and of the client's handler
PHASE = "evaluation"
OWN, FEDAVG, RESULT = "own", "fedavg", "result"
CHOICE = "choice"  # a result on the half of the examples that chooses among several results
MOST_RESULTS = 64  # of one question
MOST_SCORES, MOST_LETTERS = 64, 80  # of a function of the client's own: scores of a model, letters of a name
_RESULT = re.compile(rf"{RESULT}(\.[1-9]\d?)?")


@dataclass(frozen=True)
class ClientScores:
    """One client's sums of its own model, of FedAvg and of the result, those that it has, on its own examples.

    Attributes:
        sums: The sums by model; always of the result. Of several results asked about together they count one half of
            the examples, and those of ``choice`` the result's other half.
        pairs: The result compared with the other models, by their names.
        values: In place of sums the scores of each model by a function of the client's own, by name.
        count: The test examples of these scores; 0 where there are sums.
    """

    client: str
    sums: Mapping[str, Sums]
    pairs: Mapping[str, PairSums] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    count: int = 0

    @property
    def examples(self) -> int:
        """The client's test examples."""
        return self.count or self.sums[RESULT].examples


@dataclass(frozen=True)
class Evaluation:
    """What the clients have answered.

    Attributes:
        clients: In the order of their names.
        refused: Client -> why its scores are missing.
    """

    clients: tuple[ClientScores, ...]
    refused: Mapping[str, str]

    def pooled(self, model: str) -> Sums | None:
        """Return the sums of a model over the examples of all clients that have it; None if none has."""
        found = [client.sums[model] for client in self.clients if model in client.sums]
        return reduce(add, found) if found else None

    def mean(self, model: str) -> dict[str, float]:
        """Return the means of a model's :attr:`ClientScores.values`, weighted by the clients' examples."""
        held = [(client.values[model], client.count) for client in self.clients if model in client.values]
        names = dict.fromkeys(name for values, _ in held for name in values)
        known = {name: [(values[name], count) for values, count in held if name in values] for name in names}
        return {name: sum(v * n for v, n in each) / sum(n for _, n in each) for name, each in known.items()}


def result_name(number: int) -> str:
    """Return the name of a result in a question: ``result``, ``result.1``, ``result.2`` and so on, from number 0."""
    return f"{RESULT}.{number}" if number else RESULT


def results_in(models: object) -> list[str]:
    """Return the results among the models of a question, in its order."""
    named = models if isinstance(models, list) else []
    return [name for name in named if isinstance(name, str) and _RESULT.fullmatch(name)]


def classes_digest(num_classes: int, names: Sequence[str]) -> str:
    """Return the digest of the classes, which server and client must share."""
    return hashlib.sha256("\n".join([str(num_classes), *names]).encode()).hexdigest()


def models_to_score(method: Method, job: Job, outcomes: Sequence[Outcome], averaging: Any = None) -> dict[str, Outcome]:
    """Return results on the same uploads by their names, and one-shot FedAvg where that is something else.

    Args:
        method: The method of the first result.
        job: Its job.
        averaging: The config of that FedAvg; None: its defaults.
    """
    models = {result_name(number): outcome for number, outcome in enumerate(outcomes)}
    alike = {upload.architecture for upload in job.uploads} == {job.student}
    if alike and method.uploads == CLASSIFIER and (method.name != "fedavg" or len(outcomes) > 1):
        average = METHODS["fedavg"]
        models[FEDAVG] = average.fit(replace(job, config=averaging or average.config(), device="cpu"), Silent())
    return models


def question_of(
    models: Mapping[str, Outcome], job: Job, classes: Sequence[str] = (), jobs: Mapping[str, Job] | None = None
) -> Question:
    """Return the question that has clients score these models.

    Args:
        models: The outcomes of ``fedavg`` if there is one, and of the results, by the names of :func:`result_name`; of
            one with a student and an ensemble the student.
        jobs: The job of a model that has another one, by its name.
    """
    facts: dict[str, Any] = {"num-classes": job.num_classes, "classes": classes_digest(job.num_classes, classes)}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    packed: dict[str, PackedMember] = {}  # equal members travel once
    for name, outcome in models.items():
        spec, own = outcome.ensemble, (jobs or {}).get(name, job)
        if outcome.student is not None:
            members = [pack_member(own.student, outcome.student, precision="float32")]
            combiner, weights = "", {}
        elif spec is not None:
            precision = "int8" if spec.precision == "int8" else "float32"
            uploads = find_members(own, spec)
            members = [
                pack_member(each.architecture, each.read(), precision=precision, ranges=each.ranges) for each in uploads
            ]
            combiner, weights = spec.combiner, dict(spec.weights)
        else:
            continue
        packed |= {member.digest: member for member in members}
        places = {digest: place for place, digest in enumerate(packed)}
        facts[f"{name}-members"] = [places[member.digest] for member in members]
        facts[f"{name}-combiner"] = combiner
        arrays |= {f"{name}/{key}": value.detach().cpu().numpy() for key, value in weights.items()}
    for number, member in enumerate(packed.values()):
        sent, layers = to_wire(number, member)
        arrays |= sent
        facts |= layers
    facts["architectures"] = [member.architecture for member in packed.values()]
    facts["precisions"] = [member.precision for member in packed.values()]
    facts["models"] = [name for name in models if f"{name}-members" in facts]
    return Question(KIND, facts, arrays)


def ask(
    clients: Clients, question: Question, *, wanted: Sequence[str], why: Callable[[str], str]
) -> dict[str, Evaluation]:
    """Ask the clients, and return by the name of each result what those answer whose sums fit.

    Args:
        why: A client's name -> why its answer is missing.
    """
    found: dict[str, dict[str, ClientScores]] = {}

    def check(answer: Answer) -> None:
        found[answer.client] = read_answer(answer, question)

    answers = clients.ask(question, phase=PHASE, check=check)
    refused = {name: why(name) for name in wanted if name not in answers}
    return {
        result: Evaluation(tuple(found[name][result] for name in sorted(answers)), refused)
        for result in results_in(question.facts["models"])
    }


def read_answer(answer: Answer, question: Question) -> dict[str, ClientScores]:
    """Read one client's answer: its sums of each result, by the result's name.

    Raises:
        UploadError: It contradicts itself or the question, in one line.
    """
    facts, classes = answer.facts, int(question.facts["num-classes"])
    if facts.get("classes") != question.facts["classes"]:
        raise refusals.contradicting_sums("all models", "is about other classes")
    if facts.get("share") not in SHARES:
        raise refusals.contradicting_sums("all models", f"shares {str(facts.get('share'))[:40]!r}")
    if not classes:
        return _read_values(answer, list(question.facts["models"]))
    arrays: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for key, value in answer.arrays.items():
        arrays.setdefault(key.rpartition("/")[0], {})[key.rpartition("/")[2]] = value
    asked = list(question.facts["models"])
    results = results_in(asked)
    halves = {result: f"{result}-{CHOICE}" for result in results if len(results) > 1}
    known = {OWN, FEDAVG, *results, *(f"{result}-{model}" for result in results for model in (OWN, FEDAVG))}
    known |= set(halves.values())
    if unknown := sorted(set(arrays) - known):
        raise refusals.contradicting_sums("all models", f"has {unknown[0][:80]!r}")
    if missing := [model for model in (*asked, *halves.values()) if model not in arrays]:
        raise refusals.contradicting_sums("all models", f"lacks {missing[0]!r}")
    models = [model for model in (OWN, FEDAVG, *results) if model in arrays]
    sums = {model: unpack(arrays[model], classes, f"model {model!r}") for model in models}
    if len({each.examples for each in sums.values()}) > 1 or not sums[RESULT].examples:
        raise refusals.contradicting_sums("all models", "has different numbers of examples, or none")
    chooses = {result: unpack(arrays[name], classes, f"model {name!r}") for result, name in halves.items()}
    if len({each.examples for each in chooses.values()}) > 1 or not all(each.examples for each in chooses.values()):
        raise refusals.contradicting_sums("all choices", "has different numbers of examples, or none")
    others, found = [model for model in models if model not in results], {}
    for result in results:
        pairs = {
            model: unpack_pair(
                arrays.get(f"{result}-{model}", {}), sums[model], sums[result], f"models {model!r}, {result!r}"
            )
            for model in others
        }
        own = {**{model: sums[model] for model in others}, RESULT: sums[result]}
        own |= {CHOICE: chooses[result]} if chooses else {}
        found[result] = ClientScores(answer.client, own, pairs)
    return found


def _read_values(answer: Answer, asked: Sequence[str]) -> dict[str, ClientScores]:
    """Read an answer of scores by a function of the client's own; the errors are those of :func:`read_answer`."""
    count, values = answer.facts.get("examples"), dict[str, dict[str, float]]()
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**31:
        raise refusals.contradicting_sums("all models", f"has {str(count)[:40]} examples")
    for key, value in answer.facts.items():
        model, found, name = key.partition("/")
        if not found:
            continue
        if model not in (OWN, *asked) or not name.isprintable() or len(name) > MOST_LETTERS:
            raise refusals.contradicting_sums("all models", f"has {key[:MOST_LETTERS]!r}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise refusals.bad_score(name, value, "a finite number")
        values.setdefault(model, {})[name] = value
        if len(values[model]) > MOST_SCORES:
            raise refusals.contradicting_sums(f"model {model!r}", f"has more than {MOST_SCORES} scores")
    others = {model: own for model, own in values.items() if model in (OWN, FEDAVG)}
    return {
        result: ClientScores(answer.client, {}, {}, {**others, RESULT: values.get(result, {})}, count)
        for result in results_in(asked)
    }
