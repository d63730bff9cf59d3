"""The answers of a round: the records that a strategy needs beside weights, and the form in which it gets them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from ...core.errors import UploadError
from ..messages import Reply

EXAMPLES = "num-examples"


@dataclass(frozen=True)
class Answered:
    """One checked answer of a round.

    Attributes:
        client: The client's name.
        message: The reply.
        content: Its content, after the strategy's own check.
        reply: Its checked facts.
    """

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
        raise UploadError("it trained nothing in this round, which is all that a round asks for", reply.facts.client)


def checked_by(strategy: Strategy, content: RecordDict) -> RecordDict:
    """Check the strategy's own parts of an answer: its records, and the numbers that it computes with.

    Args:
        strategy: Its ``check_answer``, if it has one, unpacks records beside a plain model; its ``weighted_by_key``
            names the clients' weights, its ``train_loss_key`` (q-FedAvg) their losses.
        content: The content of the reply.

    Returns:
        The content; a weight that counts examples under another name is there as ``num-examples``, too.

    Raises:
        UploadError: The answer does not fit the question.
    """
    check = getattr(strategy, "check_answer", None)
    content = content if check is None else check(content)
    weight, loss = getattr(strategy, "weighted_by_key", EXAMPLES), getattr(strategy, "train_loss_key", None)
    metrics = _metrics_of(content)
    for key in (key for key in (weight, loss) if key not in (None, EXAMPLES)):
        value = metrics.get(key)
        if not isinstance(value, int | float) or not 0 <= value < math.inf or (key == weight and value == 0):
            raise UploadError(
                f"metrics[{key!r}] is {str(value)[:40]}: must be a finite number above 0, for the "
                "strategy computes with it"
            )
    if EXAMPLES in metrics or weight == EXAMPLES:
        return content
    name = next(iter(content.metric_records))
    return RecordDict({**content, name: MetricRecord({**metrics, EXAMPLES: metrics[weight]})})


def show(answers: Sequence[Answered], names: Collection[str]) -> list[Message]:
    """Return the replies of a round as strategies expect them: checked arrays, and one record of numbers alike in all.

    Args:
        answers: The messages of these are changed.
        names: The arrays that the strategy sees.
    """
    records = [_metrics_of(answer.content) for answer in answers]
    shared = set.intersection(*({(key, _length(value)) for key, value in record.items()} for record in records))
    keys = sorted(key for key, _ in shared)
    for answer, record in zip(answers, records, strict=True):
        content, state = answer.content, answer.reply.state
        arrays = _name_of(content.array_records, "arrays")
        numbers = _name_of(content.metric_records, "metrics")
        others = {
            name: found
            for name, found in content.items()
            if name not in (arrays, numbers) and not isinstance(found, MetricRecord)
        }
        answer.message.content = RecordDict(
            {
                arrays: ArrayRecord({name: state[name] for name in names}),
                numbers: MetricRecord({key: record[key] for key in keys}),
                **others,
            }
        )
    return [answer.message for answer in answers]


def _metrics_of(content: RecordDict) -> MetricRecord:
    return content.metric_records.get(_name_of(content.metric_records, "metrics"), MetricRecord())


def _name_of(records: Any, usual: str) -> str:
    """Return which of some records is meant, by the rule of :func:`strategies.flower.messages.read_reply`."""
    return usual if usual in records or not len(records) else str(next(iter(records)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1
