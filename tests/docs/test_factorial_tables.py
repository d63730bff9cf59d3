"""Teachers crossed with images: the tables of the page, and the effects of cells that are known."""

from __future__ import annotations

import runpy
from itertools import product
from typing import Any

import pandas as pd
import pytest
from doc_pages import ROOT

BENCH = ROOT / "tests" / "bench"
OF_TEACHER = {"mean": 40.0, "learned weights": 46.0, "Tally": 55.0}
OF_IMAGES = {"noise": 0.0, "Co-Boosting's": 3.0, "DENSE's": -9.0, "real": 12.0}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    return runpy.run_path(str(BENCH / "factorial_tables.py"))


def cells(optimizer: str, seed: int, *, steps: int = 800, chosen_by: float = 0.0, more: float = 0.0) -> pd.DataFrame:
    """Additive cells but for the one of Tally on real images, which has 2 points and `more` besides."""
    return pd.DataFrame([
        {
            "seed": seed, "teacher": teacher, "images": images, "steps": steps, "optimizer": optimizer,
            "start": "fresh", "taught": 80.0, "agreement": 70.0, "chosen_by": chosen_by,
            "student": OF_TEACHER[teacher] + OF_IMAGES[images] + ((teacher, images) == ("Tally", "real")) * (2 + more),
        }
        for teacher, images in product(OF_TEACHER, OF_IMAGES)
    ])  # fmt: skip


def test_the_page_has_the_tables_of_the_results(bench: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "lab" / "teacher-or-images.md").read_text()
    assert [name for name, table in bench["tables"]().items() if table not in page] == []


def test_effects_of_known_cells_are_those_they_were_made_with(bench: dict[str, Any]) -> None:
    found = bench["effects_of"](cells("adam", 0).query('images != "DENSE\'s"'))
    third = 2 / 3  # the interaction's share of a mean over three
    assert list(found.values()) == pytest.approx([6, 15 + third, 3, 12 + third, 2, 55 - 52])


def test_effects_of_some_cells_are_over_those_that_compare(bench: dict[str, Any]) -> None:
    corners = cells("adam", 0).query("images in ('noise', 'real') and teacher != 'learned weights'")
    lone = cells("adam", 0).query("images == 'noise' and teacher == 'learned weights'")
    found = bench["effects_of"](pd.concat([corners, lone]))
    assert bench["effects_of"](corners[1:]) == {}
    assert [name for name in found if "learned" in name or "Co-Boosting" in name] == []
    assert list(found.values()) == pytest.approx([16, 13, 2, 3])


def test_effects_are_paired_over_the_seeds(bench: dict[str, Any]) -> None:
    table = bench["effects"](pd.concat([cells("adam", 0), cells("adam", 1, more=3.0)]))
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines()}
    assert rows["interaction: Tally less mean, on real less on noise"] == "+3.5 ± 2.1 (2 of 2)"
    assert rows["teacher: learned weights less mean"] == "+6.0 ± 0.0 (2 of 2)"


def test_the_optimiser_that_chose_better_makes_all_cells_of_a_block(bench: dict[str, Any]) -> None:
    better = cells("sgd", 0, chosen_by=60.0)
    other, alone = cells("adam", 0, chosen_by=50.0), cells("adam", 0, steps=8000, chosen_by=10.0)
    unpaired = cells("adam", 1, chosen_by=99.0)  # the other optimiser has no cell of this seed
    found = pd.concat([better, other, alone, unpaired])

    kept = bench["chosen"](found)

    assert {(row.steps, row.optimizer) for row in kept.itertuples()} == {(800, "sgd"), (8000, "adam")}
    assert bench["optimizers"](found).splitlines()[2:] == [
        "| 800 | fresh | 9 | 50.0 | 60.0 |",
    ]
