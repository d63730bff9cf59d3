"""One answer from the SuperLink, bounded before it is inflated.

Flower moves a message as objects: arrays in chunks, arrays, records, and the message itself. A node writes them as it
likes. An array may name one chunk a thousand times, and a record one array, so that a few MiB on the wire become GiB in
memory. Here the bytes of the objects are counted while they arrive, and the bytes of the message before it is inflated.
The announcement of an answer is a tree of objects, and a few KiB of it become millions of nodes in the same way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    iterate_object_tree,
)

from ..core import refusals
from ..core.durable import MIB
from .messages import count_bytes

DEEPEST = 5  # message, records, record, array, chunk
# The body of a record of numbers and texts, and the list of an array's chunks: Python needs many times their bytes.
MOST_TEXT = 4 * MIB
# Ten thousand arrays of one chunk each; DenseNet-201 has a thousand. With so many Flower needs seconds to begin.
MOST_OBJECTS = 20_000
_CLIENT = "_client"  # where Flower's grid keeps its client of the SuperLink


class Puller:
    """Pulls answers one at a time and waits for none of them.

    A node announces its answer first and sends its objects later, and Flower's grid waits until the last one is there.
    A node that sends none would hold up all others. Here an answer is pulled as a whole once all its objects are at the
    SuperLink, and each earlier look asks for one that is missing.

    Args:
        grid: Flower's grid. One without a connection, as in a simulation, hands over whole messages.
        max_bytes: The largest answer, on the wire and in memory, all records together.
    """

    def __init__(self, grid: Grid, max_bytes: int) -> None:
        self._grid, self._max_bytes = grid, max_bytes
        self._announced: dict[str, _Announced] = {}

    def pull(self, message_id: str) -> Message | None:
        """Return the answer to one message, inflated by Flower; None if it has not arrived whole.

        Args:
            message_id: The id of the question, which identifies the node: a reply's sender is only the sender's claim.

        Raises:
            UploadError: The answer is larger, or nested deeper than any message.
        """
        client = getattr(self._grid, "_runtime_client", None)  # connects where the grid is not connected yet
        if client is None:
            return self._measured(self._grid.pull_messages([message_id]))
        announced = self._announced.pop(message_id, None)
        if announced is not None and not announced.has_arrived(client):
            self._announced[message_id] = announced
            return None
        bounded = _Bounded(client, self._max_bytes, announced and announced.response)
        setattr(self._grid, _CLIENT, bounded)
        try:
            return self._measured(self._grid.pull_messages([message_id]))
        except _MissingObjectError as error:
            self._announced[message_id] = _Announced(bounded.response, error.request, self._max_bytes)
            return None
        finally:
            setattr(self._grid, _CLIENT, client)

    def _measured(self, replies: Iterable[Message]) -> Message | None:
        reply = next(iter(replies), None)
        if reply is not None and not reply.has_error():
            _check(count_bytes(reply.content), self._max_bytes)
        return reply


class _MissingObjectError(Exception):
    """An object is announced and not at the SuperLink yet."""

    def __init__(self, request: Any) -> None:
        super().__init__(request.object_id)
        self.request = request


class _Announced:
    """An answer whose objects are on their way."""

    def __init__(self, response: Any, request: Any, max_bytes: int) -> None:
        self.response, self._max_bytes, self._received = response, max_bytes, 0
        names = [tree.object_id for whole in response.message_object_trees for tree in iterate_object_tree(whole)]
        # In the order in which honest nodes send: while the last one is missing, none is pulled in vain.
        self._missing = [_for_object(request, name) for name in dict.fromkeys(names)]

    def has_arrived(self, client: Any) -> bool:
        """Return whether all objects are at the SuperLink, or one is lost for good: Flower reports that itself."""
        while self._missing:
            response = client.PullObject(self._missing[-1])
            if not response.object_found:
                return True
            if not response.object_available:
                return False
            self._received += len(response.object_content)  # not kept: of many slow nodes none fills the memory
            _check(self._received, self._max_bytes)
            self._missing.pop()
        return True


def _for_object(request: Any, object_id: str) -> Any:
    other = type(request)()
    other.CopyFrom(request)
    other.object_id = object_id
    return other


class _Bounded:
    """Flower's client of the SuperLink during one pull.

    Flower confirms a message after its last object has arrived and before it inflates them, so that is where the whole
    is measured.
    """

    def __init__(self, client: Any, max_bytes: int, response: Any = None) -> None:
        self._client, self._max_bytes, self.response = client, max_bytes, response
        self._lock = threading.Lock()  # Flower pulls objects in several threads
        self._objects: dict[str, bytes] = {}
        self._received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802  Flower's name
        if self.response is None:
            self.response = _flat(self._client.PullMessages(request))
        return self.response

    def PullObject(self, request: Any) -> Any:  # noqa: N802  Flower's name
        response = self._client.PullObject(request)
        if response.object_found and not response.object_available:
            raise _MissingObjectError(request)
        with self._lock:
            self._received += len(response.object_content)
            _check(self._received, self._max_bytes)
            self._objects[request.object_id] = response.object_content
        return response

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802  Flower's name
        response = self._client.ConfirmMessageReceived(request)
        objects, self._objects = self._objects, {}  # Flower frees an object as soon as it is inflated
        _check(count_inflated_bytes(request.message_object_id, objects), self._max_bytes)
        return response


def _flat(response: Any) -> Any:
    """Return an announcement that names every object once: Flower pulls an object as often as it is named."""
    trees = chain.from_iterable(map(iterate_object_tree, response.message_object_trees))
    if next(islice(trees, MOST_OBJECTS, None), None) is not None:
        raise refusals.too_many_objects(MOST_OBJECTS)
    for whole in response.message_object_trees:
        names = dict.fromkeys(tree.object_id for tree in iterate_object_tree(whole))
        del whole.children[:]
        for name in names:
            if name != whole.object_id:
                whole.children.add(object_id=name)
    return response


def count_inflated_bytes(object_id: str, objects: dict[str, bytes]) -> int:
    """Return the bytes of an object in memory: an object that it names several times counts several times.

    Args:
        objects: Id -> content, of the object and of all that it names.

    Raises:
        UploadError: It is nested deeper than any message, or a record's texts or numbers are too many.
        KeyError: An object is missing.
        ValueError: A content is malformed.
    """
    known: dict[str, int] = {}

    def measure(name: str, depth: int) -> int:
        if depth > DEEPEST:
            raise refusals.too_deep(DEEPEST)
        if name not in known:
            content = objects[name]
            kind, children, _ = get_object_head_values_from_object_content(content)
            size = len(content) - content.find(HEAD_BODY_DIVIDER) - 1
            if kind != "ArrayChunk" and size > MOST_TEXT:
                raise refusals.long_record(size, MOST_TEXT)
            named = _list_objects(kind, children, content) if children else []
            known[name] = size + sum(measure(child, depth + 1) for child in named)
        return known[name]

    return measure(object_id, 1)


def _list_objects(kind: str, children: list[str], content: bytes) -> list[str]:
    """Return the ids of the objects that an object names, each as often as it names it."""
    if kind not in ("Array", "ArrayRecord", "RecordDict"):
        return children
    facts = json.loads(content[content.find(HEAD_BODY_DIVIDER) + 1 :])
    named = [children[place] for place in facts["arraychunk_ids"]] if kind == "Array" else list(facts.values())
    return [*named, *(set(children) - set(named))]  # Flower inflates all that the head names


def _check(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise refusals.large_answer(max_bytes)
