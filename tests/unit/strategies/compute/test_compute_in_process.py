"""The job in this process, and the choice of a place."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import strategies.compute as compute
from strategies.compute.in_process import InProcess
from strategies.compute.ray_start import NoRoomError, start_ray
from strategies.core.errors import ComputeError
from strategies.core.facts import UploadFacts
from strategies.core.offline import ray_token
from strategies.method import ClientPhase, Job, Method, Need, Normalization, Outcome, Progress, Silent, Upload


def job(**changes: object) -> Job:
    upload = Upload(UploadFacts("a", "linear"), lambda: {"weight": torch.ones(1)})
    facts = {"uploads": (upload,), "builders": {}, "student": "linear", "num_classes": 2, "input_shape": (1, 2, 2)}
    return Job(**{**facts, "normalization": Normalization((0.5,), (0.5,)), "config": None, **changes})  # type: ignore[arg-type]


def method(fit: object, *needs: Need) -> Method:
    return Method("toy", "Toy", "nowhere", type(None), fit, frozenset(needs))  # type: ignore[arg-type]


def test_run_sets_the_threads_of_the_job_and_restores_them_also_after_an_error() -> None:
    def fit(job: Job, progress: Progress) -> Outcome:
        raise KeyError(torch.get_num_threads())

    with pytest.raises(KeyError, match="2"):
        InProcess().run(method(fit), job(threads=2), Silent())
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_method_with_or_without_clients_has_gradients_though_its_caller_has_none(without: type) -> None:
    def fit(job: Job, progress: Progress, *clients: object) -> Outcome:
        weight = torch.ones(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(weight.sum(), weight)
        return Outcome({"gradient": gradient})

    toy = replace(method(fit), client_phase=ClientPhase(fit, lambda job: None))
    with without():
        outcomes = [place.run(toy, job(), Silent()) for place in (InProcess(), InProcess(object()))]  # type: ignore[arg-type]
    assert [outcome.student for outcome in outcomes] == [{"gradient": torch.ones(1)}] * 2


def test_ray_actors_with_ray_blocked_imports_and_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    def fit(job: Job, progress: Progress) -> Outcome:
        return Outcome({"w": torch.ones(1)})

    outcome = compute.RayActors().run(method(fit), job(), Silent())
    assert outcome.student is not None
    assert [record.message for record in caplog.records] == [
        "Ray is not installed: the server stage runs in this process"
    ]
    with pytest.raises(ComputeError, match="Ray is not installed"):
        compute.RayActors(fallback=False).run(method(fit), job(), Silent())


# What Ray may raise, said by a stand-in for it.


class FakeRayError(Exception):
    """Ray's own."""


def ray_that_raises(error: Exception) -> Any:
    kinds = dict.fromkeys(("RayActorError", "OutOfMemoryError", "ObjectLostError"), type("Other", (FakeRayError,), {}))
    return SimpleNamespace(
        init=Mock(side_effect=error),
        exceptions=SimpleNamespace(RayError=FakeRayError, **kinds),
        _private=SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True)),
    )


@pytest.mark.parametrize(
    "error",
    [Exception("The current node timed out during startup."), RuntimeError("no"), OSError("no"), FakeRayError("no")],
)
def test_start_when_ray_does_not_start_says_so_and_leaves_the_job_to_this_process(error: Exception) -> None:
    ray = ray_that_raises(error)
    with pytest.raises(NoRoomError, match=f"Ray does not start: {error}"):
        start_ray(ray, "")
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER


# A Ray that the library starts has a token: the variables are there before Ray is imported, which reads them once.


SESSION = """
from strategies.compute.ray_actors import RayActors
from strategies.compute.ray_start import NoRoomError
try:
    with RayActors().session(lambda: None):
        pass
except NoRoomError:
    print("no Ray")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "mode"), [({}, "token 64"), ({"RAY_AUTH_MODE": "disabled"}, "disabled 0")])
def test_token_is_in_the_environment_before_ray_is_imported(tmp_path: Path, given: dict[str, str], mode: str) -> None:
    names = '"RAY_AUTH_MODE"'
    text = f'import os\nprint(os.environ[{names}], len(os.environ.get("RAY_AUTH_TOKEN", "")))\nraise ImportError\n'
    (tmp_path / "ray.py").write_text(text)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment = {**plain, "PYTHONPATH": str(tmp_path), **given}

    done = subprocess.run([sys.executable, "-c", SESSION], env=environment, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == [mode, "no Ray"], done.stderr[-2000:]


def test_cluster_of_the_user_keeps_its_own_mode() -> None:
    assert ray_token({"RAY_ADDRESS": "ray.example.org:6379"}) == {}
    assert ray_token({"RAY_AUTH_MODE": "disabled"}) == {}
    assert ray_token({})["RAY_AUTH_TOKEN"] != ray_token({})["RAY_AUTH_TOKEN"]


def test_a_stage_goes_to_ray_by_itself_only_where_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(compute.choose("auto")).__name__ == type(compute.choose("auto:1")).__name__ == "InProcess"
    assert type(compute.choose("auto:2")).__name__ == "RayActors"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert type(compute.choose("auto")).__name__ == "RayActors"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert type(compute.choose("auto:0")).__name__ == "RayActors"
