"""What `oneshot run` refuses before it starts the nodes of ``client.nodes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import named

from fl_app.node_config import SUPERNODES_VARIABLE
from server_app.settings.build import build_strategy, check_before_start, number_of_clients
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError

ROOT = Path(__file__).parents[4]


def settings(nodes: Path | str, **more: Any) -> Any:
    return read_settings({"client.nodes": str(nodes), "method": "fedens", "data.limit": 300, **named(more)})


def write(folder: Path, **nodes: str) -> Path:
    for name, text in nodes.items():
        (folder / f"{name}.toml").write_text(f'client = "{name}"\n{text}')
    return folder


def test_number_of_clients_is_that_of_the_nodes_and_those_of_deploy_pass_the_check() -> None:
    given = settings(ROOT / "deploy" / "nodes")
    assert number_of_clients(given.app) == 3
    check_before_start(given, 3)
    assert number_of_clients(settings("").app) == 5


@pytest.mark.parametrize(
    ("node", "clients", "line"),
    [
        ('checkpoint = "m.pt"', 3, "--num-supernodes is 3: must be at most 2, the nodes of"),
        ('partition-id = 0\narchitecture = "resnet99"', 2, "node b: architecture is 'resnet99': must be lenet5"),
        ("partition-id = 2\nnum-partitions = 2", 2, "node b: partition-id is 2: must be 0 to 1"),
        ("partition-id = 1", 2, "node b: partition-id is 1: must be 0 to 0"),
        ("partition-id = 0\nnum-partitions = 301", 2, "--num-supernodes is 301: must be at most 300"),
    ],
)
def test_nodes_that_cannot_be_are_refused(tmp_path: Path, node: str, clients: int, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        check_before_start(settings(write(tmp_path, a="partition-id = 0", b=node)), clients)


def test_server_of_a_deployment_refuses_to_rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERNODES_VARIABLE, raising=False)
    given = settings(write(tmp_path, a="partition-id = 0"), run_dir=str(tmp_path / "run"))
    with pytest.raises(OptionError, match="'client.nodes' is .*: must be '' outside `oneshot run`"):
        build_strategy(given, None)  # type: ignore[arg-type]  refused before the job is looked at
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_are_too_few_are_refused_before_any_client_starts(tmp_path: Path) -> None:
    pretrained = {"nodes": "", "client__checkpoint": str(tmp_path / "{client}.pt")}
    (tmp_path / "client-001.pt").touch()
    line = rf"2 of the 3 clients' checkpoints are missing, {tmp_path}/client-000.pt is the first"
    with pytest.raises(OptionError, match=line):
        check_before_start(settings(**pretrained), 3)
    check_before_start(settings(**pretrained, resume=str(tmp_path)), 3)  # clients that sent theirs are not asked
    (tmp_path / "client-002.pt").touch()
    check_before_start(settings(**pretrained), 3)  # one that is missing costs its own upload


def test_nodes_that_train_need_no_checkpoint(tmp_path: Path) -> None:
    nodes = write(tmp_path, a="partition-id = 0", b='checkpoint = "m.pt"', c="partition-id = 0")
    check_before_start(settings(nodes), 3)
    with pytest.raises(OptionError, match=r"1 of the 3 clients' checkpoints are missing, .*/m\.pt is the first"):
        check_before_start(settings(nodes, min_uploads=3), 3)
