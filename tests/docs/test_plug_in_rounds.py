"""The ClientApp's part of a round as docs/plug-in.md shows it, asked by every kind of strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import ROOT, blocks
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import nn

PAGE = ROOT / "docs" / "plug-in.md"


class Net(nn.Module):
    """Stands for the reader's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(images)
        return found


def shown(what: str) -> dict[str, Any]:
    """Run the page's one block that holds a piece of text; return its names."""
    (code,) = [block for block in blocks(PAGE, "python") if what in block]
    names: dict[str, Any] = {"torch": torch, "nn": nn, "Net": Net}
    exec(compile(code, PAGE.name, "exec"), names)  # noqa: S102  our own page
    return names


@pytest.mark.parametrize(
    ("said", "record", "remembers"),
    [
        ({}, None, False),
        ({"proximal-mu": 0.1}, None, False),
        ({"feddyn-alpha": 0.1}, None, True),
        ({}, "control", True),
        ({"stc-density": 0.1}, None, True),
    ],
)
def test_round_is_trained_by_the_rules_of_the_strategy_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], record: str | None, remembers: bool
) -> None:
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path))
    start, config = Net(), {"run-id": "0" * 32, "server-round": 1, "last-round": 0, **said}
    asked = RecordDict({"arrays": ArrayRecord(start.state_dict()), "config": ConfigRecord(config)})
    if record is not None:
        asked[record] = ArrayRecord({key: torch.ones_like(value) for key, value in start.named_parameters()})
    batches = [(torch.rand(4, 3, 32, 32), torch.arange(4)) for _ in range(2)]
    message = Message(asked, dst_node_id=1, message_type=MessageType.TRAIN)

    model = Net()
    records, metrics = shown("def one_round")["one_round"](model, batches, message, "hospital-a")

    extra = "ternary" if "stc-density" in said else record
    assert set(records) == {"arrays", *([extra] if extra else [])}
    assert metrics["travel"] == pytest.approx(0.01 * (1 + 1.9))
    assert ("restarted" in metrics) == remembers
    kept = [path.name for path in tmp_path.rglob("*.safetensors")]
    assert kept == (["hospital-a-state-1.safetensors"] if remembers else [])
    assert all(not torch.equal(value, start.state_dict()[key]) for key, value in model.state_dict().items())


def test_parts_can_be_used_alone() -> None:
    names = shown("dynamic.finish")
    for key, way in names["drift"].items():
        # One step of 0.1 from the start, where all three terms have no gradient of their own.
        torch.testing.assert_close(names["own"][key], -way / 0.1)
        torch.testing.assert_close(names["change"][key], names["own"][key])
        assert way.abs().max() > 0
