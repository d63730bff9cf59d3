"""Run folders and server stages made by hand, without Flower and without a client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from commands import named
from commands import oneshot as run_command

from fl_app.data import open_split
from fl_app.models import build
from server_app.compare import comparison
from server_app.compare.cell import Cell, work
from server_app.settings.build import build_job, held_out
from server_app.settings.catalogue import toml_table
from server_app.settings.read import Settings, default_settings, read_settings
from server_app.settings.server_data import HeldOut
from strategies.core.facts import UploadFacts
from strategies.core.options import Scalar, options_of
from strategies.core.seeds import seeded_torch
from strategies.method import METHODS, Silent, Upload
from strategies.run.files import write_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport

# As little work as every method can do.
TINY: dict[str, Any] = {
    "steps": 4,
    "epochs": 2,
    "generator-steps": 2,
    "inversion-steps": 2,
    "synthesis-batch-size": 8,
    "batch-size": 8,
    "latent": 8,
    "steps-per-epoch": 2,
    "images": 64,
}
SMALL: dict[str, Any] = {
    "method": "fedens",
    "compute": "in-process",
    "device": "cpu",
    "threads": 1,
    "data.proxy": 0.1,
    **{
        option.key: TINY[option.key.partition(".")[2]]
        for name in METHODS
        for option in options_of(METHODS[name].config, name)
        if option.key.partition(".")[2] in TINY
    },
}


@lru_cache
def _trained(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    with seeded_torch(seed):
        model = build(architecture, num_classes=10, input_shape=(1, 16, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        split = open_split("digits", "train")
        for start in range(100 * seed, 100 * seed + 256, 64):
            data = split.take(torch.arange(start, start + 64))
            loss = torch.nn.functional.cross_entropy(model((data.images / 255 - 0.5) / 0.5), data.labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return dict(model.state_dict())


def state_of(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Return weights that know a little about the digits, each seed's another little."""
    return {key: value.detach().clone() for key, value in _trained(architecture, seed).items()}


def counts_of(seed: int) -> tuple[int, ...]:
    return tuple((7 * label + 13 * seed) % 50 + 1 for label in range(10))


class Blank:
    """A figure, and all its parts, that takes every call and saves an empty file."""

    def __getattr__(self, _: str) -> Blank:
        return self

    def __call__(self, *_: Any, **__: Any) -> Blank:
        return self

    def __getitem__(self, _: Any) -> Blank:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __reversed__(self) -> Iterator[Any]:
        return iter(((), ()))  # a legend's labels and handles

    def subplots(self, rows: int, columns: int) -> tuple[Blank, ...]:
        return (self,) * rows * columns

    def get_size_inches(self) -> tuple[float, float]:
        return 8.0, 4.0

    def get_title(self) -> str:
        return "blank"

    def savefig(self, path: Path, **_: Any) -> None:
        path.touch()


@pytest.fixture(autouse=True)
def _blank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave plots blank, because drawing takes most of a small run; the mark ``plots`` draws them."""
    if request.node.get_closest_marker("plots") is None:
        monkeypatch.setattr("matplotlib.figure.Figure", lambda **_: Blank())
        monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", lambda _: None)


@pytest.fixture(autouse=True, scope="session")
def _one_command() -> Iterator[None]:
    """Make the command once: it takes as long as many of its answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture
def small() -> dict[str, Any]:
    """Return settings that run in moments."""
    return dict(SMALL)


@pytest.fixture
def oneshot(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Return a function that runs a command with small settings; it returns exit status, JSON and log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "clients"))
    quick = {**small, "client.epochs": 1, "data.limit": 300, "checkpoint-s": 0.0}
    del quick["compute"], quick["method"]

    def command(name: str, *words: object, **settings: Scalar) -> tuple[int, dict[str, Any], str]:
        (tmp_path / "settings.toml").write_text(toml_table({**quick, **named(settings)}))
        more = ["--set", "settings.toml", "--clients", "3"] if name == "run" else []
        done = run_command(name, *words, "--local", *more, "--format", "json")
        lines = done.stdout.splitlines()
        return done.exit_code, json.loads(lines[-1]) if lines else {}, done.stderr

    return command


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Let the cells of comparisons run in this process, and return the list of those that do."""
    found: list[tuple[str, str, int]] = []

    def here(cell: Cell, token: str, log: Callable[[str], None]) -> str:
        found.append((cell.method, cell.run.name, cell.seed))
        work(cell, log)
        return ""

    monkeypatch.setattr(comparison, "run_cell", here)
    monkeypatch.setattr(comparison, "guarded", lambda: nullcontext((Path(), "")))  # there is no process to guard
    monkeypatch.setattr(comparison, "jobs_for", lambda *_: 1)  # cells in one process take turns
    return found


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a run folder with stored uploads, as an app's run leaves it."""

    def make(*architectures: str, name: str = "run", **settings: Any) -> Path:
        flat = {**default_settings(), **SMALL, **named(settings)}
        info = {
            "method": flat["method"],
            "seed": flat["seed"],
            "student": flat["model.student"] or flat["model.name"],
            "num-classes": 10,
            "input-shape": [1, 16, 16],
            "normalization": [[0.5], [0.5]],
            "settings": flat,
            "num-supernodes": 3,
            "commit": "0123456789ab",
        }
        with RunFolder.create(tmp_path / "runs" / name, info) as folder:
            first = folder.round(1)
            for seed, architecture in enumerate(architectures or ("lenet5", "lenet5", "lenet5")):
                counts = counts_of(seed)
                state = state_of(architecture, seed)
                first.accept(UploadFacts(f"client-{seed:03d}", architecture, sum(counts), counts), state)
            first.refuse("node-7", "no answer within 5 s")
            moved = {f"client-{seed:03d}": 1000 + seed for seed in range(3)}
            phases = {"upload": {"up": moved, "down": dict.fromkeys(moved, 150)}}
            write_json(folder.path / "traffic.json", {"phases": phases})
        return tmp_path / "runs" / name

    return make


@pytest.fixture
def stage() -> Callable[..., tuple[StageReport, Settings, HeldOut]]:
    """Return a function that runs a method on uploads of some architectures, in memory."""

    def run(method: str, *architectures: str, **settings: Any) -> tuple[StageReport, Settings, HeldOut]:
        chosen = read_settings({**SMALL, "method": method, **named(settings)})
        images, split = held_out(chosen)
        uploads = tuple(
            Upload(
                UploadFacts(f"client-{seed:03d}", architecture, sum(counts_of(seed)), counts_of(seed)),
                partial(state_of, architecture, seed),
            )
            for seed, architecture in enumerate(architectures or ("lenet5", "lenet5", "lenet5"))
        )
        job = replace(build_job(chosen, split, images), uploads=uploads)
        return StageReport(chosen.method.fit(job, Silent()), job, 0, 0.5), chosen, images

    return run
