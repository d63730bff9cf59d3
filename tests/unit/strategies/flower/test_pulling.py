"""Answers as they travel: objects of a real grid, counted before they are inflated."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_object_id
from wire_fakes import Link, deflated, grid_of, rewritten

from strategies.core.durable import MIB
from strategies.core.errors import UploadError
from strategies.flower.pulling import MOST_OBJECTS, MOST_TEXT, Puller, count_inflated_bytes


def message(arrays: Mapping[str, Any], **records: Any) -> Message:
    kept = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    content = RecordDict({"arrays": kept, "metrics": MetricRecord({"num-examples": 3}), **records})
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    question.metadata.__dict__["_src_node_id"] = 1
    return Message(content, reply_to=question)


def sent(answer: Message) -> Link:
    return Link(answer, deflated(answer))


def test_an_answer_within_the_limit_is_that_of_flower() -> None:
    values = np.arange(40_000, dtype=np.float32)
    link = sent(message({"weight": values}))
    grid = grid_of(link)

    reply = Puller(grid, MIB).pull("1")

    assert (reply.content.array_records["arrays"]["weight"].numpy() == values).all()
    assert link.confirmed == 1
    assert grid._runtime_client is link  # type: ignore[comparison-overlap]


def test_an_answer_that_is_larger_on_the_wire_is_refused_before_it_is_confirmed() -> None:
    link = sent(message({"weight": np.random.default_rng(0).random(400_000, np.float32)}))

    with pytest.raises(UploadError, match=r"its answer is larger than 1.0 MiB \(max-upload-mib\)"):
        Puller(grid_of(link), MIB).pull("1")

    assert link.confirmed == 0


def test_an_answer_whose_objects_are_missing_is_not_waited_for_and_pulled_once_they_are_there() -> None:
    link = sent(message({"weight": np.arange(40_000, dtype=np.float32), "bias": [1.0]}))
    link.absent = set(link.objects)
    puller = Puller(grid_of(link), MIB)
    began = time.monotonic()

    assert [puller.pull("1") for _ in range(3)] == [None] * 3
    for name in list(link.absent):
        link.absent.discard(name)
        assert (puller.pull("1") is None) == bool(link.absent)

    assert time.monotonic() - began < 0.9  # Flower's first pause alone is longer
    assert link.confirmed == 1


def test_an_answer_whose_objects_are_lost_is_an_error_of_flower() -> None:
    link = sent(message({"weight": [1.0]}))
    link.absent = set(link.objects)
    puller = Puller(grid_of(link), MIB)

    assert puller.pull("1") is None
    link.absent, link.lost = set(), set(link.objects)
    reply = puller.pull("1")

    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_an_object_that_an_announcement_names_often_is_pulled_once() -> None:
    link = sent(message({"weight": np.arange(40_000, dtype=np.float32), "bias": [1.0]}))
    tree = link.announced.message_object_trees[0]
    names = [child.object_id for child in tree.children]
    for child in tree.children:
        child.children.extend(ObjectTree(object_id=name) for name in names)

    reply = Puller(grid_of(link), MIB).pull("1")

    assert reply.content.array_records["arrays"]["bias"].numpy() == [1.0]
    assert sorted(link.pulled) == sorted(link.objects)


@pytest.mark.parametrize("levels", [1, 3])
def test_an_announcement_of_too_many_objects_is_refused_before_one_is_pulled(levels: int) -> None:
    link = sent(message({"weight": [1.0]}))
    leaves = [link.announced.message_object_trees[0]]
    width = math.ceil(MOST_OBJECTS ** (1 / levels))
    for level in range(levels):
        names = [f"{level:032x}{k * (levels == 1):032x}" for k in range(width)]
        leaves = [leaf.children.add(object_id=name) for leaf in leaves for name in names]

    with pytest.raises(UploadError, match="its answer names more than 20000 objects"):
        Puller(grid_of(link), MIB).pull("1")

    assert link.pulled == []


def test_a_chunk_that_an_array_names_often_counts_as_often_and_is_never_joined() -> None:
    answer = message({"weight": np.random.default_rng(0).random(200_000, np.float32)})
    bomb = rewritten(deflated(answer), "Array", lambda facts: {**facts, "arraychunk_ids": [0] * 400})
    link = Link(answer, bomb)
    tracemalloc.start()

    with pytest.raises(UploadError, match="larger than 8.0 MiB"):
        Puller(grid_of(link), 8 * MIB).pull("1")

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, bomb.values())) < MIB
    assert peak < 16 * MIB


def test_numbers_and_texts_that_would_fill_the_memory_are_refused() -> None:
    answer = message({"weight": [1.0]}, more=ConfigRecord({"numbers": [0], "text": "x" * (MOST_TEXT + 1)}))

    with pytest.raises(UploadError, match="MiB of numbers and texts, must be at most 4 MiB"):
        Puller(grid_of(sent(answer)), 64 * MIB).pull("1")


def test_an_answer_that_is_nested_deeper_than_a_message_is_refused() -> None:
    content, objects = b"ArrayChunk  1\0x", dict[str, bytes]()
    for _ in range(6):
        name = get_object_id(content)
        objects[name] = content
        body = json.dumps({"inside": name}).encode()
        content = f"RecordDict {name} {len(body)}".encode() + b"\0" + body
    objects[get_object_id(content)] = content

    with pytest.raises(UploadError, match="nested deeper than 5 objects"):
        count_inflated_bytes(get_object_id(content), objects)
