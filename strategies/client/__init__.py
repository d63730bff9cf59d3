"""The client half, for any ClientApp; importing it loads neither torch, Ray nor Flower.

A ClientApp that replies with stock records works unchanged. These few lines give it a stable name and label counts, and
spare it a second training for the same run::

    from oneshot_fl.client import already_held, upload_facts

    @app.train()
    def train(msg, context):
        if reply := already_held(msg, client="hospital-a"):
            return reply
        ...
        content["upload"] = upload_facts(client="hospital-a", architecture="resnet18", label_counts=counts)
        return Message(content, reply_to=msg)
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..core import refusals
from ..core.errors import OptionError, UploadError
from ..core.facts import CLIENT_NAME as CLIENT_NAME
from ..core.facts import EXPECTED, Agreed, Agreement, UploadFacts, held_digest, read_agreement

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message

V = TypeVar("V")

# The errors that numpy raises for bytes that are no array, or a torn one.
TORN = (ArithmeticError, EOFError, LookupError, MemoryError, OSError, RuntimeError, SyntaxError, TypeError, ValueError,
        tokenize.TokenError, zipfile.BadZipFile, zlib.error)  # fmt: skip


def already_held(msg: Message, *, client: str) -> Message | None:
    """Return the answer of a client whose upload the server already holds, or None if the client has to train."""
    from flwr.app import ConfigRecord, Message, RecordDict

    config = msg.content.config_records.get("config", ConfigRecord())
    held = config.get("held", [])
    if not isinstance(held, list) or held_digest(client, str(config.get("run-id", ""))) not in held:
        return None
    return Message(RecordDict({"upload": ConfigRecord({"client": client, "held": True})}), reply_to=msg)


def disagreement(
    msg: Message, *, client: str, classes: Sequence[str] = (), preprocessing: Sequence[str] = ()
) -> Message | None:
    """Return the answer of a client whose classes or preprocessing differ from the server's, or None if it may train.

    Args:
        classes: As in :func:`upload_facts`.
        preprocessing: As in :func:`upload_facts`.
    """
    from flwr.app import ConfigRecord

    try:
        expected = read_agreement(msg.content.config_records.get("config", ConfigRecord()), EXPECTED)
        Agreed(expected).check(_agreement(classes, preprocessing))
    except UploadError as error:
        return failure(msg, client=client, reason=str(error))
    return None


def failure(msg: Message, *, client: str, reason: str) -> Message:
    """Return the answer of a client without an upload, so that the server knows the client's name and its reason."""
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({"upload": ConfigRecord({"client": client, "error": reason})}), reply_to=msg)


def answer_question(msg: Message, said: Mapping[str, Any], arrays: ArrayRecord) -> Message:
    """Return the answer to a question of FENS or FuseFL.

    Args:
        said: The facts, with the client's name as ``client``, and the reason as ``error`` if it cannot answer.
    """
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({"answer": ConfigRecord(dict(said)), "arrays": arrays}), reply_to=msg)


def read_arrays(record: ArrayRecord, made: Callable[[np.ndarray[Any, Any]], V]) -> dict[str, V]:
    """Return the arrays of a server's record by name, whatever their bytes are.

    Args:
        made: Makes the result of an array, such as ``torch.from_numpy``.

    Raises:
        UploadError: Names an array that cannot be read.
    """
    found = {}
    for key, array in record.items():
        try:
            values = array.numpy()
            if not isinstance(values, np.ndarray):  # numpy reads an archive of arrays, too
                raise TypeError(f"it is {type(values).__name__}")
            found[key] = made(values)
        except TORN as error:
            raise refusals.unreadable_array(key, error) from error
    return found


def upload_facts(  # noqa: PLR0913  every fact that a client may send
    *,
    client: str,
    architecture: str = "",
    label_counts: Sequence[int] | None = None,
    pretrained: bool = False,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    classes: Sequence[str] = (),
    preprocessing: Sequence[str] = (),
    start: Mapping[str, Any] | None = None,
) -> ConfigRecord:
    """Return the record that travels beside "arrays" and "metrics".

    Args:
        client: A stable name: letters, digits, '.', '_' and '-', at most 64 characters.
        architecture: The server's name for this model; empty if the server knows only one model.
        label_counts: Training examples per class [C]; None if the client keeps them to itself.
        pretrained: The weights were not trained in this run.
        ranges: The activation ranges from :func:`.measures.calibrate`, measured on the client's own examples.
            Methods that send models in INT8 need them.
        classes: The names of the classes in the order of their numbers, such as ``ImageFolder(...).classes``. The
            server refuses an upload whose names or order differ from its own, or from the first upload's.
        preprocessing: What makes an example the model's input, in words that all clients write alike, such as
            ``repr(transform).splitlines()``; compared as the classes are.
        start: The weights that the training started from: the request's ``msg.content["arrays"]``, or a state_dict.
            Methods that merge updates compare their digest with that of the run.

    Raises:
        OptionError: The label counts are by class, as of a Counter, and not a list.
    """
    from flwr.app import ConfigRecord

    if isinstance(label_counts, Mapping | Set):
        raise OptionError(f"label_counts is {type(label_counts).__name__}: must be a list of numbers, one per class")
    digest = None if start is None else start_digest(start)
    counts = None if label_counts is None else tuple(label_counts)
    agreement = _agreement(classes, preprocessing)
    facts = UploadFacts(client, architecture, None, counts, pretrained, ranges, agreement, digest)
    return ConfigRecord(facts.to_record())


def _agreement(classes: Sequence[str], preprocessing: Sequence[str]) -> Agreement:
    return Agreement.of(classes, [preprocessing] if isinstance(preprocessing, str) else preprocessing)


def start_digest(start: Mapping[str, Any]) -> str:
    """Return the digest by which the server knows the weights that a training started from.

    Args:
        start: A state_dict, or the arrays of the request.
    """
    from ..core.fingerprint import weights_sha256

    return weights_sha256({key: value if hasattr(value, "dim") else value.numpy() for key, value in start.items()})
