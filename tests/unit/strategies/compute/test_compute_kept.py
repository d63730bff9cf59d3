"""Many runs in one actor, against as many single runs."""

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from compute_fakes import ON_RAY, Heard, uploads_of
from flower_fakes import equal
from torch import nn

from strategies.compute.in_process import InProcess
from strategies.compute.ray_actors import RayActors
from strategies.core.errors import ComputeError, OptionError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Method, Normalization, Outcome, Progress, Silent, Upload

pytestmark = [*ON_RAY, pytest.mark.usefixtures("local_ray")]

ray = pytest.importorskip("ray")


def fit(job: Job, progress: Progress) -> Outcome:
    """One noisy step from the start; tells the process, and all that the job carries over."""
    progress.record({"pid": os.getpid()})
    net = job.builders[job.student]()
    states = [upload.read() for upload in job.uploads]
    net.load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    draws = torch.Generator().manual_seed(job.seed + job.server_round)
    images = torch.randn(16, 8, generator=draws)
    if job.proxy is not None:
        images = images + job.proxy.float().mean()
    loss = net(images).square().mean()
    for parameter, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        parameter.data -= job.config["lr"] * gradient
    before = (job.memory or {"sum": torch.zeros(1)})["sum"]
    start = sum(value.sum() for value in (job.start or {}).values())
    return Outcome(dict(net.state_dict()), memory={"sum": before + start + loss.detach()})


def fit_negated(job: Job, progress: Progress) -> Outcome:
    outcome = fit(job, progress)
    return replace(outcome, student={key: -value for key, value in (outcome.student or {}).items()})


def refuse(job: Job, progress: Progress) -> Outcome:
    raise OptionError(f"no such round {job.server_round}")


def die_once(job: Job, progress: Progress) -> Outcome:
    try:
        os.close(os.open(job.config["marker"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return fit(job, progress)
    os._exit(1)


def hang(job: Job, progress: Progress) -> Outcome:
    progress.record({"pid": os.getpid()})
    time.sleep(60)
    return Outcome()


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), activation())


TOY = Method("toy", "Toy", "nowhere", dict, fit)


def job(server_round: int = 1, **changes: Any) -> Job:
    uploads = uploads_of(net, 2, 100 * server_round)
    facts = Job(uploads, {"net": net}, "net", 3, (1, 1, 8), Normalization((0.5,), (0.5,)), {"lr": 0.1})
    return replace(facts, **{"server_round": server_round, "start": {"w": torch.ones(3)}, **changes})


def assert_as_single(outcome: Outcome, method: Method, one: Job) -> None:
    """Compare with a run in this process, bit for bit."""
    expected = InProcess().run(method, one, Silent())
    assert equal(outcome.student, expected.student)
    assert equal(outcome.memory, expected.memory)


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def gone(pid: int) -> bool:
    return soon(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_rounds_in_one_actor_end_as_single_runs_and_carry_memory_over() -> None:
    heard, memory = Heard(), None
    with RayActors(fallback=False).kept() as kept:
        for number in (1, 2, 3):
            one = job(number, memory=memory)
            outcome = kept.run(TOY, one, heard)
            assert_as_single(outcome, TOY, one)
            memory = outcome.memory
    assert len(heard.pids) == 3
    assert len(set(heard.pids)) == 1
    assert heard.pids[0] != os.getpid()
    assert gone(heard.pids[0])
    assert ray.is_initialized()  # it was there before


def test_changes_between_rounds_take_effect() -> None:
    proxy = torch.ones(2, 1, 1, 8, dtype=torch.uint8)
    heard = Heard()
    with RayActors(fallback=False).kept() as kept:
        changes: list[dict[str, Any]] = [
            {},
            {"config": {"lr": 0.5}},
            {"builders": {"net": partial(net, nn.ReLU)}},
            {"proxy": proxy},
            {"proxy": proxy, "start": None, "seed": 7},
        ]
        for change in changes:
            assert_as_single(kept.run(TOY, job(**change), heard), TOY, job(**change))
        proxy.fill_(9)
        assert_as_single(kept.run(TOY, job(proxy=proxy), heard), TOY, job(proxy=proxy))
        assert_as_single(kept.run(TOY, job(), heard), TOY, job())
        other = replace(TOY, fit=fit_negated)
        assert_as_single(kept.run(other, job(), heard), other, job())
        assert_as_single(kept.run(TOY, job(device="auto"), heard), TOY, job())
    assert len(set(heard.pids[:-1])) == 1
    assert heard.pids[-1] != heard.pids[0]  # another device asks for another share of a GPU


def test_an_actor_that_dies_between_or_in_runs_is_replaced(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    with RayActors(fallback=False, max_restarts=1).kept() as kept:
        kept.run(TOY, job(1), heard)
        os.kill(heard.pids[0], signal.SIGKILL)
        assert_as_single(kept.run(TOY, job(2), heard), TOY, job(2))
        dying = replace(TOY, fit=die_once)
        for number in (3, 4):
            one = job(number, config={"lr": 0.1, "marker": str(tmp_path / str(number))})
            assert_as_single(kept.run(dying, one, heard), TOY, one)
    assert len(set(heard.pids)) == 4
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("strategies")]
    assert ours == [
        "the Ray actor died since the last run: a new one replaces it",
        *["the Ray actor died; restart 1 of 1 from the last checkpoint"] * 2,
    ]


def test_a_run_that_fails_leaves_the_next_its_actor_and_one_cut_off_does_not() -> None:
    class Interrupting(Heard):
        def record(self, row: Any) -> None:
            super().record(row)
            raise KeyboardInterrupt

    heard, cut = Heard(), Interrupting()
    with RayActors(fallback=False).kept() as kept:
        kept.run(TOY, job(1), heard)
        with pytest.raises(OptionError, match="no such round 2"):
            kept.run(replace(TOY, fit=refuse), job(2), heard)
        assert_as_single(kept.run(TOY, job(3), heard), TOY, job(3))
        with pytest.raises(KeyboardInterrupt):
            kept.run(replace(TOY, fit=hang), job(4), cut)
        assert gone(cut.pids[0])
        assert_as_single(kept.run(TOY, job(5), heard), TOY, job(5))
    assert heard.pids[0] == heard.pids[1] == cut.pids[0] != heard.pids[2]
    assert gone(heard.pids[2])


def test_memory_does_not_grow_with_the_rounds() -> None:
    mib = 2**20

    def heavy(job: Job, progress: Progress) -> Outcome:
        progress.record({"pid": os.getpid()})
        total = sum(float(upload.read()["w"].sum()) for upload in job.uploads)
        return Outcome({"w": torch.full((mib // 4,), total)})

    uploads = tuple(Upload(UploadFacts(f"c{n}", "net", 10), lambda: {"w": torch.ones(mib)}) for n in range(4))
    heard, sizes = Heard(), []
    with RayActors(fallback=False).kept() as kept:
        for number in range(1, 25):
            kept.run(replace(TOY, fit=heavy), job(number, uploads=uploads, start={"w": torch.ones(mib)}), heard)
            if 5 < number <= 10 or number > 19:
                gc.collect()
                sizes.append(psutil.Process(heard.pids[-1]).memory_full_info().uss / mib)
        gc.collect()
        assert soon(lambda: not ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    assert len(set(heard.pids)) == 1
    # A round brings 20 MiB, 4 of them with each upload.
    assert max(sizes[5:]) < max(sizes[:5]) + 40


def test_ray_that_ends_between_rounds_is_missed_at_once_and_our_own_is_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Last in this file: it ends the module's Ray."""
    heard = Heard()
    with RayActors(owns_ray=False).kept() as kept, RayActors(owns_ray=False, fallback=False).kept() as strict:
        kept.run(TOY, job(1), heard)
        strict.run(TOY, job(1), heard)
        ray.shutdown()
        began = time.monotonic()
        with pytest.raises(ComputeError, match="the simulation's Ray has ended"):
            strict.run(TOY, job(2), heard)
        assert_as_single(kept.run(TOY, job(2), heard), TOY, job(2))
        assert time.monotonic() - began < 60  # not the 120 s that a Ray to come is waited for
    assert heard.pids[2:] == [os.getpid()]
    assert not ray.is_initialized()
    with RayActors(fallback=False).kept() as kept:
        for number in (1, 2):
            assert_as_single(kept.run(TOY, job(number), heard), TOY, job(number))
        raylets = [child for child in psutil.Process().children(recursive=True) if "raylet" in child.name()]
        assert heard.pids[-1] == heard.pids[-2]
        assert raylets
    assert not ray.is_initialized()
    assert all(gone(child.pid) for child in raylets)
    assert gone(heard.pids[-1])
