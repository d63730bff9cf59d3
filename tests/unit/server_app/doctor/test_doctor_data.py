from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fl_app.models import build
from server_app.doctor import DoctorFinding, data
from server_app.doctor.data import NodeConfig
from server_app.settings.read import Settings, read_settings
from strategies.core.errors import OptionError

DIGITS = read_settings({})


def levels(findings: Iterable[DoctorFinding]) -> list[str]:
    found = list(findings)
    assert all(finding.fix for finding in found if finding.level == "error")
    return [finding.level for finding in found]


def absent(tmp_path: Path) -> Settings:
    return read_settings({"data.name": "cifar10", "data.root": str(tmp_path)})


def test_data_that_can_be_read_are_counted(tmp_path: Path) -> None:
    (server,) = data.server_data(DIGITS)
    (whole,) = data.node_data(DIGITS, NodeConfig.of('client="a" partition-id=0'))
    parts = [
        next(iter(data.node_data(DIGITS, NodeConfig.of(f'client="a" partition-id={part} num-partitions=2'))))
        for part in (0, 1)
    ]

    assert server.found == "500 examples of 10 classes, embedded in scikit-learn"
    assert whole.found.startswith("1297 of 1297 examples")
    assert 1290 <= sum(int(part.found.split()[0]) for part in parts) <= 1297  # what the law cannot round stays over
    assert levels(data.server_data(read_settings({"data.proxy": 0.2}))) == ["ok", "ok"]


def test_data_that_are_absent_are_an_error_and_nothing_is_downloaded(tmp_path: Path) -> None:
    settings = absent(tmp_path)

    assert levels(data.server_data(settings)) == ["error"]
    assert levels(data.node_data(settings, NodeConfig.of('client="a" partition-id=0'))) == ["error"]
    assert levels(data.node_data(settings, NodeConfig.of('client="a" checkpoint="a.pt"'))) == ["skipped"]
    assert data.split_of(settings, ("train", "test")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_there_is_not_is_an_error_that_says_so() -> None:
    (finding,) = data.node_data(DIGITS, NodeConfig.of('client="a" partition-id=3 num-partitions=2'))

    assert (finding.level, finding.found) == ("error", "partition-id is 3: must be 0 to 1")


def test_architectures_have_to_take_the_examples() -> None:
    split = data.split_of(DIGITS, ("test",))

    assert levels(data.architectures(("lenet5", "cnn5", "lenet5"), split, DIGITS)) == ["ok", "error"]
    assert levels(data.architectures(("lenet5",), None, DIGITS)) == ["skipped"]


def test_a_checkpoint_has_to_fit_its_architecture(tmp_path: Path) -> None:
    split = data.split_of(DIGITS, ("test",))
    state = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()
    torch.save(state, tmp_path / "good.pt")
    torch.save({key: value.half() for key, value in state.items()}, tmp_path / "half.pt")
    torch.save({key: value * torch.nan for key, value in state.items()}, tmp_path / "nan.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:900])

    def look(name: str, architecture: str = "lenet5", *, known: bool = True) -> DoctorFinding:
        found = data.checkpoint(tmp_path / name, architecture, split if known else None, DIGITS)
        assert found.level != "error" or found.fix
        return found

    assert look("good.pt").level == "ok"
    assert look("good.pt", known=False).level == "skipped"
    refused = {name: look(name) for name in ("half.pt", "nan.pt", "torn.pt", "absent.pt")}
    assert {finding.level for finding in refused.values()} == {"error"}
    assert "float16" in refused["half.pt"].found
    assert "NaN" in refused["nan.pt"].found
    assert look("good.pt", "mnist-cnn").level == "error"
    assert look("good.pt", "no-such-net").level == "skipped"  # the architecture's own line is the error


def test_the_bytes_of_a_model_are_those_of_its_tensors() -> None:
    split = data.split_of(DIGITS, ("test",))
    assert split is not None
    state = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()

    assert data.model_bytes(split, ("lenet5", "cnn5"), DIGITS) == {
        "lenet5": sum(value.nbytes for value in state.values())
    }


def test_a_node_config_is_read_as_flower_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('client = "a"\npartition-id = 1\nnum-partitions = 3\nmax-ensemble-mib = 5\n')

    found = NodeConfig.of(str(tmp_path / "a.toml"))

    assert (found.client, found.partition_id, found.num_partitions, found.has_data) == ("a", 1, 3, True)
    assert levels(found.look()) == ["ok"]
    assert NodeConfig.of("partition-id=3 num-partitions=9").client == "client-003"
    assert levels(NodeConfig.of("").look()) == ["warning"]
    assert levels(NodeConfig.of('client="a b"').look()) == ["error"]  # a name that the server refuses


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('client="a" partition="3"', "must be"),
        ('client="a" partition-id="3"', "must be"),
        *((text, "cannot be read") for text in ("client=a", "absent.toml", 'client="a" client="b"')),
    ],
)
def test_a_node_config_with_another_key_or_kind_or_that_cannot_be_read_is_refused(text: str, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        NodeConfig.of(text)


def test_a_head_is_known_by_its_name_and_its_missing_backbone_is_told() -> None:
    split = data.split_of(DIGITS, ("test",))
    assert split is not None
    names = ("head+nowhere:make", "head+efficientnet")
    for finding in data.architectures(names, split, DIGITS):
        assert finding.level == "error"
        assert "setting 'features.backbone' is" in finding.found
    assert data.model_bytes(split, names, DIGITS) == {}
