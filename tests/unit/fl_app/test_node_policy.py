"""What a node's own config permits a run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_app.node_config import node_facts, node_policy
from fl_app.node_policy import CACHE_MIB, FREE, NodePolicy
from strategies.core.errors import DataError, OptionError, UploadError

SIMULATED = {"partition-id": 1, "num-partitions": 3}


@pytest.mark.parametrize("own", [{"client": "hospital-a"}, {"architecture": "mlp"}, {"data-root": "/srv/data"}])
def test_node_with_a_config_of_its_own_permits_no_path_of_the_run(own: dict[str, Any]) -> None:
    config = {**SIMULATED, **own}

    policy = node_policy(config, node_facts(config, {}))

    assert not policy.permits(Path("/etc/passwd"))
    assert policy.state_dir("/given") == ""


def test_path_outside_the_read_folders_is_refused_whether_it_exists_or_not(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "secret").write_text("")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    policy = NodePolicy.of({"read": f"/nowhere, {tmp_path / 'open'}"})

    for inside in ("open", "open/a", "open/../open/a/b"):
        policy.check_readable("client.checkpoint", tmp_path / inside)
    for outside in ("secret", "absent", "open/link", "open/../secret", "opened", ""):
        with pytest.raises(UploadError, match="must be in a folder of this node's 'read'"):
            policy.check_readable("client.checkpoint", tmp_path / outside)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"max-epsilon": 0.0}, "max-epsilon is 0.0: must be a number greater than 0"),
        ({"max-epsilon": float("nan")}, "max-epsilon is nan: must be a number greater than 0"),
        ({"max-epsilon": float("inf")}, "max-epsilon is inf: must be a number greater than 0"),
        ({"max-epsilon": 10**400}, "max-epsilon is 1"),
        ({"read": "~unknown-user/models"}, "read has '~unknown-user/models': must be absolute paths"),
        ({"max-epsilon": 8.0, "max-delta": 1.0}, "max-delta is 1.0: must be a number greater than 0 and below 1"),
        ({"max-delta": 0.1}, "max-delta and no max-epsilon"),
        ({"max-ensemble-mib": -1.0}, "max-ensemble-mib is -1.0: must be at least 0"),
        ({"max-cache-mib": float("inf")}, "max-cache-mib is inf: must be at least 0"),
        ({"label-counts": "some"}, "label-counts is 'some': must be one of numbers, presence, none"),
        ({"read": "/a, b"}, "read has 'b': must be absolute paths"),
        ({"max-epsilon": "8"}, "max-epsilon is '8': must be a number"),
        ({"architectures": 3}, "architectures is '3': must be a text"),
    ],
)
def test_config_with_a_value_out_of_range_is_one_line_with_key_and_range(facts: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        node_facts(facts, {})

    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unlisted_architecture_is_refused() -> None:
    policy = NodePolicy.of({"architectures": "lenet5, resnet8"})

    policy.check_architecture("resnet8")
    with pytest.raises(UploadError, match="'resnet34' is not permitted on this node: must be one of lenet5, resnet8"):
        policy.check_architecture("resnet34")
    FREE.check_architecture("resnet34")


def test_a_run_s_own_code_is_refused_by_a_deployed_node_that_does_not_list_it() -> None:
    listing = NodePolicy.of({"architectures": "lenet5, own.models:Net"}, deployed=True)

    listing.check_architecture("own.models:Net")
    FREE.check_architecture("own.models:Net")
    NodePolicy(deployed=True).check_architecture("lenet5")
    with pytest.raises(UploadError, match="'own.models:Net' is a module of the run's choice: must be among this node"):
        NodePolicy(deployed=True).check_architecture("own.models:Net")


def test_a_data_source_of_a_run_s_own_code_is_refused_by_a_deployed_node_that_does_not_list_it() -> None:
    listing = NodePolicy.of({"data-sources": "own.data:load, own.data:other"}, deployed=True)

    listing.check_source("own.data:other")
    FREE.check_source("own.data:load")
    NodePolicy(deployed=True).check_source("cifar10")
    with pytest.raises(
        UploadError, match="'own.data:load', a module of the run's choice: must be among this node's 'd"
    ):
        NodePolicy(deployed=True).check_source("own.data:load")


def test_run_without_privacy_is_refused_where_there_is_a_budget() -> None:
    policy = NodePolicy.of({"max-epsilon": 8})

    policy.check_private(1.0)
    with pytest.raises(
        UploadError, match=r"'privacy.epsilon' is 0: must be above 0 on this node, whose max-epsilon is 8"
    ):
        policy.check_private(0.0)
    assert not policy.tells_counts
    FREE.check_private(0.0)


@pytest.mark.parametrize(
    "error", [DataError("no file /srv/x"), UploadError("a damaged /srv/x"), PermissionError("/srv/x")]
)
def test_deployed_node_gives_one_line_for_all_that_cannot_be_read(error: Exception) -> None:
    with pytest.raises(UploadError) as caught, NodePolicy(deployed=True).reading("the checkpoint"):
        raise error
    assert str(caught.value) == "the checkpoint cannot be read on this node; its log has the reason"
    with pytest.raises(type(error)) as free, FREE.reading("the checkpoint"):
        raise error
    assert free.value is error


@pytest.mark.parametrize(
    ("own", "most"), [({}, 9000.0), ({"client": "hospital-a"}, CACHE_MIB), ({"max-cache-mib": 2048.0}, 2048.0)]
)
def test_a_deployed_node_bounds_the_features_that_a_run_keeps_on_its_disk(own: dict[str, Any], most: float) -> None:
    config = {**SIMULATED, **own}

    policy = node_policy(config, node_facts(config, {}))

    assert policy.cache_mib(9000.0) == most
    assert policy.cache_mib(5.0) == 5.0
