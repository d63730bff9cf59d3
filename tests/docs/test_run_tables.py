"""Tables of the published schedule from results that are known."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from doc_pages import ROOT

BENCH = ROOT / "tests" / "bench"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCH))
    SCRIPT = runpy.run_path(str(BENCH / "run_tables.py"))


def row(name: str, seed: int, **accuracy: float) -> dict[str, Any]:
    return {"data": "mnist", "alpha": 0.1, "seed": seed, "name": name, "accuracy": accuracy}


def test_what_a_method_has_over_fedens_is_paired_by_seed_and_stands_beside_the_papers() -> None:
    rows = [row("fedens", seed, FedENS=value) for seed, value in enumerate((90.0, 80.0, 70.0))]
    rows += [row("dense", seed, DENSE=value) for seed, value in enumerate((91.0, 82.0, 73.0))]
    rows += [row("tally, spans", 1, Tally=95.0)]

    table = SCRIPT["over_fedens"]({"rows": rows}, data="mnist").splitlines()

    # The paper's DENSE has 87.8, and its FedENS 88.2.
    assert "| DENSE | +2.0 ± 1.0 | -0.4 |" in table
    assert "| Tally, counts read off, images in the spans | +15.0* |  |" in table
    assert not any(line.startswith("| FedENS") for line in table)
