"""Every reason of refusal is one clear line, and one module makes them all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strategies.core import refusals
from strategies.core.errors import UploadError

ROOT = Path(__file__).parents[4]
REASONS = {
    name: reason
    for name, reason in inspect.getmembers(refusals, inspect.isfunction)
    if reason.__module__ == refusals.__name__ and not name.startswith("_")
}
# By the annotation of an argument: a value as our own code passes it.
VALUES: dict[str, Any] = {
    "str": "some field", "object": "some value", "int": 3, "float": 3.0, "bytes": b"PK",
    "Path": Path("some/file"), "Sequence[str]": ["one", "two"], "Iterable[str]": ["one", "two"],
    "Sequence[int]": [4, 5],
}  # fmt: skip
SHOWN = {
    "str": "some field", "object": "some value", "bytes": "PK", "Path": "some/file", "Sequence[str]": "one",
    "Iterable[str]": "one, two", "Sequence[int]": "[4, 5]",
}  # fmt: skip


def said(reason: Callable[..., UploadError], **values: Any) -> str:
    """Return the line of a reason; ``values`` replace those of an annotation."""
    found = inspect.signature(reason).parameters.values()
    return reason(*({**VALUES, **values}[parameter.annotation] for parameter in found)).reason


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS)
def test_a_reason_is_one_line_that_names_all_it_was_given(reason: Callable[..., UploadError]) -> None:
    line = said(reason)
    names = [parameter.annotation for parameter in inspect.signature(reason).parameters.values()]
    assert line.isprintable()
    assert not line.endswith(".")
    assert all(SHOWN[name] in line for name in names if name in SHOWN)


@pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS)
def test_a_reason_stays_short_whatever_value_came_from_outside(reason: Callable[..., UploadError]) -> None:
    line = said(reason, object="x\n\x1b[31m" * 10**5)
    assert line.isprintable()
    assert len(line) <= 4000


def test_no_other_module_makes_an_upload_error_and_none_of_the_reasons_is_left_over() -> None:
    makers, used = set(), set()
    for top in ("strategies", "client_app", "fl_app", "server_app"):
        for path in (ROOT / top).rglob("*.py"):
            source = path.read_text()
            if re.search(r"(?<!class )\bUploadError\(", source):
                makers.add(path.relative_to(ROOT).as_posix())
            used |= set(re.findall(r"\brefusals\.(\w+)", source))
    assert makers == {"strategies/core/errors.py", "strategies/core/refusals.py"}
    assert REASONS.keys() - used - {"bad_metric"} == set()
