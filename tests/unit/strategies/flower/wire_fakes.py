"""The SuperLink's side of a real grid: answers as objects, and changes to these objects that keep their ids true."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

Objects = Mapping[str, bytes]
# From the ground up: a kind names objects of the kinds before it.
LEVELS = ("ArrayChunk", "Array", "ArrayRecord", "MetricRecord", "ConfigRecord", "RecordDict", "Message")


class Link:
    """Hands over an answer as objects, and announces it once.

    Attributes:
        announced: The announcement.
        waiting: It, until it is pulled.
        absent: Ids of the objects that have not arrived.
        lost: Ids of the objects that will not.
        pulled: Ids of the objects that were pulled.
    """

    def __init__(self, message: Message, objects: Objects) -> None:
        self.objects, self.confirmed = dict(objects), 0
        self.absent, self.lost, self.pulled = set[str](), set[str](), list[str]()
        first, *others = objects
        bare = message_to_proto(remove_content_from_message(message))
        bare.metadata.message_id = first
        tree = ObjectTree(object_id=first, children=[ObjectTree(object_id=name) for name in others])
        self.announced = PullAppMessagesResponse(messages_list=[bare], message_object_trees=[tree])
        self.waiting = [self.announced]

    def PullMessages(self, request: Any) -> Any:  # noqa: N802, ARG002
        return self.waiting.pop() if self.waiting else PullAppMessagesResponse()

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        name = request.object_id
        self.pulled.append(name)
        found = name in self.objects and name not in self.lost
        available = found and name not in self.absent
        content = self.objects[name] if available else b""
        return SimpleNamespace(object_found=found, object_available=available, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802, ARG002
        self.confirmed += 1


def grid_of(link: Any) -> HttpGrid:
    """Return Flower's grid, connected to a link."""
    from flwr.superlink.grid.http_grid import HttpGrid  # loads Flower's databases, for a second

    grid = HttpGrid.__new__(HttpGrid)
    grid._client = link
    grid._run = SimpleNamespace(run_id=1)  # type: ignore[assignment]
    grid.node = Node(node_id=1)
    return grid


def deflated(answer: Message) -> dict[str, bytes]:
    """Return id -> content, the message first."""
    objects = {name: item.deflate() for name, item in get_all_nested_objects(answer).items()}
    first = answer.object_id
    return {first: objects.pop(first), **objects}


def resealed(objects: Objects, changed: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the objects with other contents; every id above a change follows, and its head has the true length."""
    found, renamed = dict(objects), dict[str, str]()
    for level in LEVELS:
        for name, content in objects.items():
            if not content.startswith(f"{level} ".encode()):
                continue
            fresh = changed[name] if name in changed else _with_names(content, renamed)
            if fresh != content:
                del found[name]
                renamed[name] = get_object_id(fresh)
                found[renamed[name]] = fresh
    first = renamed.get(next(iter(objects)), next(iter(objects)))
    return {first: found.pop(first), **found}


def rewritten(objects: Objects, kind: str, change: Callable[[Any], Any]) -> dict[str, bytes]:
    """Return the objects after a change to the body of one kind."""
    changed = {}
    for name, content in objects.items():
        head, _, body = content.partition(b"\0")
        if head.startswith(f"{kind} ".encode()):
            changed[name] = _sealed(head, json.dumps(change(json.loads(body))).encode())
    return resealed(objects, changed)


def _with_names(content: bytes, renamed: Mapping[str, str]) -> bytes:
    head, _, body = content.partition(b"\0")
    for old, new in renamed.items():
        head, body = head.replace(old.encode(), new.encode()), body.replace(old.encode(), new.encode())
    return _sealed(head, body)


def _sealed(head: bytes, body: bytes) -> bytes:
    return b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\0" + body
