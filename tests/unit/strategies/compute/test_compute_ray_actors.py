"""The job in a Ray actor, against the same job in this process."""

import logging
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compute_fakes import ON_RAY, Heard, uploads_of
from flower_fakes import equal

from strategies.compute.in_process import InProcess
from strategies.compute.ray_actors import RayActors
from strategies.core.errors import ComputeError
from strategies.method import Job, Method, Normalization, Outcome, Progress, Silent, Snapshot

pytestmark = [*ON_RAY, pytest.mark.usefixtures("local_ray")]

ray = pytest.importorskip("ray")


@dataclass(frozen=True)
class ToyConfig:
    epochs: int = 4
    lr: float = 0.1
    marker: str = ""
    die_at: int = 0
    wait_s: float = 0.0


class Net(torch.nn.Module):
    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out


def fit(job: Job, progress: Progress) -> Outcome:
    """Average, then noisy gradient steps; enough floating-point work for thread counts to show."""
    net = job.builders[job.student]()
    states = [upload.read() for upload in job.uploads]
    net.load_state_dict({key: sum(state[key] for state in states) / len(states) for key in states[0]})
    draws = torch.Generator().manual_seed(job.seed)
    start = progress.resume()
    first, pool = 0, torch.zeros(0, 64)
    if start is not None:
        first, pool = start.step, start.appended["pool"]
        net.load_state_dict(start.state["net"])
        draws.set_state(start.state["draws"])
    for epoch in range(first + 1, job.config.epochs + 1):
        images = torch.randn(64, 64, generator=draws)
        pool = torch.cat([pool, images])
        loss = net(pool).square().mean()
        for parameter, gradient in zip(
            net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
        ):
            parameter.data -= job.config.lr * gradient
        scores = job.observer(epoch, net) if job.observer else {}
        progress.report(epoch, job.config.epochs, {"loss": float(loss.detach())})
        progress.record({"epoch": epoch, "loss": float(loss.detach()), **scores})
        state = {"net": net.state_dict(), "draws": draws.get_state()}
        progress.checkpoint(lambda: Snapshot(epoch, state, {"pool": images}))  # noqa: B023  called at once
        if epoch == job.config.die_at and not Path(job.config.marker).exists():
            time.sleep(0.5)  # for the driver to fetch the last checkpoint
            Path(job.config.marker).touch()
            os._exit(1)
        time.sleep(job.config.wait_s)
    facts = torch.tensor([torch.get_num_threads(), float(job.device == "cpu")])
    return Outcome({**net.state_dict(), "facts": facts, "pool": pool.bfloat16()}, timings={"fit": 1.0})


def observe(epoch: int, module: torch.nn.Module) -> dict[str, float]:
    return {"norm": sum(float(p.detach().norm()) for p in module.parameters())}


TOY = Method("toy", "Toy", "nowhere", ToyConfig, fit)


def job(**changes: Any) -> Job:
    facts = Job(uploads_of(Net, 3), {"net": Net}, "net", 3, (1, 8, 8), Normalization((0.5,), (0.5,)), ToyConfig())
    return replace(facts, **{"threads": 2, "device": "auto", "observer": observe, "seed": 3, **changes})


def test_run_in_an_actor_ends_as_in_process_and_says_the_same() -> None:
    here, there = Heard(), Heard()
    threads = torch.get_num_threads()
    expected = InProcess().run(TOY, job(), here)
    outcome = RayActors(fallback=False).run(TOY, job(), there)
    assert equal(outcome.student, expected.student)
    assert outcome.student["facts"].tolist() == [2.0, 1.0]
    assert outcome.student["pool"].dtype == torch.bfloat16
    assert there.rows == here.rows
    assert len(here.rows) == 4
    for one, two in zip(here.snapshots, there.snapshots, strict=True):
        assert torch.equal(one.appended["pool"], two.appended["pool"])
        first, second = (snapshot.state["state"]["net"]["body.0.weight"] for snapshot in (one, two))
        assert torch.equal(first, second)
    assert there.ticks
    assert torch.get_num_threads() == threads


def test_run_with_a_dying_actor_resumes_from_the_checkpoint_and_ends_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ToyConfig(marker=str(tmp_path / "died"), die_at=2)
    log = Heard()
    outcome = RayActors(fallback=False).run(TOY, job(config=config), log)
    assert (tmp_path / "died").exists()
    assert log.resumed == [2]
    assert [snapshot.step for snapshot in log.snapshots] == [1, 2, 3, 4]
    assert equal(outcome.student, InProcess().run(TOY, job(), Silent()).student)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("strategies")] == [
        "the Ray actor died; restart 1 of 2 from the last checkpoint"
    ]


def test_run_without_room_falls_back_in_one_line_or_refuses(caplog: pytest.LogCaptureFixture) -> None:
    log = Heard()
    outcome = RayActors(num_gpus=1, wait_s=1.0).run(TOY, job(), log)
    assert equal(outcome.student, InProcess().run(TOY, job(), Silent()).student)
    assert log.ticks
    assert max(b - a for a, b in zip(log.ticks, log.ticks[1:], strict=False)) < 0.6
    line = "Ray had no room for an actor within"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("strategies")] == [
        f"{line} 1 s: the server stage runs in this process"
    ]
    with pytest.raises(ComputeError, match=line):
        RayActors(num_gpus=1, wait_s=0.5, fallback=False).run(TOY, job(), Silent())


def test_run_with_other_code_in_the_actor_names_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.modules["strategies"].__path__[0])
    shutil.copytree(own, tmp_path / "strategies", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "strategies" / "core" / "seeds.py").open("a") as file:
        file.write("# changed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ComputeError, match="the Ray actor runs other code") as caught:
        RayActors().run(TOY, job(), Silent())
    assert str(tmp_path / "strategies") in str(caught.value)
    assert str(own.resolve()) in str(caught.value)


def test_run_with_the_library_under_another_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.modules["strategies"].__path__[0])
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "__init__.py").touch()
    shutil.copytree(own, tmp_path / "host" / "oneshot", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "host" / "toy.py").write_text(
        "from .oneshot.method import Job, Method, Normalization, Outcome, Silent\n"
        "from .oneshot.compute import RayActors\n"
        "def fit(job, progress):\n    return Outcome({'x': job.builders['m']().weight.detach() * 0 + job.seed})\n"
        "def build():\n    import torch\n    return torch.nn.Linear(2, 1)\n"
        "def run():\n"
        "    job = Job((), {'m': build}, 'm', 2, (1, 1, 1), Normalization((0.,), (1.,)), None, seed=5)\n"
        "    return RayActors(fallback=False).run(Method('toy', '', '', type(None), fit), job, Silent())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import host.toy  # type: ignore[import-not-found]

    assert host.toy.run().student["x"].tolist() == [[5.0, 5.0]]
    for name in [name for name in sys.modules if name.partition(".")[0] == "host"]:
        monkeypatch.delitem(sys.modules, name)


def test_run_without_any_ray_starts_its_own_on_loopback_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Last in this file: it ends the module's Ray."""
    ray.shutdown()
    caplog.set_level(logging.WARNING)
    with pytest.raises(ComputeError, match=r"Ray was not started within 0\.2 s"):
        RayActors(owns_ray=False, wait_s=0.2, fallback=False).run(TOY, job(), Silent())
    monkeypatch.setattr("strategies.compute.ray_start.PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port, why in ((9, "refused"), (other.getsockname()[1], "what listens there is not Ray")):
            with pytest.raises(ComputeError, match=rf"Ray at 127\.0\.0\.1:{port} does not answer: .*{why}"):
                RayActors(address=f"127.0.0.1:{port}", fallback=False).run(TOY, job(), Silent())
    addresses: list[str] = []
    handler = signal.getsignal(signal.SIGTERM)

    class Looking(Heard):
        def record(self, row: Any) -> None:  # noqa: ARG002
            addresses.append(ray.nodes()[0]["NodeManagerAddress"])

    outcome = RayActors(fallback=False).run(TOY, job(), Looking())
    assert equal(outcome.student, InProcess().run(TOY, job(), Silent()).student)
    assert set(addresses) == {"127.0.0.1"}
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler
