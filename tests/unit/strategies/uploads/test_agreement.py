"""What all parties of a run must share: the names and the order of the classes, and the preprocessing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from strategies.core.errors import UploadError
from strategies.core.facts import UNNAMED, Agreed, Agreement, UploadFacts

CLASSES = ("cat", "dog", "owl")


def sent(classes: Sequence[str] = (), preprocessing: Sequence[str] = (), *, words: bool = True) -> Agreement:
    """Return an agreement as the server reads it from a client's record."""
    own = Agreement.of(classes, preprocessing)
    facts = UploadFacts("a", agreement=own if words else own.without_words(), num_examples=1)
    record = {**facts.to_record(), "num-examples": 1}
    return UploadFacts.from_record(json.loads(json.dumps(record)), len(CLASSES), client="a").agreement


@pytest.mark.parametrize(
    ("classes", "preprocessing", "line"),
    [
        (("ant", "cat", "dog"), (), "class 0 is 'ant' here and 'cat' there"),
        (("dog", "cat", "owl"), (), "class 0 is 'dog' here and 'cat' there, the same names in another order"),
        (("cat", "dog"), (), "2 and 3 classes, class 2, 'owl', is not here"),
        (("cat", "dog", "owl", "yak"), (), "4 and 3 classes, class 3, 'yak', is not there"),
        (("cat", "dog", "Owl"), (), "class 2 is 'Owl' here and 'owl' there"),
        (CLASSES, ("mean 0", "std 1"), "line 0 is 'mean 0' here and 'mean 0.5' there"),
    ],
)
def test_another_agreement_is_refused_with_the_first_difference(
    classes: tuple[str, ...], preprocessing: tuple[str, ...], line: str
) -> None:
    agreed = Agreed(Agreement.of(CLASSES, ("mean 0.5", "std 1")))
    agreed.check(sent(CLASSES, ("mean 0.5", "std 1")))
    with pytest.raises(UploadError, match=f"differ from those of the server: {line}"):
        agreed.check(sent(classes, preprocessing))


def test_a_digest_alone_is_compared_too() -> None:
    agreed = Agreed(Agreement.of(CLASSES))
    agreed.check(sent(CLASSES, words=False))
    with pytest.raises(UploadError, match=r"classes differ .* their sha256 are .*, and the names are not sent"):
        agreed.check(sent(CLASSES[::-1], words=False))


def test_uploads_are_compared_with_the_first_that_names_its_classes() -> None:
    agreed = Agreed(UNNAMED)
    for client, agreement in (("a", UNNAMED), ("b", sent(CLASSES)), ("c", UNNAMED)):
        agreed.check(agreement)
        agreed.add(client, agreement)
    with pytest.raises(UploadError, match="differ from those of client 'b': class 0 is 'owl' here"):
        agreed.check(sent(CLASSES[::-1]))


def test_a_list_that_is_too_long_goes_as_its_digest() -> None:
    many = [f"class {number}" for number in range(5000)]
    assert sent(many) == Agreement.of(many).without_words()


@pytest.mark.parametrize(
    "said",
    [
        {"classes": "cat"},
        {"classes": [1, 2]},
        {"classes": [""]},
        {"classes": ["x" * 300]},
        {"classes": ["x"] * 5000},
        {"classes-sha256": "no digest"},
        {"classes-sha256": 7},
        {"classes": list(CLASSES), "classes-sha256": "0" * 64},
        {"preprocessing": [b"bytes"]},
    ],
)
def test_anything_else_in_an_answer_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UploadError, match=r"upload\.(classes|preprocessing)"):
        UploadFacts.from_record({**said, "num-examples": 1}, 3, client="a")


def test_the_index_keeps_the_agreement() -> None:
    facts = UploadFacts("a", "net", 3, agreement=Agreement.of(CLASSES, ("mean 0.5",)))
    assert UploadFacts.from_row(json.loads(json.dumps(facts.as_row()))) == facts
    assert "agreement" not in UploadFacts("a", "net", 3).as_row()
