"""What SECURITY.md says, against the code that it is about."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from doc_pages import ROOT, rows, section

from fl_app.config import AppConfig
from server_app.launch.superlink import run_environment
from server_app.settings.choices import CHOICES
from strategies.core import offline
from strategies.core.options import options_of
from strategies.core.places import RUNS_KEPT
from strategies.core.stage_options import POLICIES
from strategies.flower.rounds.refinement import refines
from strategies.method import METHODS, Need
from strategies.methods.fens import FensConfig

PAGE = ROOT / "SECURITY.md"
TABLE = {row[0]: row[1:] for row in rows(section(PAGE, "## What the server sees, by method"), "method")}
SENT = {
    "classifier": "a classifier's weights",
    "open-set": 'the weights of a classifier with a class "unknown"',
    "block": "the weights of a classifier's first block",
    "prototypes": "the weights of an encoder, and a prototype per class",
    "statistics": "sums of a frozen backbone's features",
    "cvae": "the weights of a CVAE's decoder",
}


def test_page_has_every_method_in_its_order() -> None:
    assert list(TABLE) == list(CHOICES)


@pytest.mark.parametrize("name", list(CHOICES))
def test_page_names_the_data_that_leaves_a_client_per_method(name: str) -> None:
    method, (sent, counts, after, back) = CHOICES[name], TABLE[name]
    options = {option.key for option in options_of(method.config, name)}
    server = method.method
    in_rounds = server is None
    goes_on = server is None or server.client_phase is not None
    again = f"{name}.rounds" in options

    assert sent.startswith("once") is not in_rounds
    assert SENT[method.uploads] in sent
    assert (f"{name}.rounds" in sent) is (again and (in_rounds or not goes_on))
    assert ("ranges" in sent) is ("precision" in {field.name for field in fields(method.config)})
    assert (counts == "needed") is (Need.LABEL_COUNTS in method.needs)
    assert ("needed by some" in counts) is (name in ("fens", "fusefl"))
    assert (after == "nothing") is not goes_on
    assert back.startswith("nothing") is not goes_on
    assert ("student" in back) is (again and not goes_on)
    shares = server is not None and server.in_rounds.shares_generator is not None
    assert ("iterative.refiner" in back) is shares
    assert not shares or refines(METHODS[name])


def test_page_names_settings_that_there_are() -> None:
    known = {option.key for option in options_of(AppConfig)}
    known |= {option.key for name in CHOICES for option in options_of(CHOICES[name].config, name)}
    text = PAGE.read_text()
    named = set(re.findall(r"`((?:client|privacy|fens|dense|iterative)\.[a-z-]+)(?:=[^`]*)?`", text))
    values = dict(re.findall(r"`((?:client|fens|gatekeeper)\.[a-z-]+)=(\w+)`", text))

    assert len(named) > 8
    assert named <= known
    assert {"warn", "exclude"} <= set(POLICIES)
    assert values == {
        "client.share-label-counts": "false",
        "fens.precision": FensConfig().precision,
        "fens.local-steps": str(FensConfig().local_steps),
        "fens.train-on": "server",
        "gatekeeper.policy": "warn",
    }


def test_page_names_the_variables_that_are_set() -> None:
    text, made = PAGE.read_text(), run_environment(ROOT, "token")
    variables = dict(re.findall(r"\b([A-Z]+_[A-Z_a-z]+)=(\d)\b", text))

    assert offline.QUIET.items() <= variables.items()
    assert (
        variables.items()
        <= {**made, **offline.environment({offline.VARIABLE: "1"}), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}.items()
    )
    assert f"its last {RUNS_KEPT} runs" in text


def test_page_names_the_refusals_of_differential_privacy() -> None:
    text = section(PAGE, "## Differential privacy")

    assert {"client.share-label-counts", "client.checkpoint"} <= {
        option.key for option in options_of(AppConfig) if option.rules["private"] is not None
    }
    for word in ("label counts", "checkpoints", "batch normalisation", "number of examples"):
        assert word in text
