"""What holds for every test."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_MEMORY = Path("/dev/shm")  # noqa: S108  a file system in memory, where Linux has one


def pytest_configure() -> None:
    """Keep the files of the tests in memory, because runs sync thousands of small files to the disk."""
    if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


# The files whose tests take longest, which start first, so that two processes end together.
LONGEST = (
    "test_deploy_tls.py", "test_faults_deployment.py", "test_compare.py", "test_launch.py", "test_local_runs.py",
    "test_published_loops.py", "test_compute_kept.py", "test_faults.py", "test_wheel.py", "test_published.py",
    "test_plugin.py", "test_compute_ray_actors.py", "test_replay.py", "test_offline.py", "test_local.py",
    "test_export.py", "test_compute_shards.py", "test_changed_bits.py", "test_scores.py", "test_cli.py",
    "test_methods.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others keep their order."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests, which live to the end, and let it look seldom at the rest."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Restore the environment, which the option --offline changes for the rest of a process."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})


@pytest.fixture(scope="session")
def plotless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH for runs that go on without their plots, which take a third of a small run."""
    folder = tmp_path_factory.mktemp("plotless")
    (folder / "matplotlib.py").write_text("raise ImportError('no plots here')\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def without_plots(plotless: str) -> Iterator[None]:
    """Let no run of a module draw, in this process or in those that inherit its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", plotless)
        for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sums of several threads round otherwise, and for models as small as these one is the fastest."""
    import torch  # here, since the process that hands files to the others does without

    torch.set_num_threads(1)  # before all tests, so that what they share is made with one thread too
