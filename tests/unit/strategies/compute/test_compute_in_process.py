"""The job in this process, and the choice of a place."""

import sys
from dataclasses import replace

import pytest
import torch

import strategies.compute as compute
from strategies.compute.in_process import InProcess
from strategies.compute.with_clients import WithClients
from strategies.core.errors import ComputeError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Method, Need, Normalization, Outcome, Progress, Silent, Upload


def job(**changes: object) -> Job:
    upload = Upload(UploadFacts("a", "linear"), lambda: {"weight": torch.ones(1)})
    facts = {"uploads": (upload,), "builders": {}, "student": "linear", "num_classes": 2, "input_shape": (1, 2, 2)}
    return Job(**{**facts, "normalization": Normalization((0.5,), (0.5,)), "config": None, **changes})  # type: ignore[arg-type]


def method(fit: object, *needs: Need) -> Method:
    return Method("toy", "Toy", "nowhere", type(None), fit, frozenset(needs))  # type: ignore[arg-type]


def test_run_sets_the_threads_of_the_job_and_restores_them() -> None:
    seen: list[int] = []

    def fit(job: Job, progress: Progress) -> Outcome:
        seen.append(torch.get_num_threads())
        return Outcome()

    InProcess().run(method(fit), job(threads=2), Silent())
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_run_with_a_failing_method_restores_threads_and_lets_the_error_through() -> None:
    def fit(job: Job, progress: Progress) -> Outcome:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        InProcess().run(method(fit), job(threads=2), Silent())
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_method_with_or_without_clients_has_gradients_though_its_caller_has_none(without: type) -> None:
    def fit(job: Job, progress: Progress, *clients: object) -> Outcome:
        weight = torch.ones(1, requires_grad=True)
        (gradient,) = torch.autograd.grad(weight.sum(), weight)
        return Outcome({"gradient": gradient})

    toy = replace(method(fit), fit_with=fit)
    with without():
        outcomes = [place.run(toy, job(), Silent()) for place in (InProcess(), WithClients(None))]  # type: ignore[arg-type]
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
