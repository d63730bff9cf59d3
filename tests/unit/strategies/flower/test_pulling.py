"""Answers as they travel: objects of a real grid, counted before they are inflated."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_id
from wire_fakes import Link, deflated, grid_of, rewritten

from strategies.core.errors import UploadError
from strategies.flower.pulling import MOST_TEXT, inflated_bytes, pull
from strategies.uploads.checks import MIB


def message(arrays: Mapping[str, Any], **records: Any) -> Message:
    kept = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    content = RecordDict({"arrays": kept, "metrics": MetricRecord({"num-examples": 3}), **records})
    question = Message(RecordDict(), dst_node_id=1, message_type="train")
    question.metadata.__dict__["_src_node_id"] = 1
    return Message(content, reply_to=question)


def test_an_answer_within_the_limit_is_that_of_flower() -> None:
    values = np.arange(40_000, dtype=np.float32)
    answer = message({"weight": values})
    link = Link(answer, deflated(answer))
    grid = grid_of(link)

    reply = pull(grid, "1", MIB)

    assert reply is not None
    assert (reply.content.array_records["arrays"]["weight"].numpy() == values).all()
    assert link.confirmed == 1
    assert grid._runtime_client is link  # type: ignore[comparison-overlap]


def test_an_answer_that_is_larger_on_the_wire_is_refused_before_it_is_confirmed() -> None:
    answer = message({"weight": np.random.default_rng(0).random(400_000, np.float32)})
    link = Link(answer, deflated(answer))

    with pytest.raises(UploadError, match=r"its answer is larger than 1.0 MiB \(max-upload-mib\)"):
        pull(grid_of(link), "1", MIB)

    assert link.confirmed == 0


def test_every_record_of_an_answer_counts() -> None:
    answer = message({"weight": [1.0]}, more=ConfigRecord({"ballast": b"x" * (2 * MIB)}))

    with pytest.raises(UploadError, match="larger than 1.0 MiB"):
        pull(grid_of(Link(answer, deflated(answer))), "1", MIB)


def test_a_chunk_that_an_array_names_often_counts_as_often_and_is_never_joined() -> None:
    answer = message({"weight": np.random.default_rng(0).random(200_000, np.float32)})
    bomb = rewritten(deflated(answer), "Array", lambda facts: {**facts, "arraychunk_ids": [0] * 400})
    link = Link(answer, bomb)
    tracemalloc.start()

    with pytest.raises(UploadError, match="larger than 8.0 MiB"):
        pull(grid_of(link), "1", 8 * MIB)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, bomb.values())) < MIB
    assert peak < 16 * MIB


def test_an_array_that_a_record_names_often_counts_as_often() -> None:
    objects = deflated(message({"weight": np.zeros(50_000, np.float32)}))
    named = rewritten(
        objects, "ArrayRecord", lambda names: {f"copy-{k}": array for k in range(50) for array in names.values()}
    )

    whole, repeated = (inflated_bytes(next(iter(each)), each) for each in (objects, named))

    assert 200_000 < whole < 210_000
    assert repeated > 50 * 200_000


def test_numbers_and_texts_that_would_fill_the_memory_are_refused() -> None:
    answer = message({"weight": [1.0]}, more=ConfigRecord({"numbers": [0], "text": "x" * (MOST_TEXT + 1)}))

    with pytest.raises(UploadError, match="MiB of numbers and texts, must be at most 4 MiB"):
        pull(grid_of(Link(answer, deflated(answer))), "1", 64 * MIB)


def test_an_answer_that_is_nested_deeper_than_a_message_is_refused() -> None:
    content, objects = b"ArrayChunk  1\0x", dict[str, bytes]()
    for _ in range(6):
        name = get_object_id(content)
        objects[name] = content
        body = json.dumps({"inside": name}).encode()
        content = f"RecordDict {name} {len(body)}".encode() + b"\0" + body
    objects[get_object_id(content)] = content

    with pytest.raises(UploadError, match="nested deeper than 5 objects"):
        inflated_bytes(get_object_id(content), objects)


class Simulated:
    """A grid that hands over whole messages."""

    def __init__(self, answer: Message) -> None:
        self._answer = answer

    def pull_messages(self, ids: Any) -> list[Message]:  # noqa: ARG002
        return [self._answer]


def test_a_whole_message_is_measured_with_all_its_records() -> None:
    answer = message({"weight": np.zeros(10)}, more=ConfigRecord({"ballast": b"x" * MIB}))

    assert pull(Simulated(answer), "1", 2 * MIB) is answer  # type: ignore[arg-type]
    with pytest.raises(UploadError, match="larger than 1.0 MiB"):
        pull(Simulated(answer), "1", MIB)  # type: ignore[arg-type]
