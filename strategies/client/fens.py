"""The client half of FENS, for any ClientApp.

Two lines give the server's ``Fens`` strategy everything it needs::

    from oneshot_fl.client import fens
    fens.serve(app, model=Net, examples=held_examples, client=name_of)

``held_examples(context)`` returns the examples that the client did not train on, as normalised inputs [n, ...] and
labels [n]; :func:`.holdout.held_out` selects them. The server sends four kinds of questions. ``offer`` asks whether the
client has the ensemble's logits, ``ensemble`` has it compute them, ``round`` requests steps of the aggregator, and
``votes`` the members' votes.

Only ``ensemble`` needs torch, and ``round`` if the aggregator reads the inputs. In deployment every message starts a
new process, which would otherwise spend most of its time on that import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from ..combiners.aggregator_steps import Sgd, hidden_units, round_steps
from ..combiners.aggregators import vote_counts
from ..core import refusals
from ..core.clients import read_float, read_int, read_test_share
from ..core.durable import MIB
from ..core.errors import OneShotError, OptionError, UploadError
from ..core.facts import EXPECTED, SHA256, read_agreement
from ..core.processor import flush_subnormals
from ..core.seeds import derive_seed
from ..uploads.packed import PackedMember, ensemble_digest, from_wire, pack_member, unpack_member
from . import answer_question, read_arrays
from .holdout import HoldoutRequest
from .logits import LogitCache, Logits, check_made

if TYPE_CHECKING:
    import torch

    from ..core.facts import ModelBuilder, State


# A client's answers to the questions of FENS, without Flower. See :mod:`.fens`.


Arrays = Mapping[str, np.ndarray[Any, Any]]
Said = tuple[dict[str, Any], Arrays]

BATCH = 256
MOST = 2**20  # local steps of a round, examples of a step, classes


@dataclass(frozen=True)
class OwnModel:
    """A client's copy of the model that it uploaded, with the ranges of its activations if it sent any."""

    architecture: str
    state: State
    ranges: Mapping[str, tuple[float, float]] | None = None


@dataclass(frozen=True)
class LocalFens:
    """The client's side of FENS; its callables run only when a message needs their result.

    Attributes:
        examples: Its held examples: normalised inputs [n, ...], labels int64 [n] or [n, 1]; tensors, or numpy arrays.
        own: The client's copy of its own upload, which the server then need not send; None if it has lost the copy.
        max_ensemble_mib: The largest ensemble that the client accepts, MiB; 0: any; measured on arrival. What the
            client makes of an ensemble keeps to it too, and to :data:`.logits.MADE_MIB` if it is 0.
        refusal: The error with which the client answers every question; empty if it answers.
        tells_counts: Whether the client answers with votes, which count its examples by class.
    """

    client: str
    examples: Callable[[HoldoutRequest], tuple[Any, Any]]
    build: Callable[[str, HoldoutRequest], torch.nn.Module]
    own: Callable[[HoldoutRequest], OwnModel | None] = lambda holdout: None  # noqa: ARG005  a foreign client keeps none
    state_dir: str = ""
    max_ensemble_mib: float = 0.0
    refusal: str = ""
    tells_counts: bool = True


def respond(facts: Mapping[str, Any], arrays: Arrays, local: LocalFens) -> Said:
    """Answer one question of FENS with facts and arrays; a failure becomes the answer's "error"."""
    if local.refusal:
        return {"error": local.refusal}, {}
    try:
        _check_size(sum(array.nbytes for array in arrays.values()) / MIB, local)
        step, question = _STEPS[str(facts["step"])], _Question(facts, arrays, local)
    except KeyError as error:
        return {"error": f"the server's question has a missing or unknown {error}"}, {}
    except OneShotError as error:
        return {"error": str(error)}, {}
    try:
        return step(question)
    except (OneShotError, OSError) as error:
        return {"error": str(error)}, {}


@dataclass
class _Question:
    """One question, and the client's side for its answer."""

    facts: Mapping[str, Any]
    arrays: Arrays
    local: LocalFens

    def __post_init__(self) -> None:
        facts = self.facts
        self.ensemble = str(facts["ensemble"])
        if not SHA256.fullmatch(self.ensemble):  # it becomes the name of a file
            raise refusals.bad_request("ensemble", self.ensemble, "64 hexadecimal digits")
        self.holdout = HoldoutRequest(
            run_id=str(facts["run-id"]),
            seed=self.number("seed"),
            share=self.real("holdout"),
            per_class=bool(facts["per-class"]),
            num_classes=self.number("num-classes", counts=True),
            test_share=read_test_share(facts),
            expected=read_agreement(facts, EXPECTED),
        )
        # These three settings determine the held examples, and so their logits.
        held = f"{self.holdout.seed}/{self.holdout.share}/{self.holdout.per_class}"
        held += f"/{self.holdout.test_share}" if self.holdout.test_share else ""
        self.cache = LogitCache(self.local.state_dir, self.holdout.run_id, self.local.client, held)

    def fact(self, key: str) -> Any:
        """Return an entry of the question."""
        if key not in self.facts:
            raise refusals.unknown_question(key)
        return self.facts[key]

    def number(self, key: str, *, counts: bool = False) -> int:
        """Return a whole number of the question; one that ``counts`` lies in 1 to :data:`MOST`."""
        self.fact(key)
        value = read_int(self.facts, key)
        if counts and not 1 <= value <= MOST:
            raise refusals.bad_request(key, value, f"a whole number from 1 to {MOST}")
        return value

    def real(self, key: str) -> float:
        """Return a finite number of the question."""
        self.fact(key)
        return read_float(self.facts, key)

    def listed(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """Return a list of the question whose values are all of one kind, of the given length."""
        values = self.fact(key)
        fits = isinstance(values, list) and all(type(value) is kind for value in values)
        if not fits or (length is not None and len(values) != length):
            wanted = "" if length is None else f"{length} of them, "
            raise refusals.bad_request(key, values, f"a list, {wanted}each {kind.__name__}")
        return list(values)


def _offer(question: _Question) -> Said:
    """Answer whether the client has the ensemble's logits, and if not, which members the server has to send."""
    facts, local = question.facts, question.local
    members = _members(question)
    logits = _load_logits(question) or _reuse_larger_ensemble(question, members)
    if facts.get("forget-others") is True:
        question.cache.forget_others(question.ensemble)
    if logits is not None:
        return {"ensemble": question.ensemble, "examples": len(logits.labels)}, {}
    own = question.local.own(question.holdout)
    digest = "" if own is None else _read_packed(own, str(question.fact("precision"))).digest
    needed = [number for number, member in enumerate(members) if member != digest]
    sizes = question.listed("sizes", int, len(members))
    _check_size(sum(sizes[number] for number in needed) / MIB, local)
    examples = len(_examples(question)[1])
    check_made("logits", len(members) * examples * question.holdout.num_classes * 4, local.max_ensemble_mib)
    return {"ensemble": question.ensemble, "examples": examples, "needs": needed}, {}


def _check_size(size: float, local: LocalFens) -> None:
    """Refuse an ensemble beyond the node's limit, by its announced or its actual size in MiB."""
    if 0 < local.max_ensemble_mib < size:
        raise refusals.beyond_limit("the ensemble is", size, local.max_ensemble_mib)


def _members(question: _Question) -> list[str]:
    members: list[str] = question.listed("members", str)
    if not members or ensemble_digest(members) != question.ensemble:
        raise refusals.refused("the ensemble's digest does not match its members")
    return members


def _load_logits(question: _Question) -> Logits | None:
    """Return the ensemble's logits, with the inputs if the aggregator reads them; None if any of this is missing."""
    found = question.cache.load(question.ensemble)
    return None if found is not None and question.facts.get("sees-inputs") and not found.inputs.size else found


def _reuse_larger_ensemble(question: _Question, members: list[str]) -> Logits | None:
    """Select the logits from those of a larger ensemble, and save them under this one's digest."""
    found = question.cache.known(members)
    if found is None or (question.facts.get("sees-inputs") and not found.inputs.size):
        return None
    check_made("logits", len(members) * found.values[0].nbytes, question.local.max_ensemble_mib)
    selected = found.of(members)
    question.cache.save(question.ensemble, selected)
    return selected


def _read_packed(own: OwnModel, precision: str) -> PackedMember:
    return pack_member(own.architecture, own.state, precision=precision, ranges=own.ranges)


def _examples(question: _Question) -> tuple[Any, np.ndarray[Any, Any]]:
    inputs, given = question.local.examples(question.holdout)
    labels, count = np.asarray(given), len(inputs)
    if labels.size != count:
        raise refusals.bad_labels(labels.shape, count)
    if count == 0:
        raise refusals.no_part(
            f"'fens.holdout' is {question.holdout.share:g}, which holds out none of the client's examples"
        )
    return inputs, labels.astype(np.int64).reshape(-1)  # a column [n, 1] would pick rows by broadcasting


@flush_subnormals()
def _compute(question: _Question) -> Said:
    """Compute the logits of every member on the held examples, of equal members once, and save them."""
    import torch

    facts, arrays, precision = question.facts, question.arrays, str(question.fact("precision"))
    members = _members(question)
    architectures = question.listed("architectures", str, len(members))
    numbers = {key.split("/", 1)[0] for key in arrays}
    sent = {number for number in range(len(members)) if str(number) in numbers}
    own = question.local.own(question.holdout) if len(sent) < len(members) else None
    copy = None if own is None else _read_packed(own, precision)
    inputs, labels = _examples(question)
    if isinstance(inputs, np.ndarray):  # numpy's own floats are double, a module's are not
        inputs = torch.as_tensor(inputs.astype(np.float32) if inputs.dtype == np.float64 else inputs)
    check_made("logits", len(members) * len(labels) * question.holdout.num_classes * 4, question.local.max_ensemble_mib)
    values: dict[str, np.ndarray[Any, Any]] = {}
    for number, (digest, architecture) in enumerate(zip(members, architectures, strict=True)):
        if digest in values:  # clients with equal uploads are equal members
            continue
        packed = copy
        if number in sent:
            packed = from_wire(number, arrays, facts, architecture=architecture, precision=precision)
        if packed is None or packed.digest != digest:
            raise refusals.refused(f"member {number} of the ensemble has another digest than the server's offer")
        module = unpack_member(packed, partial(question.local.build, architecture, question.holdout))
        with torch.no_grad():  # copies, because a member that works in place would change the others' inputs
            outputs = torch.cat([module(part.clone()) for part in torch.split(inputs, BATCH)])
        values[digest] = outputs.float().numpy()
        # Again, because a module may have more outputs than the server says.
        check_made("logits", len(members) * values[digest].nbytes, question.local.max_ensemble_mib)
    seen = inputs.float().numpy() if facts.get("sees-inputs") else np.zeros(0, np.float32)
    logits = Logits(tuple(members), np.stack([values[digest] for digest in members]), labels, seen)
    question.cache.save(question.ensemble, logits)
    return {"ensemble": question.ensemble, "examples": len(logits.labels)}, {}


def _round(question: _Question) -> Said:
    """Do the local steps of one round; a client that has lost the logits answers "missing"."""
    logits = _load_logits(question)
    if logits is None:
        return {"ensemble": question.ensemble, "missing": True}, {}
    number, aggregator = question.number("round"), str(question.fact("aggregator"))
    sgd = Sgd(question.number("steps", counts=True), question.number("batch-size", counts=True), question.real("lr"))
    work = 4 * hidden_units(question.arrays) * min(sgd.batch_size, len(logits.labels))
    check_made("hidden units in a step", work, question.local.max_ensemble_mib)
    try:
        params = round_steps(
            aggregator,
            question.arrays,
            inputs=logits.inputs,
            logits=logits.values,
            labels=logits.labels,
            sgd=sgd,
            seed=derive_seed(question.holdout.seed, "fens", question.local.client, number),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise refusals.misfit_aggregator(aggregator, error) from error
    return {"ensemble": question.ensemble, "round": number, "examples": len(logits.labels)}, params


def _votes(question: _Question) -> Said:
    """Count how each member labels the held examples of each class."""
    if not question.local.tells_counts:
        raise refusals.counts_not_shared("votes")
    logits = _load_logits(question)
    if logits is None:
        return {"ensemble": question.ensemble, "missing": True}, {}
    members, _, classes = logits.values.shape
    check_made("votes", members * classes**2 * 8, question.local.max_ensemble_mib)
    return {"ensemble": question.ensemble}, {"counts": vote_counts(logits.values, logits.labels).astype(np.int64)}


_STEPS: Mapping[str, Callable[[_Question], Said]] = {
    "offer": _offer, "ensemble": _compute, "round": _round, "votes": _votes,
}  # fmt: skip


def serve(
    app: ClientApp,
    *,
    model: ModelBuilder | Mapping[str, ModelBuilder],
    examples: Callable[[Context], tuple[Any, Any]],
    client: str | Callable[[Context], str],
    state_dir: str = "",
    max_ensemble_mib: float = 0.0,
) -> None:
    """Let a ClientApp answer the server's ``Fens`` strategy.

    Args:
        app: The ClientApp.
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable, as for the
            strategy. A client must be able to build every architecture of the ensemble.
        examples: Context -> the examples that this client did not train on: normalised inputs [n, ...], labels [n];
            tensors, or numpy arrays.
        client: The client's stable name, or context -> name; its upload bears the same name.
        state_dir: Folder of the logits; empty: ``$ONESHOT_CLIENT_STATE``, else the user's cache folder.
        max_ensemble_mib: The largest ensemble that the client accepts, in MiB; 0: any. Its logits, its votes, and
            the hidden units of an aggregator's step each take at most that too, and at most 1024 MiB if it is 0.
    """
    builders = dict(model) if isinstance(model, Mapping) else {}

    def build(architecture: str, holdout: HoldoutRequest) -> torch.nn.Module:  # noqa: ARG001  a foreign model knows its classes
        if builders and architecture not in builders:
            raise OptionError(f"architecture is {architecture!r}: must be one of {', '.join(builders)}")
        chosen = builders[architecture] if builders else model
        return chosen()  # type: ignore[operator]

    @app.train("fens")
    def fens(msg: Message, context: Context) -> Message:
        name = client if isinstance(client, str) else client(context)
        return answer(
            msg,
            LocalFens(
                client=name,
                examples=lambda holdout: examples(context),  # noqa: ARG005  the client selects its held examples itself
                build=build,
                state_dir=state_dir,
                max_ensemble_mib=max_ensemble_mib,
            ),
        )


def answer(msg: Message, local: LocalFens) -> Message:
    """Answer one message of FENS."""
    facts = dict(msg.content.config_records.get("config", ConfigRecord()))
    arrays = msg.content.array_records.get("arrays", ArrayRecord())
    try:
        said, made = respond(facts, read_arrays(arrays, np.asarray), local)
    except UploadError as error:
        said, made = {"error": str(error)}, {}
    record = ArrayRecord({key: Array(value) for key, value in made.items()})
    return answer_question(msg, {"client": local.client, **said}, record)
