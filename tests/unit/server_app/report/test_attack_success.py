from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import finished_in
from torch import nn

from fl_app.attacks import triggered
from fl_app.data import ImageData
from server_app.launch.result import print_result
from server_app.report.finish import table_lines
from server_app.report.gatekeeping import backdoor_success
from server_app.settings.server_data import HeldOut
from strategies.method import Normalization

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


def finished(path: Path, stage: Callable[..., Any], **settings: Any) -> dict[str, Any]:
    return finished_in(path, *stage("fedens", **settings))


def test_a_result_when_attackers_were_simulated_says_so_everywhere(
    run_folder: Callable[..., Path], stage: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder()

    result = finished(path, stage, **BACKDOOR)

    facts = json.loads((path / "result.json").read_text())["attack"]
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
