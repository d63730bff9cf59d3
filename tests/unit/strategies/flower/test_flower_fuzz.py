"""Whatever a client sends: an upload that fits, or one line that says why not; never anything else."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flower_fakes import SIGNATURES, net, records, weights
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies.client import upload_facts
from strategies.core.errors import UploadError
from strategies.flower.collect import Collector
from strategies.flower.messages import Reply, read_reply
from strategies.run.run_folder import RunFolder

QUIET = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
BIAS = Array(np.zeros(4, np.float32))

whole = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=70)
scalars = st.one_of(whole, st.floats(), texts, st.binary(max_size=9), st.booleans())
lists = st.one_of(*(st.lists(kind, max_size=6) for kind in (whole, st.floats(), texts, st.booleans())))
facts = st.dictionaries(
    st.sampled_from(
        ["client", "architecture", "label-counts", "range-layers", "ranges", "pretrained", "held", "error", "more"]
    ),
    st.one_of(scalars, lists, st.sampled_from(["alice", "net", True, [1, 2, 3, 4], ["0"], [0.0, 1.0]])),
)
numbers = st.one_of(whole, st.floats(), st.lists(st.floats(), max_size=4), st.just(10))
metrics = st.dictionaries(st.sampled_from(["num-examples", "loss"]), numbers)


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """A good array file with a piece of it replaced by anything."""
    begin = draw(st.integers(0, len(BIAS.data)))
    end = draw(st.integers(begin, min(len(BIAS.data), begin + 40)))
    return BIAS.data[:begin] + draw(st.binary(max_size=60)) + BIAS.data[end:]


arrays = st.builds(
    Array,
    dtype=st.one_of(st.just("float32"), texts),
    shape=st.one_of(st.just((4,)), st.lists(st.integers(-2, 2**62), max_size=4).map(tuple)),
    stype=st.one_of(st.just("numpy.ndarray"), texts),
    data=st.one_of(spliced(), st.binary(max_size=200), st.just(BIAS.data)),
)


def read(content: RecordDict) -> Reply | str:
    try:
        return read_reply(content, SIGNATURES, num_classes=4, max_bytes=10**6, sender="node-7")
    except UploadError as error:
        return str(error)


def check(found: Reply | str) -> None:
    if isinstance(found, str):
        name, _, reason = found.partition(": ")
        assert name
        assert reason
        assert "\n" not in found
    elif not found.held:
        assert found.facts.num_examples is not None or found.facts.pretrained
        assert all(torch.isfinite(tensor).all() for tensor in found.state.values())
        assert all(-np.inf < low <= high < np.inf for low, high in (found.facts.ranges or {}).values())
        if found.facts.architecture == "net":
            net().load_state_dict(found.state)


@QUIET
@given(array=arrays)
def test_read_reply_when_an_array_is_anything_refuses_or_decodes_it(array: Array) -> None:
    content = records(weights(1), facts=upload_facts(client="alice", architecture="net"))
    content["arrays"]["4.bias"] = array
    found = read(content)
    check(found)
    if isinstance(found, str):
        assert found.startswith("alice: arrays['4.bias'] ")


@QUIET
@given(facts=facts, metrics=metrics, extra=st.dictionaries(texts, arrays, max_size=2), drop=st.integers(0, 9))
def test_read_reply_when_records_are_anything_refuses_or_reads_them(
    facts: dict[str, Any], metrics: dict[str, Any], extra: dict[str, Array], drop: int
) -> None:
    content = RecordDict({"arrays": ArrayRecord(weights(1)), "metrics": MetricRecord(metrics)})
    content["arrays"].update(extra)
    if drop < 2:
        del content["arrays"]["4.bias"]
    if drop % 2:
        content["upload"] = ConfigRecord(facts)
    check(read(content))


@settings(QUIET, max_examples=40)
@given(facts=facts, metrics=metrics)
def test_collector_when_records_are_anything_goes_on(facts: dict[str, Any], metrics: dict[str, Any]) -> None:
    content = RecordDict({"arrays": ArrayRecord(weights(1)), "metrics": MetricRecord(metrics)})
    content["upload"] = ConfigRecord(facts)
    question = Message(RecordDict(), dst_node_id=7, message_type="train")
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", {}) as run:
        collector = Collector(run.round(1), SIGNATURES, num_classes=4, max_bytes=10**6)
        collector.take(Message(content, reply_to=question))
        assert len(run.round(1).held()) + len(run.round(1).refused()) == 1
        assert set(run.round(1).held()) == collector.clients == set(collector.traffic.up)
