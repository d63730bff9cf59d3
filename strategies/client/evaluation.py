"""The client half of an evaluation: scores a result on the client's own test examples, and answers with sums.

What is sent is decided here, not by the server: edges of histograms are the library's, a client answers at most two
different questions of a run, and the second of two equal questions gets the first one's bytes. For a ClientApp of your
own::

    from oneshot_fl.client import evaluation
    evaluation.serve(app, model=Net, examples=test_examples, client=name_of)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from ..core import refusals
from ..core.durable import atomic_write
from ..core.errors import OneShotError, OptionError
from ..core.facts import ModelBuilder
from ..core.places import make_private, run_place
from ..core.processor import flush_subnormals
from ..scores.exchange import CHOICE, FEDAVG, KIND, MOST_RESULTS, OWN, RESULT, classes_digest, results_in
from ..scores.sums import Answers, pack, pack_pair
from ..uploads.packed import from_wire, unpack_member
from . import answer_question, read_arrays
from .holdout import halve

Arrays = Mapping[str, np.ndarray[Any, Any]]
# The number of test examples, and what gives a module's scores on them by name.
Scoring = tuple[int, Callable[[torch.nn.Module], Mapping[str, float]]]
MIB = 2**20
BATCH = 256
MOST_QUESTIONS = 2  # of one run


@dataclass(frozen=True)
class OwnExamples:
    """A client's test examples.

    Attributes:
        inputs: Normalised, [n, ...].
        labels: int64 [n].
        num_classes: C.
        classes: The classes' names; empty where numbers are their names.
        groups: The group of each example [n], such as a patient's number; None if each is its own.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    classes: tuple[str, ...] = ()
    groups: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class LocalEvaluation:
    """The client's side; its callables run only where a question needs them.

    Attributes:
        examples: Facts of the question -> its test examples.
        own: Facts of the question -> its own model, ready to predict; None if it has none.
        max_mib: The most that it accepts from the server, MiB; 0: any.
        min_examples: Fewer test examples are not evaluated; of several results, in either half; with a scorer, in all.
        share: What it sends, one of :data:`strategies.scores.sums.SHARES`.
        refusal: The line with which it answers every question; empty if it answers.
        scorer: Facts of the question -> the number of test examples, and a function from a module in eval mode to its
            scores on them by name, for models that are no classifiers; None: models map examples to logits.
    """

    client: str
    examples: Callable[[Mapping[str, Any]], OwnExamples]
    build: Callable[[str], torch.nn.Module]
    own: Callable[[Mapping[str, Any]], torch.nn.Module | None] = lambda facts: None  # noqa: ARG005
    state_dir: str = ""
    max_mib: float = 0.0
    min_examples: int = 1
    share: str = "sums"
    refusal: str = ""
    scorer: Callable[[Mapping[str, Any]], Scoring] | None = None


def answer(msg: Message, local: LocalEvaluation) -> Message:
    """Answer one question; a failure is the answer's "error"."""
    facts = dict(msg.content.config_records.get("config", ConfigRecord()))
    said: dict[str, Any] = {"client": local.client}
    made: Arrays = {}
    try:
        if local.refusal:
            raise OptionError(local.refusal)
        arrays = read_arrays(msg.content.array_records.get("arrays", ArrayRecord()), np.asarray)
        found, made = respond(facts, arrays, local)
        said |= found
    except (OneShotError, OSError) as error:
        said["error"] = str(error)
    return answer_question(msg, said, ArrayRecord({key: Array(value) for key, value in made.items()}))


def respond(facts: Mapping[str, Any], arrays: Arrays, local: LocalEvaluation) -> tuple[dict[str, Any], Arrays]:
    """Return the facts and arrays of an answer: those of the first time, if the question was asked before.

    Raises:
        OneShotError: The question cannot be answered, or is a third one.
        OSError: The answer cannot be kept; it is not sent either.
    """
    from safetensors.numpy import load, save

    size = sum(array.nbytes for array in arrays.values()) / MIB
    if 0 < local.max_mib < size:
        raise refusals.beyond_limit("the models to evaluate are", size, local.max_mib)
    folder = run_place(local.state_dir, str(facts.get("run-id", ""))) / f"evaluation-{local.client}"
    file = folder / f"{_digest(facts, arrays)}.safetensors"
    if file.is_file():
        kept = load(file.read_bytes())
        return json.loads(kept.pop("<facts>").tobytes()), kept
    if len(list(folder.glob("*.safetensors"))) >= MOST_QUESTIONS:
        raise refusals.asked_too_often(MOST_QUESTIONS)
    said, made = _scored(facts, arrays, local)
    make_private(folder)
    # Kept before it is sent: sums of another draw beside these would tell of single examples.
    atomic_write(file, save({**made, "<facts>": np.frombuffer(json.dumps(said).encode(), np.uint8)}))
    return said, made


def _digest(facts: Mapping[str, Any], arrays: Arrays) -> str:
    found = hashlib.sha256(json.dumps({key: facts[key] for key in sorted(facts)}, default=str).encode())
    for key in sorted(arrays):
        found.update(f"{key}/{arrays[key].dtype.str}/{arrays[key].shape}".encode())
        found.update(np.ascontiguousarray(arrays[key]).tobytes())
    return found.hexdigest()


@flush_subnormals()
def _scored(facts: Mapping[str, Any], arrays: Arrays, local: LocalEvaluation) -> tuple[dict[str, Any], dict[str, Any]]:
    if local.scorer is not None:
        return _scored_by(local.scorer, facts, arrays, local), {}
    data = local.examples(facts)
    digest = classes_digest(data.num_classes, data.classes)
    if facts.get("num-classes") != data.num_classes or facts.get("classes") != digest:
        raise refusals.bad_request("classes", facts.get("num-classes"), f"this client's {data.num_classes}")
    results = _results(facts)
    labels, least = data.labels.numpy(), max(1, local.min_examples)
    parts: list[Any] = [np.arange(len(labels))]
    if len(results) > 1:  # what chooses among them does not report how good the chosen one is
        parts = list(halve(labels, client=local.client, groups=data.groups))
    if any(len(part) < least for part in parts):
        raise refusals.too_few_test_examples(least * len(parts))
    named = [*([FEDAVG] if FEDAVG in facts["models"] else []), *results]
    models = {name: partial(_model, name, facts, arrays, local) for name in named}
    answers: dict[str, Answers] = {}
    if (own := local.own(facts)) is not None:
        answers[OWN] = _answers(own, data)
    for name, build in models.items():
        answers[name] = _answers(build(), data)
    made: dict[str, Any] = {}
    reported = {name: found.take(parts[0]) for name, found in answers.items()}
    shown = [(name, found, parts[0]) for name, found in reported.items()]
    shown += [(f"{name}-{CHOICE}", answers[name].take(part), part) for name in results for part in parts[1:]]
    for name, found, part in shown:
        sums = found.sums(None if data.groups is None else data.groups[part])
        made |= {f"{name}/{key}": value for key, value in pack(sums, local.share).items()}
    for name, result in product([name for name in reported if name not in results], results):
        pair = reported[name].against(reported[result], data.num_classes)
        made |= {f"{result}-{name}/{key}": value for key, value in pack_pair(pair, local.share).items()}
    return {"classes": digest, "share": local.share}, made


def _results(facts: Mapping[str, Any]) -> list[str]:
    results = results_in(facts.get("models"))
    if RESULT not in results or len(set(results)) < len(results) or len(results) > MOST_RESULTS:
        raise refusals.bad_request("models", facts.get("models"), f"a list with 'result', and at most {MOST_RESULTS}")
    return results


def _scored_by(
    scorer: Callable[[Mapping[str, Any]], Scoring], facts: Mapping[str, Any], arrays: Arrays, local: LocalEvaluation
) -> dict[str, Any]:
    """Return the facts of an answer: the scores of each model by a function of the client's own, all examples' each."""
    count, score = scorer(facts)
    results = _results(facts)
    if facts.get("num-classes") != 0:
        raise refusals.bad_request("classes", facts.get("num-classes"), "0, as this client's models are no classifiers")
    if local.share != "sums":
        raise refusals.not_permitted("share", repr(local.share), "'sums' for scores by 'model.evaluate'")
    if count < max(1, local.min_examples):
        raise refusals.too_few_test_examples(max(1, local.min_examples))
    said: dict[str, Any] = {"classes": facts.get("classes"), "share": local.share, "examples": count}
    for name in [OWN, *([FEDAVG] if FEDAVG in facts["models"] else []), *results]:
        model = local.own(facts) if name == OWN else _model(name, facts, arrays, local)
        if model is not None:
            with torch.no_grad():
                said |= {f"{name}/{key}": float(value) for key, value in score(model.eval()).items()}
    return said


def _model(name: str, facts: Mapping[str, Any], arrays: Arrays, local: LocalEvaluation) -> torch.nn.Module:
    """Build a model of the question."""
    import torch

    from ..combiners.combiners import build_combiner
    from ..teacher.ensemble import Ensemble

    numbers, combiner = facts.get(f"{name}-members"), facts.get(f"{name}-combiner")
    kinds, precisions = facts.get("architectures"), facts.get("precisions")
    members = []
    try:
        for number in numbers:  # type: ignore[union-attr]
            kind = kinds[number]  # type: ignore[index]
            packed = from_wire(number, arrays, facts, architecture=kind, precision=precisions[number])  # type: ignore[index]
            members.append(unpack_member(packed, partial(local.build, kind)))
        if not combiner:
            (member,) = members
            return member
        own = {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}
        weights = {key: torch.from_numpy(np.array(value)) for key, value in own.items()}
        build = partial(local.build, kinds[numbers[0]])  # type: ignore[index]
        return Ensemble(members, build_combiner(str(combiner), weights, build), form="loop")
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise refusals.unknown_question(f"{name}-members: {type(error).__name__}") from error


def _answers(model: torch.nn.Module, data: OwnExamples) -> Answers:
    import torch

    model.eval()
    with torch.no_grad():
        parts = [model(part.clone())[..., : data.num_classes] for part in torch.split(data.inputs, BATCH)]
    logits = torch.cat(parts)
    if logits.shape != (len(data.labels), data.num_classes):
        raise refusals.bad_request("result", list(logits.shape), f"logits [{len(data.labels)}, {data.num_classes}]")
    return Answers.of(logits, data.labels)


def serve(
    app: ClientApp,
    *,
    model: ModelBuilder | Mapping[str, ModelBuilder],
    examples: Callable[[Context], OwnExamples],
    client: str | Callable[[Context], str],
    own: Callable[[Context], torch.nn.Module | None] = lambda context: None,  # noqa: ARG005
    state_dir: str = "",
    max_mib: float = 0.0,
) -> None:
    """Let a ClientApp score results, students and ensembles, on its own test examples.

    Args:
        app: The ClientApp.
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable, as the server's.
        examples: The client's test examples, which it does not train on.
        client: The client's name.
        own: The client's own model; None if it has none.
        state_dir: Folder of the answers; empty: ``$ONESHOT_CLIENT_STATE``, else the user's cache folder.
        max_mib: The most that the client accepts from the server, MiB; 0: any.
    """
    builders = dict(model) if isinstance(model, Mapping) else {}

    def build(architecture: str) -> torch.nn.Module:
        if builders and architecture not in builders:
            raise OptionError(f"architecture is {architecture!r}: must be one of {', '.join(builders)}")
        return (builders[architecture] if builders else model)()  # type: ignore[operator]

    @app.train(KIND)
    def evaluate(msg: Message, context: Context) -> Message:
        return answer(
            msg,
            LocalEvaluation(
                client=client if isinstance(client, str) else client(context),
                examples=lambda facts: examples(context),  # noqa: ARG005
                build=build,
                own=lambda facts: own(context),  # noqa: ARG005
                state_dir=state_dir,
                max_mib=max_mib,
            ),
        )
