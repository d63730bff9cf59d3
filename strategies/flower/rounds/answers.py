"""The answers of a round: the records that a strategy needs beside weights, and the form in which it gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from ...core import refusals
from ...core.errors import UploadError, one_line, printable
from ...core.names import match_names
from ...core.scan import LOG
from ...uploads.checks import check_arrays
from ..messages import (
    EXAMPLES,
    Reply,
    array_form,
    arrays_name,
    common_to_most,
    is_weight,
    metrics_name,
    metrics_of,
    number_forms,
    say_left_out_of_means,
)
from ..surroundings import within

OURS = f"{__name__.partition('.')[0]}."  # the package, which is installed under another name


@dataclass(frozen=True)
class CheckedAnswer:
    """One checked answer of a round."""

    client: str
    message: Message
    content: RecordDict
    reply: Reply


def check_trained(reply: Reply) -> None:
    """Refuse an answer that holds no training.

    Raises:
        UploadError: The client trained nothing, or on an unknown number of examples.
    """
    if reply.held or reply.facts.pretrained or reply.facts.num_examples is None:
        raise refusals.no_training().of(reply.facts.client)


def check_strategy_parts(strategy: Strategy, content: RecordDict) -> RecordDict:
    """Check the strategy's own parts of an answer: its records, and the numbers that it computes with.

    Args:
        strategy: Its ``check_answer``, if it has one, unpacks records beside a plain model; its ``weighted_by_key``
            names the clients' weights, its ``train_loss_key`` (q-FedAvg) their losses.

    Returns:
        The content; a weight that counts examples under another name is there as ``num-examples``, too.

    Raises:
        UploadError: The answer does not fit the question.
    """
    check = getattr(strategy, "check_answer", None)
    content = content if check is None else check(content)
    weight, loss = getattr(strategy, "weighted_by_key", EXAMPLES), getattr(strategy, "train_loss_key", None)
    metrics = metrics_of(content)
    for key in (key for key in (weight, loss) if key not in (None, EXAMPLES)):
        value = metrics.get(key)
        if not is_weight(value) and not (key != weight and value == 0):
            raise refusals.bad_metric(
                key, value, "a finite number above 0, and below 2**63, for the strategy computes with it"
            )
    if EXAMPLES in metrics or weight == EXAMPLES:
        return content
    if (share := metrics[weight]) != int(share):  # type: ignore[arg-type]
        raise refusals.bad_metric(
            weight,
            share,
            f"a whole number of examples, or beside {EXAMPLES!r}, by which a model's buffers are averaged",
        )
    return RecordDict({**content, metrics_name(content): MetricRecord({**metrics, EXAMPLES: metrics[weight]})})


def drop_incomplete(
    strategy: Strategy, answers: Sequence[CheckedAnswer]
) -> tuple[list[CheckedAnswer], dict[int, UploadError]]:
    """Return the answers that a project's own code can compute with, and why the others cannot be used.

    Such code may read any number that the clients send. So a client that leaves out one which most of them send costs
    its own answer: without the number, the code would fail for all. Flower's average does without it. A list counts
    as one number with others of its length.

    Args:
        strategy: It has own code if it replaces Flower's average of the numbers, or of the models.

    Returns:
        The usable answers, and node -> refusal of the others.
    """
    if not any(_reads_numbers(each) for _, each in within(strategy)):
        return list(answers), {}
    forms = [number_forms(metrics_of(answer.content)) for answer in answers]
    common = common_to_most(forms)
    usable = [answer for answer, form in zip(answers, forms, strict=True) if common <= form]
    others = {
        answer.message.metadata.src_node_id: refusals.lacks_numbers(sorted(key for key, _ in common - form))
        for answer, form in zip(answers, forms, strict=True)
        if not common <= form
    }
    return usable, others


def _reads_numbers(strategy: Strategy) -> bool:
    known = type(strategy).aggregate_train.__module__.startswith(("flwr.", OURS))
    average = getattr(strategy, "train_metrics_aggr_fn", aggregate_metricrecords)
    return not known or average is not aggregate_metricrecords


def _numbers(strategy: Strategy, answers: Sequence[CheckedAnswer]) -> list[MetricRecord]:
    """Return of each answer the numbers that most clients send.

    Where a client does not send one, the mean of the others stands in its place. So Flower's average is that of the
    others, and no client voids a number for all.
    """
    records = [metrics_of(answer.content) for answer in answers]
    weight, forms = getattr(strategy, "weighted_by_key", EXAMPLES), [number_forms(record) for record in records]
    found = [MetricRecord() for _ in answers]
    nodes = [f"node-{answer.message.metadata.src_node_id}" for answer in answers]
    say_left_out_of_means(dict(zip(nodes, records, strict=True)))
    for number in sorted(common_to_most(forms)):
        key, has = number[0], [number in form for form in forms]
        mean = None if all(has) else _mean(list(compress(records, has)), key, weight)
        for into, record, own in zip(found, records, has, strict=True):
            into[key] = record[key] if own or mean is None else mean
    return found


def _mean(records: Sequence[MetricRecord], key: str, weight: str) -> int | float | list[int] | list[float]:
    alone = [RecordDict({"metrics": MetricRecord({weight: each[weight], key: each[key]})}) for each in records]
    return aggregate_metricrecords(alone, weight)[key]


def show_to_strategy(strategy: Strategy, answers: Sequence[CheckedAnswer], names: Collection[str]) -> list[Message]:
    """Return the replies of a round as strategies expect them: alike, whatever one client's records are called.

    Each has the checked arrays and one record of numbers, under the same two names, and the client's config records.
    Of other array records it has those that belong to the strategy: Flower refuses a whole round for a surplus one.

    Args:
        strategy: Its ``bounded_records``, if it has any, are further array records that it reads.
    """
    contents = [answer.content for answer in answers]
    arrays, numbers = _names_of(contents, getattr(strategy, "arrayrecord_key", "arrays"))
    # A project's own strategy may read the array records beside the model that all answers have.
    further = set.intersection(*(set(content.array_records) - {arrays_name(content)} for content in contents))
    wanted = further.union(getattr(strategy, "bounded_records", ()))
    for answer, record in zip(answers, _numbers(strategy, answers), strict=True):
        state = answer.reply.state
        others = {
            name: found
            for name, found in answer.content.items()
            if name not in (arrays, numbers)
            and (isinstance(found, ConfigRecord) or (isinstance(found, ArrayRecord) and name in wanted))
        }
        answer.message.content = RecordDict(
            {
                arrays: ArrayRecord({name: state[name] for name in names}),
                numbers: record,
                **others,
            }
        )
    return [answer.message for answer in answers]


def _names_of(contents: Sequence[RecordDict], usual: str) -> tuple[str, str]:
    """Return the names of the arrays and of the numbers in most answers, which a project's own strategy may read."""
    found = Counter((arrays_name(content), metrics_name(content)) for content in contents)
    # Among equally many, the strategy's own name, else that of the first client.
    return max(found, key=lambda pair: (found[pair], pair == (usual, "metrics")))


# Records of a round's messages: from arrays to numpy and back, and their checks.


# The names of a round's own numbers in its row of metrics.
OWN = ("epoch", "answers", "accuracy", "mib_up", "mib_down", "mib_per_client")


def in_row(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the clients' numbers as a round's row names them: ``train-accuracy`` is theirs, ``accuracy`` the server's.

    Args:
        metrics: By the clients' own names, of which any may be one of :data:`OWN`, or steer a terminal. No value takes
            the place of another: a name that is taken gets one more ``train-``.
    """
    row = {printable(name): value for name, value in metrics.items() if name not in OWN}
    for name in filter(metrics.__contains__, OWN):
        free = f"train-{name}"
        while free in row:
            free = f"train-{free}"
        row[free] = metrics[name]
    return row


def to_numpy(record: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an array record by name."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Return arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def decode_record(
    content: RecordDict, name: str, wanted: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a record of an answer, decoded and compared with the expected ones.

    Args:
        wanted: Arrays of the same shapes and dtypes; names fit by :func:`..core.names.match_names`.

    Raises:
        UploadError: It is missing, or is not like that.
    """
    record = content.array_records.get(name)
    if record is None:
        raise refusals.missing_record(name)
    signature = {key: (value.shape, str(value.dtype)) for key, value in wanted.items()}
    names = match_names(record, signature)
    found = check_arrays(record, name, signature, array_form(name), names)
    for note in names.notes:
        LOG.info("array record %s: %s", one_line(repr(name)), one_line(note))
    return found
