"""Plain arguments of the strategies: wrong ones are one line, and what a project adds is heard of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_fakes import SHAPE, strategy
from flwr.serverapp.strategy import FedAvg

from strategies import FedENS, FLBoost, Iterative, OneShotFedAvg
from strategies.core.errors import OptionError


def around(model: Any, **settings: Any) -> FLBoost:
    return FLBoost(model, base=FedAvg(), **settings)


KINDS = [FedENS, Iterative, around]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *[({"input_shape": shape}, "must be three whole numbers above 0, ") for shape in (8, (3, 8), (1, *SHAPE))],
        *[({"input_shape": shape}, "must be three whole numbers above 0, ") for shape in ((1, 8, 0), (1, 8.0, 8))],
        ({"seed": None}, "seed is None: must be a whole number"),
        ({"run_dir": 5}, "run_dir is 5: must be the path of a folder, or None for a new one"),
        ({"min_uploads": "two"}, "min_uploads is 'two': must be a whole number at least 1"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_one_line(
    tmp_path: Path, kind: Any, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError) as refusal:
        strategy(kind, **{"run_dir": tmp_path / "run", **change})
    assert str(refusal.value).startswith(next(iter(change)))
    assert reason in str(refusal.value)


@pytest.mark.parametrize("kind", [OneShotFedAvg, Iterative])
def test_a_run_folder_is_the_one_meant_when_the_strategy_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setenv("ONESHOT_RUNS", "runs")
    mine = strategy(kind, "mine")  # type: ignore[arg-type]
    new = strategy(kind, None)
    folder = new.folder.path
    new.close()
    monkeypatch.chdir(tmp_path / "other")
    assert mine.folder.path == tmp_path / "one" / "mine"
    assert new.folder.path == folder
    assert folder.is_relative_to(tmp_path / "one")
    mine.close()
    new.close()
    assert list((tmp_path / "other").iterdir()) == []
