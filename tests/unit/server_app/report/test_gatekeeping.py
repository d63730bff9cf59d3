from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MakeRun, Stage, finished_in, replayed
from torch import nn

from fl_app.attacks import triggered
from fl_app.data import ImageData
from server_app.launch.result import print_result
from server_app.report.finish import table_lines
from server_app.report.gatekeeping import backdoor_success, verdict_lines, verdict_table
from server_app.settings.server_data import HeldOut
from strategies.core.durable import read_json, sha256_file, with_digest
from strategies.gatekeeper.verdicts import Finding, Inspection, VerdictRow
from strategies.method import Normalization
from strategies.run.files import save_weights
from strategies.run.run_folder import RunFolder

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


@pytest.mark.slow
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
    assert result["gatekeeper"] == read_json(folder / "result.json")["gatekeeper"]


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


BACKDOOR = {"attack.kind": "backdoor", "attack.clients": "client-000,client-002", "attack.target": 1}


class Corner(nn.Module):
    """Says class 1 where the lower right corner is white, else class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        white = images[:, 0, -1, -1] > 0.9
        return torch.stack([~white, white, torch.zeros_like(white)], dim=1).float()


def held_out(labels: list[int]) -> HeldOut:
    images = torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8)
    return HeldOut(ImageData(images, torch.tensor(labels)), Normalization((0.5,), (0.5,)))


def test_success_is_the_share_of_other_classes_images_that_the_trigger_leads_to_the_target() -> None:
    images = held_out([0, 1, 2, 2])

    assert backdoor_success(Corner(), images, 1) == {"success": 100.0, "images": 3}
    assert backdoor_success(Corner(), images, 0) == {"success": 0.0, "images": 3}
    assert backdoor_success(Corner(), images, 2) == {"success": 0.0, "images": 2}
    assert backdoor_success(Corner(), held_out([1, 1]), 1) == {"success": None, "images": 0}
    assert images.accuracy(Corner()) == 25.0  # the held-out images are as they were


def test_a_result_when_attackers_were_simulated_says_so_everywhere(
    run_folder: MakeRun, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder()

    result = finished_in(path, *stage("fedens", **BACKDOOR))

    facts = read_json(path / "result.json")["attack"]
    assert (facts["kind"], facts["clients"], facts["target"]) == ("backdoor", ["client-000", "client-002"], 1)
    report, _, images = stage("fedens")
    others = images.data.labels != 1
    members = [upload.read() for upload in report.job.uploads]
    assert facts["images"] == int(others.sum())
    model = report.job.builders["lenet5"]()
    logits = torch.zeros(int(others.sum()), 10)
    for state in members:  # FedENS by hand: the mean of the members' logits
        model.load_state_dict(state)
        logits = logits + model.eval()((triggered(images.data.images[others]) / 255 - 0.5) / 0.5)
    hit = int((logits.argmax(1) == 1).sum())
    assert facts["success"] == pytest.approx(100 * hit / int(others.sum()), abs=0.3)
    (line,) = [line for line in table_lines(result) if line.startswith("attackers")]
    assert line.startswith(
        "attackers are simulated: backdoor, target 1, 30 % of the images, by client-000, client-002;"
    )
    assert f"attack success {facts['success']:.2f} % (of {facts['images']} held-out images" in line
    assert f"A{line[1:]}." in (path / "model_card.md").read_text()
    print_result({**result, "refusals": []}, "text")
    assert f"attack       {line}" in capsys.readouterr().out
