"""The switches that keep a process and its children off the network."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strategies.core import offline

# HTTP clients of the standard library and of Ray's; an address that nobody has.
ASK = """
import urllib.request
import requests
for ask in (lambda: urllib.request.urlopen("http://192.0.2.1/", timeout=9), lambda: requests.get("https://192.0.2.1/")):
    try:
        ask()
    except OSError as error:
        print("Connection refused" in str(error))
"""


def test_http_clients_of_a_process_off_the_network_end_at_this_machine() -> None:
    environ = {**os.environ, offline.VARIABLE: "1"}

    done = subprocess.run(
        [sys.executable, "-c", ASK], env={**environ, **offline.environment(environ)}, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip

    assert done.stdout.split() == ["True", "True"]


def test_environment_switches_off_telemetry_downloads_and_every_proxy() -> None:
    given = {offline.VARIABLE: "yes", "HTTPS_PROXY": "http://a:1", "NO_PROXY": "b.example"}

    made = offline.environment(given)

    assert made.items() >= {**offline.QUIET, offline.VARIABLE: "1", "UV_OFFLINE": "1"}.items()
    assert {
        value for name, value in made.items() if name.lower().endswith("_proxy") and not name.lower().startswith("no_")
    } == {"http://127.0.0.1:9"}
    assert made["NO_PROXY"] == "b.example,127.0.0.1,localhost,::1"


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_environment_that_does_not_ask_for_it_stays_as_it_is(value: str) -> None:
    assert offline.environment({offline.VARIABLE: value}) == {}
    assert offline.environment({}) == {}


def test_switched_on_this_process_asks_its_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert not offline.wanted()
    offline.switch_on()
    assert offline.wanted()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
