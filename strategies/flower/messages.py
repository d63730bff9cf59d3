"""The record schema: the server's request, the client's answer, and the check of every answer.

Request  "arrays": start weights, may be empty.  "config": the caller's train_config and the keys named below.
Reply    "arrays": a state_dict.  "metrics": "num-examples" and floats.
         "upload", optional: "client", "architecture", "label-counts", "pretrained", "held", "error"; "range-layers",
         names of layers, with "ranges", the smallest and the largest output of each in turn; "classes" and
         "preprocessing", lists of texts that all parties share, with "classes-sha256" and "preprocessing-sha256".

Stock ClientApps send no "upload" record. Their architecture is the only known one whose keys and shapes fit; their
name follows from their weights, because node ids are random per run and the order of arrival too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from ..core import refusals
from ..core.errors import blaming, one_line, printable, shorten_list
from ..core.facts import CLIENT_NAME, EXPECTED, Agreed, UploadFacts, held_digest, read_agreement, weights_alone
from ..core.scan import LOG, log_once
from ..method import Job, Method, State
from ..uploads.checks import ArrayForm, Signature, check_measured, check_size, check_upload, fits
from ..uploads.parts import Part

V = TypeVar("V")
H = TypeVar("H", bound=Hashable)
FLOATS = {"float16", "float32", "float64"}
WHOLES = {"uint8", "int8", "int16", "int32", "int64"}
ANONYMOUS = re.compile(r"anonymous-[0-9a-f]{12}(-[0-9]+)?")
EXAMPLES = "num-examples"  # Flower's name of the number of a client's training examples
EPSILON = re.compile(r"(^|[^a-z])(eps|epsilon)([^a-z]|$)")
# Of numpy's file format, version 1.0; later ones are for headers beyond 64 KiB.
NPY_MAGIC = b"\x93NUMPY\x01\x00"
# The limit of the numbers that a client's answer is weighted with: products of larger ones overflow.
MOST_WEIGHT = 2**63


@dataclass(frozen=True)
class Request:
    """The request of one round to a client.

    Attributes:
        start: Start weights; empty if every client starts from the seed.
        server_round: The round, from 1.
        run_id: The run folder's id: the key of the files on the client's own disk.
        held: Names whose uploads of this round are here already: they answer at once without work. The message has
            their digests.
        asks: Further requests of the method to the clients: "holdout", "holdout-per-class", "calibrate", "sums",
            "task". Also what the server's own classes and preprocessing are, under names that begin with
            :data:`..core.facts.EXPECTED`: a client with others need not train.
    """

    start: ArrayRecord
    config: Mapping[str, Any]
    server_round: int
    run_id: str
    seed: int
    held: tuple[str, ...] = ()
    asks: Mapping[str, Any] = field(default_factory=dict)
    arrays_key: str = "arrays"
    config_key: str = "config"

    @classmethod
    def of(cls, method: Method, job: Job, start: ArrayRecord, server_round: int, **said: Any) -> Request:
        """Return a method's request; ``said`` are the other attributes, ``seed`` and ``asks`` apart."""
        asked, asks = method.plan(job.config).asks, job.agreement.to_record(EXPECTED)
        if asked.holdout:
            asks |= {"holdout": asked.holdout, "holdout-per-class": asked.holdout_per_class}
        if asked.calibrate:
            asks["calibrate"] = True
        if asked.sums:
            asks["sums"] = asked.sums
        if method.uploads != "classifier":
            asks["task"] = method.uploads
        return cls(start, server_round=server_round, seed=job.seed, asks=asks, **said)

    def message(self, node_id: int, message_type: str = MessageType.TRAIN) -> Message:
        """Return the message to one node."""
        config = ConfigRecord(dict(self.config))
        config["server-round"] = self.server_round
        config["run-id"] = self.run_id
        config["seed"] = self.seed
        config.update(self.asks)
        config.pop("held", None)  # ours alone
        if self.held:  # Flower cannot count the bytes of an empty list
            config["held"] = [held_digest(name, self.run_id) for name in self.held]
        return Message(
            RecordDict({self.arrays_key: self.start, self.config_key: config}),
            dst_node_id=node_id,
            message_type=message_type,
        )


@dataclass(frozen=True)
class Reply:
    """A checked answer.

    Attributes:
        facts: The client's facts about its upload; its name is given, or derived from its weights.
        state: Its weights, decoded and checked; empty if the server holds them already.
        anonymous: It gave no name; that of the facts follows from its weights.
        metrics: Further numbers, and lists of numbers, that it reports.
    """

    facts: UploadFacts
    state: State = field(default_factory=dict)
    held: bool = False
    anonymous: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


def read_reply(  # noqa: PLR0913  everything that an answer is compared with
    content: RecordDict,
    signatures: Mapping[str, Signature],
    *,
    num_classes: int,
    max_bytes: int,
    sender: str,
    examples_key: str = EXAMPLES,
    part: Part | None = None,
    agreed: Agreed | None = None,
) -> Reply:
    """Check a client's answer and decode it.

    Args:
        num_classes: C, the length of label counts.
        max_bytes: Largest allowed size of the weights in bytes.
        sender: How to call the client in errors as long as it has not named itself.
        part: The arrays that travel; None for all of the model.
        agreed: What all uploads must share, which is compared before anything else; None to compare nothing.

    Raises:
        UploadError: Names the client, the field and the reason.
    """
    said = content.config_records.get("upload", ConfigRecord())
    with blaming(sender):
        client = _client_name(said, sender)
    with blaming(client):
        if "error" in said:
            raise refusals.client_error(said["error"])
        if said.get("held") is True:
            if "client" not in said:
                raise refusals.held_without_name()
            return Reply(UploadFacts(client), held=True)
        if agreed is not None:
            own = read_agreement(said)
            agreed.check(own)
            if num_classes and len(own.classes.words) not in (0, num_classes):
                raise refusals.broken_rule(f"upload.classes has {len(own.classes.words)} names", f"{num_classes}")
        arrays, metrics = content.array_records[arrays_name(content)], metrics_of(content)
        check_size(sum(len(array.data) for array in arrays.values()), max_bytes, "arrays")
        architecture = _architecture(said, arrays, signatures)
        client = client if "client" in said else _content_name(arrays)
        if metrics and examples_key not in metrics and said.get("pretrained") is not True:
            raise refusals.no_size(examples_key, list(metrics))
        # An empty list says nothing.
        filled = {key: value for key, value in said.items() if value != []}
        record = {**filled, "num-examples": metrics.get(examples_key)}
        facts = UploadFacts.from_record(record, num_classes, client=client, architecture=architecture)
        state = _check_state(arrays, facts, signatures[architecture], part)
    numbers = {key: value for key, value in metrics.items() if key != examples_key}
    return Reply(facts, state, anonymous="client" not in said, metrics=numbers)


def _check_state(arrays: ArrayRecord, facts: UploadFacts, whole: Signature, part: Part | None) -> State:
    architecture, form, notes = facts.architecture, array_form("arrays"), list[str]()
    if part is None or arrays.keys() != part.names.keys():
        own = check_upload(weights_alone(arrays), architecture, whole, form, notes)
        state = own | check_measured(arrays, architecture, whole, form)
    else:
        state = part.complete(check_upload(arrays, architecture, part.signature(whole), form, notes))
    for note in notes:
        LOG.info("upload of %s: %s", facts.client, one_line(note))
    return state


def count_bytes(content: RecordDict) -> int:
    """Return the bytes of all records of a message: names, texts, arrays, and 8 for a number."""
    # Flower's own count refuses empty texts and lists, which its messages carry.
    return sum(len(key) + _size(value) for record in content.values() for key, value in record.items())


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    if isinstance(value, Array):
        return len(value.data)
    return len(value) if isinstance(value, (str, bytes)) else 1 if isinstance(value, bool) else 8


def _client_name(said: ConfigRecord, sender: str) -> str:
    name = said.get("client", sender)
    if "client" in said and not (isinstance(name, str) and CLIENT_NAME.fullmatch(name)):
        raise refusals.bad_name("upload.client", name, CLIENT_NAME.pattern)
    if "client" in said and is_anonymous(str(name)):  # it would pass for a client that gave none
        raise refusals.reserved_name(str(name))
    return str(name)


def _content_name(arrays: ArrayRecord) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        digest.update(key.encode() + b"\0" + arrays[key].data)
    return f"anonymous-{digest.hexdigest()[:12]}"


def is_anonymous(client: str) -> bool:
    """Tell whether a name was derived from weights, for a client that gave none."""
    return ANONYMOUS.fullmatch(client) is not None


def arrays_name(content: RecordDict) -> str:
    """Return the name of the record with a client's weights: ``arrays``, or another one if there is no second.

    Raises:
        UploadError: No record or several could be meant.
    """
    names = list(content.array_records)
    if "arrays" in names:
        return "arrays"
    if len(names) != 1:
        raise refusals.no_single_record(len(names))
    return names[0]


def metrics_name(content: RecordDict) -> str:
    """Return the name of the record with a client's numbers: ``metrics``, or the first; an empty one does not count."""
    filled = [name for name, record in content.metric_records.items() if record]
    return "metrics" if "metrics" in filled or not filled else filled[0]


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the record with a client's numbers, see :func:`metrics_name`; an empty one if there is none."""
    return content.metric_records.get(metrics_name(content), MetricRecord())


def is_epsilon(name: str) -> bool:
    """Return whether a number is by its name the epsilon of differential privacy, whose mean would promise too much."""
    return EPSILON.search(name.lower()) is not None


def mean_metrics(records: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Average the clients' numbers, as Flower's strategies do.

    A number, or list of numbers, that most clients report is averaged over those who report it; others are left out.
    For an epsilon of differential privacy, and for the largest of several, the largest is taken, of a list at each
    place, under a name that begins with ``max``, and only where every client reports it.

    Args:
        weights: Above 0, one for each client.
    """
    means: dict[str, Any] = {}
    forms = [number_forms(record) for record in records]
    for form in sorted(common_to_most(forms)):
        key, has = form[0], [form in own for own in forms]
        values = [record[key] for record in compress(records, has)]
        if not is_epsilon(key):
            means[key] = np.average(values, axis=0, weights=list(compress(weights, has))).tolist()
        elif all(has):
            named = key if key.startswith("max") else f"max{'_' if '_' in key else '-'}{key}"
            means[named] = max(values) if form[1] < 0 else [max(each) for each in zip(*values, strict=True)]
    return means


def say_left_out_of_means(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Log once whose numbers the means of :func:`mean_metrics` leave out, and which numbers have none.

    Args:
        records: Client or node -> its numbers.
    """
    forms = {name: number_forms(record) for name, record in records.items()}
    common = common_to_most([*forms.values()])
    for form in sorted(common):
        key, lacking = printable(form[0][:80]), [name for name, own in forms.items() if form not in own]
        what = f"the mean of {key} is of {len(forms) - len(lacking)} of {len(forms)} clients"
        if is_epsilon(form[0]):
            what = f"{key} has no largest value"
        if lacking:
            log_once(WARNING, f"{what}: no finite number comes from {shorten_list(lacking)}")
    told = {key for record in records.values() for key in record if not is_epsilon(key)}
    if without := sorted(told - {key for key, _ in common}):
        which = shorten_list([printable(key) for key in without])
        log_once(WARNING, f"most clients report no finite number as {which}: it has no mean")


def number_forms(record: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return the names of a client's numbers, with the length of a list, else -1; NaN and infinity are no numbers."""
    return {
        (key, len(value) if isinstance(value, list) else -1)
        for key, value in record.items()
        if all(map(math.isfinite, value if isinstance(value, list) else [value]))
    }


def common_to_most(reports: Sequence[Collection[H]]) -> set[H]:
    """Return what more than half of the clients report; the entries of one client are different from each other."""
    counts = Counter(chain.from_iterable(reports))
    return {each for each, count in counts.items() if 2 * count > len(reports)}


def in_order(arrays: Mapping[str, V], names: Iterable[str]) -> dict[str, V]:
    """Return arrays in the order of these names, as far as there are any; the others follow."""
    return {name: arrays[name] for name in (*names, *arrays) if name in arrays}


def is_weight(value: object) -> bool:
    """Return whether a client's answer can be weighted with a number of it: above 0, and below 2**63."""
    return isinstance(value, int | float) and 0 < value < MOST_WEIGHT


def _architecture(said: ConfigRecord, arrays: ArrayRecord, signatures: Mapping[str, Signature]) -> str:
    named = said.get("architecture")
    if named is not None:
        if not isinstance(named, str) or named not in signatures:
            raise refusals.unknown_architecture(named, signatures)
        return named
    if len(signatures) == 1:
        return next(iter(signatures))
    shapes = {key: tuple(array.shape) for key, array in weights_alone(arrays).items()}
    fitting = [name for name, wanted in signatures.items() if fits(shapes, wanted)]
    if len(fitting) != 1:
        raise refusals.no_architecture(fitting)
    return fitting[0]


def decode_array(array: Array, shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray[Any, Any]:
    """Decode one array, trusting nothing: its own header is compared with the one expected, and never evaluated.

    Raises:
        UploadError: Shape, dtype or length differ from the expected ones, or the array is not numpy's.
    """
    if tuple(array.shape) != shape or array.dtype != dtype:
        found = f"{array.dtype[:80]}{list(array.shape[:9])}"
        raise refusals.other_form(where, found, f"{dtype}{list(shape)}")
    if array.stype != "numpy.ndarray" or not array.data.startswith(NPY_MAGIC):
        raise refusals.no_numpy_array(where, array.stype, array.data[:8], NPY_MAGIC)
    start = 10 + int.from_bytes(array.data[8:10], "little")
    header, size = array.data[10:start].rstrip(), math.prod(shape) * np.dtype(dtype).itemsize
    headers = [_npy_header(shape, dtype, fortran=fortran) for fortran in (False, True)]
    if header not in headers:
        shown = header[:120].decode("ascii", "replace")
        raise refusals.other_header(where, shown, headers[0].decode())
    if len(array.data) - start != size:
        raise refusals.other_length(where, len(array.data) - start, size)
    values = np.frombuffer(array.data, np.dtype(dtype), math.prod(shape), start)
    return values.reshape(shape, order="F" if header == headers[1] else "C").copy(order="C")


def array_form(record: str) -> ArrayForm:
    """Return the form in which the arrays of a record come, for the checks of an upload.

    Floats have any precision, and whole numbers any type that holds them, as a cast of a whole ``state_dict`` makes.
    """

    def read(array: Array, shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray[Any, Any]:
        known = FLOATS if dtype in FLOATS else FLOATS | WHOLES if dtype in WHOLES else {dtype}
        found = decode_array(array, shape, array.dtype if array.dtype in known else dtype, where)
        with np.errstate(over="ignore", invalid="ignore"):  # what becomes infinite is refused
            values = found.astype(dtype, copy=False)
        if dtype in WHOLES and not np.array_equal(values, found):
            raise refusals.other_form(where, f"{array.dtype}{list(shape)}", f"{dtype}{list(shape)}, whole numbers")
        return values

    return ArrayForm(record, f"{record}[{{!r}}]", read)


def _npy_header(shape: tuple[int, ...], dtype: str, *, fortran: bool) -> bytes:
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    return f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}".encode()
