from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import replayed

from server_app.report.gatekeeping import verdict_lines, verdict_table
from strategies.core.durable import sha256_file, with_digest
from strategies.gatekeeper.verdicts import Finding, Inspection, VerdictRow
from strategies.run.files import save_weights
from strategies.run.run_folder import RunFolder

MakeRun = Callable[..., Path]
QUICK = {"gatekeeper.images": 1, "gatekeeper.steps": 1, "gatekeeper.trigger-steps": 0}
ROWS = (
    VerdictRow(
        "a", "net", {"norm": 10.0, "agreement": 0.1}, {"norm": 9.0, "agreement": -4.0}, (Finding("scaled", "too much"),)
    ),
    VerdictRow("b", "net", {"norm": 1.0, "agreement": float("nan")}, {"norm": 0.0, "agreement": float("nan")}),
)


def verdict(
    policy: str = "exclude", rows: tuple[VerdictRow, ...] = ROWS, notes: tuple[str, ...] = ()
) -> dict[str, Any]:
    found = Inspection(rows, notes, 1.0)
    return {"policy": policy, "quarantined": list(found.suspects), **found.as_json()}


def scale_first(run: Path) -> None:
    """Multiply the first client's stored weights by 20, index included."""
    with RunFolder.open(run, write=False) as folder:
        state = {k: 20 * v if v.is_floating_point() else v for k, v in folder.round(1).uploads()[0].read().items()}
    file = run / "uploads" / "client-000.safetensors"
    save_weights(file, state)
    rows = [json.loads(line) for line in (run / "uploads.jsonl").read_text().splitlines()]
    rows[0] |= {"sha256": sha256_file(file), "bytes": file.stat().st_size}
    (run / "uploads.jsonl").write_text("".join(json.dumps(with_digest(row)) + "\n" for row in rows))


@pytest.mark.plots
def test_a_replay_with_exclude_leaves_the_suspect_out_and_tells_it_everywhere(run_folder: MakeRun) -> None:
    run = run_folder("lenet5", "lenet5", "lenet5")
    scale_first(run)
    lines: list[str] = []

    result = replayed(run, "fedavg", log=lines.append, **QUICK, **{"gatekeeper.policy": "exclude"})

    assert result["uploads"] == 2
    assert result["gatekeeper"]["quarantined"] == ["client-000"]
    assert "client-000" not in [row["name"] for row in result["table"]]
    folder = Path(result["run_dir"])
    assert (folder / "report" / "gatekeeper.png").stat().st_size > 0
    assert "gatekeeper.png" in result["plots"]
    assert "| client-000 | suspect | scaled: the norm of layer" in (folder / "model_card.md").read_text()
    assert any("client-000 is suspect, scaled" in line for line in lines)
    assert result["gatekeeper"] == json.loads((folder / "result.json").read_text())["gatekeeper"]


def test_lines_and_card_name_the_suspect_the_action_and_skipped_tests() -> None:
    assert verdict_lines(verdict()) == ["gatekeeper: a is quarantined, scaled: too much"]
    assert verdict_lines(verdict("warn")) == ["gatekeeper: a is suspect, scaled: too much"]
    assert verdict_lines(verdict(rows=ROWS[1:])) == ["gatekeeper: no upload of 1 looks harmful"]
    assert verdict_lines(verdict(rows=ROWS[1:], notes=("2 uploads cannot",))) == ["gatekeeper: 2 uploads cannot"]
    assert verdict_lines({}) == []
    (table,) = verdict_table(verdict("warn"))
    assert "| b | ok | - |" in table.markdown()
    assert "Suspects took part." in table.notes
    assert verdict_table({}) == []
