from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_app.attacks import AttackConfig, triggered
from fl_app.config import AppConfig
from fl_app.environment import KEPT, SPINS
from strategies.core.errors import OptionError
from strategies.core.options import flatten


def test_flat_settings_when_parsed_and_flattened_come_back() -> None:
    given = {
        "seed": 7,
        "min-uploads": 3,
        "deadline-s": 5,
        "data.alpha": 1,
        "data.classes-per-client": 4,
        "model.per-client": "lenet5, cnn5",
        "client.share-label-counts": False,
        "client.batch-size": 8,
    }

    config = AppConfig.from_settings(given)

    assert {key: flatten(config)[key] for key in given} == given
    assert isinstance(config.deadline_s, float)
    assert isinstance(config.data.alpha, float)
    assert AppConfig.from_settings(flatten(config)) == config


def test_settings_of_methods_are_left_to_the_methods() -> None:
    assert AppConfig.from_settings({"server.epochs": 3}) == AppConfig()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("seed", -1, "at least 0"),
        ("seed", True, "a whole number"),
        ("deadline-s", float("nan"), "a number"),
        ("compute", "gpu", "'ray', 'in-process'"),
        ("device", "cuda:x", "auto, cpu, cuda"),
        ("method", 3, "a text"),
        ("data.name", "cifar", "'cifar10'"),
        ("data.image-size", 513, "at most 512"),
        ("model.name", "lenet", "'lenet5'"),
        ("client.lr", 0.0, "greater than 0.0"),
        ("client.momentum", 1.5, "at most 1.0"),
        ("client.schedule", "step", "'constant', 'cosine'"),
        ("client.share-label-counts", 1, "true or false"),
        # A server must not fill a node's memory, or have it search for a noise without end.
        ("client.epochs", 2**62, "at most 1000000"),
        ("client.steps", 10**12, "at most 10000000"),
        ("client.attack-steps", 1001, "at most 1000"),
        ("client.latent", 10**8, "at most 4096"),
        ("privacy.epsilon", 1e15, "at most 1000000.0"),
        ("data.sigma", 1e4, "at most 20.0"),
        ("data.num-classes", 10**9, "at most 65536"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_key_value_and_remedy(key: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError) as error:
        AppConfig.from_settings({key: value})  # type: ignore[dict-item]

    text = str(error.value)
    assert repr(key) in text
    assert repr(value) in text
    assert allowed in text


# What every process of the app sets in its environment before torch is loaded.


ROOT = Path(__file__).parents[3]

# The settings at the import of torch; the test only watches for torch, which saves its seconds. Every module starts
# from the same environment, with none of the app's modules loaded.
PROGRAM = """
import json, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(module, os.environ.get("GOMP_SPINCOUNT"), os.environ.get("MALLOC_TRIM_THRESHOLD_"))
            raise ImportError

sys.meta_path.insert(0, Watch())
given = dict(os.environ)
for own, module in ((own, module) for own in json.loads(sys.argv[1]) for module in sys.argv[2:]):
    os.environ.clear()
    os.environ.update(given | own)
    for name in list(sys.modules):
        if name.split(".")[0] in {"strategies", "fl_app", "client_app", "server_app"}:
            del sys.modules[name]
    try:
        __import__(module)
    except ImportError:
        pass
"""
MODULES = ("server_app.launch.run_command", "server_app.app", "client_app.work")


CASES: list[tuple[dict[str, str], str | None, str | None]] = [
    ({}, SPINS, KEPT),
    ({"GOMP_SPINCOUNT": "7", "MALLOC_TRIM_THRESHOLD_": "9"}, "7", "9"),
    ({"OMP_WAIT_POLICY": "passive", "MALLOC_ARENA_MAX": "1"}, None, None),
]


def test_a_process_of_the_app_sets_what_its_environment_does_not() -> None:
    set_by_us = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MALLOC_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(set_by_us)}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([own for own, _, _ in CASES]), *MODULES],
        cwd=ROOT, env=given, capture_output=True, text=True, check=True,
    )  # fmt: skip

    expected = [f"{module} {spins} {kept}" for _, spins, kept in CASES for module in MODULES]
    assert done.stdout.split("\n")[:-1] == expected


def test_an_attacker_obeys_its_own_name_and_everybody_else_is_honest() -> None:
    attack = AttackConfig("scale", " b, a ,b")

    assert attack.names() == ("b", "a")
    assert [attack.of(name) for name in ("a", "b", "c", "", "none")] == ["scale", "scale", "none", "none", "none"]
    assert AttackConfig().of("a") == "none"


FACTOR = "must be a number greater than 0 and at most 1e+06"


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        ("none", {}, "'attack.clients' is 'a' and 'attack.kind' 'none'"),
        ("claim", {"attack.factor": 0.0}, f"'attack.factor' is 0: {FACTOR} with 'attack.kind' 'claim'"),
        (
            "claim-uniform",
            {"attack.factor": 2e6},
            f"'attack.factor' is 2e+06: {FACTOR} with 'attack.kind' 'claim-uniform'",
        ),
        (
            "backdoor",
            {"data.name": "heart-disease", "data.partition": "domains"},
            "'attack.kind' is 'backdoor': must be another attack where 'data.name' is 'heart-disease'",
        ),
        (
            "scale",
            {"client.checkpoint": "m.pt"},
            "'attack.kind' is 'scale': must be 'none' where 'client.checkpoint' names",
        ),
    ],
)
def test_settings_of_an_attack_when_they_cannot_be_are_refused_in_one_line(
    kind: str, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(line)):
        AppConfig.from_settings({"attack.kind": kind, "attack.clients": "a", **settings})


def test_attackers_when_a_simulation_does_not_have_them_are_named() -> None:
    known = ["client-000", "client-001"]
    AttackConfig("random", "client-000,client-001").check_clients(known)
    AttackConfig().check_clients(known)

    with pytest.raises(OptionError, match="names client-002, x: must be clients of this simulation, client-000 to"):
        AttackConfig("random", "client-002,client-000,x").check_clients(known)
    with pytest.raises(OptionError, match="'attack.kind' 'copy' must leave at least one honest client"):
        AttackConfig("copy", "client-000,client-001").check_clients(known)


@pytest.mark.parametrize(("side", "square"), [(8, 3), (16, 3), (28, 3), (32, 4), (64, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_trigger_is_a_white_square_in_the_lower_right_corner(side: int, square: int, channels: int) -> None:
    images = torch.zeros(2, channels, side, side, dtype=torch.uint8)

    marked = triggered(images)

    assert int(images.max()) == 0  # the argument stays unchanged
    rows, columns = (marked > 0).any(1).any(0).nonzero(as_tuple=True)
    assert int(rows.min()) == int(columns.min()) == side - square
    assert int((marked == 255).sum()) == 2 * channels * square**2 == int((marked > 0).sum())
