"""The client half of FENS: what it keeps on its disk, what it can do without torch, and two lines for any ClientApp."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fens_fakes import CLASSES, RUN, DirectClients, fens_job, fitted
from method_fakes import BUILDERS, UPLOADS, upload
from torch import nn

from strategies.client import logits as module
from strategies.client.fens import OwnModel, respond
from strategies.client.holdout import held_out
from strategies.client.logits import ENSEMBLES_KEPT, LogitCache, Logits
from strategies.combiners import aggregator_steps as gate_steps
from strategies.combiners import aggregator_steps as steps
from strategies.combiners.aggregators import AGGREGATORS
from strategies.combiners.gate import start_gate
from strategies.uploads.packed import ensemble_digest, pack_member

MEMBERS = ("m0", "m1", "m2")
ROOT = Path(__file__).resolve().parents[3]
# What every question says.
KNOWN: dict[str, Any] = {"run-id": RUN, "seed": 0, "holdout": 0.1, "per-class": False, "num-classes": CLASSES}


def logits(members: tuple[str, ...] = MEMBERS, seed: int = 0) -> Logits:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(members), 5, 4)).astype(np.float32)
    return Logits(members, values, rng.integers(0, 4, 5), np.zeros(0, np.float32))


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECENT", type(module._RECENT)())


def test_logits_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    LogitCache(str(tmp_path), RUN, "alice").save("e0", logits())

    found = LogitCache(str(tmp_path), RUN, "alice").load("e0")

    assert found.members == MEMBERS
    np.testing.assert_array_equal(found.values, logits().values)
    np.testing.assert_array_equal(found.labels, logits().labels)
    assert LogitCache(str(tmp_path), RUN, "bob").load("e0") is None
    assert LogitCache(str(tmp_path), "b" * 32, "alice").load("e0") is None


def test_logits_are_kept_of_the_newest_ensembles_only(tmp_path: Path) -> None:
    cache = LogitCache(str(tmp_path), RUN, "alice")
    for number in range(ENSEMBLES_KEPT + 2):
        cache.save(f"e{number}", logits(seed=number))
        time.sleep(0.01)

    kept = [number for number in range(ENSEMBLES_KEPT + 2) if cache.load(f"e{number}") is not None]
    assert kept == list(range(2, ENSEMBLES_KEPT + 2))


def test_held_out_examples_are_a_tenth_and_the_same_every_time() -> None:
    train, held = held_out(95, client="alice", seed=3)

    assert len(held) == 9
    assert sorted([*train, *held]) == list(range(95))
    np.testing.assert_array_equal(held_out(95, client="alice", seed=3)[1], held)
    assert not np.array_equal(held_out(95, client="bob", seed=3)[1], held)
    assert not np.array_equal(held_out(95, client="alice", seed=4)[1], held)


def test_a_member_that_works_in_place_changes_neither_examples_nor_the_logits_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, inplace in (("hasty", True), ("calm", False)):
        layers = partial(nn.Hardtanh, -0.1, 0.1, inplace)
        monkeypatch.setitem(
            BUILDERS, name, lambda layers=layers: nn.Sequential(layers(), nn.Flatten(), nn.Linear(128, CLASSES))
        )

    def stored(first: str) -> np.ndarray[Any, Any]:
        clients = DirectClients(tmp_path / first)
        fitted(clients, replace(fens_job(), uploads=(upload(0, first), *UPLOADS[1:])))
        (path,) = (tmp_path / first).rglob("c1-ensembles-*/*.npz")
        values: np.ndarray[Any, Any] = np.load(path)["values"]
        return values

    np.testing.assert_array_equal(stored("hasty"), stored("calm"))


def test_rounds_and_votes_run_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    """A deployed client starts a new process for every round: it must not wait for torch."""
    clients = DirectClients(tmp_path)
    fitted(clients, fens_job())
    ensemble = next(tmp_path.rglob("c0-ensembles-*/*.npz")).stem
    script = f"""
        import sys
        sys.modules["torch"] = None
        import client_app.app
        import numpy as np
        from strategies.client.fens import LocalFens, respond
        from strategies.combiners.aggregators import AGGREGATORS

        def never(*args):
            raise AssertionError("a round needs neither data nor models")

        facts = {{**{KNOWN!r}, "ensemble": {ensemble!r}, "round": 1, "steps": 2, "batch-size": 4, "lr": 0.5}}
        local = LocalFens("c0", never, never, never, state_dir={str(tmp_path)!r})
        for name in ("linear", "per-class", "nn"):
            params = AGGREGATORS[name].start(0, members=3, classes=3)
            said, arrays = respond({{**facts, "step": "round", "aggregator": name}}, params, local)
            assert said["examples"] == 9, said
            assert any(not np.array_equal(arrays[key], value) for key, value in params.items()), name
        _, votes = respond({{**facts, "step": "votes"}}, {{}}, local)
        assert votes["counts"].sum() == 3 * 9
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=ROOT)


@pytest.mark.parametrize("step", ["offer", "ensemble", "round", "votes"])
def test_an_ensemble_whose_name_is_a_path_is_refused(tmp_path: Path, step: str) -> None:
    facts = {**KNOWN, "step": step, "ensemble": "../../../victim"}

    said, _ = respond(facts, {}, DirectClients(tmp_path).local("c0"))

    assert said["error"] == "the server's ensemble is '../../../victim': must be 64 hexadecimal digits"


OWN = OwnModel("narrow", UPLOADS[0].read())
MINE = pack_member("narrow", OWN.state, precision="float32").digest


def repeated(folder: Path, step: str, count: int, *, classes: int = CLASSES, limit: float = 0.0) -> dict[str, Any]:
    """Return what client c0 says about an ensemble of its own upload alone, so often."""
    facts = {
        **KNOWN, "num-classes": classes, "step": step, "ensemble": ensemble_digest([MINE] * count),
        "members": [MINE] * count, "sizes": [8] * count, "architectures": ["narrow"] * count, "precision": "float32",
    }  # fmt: skip
    local = replace(DirectClients(folder, limit=limit).local("c0"), own=lambda _: OWN)
    return respond(facts, {}, local)[0]


@pytest.mark.parametrize(
    ("step", "classes", "before", "line"),
    [
        ("offer", CLASSES, 0, "logits are 0.4 MiB"),
        ("offer", CLASSES, 1, "logits are 0.4 MiB"),
        ("ensemble", CLASSES, 0, "logits are 0.4 MiB"),
        ("ensemble", 1, 0, "logits are 0.4 MiB"),  # the server names fewer classes than the member has
        ("votes", CLASSES, 4000, "votes are 0.3 MiB"),
    ],
)
def test_a_member_named_often_takes_no_more_than_the_node_permits(
    tmp_path: Path, step: str, classes: int, before: int, line: str
) -> None:
    if before:
        assert "error" not in repeated(tmp_path, "ensemble", before)
    kept = [*tmp_path.rglob("*.npz")]

    said = repeated(tmp_path, step, 4000, classes=classes, limit=0.25)

    assert said["error"] == f"the ensemble's {line}: must be at most 0.25 MiB on this node"
    assert [*tmp_path.rglob("*.npz")] == kept


def stepped(folder: Path, aggregator: str, given: dict[str, np.ndarray[Any, Any]], limit: float = 0.0) -> str:
    """Return the error of client c0 in a round whose aggregator has these parameters; empty without one."""
    rng = np.random.default_rng(0)
    found = Logits(MEMBERS, rng.normal(size=(3, 40, 3)).astype(np.float32), rng.integers(0, 3, 40), IMAGES)
    LogitCache(str(folder), RUN, "c0", "0/0.1/False").save("e" * 64, found)
    facts = {
        **KNOWN, "ensemble": "e" * 64, "step": "round", "round": 1, "aggregator": aggregator, "steps": 1,
        "batch-size": 2**20, "lr": 0.1,
    }  # fmt: skip
    said, moved = respond(facts, given, DirectClients(folder, limit=limit).local("c0"))
    assert moved.keys() == (set() if "error" in said else given.keys())
    return str(said.get("error", ""))


IMAGES = np.zeros((40, 1, 16, 16), np.float32)
GATE = start_gate(0, members=3, classes=3, input_shape=(1, 16, 16))
LINEAR = AGGREGATORS["linear"].start(0, members=3, classes=3)
NN = AGGREGATORS["nn"].start(0, members=3, classes=3, hidden=4000)


@pytest.mark.parametrize(
    ("aggregator", "given", "line"),
    [
        ("linear", {**LINEAR, "bias": np.ones((5000, 1, 1), np.float32)}, "'bias' is float32 [5000, 1, 1]: must be"),
        ("linear", {**LINEAR, "weight": np.ones((500, 3), np.float32)}, "'weight' is float32 [500, 3]: must be"),
        ("linear", {"weight": LINEAR["weight"]}, "parameters are ['weight']: must be ['bias', 'weight']"),
        ("linear", {**LINEAR, "bias": np.ones(1)}, "'bias' is float64 [1]: must be float32 [1]"),
        ("nn", {**NN, "bias1": np.ones(0, np.float32)}, "'weight1' is float32 [4000, 9]: must be float32 [6, 9]"),
        ("moe", {**GATE, "layer1_weight": np.ones((120, 5), np.float32)}, "is float32 [120, 5]: must be float32 [120,"),
        ("moe", {**GATE, "layer3_bias": np.ones(9, np.float32)}, "is float32 [3, 84]: must be float32 [9, 84]"),
        ("voting", {"counts": np.ones((3, 3, 3), np.float32)}, "it is not trained by gradients"),
        ("magic", LINEAR, "'magic'"),
    ],
)
def test_parameters_that_do_not_fit_the_logits_are_refused_before_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregator: str, given: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(steps, "local_steps", None)
    monkeypatch.setattr(gate_steps, "gate_steps", None)

    error = stepped(tmp_path, aggregator, given)

    assert error.startswith(f"the server's aggregator '{aggregator}' does not fit the logits: ")
    assert line in error


def test_the_hidden_units_of_a_step_take_no_more_than_the_node_permits(tmp_path: Path) -> None:
    line = "the ensemble's hidden units in a step are 0.6 MiB: must be at most 0.5 MiB on this node"
    assert stepped(tmp_path, "nn", NN, limit=0.5) == line
    assert stepped(tmp_path, "nn", NN, limit=0.75) == ""
