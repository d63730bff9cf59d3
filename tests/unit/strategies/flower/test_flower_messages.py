"""The record schema: the request, the accepted answers, and the one line that refuses any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import CLASSES, SIGNATURES, equal, net, records, weights
from flwr.app import Array, ArrayRecord, RecordDict

from strategies.client import already_held, upload_facts
from strategies.core.errors import OptionError, UploadError
from strategies.core.facts import UploadFacts
from strategies.flower.messages import Reply, Request, is_anonymous, read_reply
from strategies.uploads.checks import Signatures

Change = Callable[[RecordDict], None]


def read(content: RecordDict, signatures: Signatures = SIGNATURES, max_bytes: int = 10**6) -> Reply:
    return read_reply(content, signatures, num_classes=CLASSES, max_bytes=max_bytes, sender="node-7")


def good(**facts: Any) -> RecordDict:
    counts = [1, 2, 3, 4]
    return records(weights(1), facts={**upload_facts(client="alice", architecture="net", label_counts=counts), **facts})


def fact(key: str, value: Any) -> Change:
    return lambda content: content["upload"].__setitem__(key, value)


def ranges(layers: Any, bounds: Any) -> Change:
    return lambda content: content["upload"].update({"range-layers": layers, "ranges": bounds})


def metric(value: Any) -> Change:
    return lambda content: content["metrics"].__setitem__("num-examples", value)


def tensor(key: str, value: torch.Tensor) -> Change:
    return lambda content: content["arrays"].__setitem__(key, Array(value))


def without(name: str, key: str = "") -> Change:
    """Take a record, or an array of one, out of an answer."""
    return lambda content: (content[name] if key else content).__delitem__(key or name)


def two_array_records(content: RecordDict) -> None:
    content["first"], content["second"] = content["arrays"], content.pop("arrays")


def many_keys(content: RecordDict) -> None:
    for number in range(30):
        content["arrays"][f"extra-{number:02d}" + "x" * 200] = Array(torch.zeros(1))


BIAS = torch.zeros(CLASSES)
REFUSED: dict[str, tuple[Change, str]] = {
    "architecture unknown": (fact("architecture", "vgg"), r"upload\.architecture is 'vgg', known here are net, linear"),
    "architecture no text": (fact("architecture", ["net"]), r"upload\.architecture is \"\['net'\]\", known here are"),
    "architecture empty": (fact("architecture", ""), r"upload\.architecture is '', known here are"),
    "architecture of another": (
        fact("architecture", "linear"),
        r"do not fit architecture 'linear': missing nothing; not expected 0\.bias",
    ),
    "key missing": (without("arrays", "4.bias"), r"architecture 'net': missing 4\.bias; not expected nothing"),
    "key too many": (tensor("5.bias", BIAS), r"architecture 'net': missing nothing; not expected 5\.bias"),
    "many keys too many": (many_keys, r"not expected extra-00x+, extra-01x+, .* and 26 more$"),
    "shape": (tensor("4.bias", torch.zeros(5)), r"arrays\['4\.bias'\] is float32\[5\], expected is float32\[4\]"),
    "dtype": (tensor("4.bias", BIAS.long()), r"arrays\['4\.bias'\] is int64\[4\], expected is float32\[4\]"),
    "nan": (tensor("4.bias", BIAS / 0), r"arrays\['4\.bias'\] holds NaN or Inf: must be finite values"),
    "variance": (
        tensor("1.running_var", torch.tensor([1.0, -1e-6])),
        r"\['1\.running_var'\] holds a negative variance",
    ),
    "inf": (tensor("1.running_var", torch.tensor([1.0, np.inf])), r"arrays\['1\.running_var'\] holds NaN or Inf"),
    "no metrics": (without("metrics"), r"num-examples is missing: must be a positive whole number"),
    "zero examples": (metric(0), r"num-examples is 0: must be"),
    "negative examples": (metric(-3), r"num-examples is -3: must be"),
    "half an example": (metric(1.5), r"num-examples is 1\.5: must be"),
    "nan examples": (metric(float("nan")), r"num-examples is nan: must be"),
    "inf examples": (metric(float("inf")), r"num-examples is inf: must be"),
    "endless examples": (metric(10**400), r"num-examples is 1000000000"),
    "listed examples": (metric([10] * 1000), r"num-examples is \[10, 10"),
    "label counts too few": (fact("label-counts", [5, 5]), r"label-counts is \[5, 5\]: must be 4 whole"),
    "label counts too many": (fact("label-counts", [2] * 5), r"label-counts is .*: must be 4 whole"),
    "label counts negative": (fact("label-counts", [11, -1, 0, 0]), r"label-counts is \[11, -1, 0, 0\]: must be"),
    "label counts real": (fact("label-counts", [2.5] * 4), r"label-counts is .*: must be 4 whole"),
    "label counts boolean": (fact("label-counts", [True] * 4), r"label-counts is .*: must be 4 whole"),
    "label counts no list": (fact("label-counts", 10), r"label-counts is 10: must be 4 whole"),
    "label counts' sum": (fact("label-counts", [1] * 4), r"sum to 4, but num-examples is 10"),
    "range layers no list": (ranges("conv", [0.0, 1.0]), r"ranges: the layers are 'conv': must be at most 4096"),
    "range layers twice": (ranges(["a", "a"], [0.0, 1.0] * 2), r"the layers are \['a', 'a'\]: must be .* different"),
    "range layers no texts": (ranges([1.0], [0.0, 1.0]), r"the layers are \[1\.0\]: must be .* names of at most 256"),
    "range layer's long name": (ranges(["x" * 257], [0.0, 1.0]), r"the layers are \['x+: must be"),
    "range layers too many": (
        ranges([str(k) for k in range(4097)], [0.0, 1.0] * 4097),
        r"ranges: the layers are \['0', .*: must be at most 4096 different names",
    ),
    "ranges without layers": (fact("ranges", [0.0, 1.0]), r"ranges are \[0\.0, 1\.0\]: .* for each of 0 layers"),
    "range layers alone": (fact("range-layers", ["a"]), r"ranges are \[\]: must be two real numbers for each"),
    "ranges too few": (ranges(["a", "b"], [0.0, 1.0, 2.0]), r"two real numbers for each of 2 layers"),
    "ranges no list": (ranges(["a"], "no\nlist"), r"ranges are 'no\\nlist': must be two real numbers"),
    "ranges no numbers": (ranges(["a"], [True, False]), r"ranges are \[True, False\]: must be two real"),
    "ranges nan": (ranges(["a"], [0.0, float("nan")]), r"of layer 'a' are 0\.0 and nan: must be finite, smallest"),
    "ranges inf": (ranges(["a"], [-float("inf"), 0.0]), r"of layer 'a' are -inf and 0\.0: must be finite"),
    "ranges too large": (ranges(["a"], [0.0, 1e39]), r"of layer 'a' are 0\.0 and inf: must be finite"),
    "ranges upside down": (ranges(["a", "b"], [0.0, 1.0, 2.0, 1.0]), r"of layer 'b' are 2\.0 and 1\.0: must be"),
    "too many array records": (two_array_records, r"the reply has 2 array records, must be one, named 'arrays'"),
    "no array record": (without("arrays"), r"the reply has 0 array records, must be one, named 'arrays'"),
    "failure": (fact("error", "the disk\nis gone"), r"^alice: the disk is gone$"),
    "failure without words": (fact("error", ""), r"^alice: no reason given$"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_read_reply_when_an_answer_is_bad_says_client_field_and_reason(change: Change, reason: str) -> None:
    content = good()
    read(content)
    change(content)
    with pytest.raises(UploadError, match=reason) as caught:
        read(content)
    text = str(caught.value)
    assert text.startswith("alice: ")
    assert len(text) < 700


@pytest.mark.parametrize(
    "name", ["../x", "", "a" * 65, "a b", "a/b", ".hidden", "-x", "a\n", "ä", "a\x1b[31m", 7, b"a", ["a"], True]
)
def test_read_reply_when_the_name_is_no_name_refuses_it(name: object) -> None:
    with pytest.raises(UploadError, match=r"^node-7: upload\.client is .*: must be a name that matches") as caught:
        read(good(client=name))
    assert str(caught.value).isprintable()


def test_read_reply_when_too_large_says_both_sizes() -> None:
    content = good()
    size = sum(len(array.data) for array in content["arrays"].values())
    assert read(content, max_bytes=size).facts.client == "alice"
    with pytest.raises(UploadError, match=r"^alice: arrays are 0\.0 MiB, must be at most 0\.0 MiB \(max-upload-mib\)$"):
        read(content, max_bytes=size - 1)


def test_read_reply_of_our_client_half_returns_everything() -> None:
    content = good(pretrained=True)
    content["metrics"]["loss"] = 0.5
    content["metrics"]["curve"] = [1.0, 2.0]
    reply = read(content)
    assert reply.facts == UploadFacts("alice", "net", 10, (1, 2, 3, 4), pretrained=True)
    assert (reply.anonymous, reply.held) == (False, False)
    assert reply.metrics == {"loss": 0.5, "curve": [1.0, 2.0]}
    assert equal(reply.state, weights(1))
    net().load_state_dict(reply.state)


def test_read_reply_of_a_stock_client_names_it_by_its_weights() -> None:
    one, again, other = (read(records(weights(seed), num_examples=3.0)) for seed in (1, 1, 2))
    assert one.anonymous
    assert is_anonymous(one.facts.client)
    assert one.facts.client == again.facts.client != other.facts.client
    assert (one.facts.architecture, one.facts.num_examples, one.facts.label_counts) == ("net", 3, None)


def test_request_names_no_client_and_marks_of_another_run_are_no_ones() -> None:
    message = Request(ArrayRecord(), {}, 1, "f00", 5, ("alice", "bob")).message(7)
    assert "alice" not in str(message.content["config"])
    assert already_held(message, client="alice") is not None
    message.content["config"]["run-id"] = "f01"
    assert already_held(message, client="alice") is None


def test_label_counts_by_class_are_refused_as_their_keys_would_travel() -> None:
    with pytest.raises(OptionError, match="label_counts is Counter: must be a list"):
        upload_facts(client="alice", label_counts=Counter([0, 0, 1]))  # type: ignore[arg-type]
