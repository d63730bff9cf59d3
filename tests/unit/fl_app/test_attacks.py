from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_app.attacks import AttackConfig, triggered
from fl_app.config import AppConfig
from strategies.core.errors import OptionError


def test_an_attacker_obeys_its_own_name_and_everybody_else_is_honest() -> None:
    attack = AttackConfig("scale", " b, a ,b")

    assert attack.names() == ("b", "a")
    assert [attack.of(name) for name in ("a", "b", "c", "", "none")] == ["scale", "scale", "none", "none", "none"]
    assert AttackConfig().of("a") == "none"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"attack.clients": "client-001"}, "'attack.clients' is 'client-001' and 'attack.kind' 'none'"),
        ({"attack.kind": "bribe"}, "'attack.kind' is 'bribe': must be one of 'none', 'random'"),
        (
            {"attack.kind": "claim", "attack.clients": "a", "attack.factor": 0.0},
            "'attack.factor' is 0: must be a number greater than 0 and at most 1e+06 with 'attack.kind' 'claim'",
        ),
        (
            {"attack.kind": "claim-uniform", "attack.clients": "a", "attack.factor": 2e6},
            "'attack.factor' is 2e+06: must be a number greater than 0 and at most 1e+06 with 'attack.kind' 'claim-un",
        ),
        ({"attack.poisoned": 0.0}, "'attack.poisoned' is 0.0: must be a number greater than 0.0 and at most 1.0"),
        (
            {"attack.kind": "backdoor", "attack.clients": "a", "data.name": "heart-disease", "data.law": "domains"},
            "'attack.kind' is 'backdoor': must be another attack where 'data.name' is 'heart-disease'",
        ),
        (
            {"attack.kind": "scale", "attack.clients": "a", "client.checkpoint": "m.pt"},
            "'attack.kind' is 'scale': must be 'none' where 'client.checkpoint' names a file",
        ),
    ],
)
def test_settings_of_an_attack_when_they_cannot_be_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError) as caught:
        AppConfig.from_settings(settings)

    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attackers_when_a_simulation_does_not_have_them_are_named() -> None:
    known = ["client-000", "client-001"]
    AttackConfig("random", "client-000,client-001").check_clients(known)
    AttackConfig().check_clients(known)

    with pytest.raises(OptionError, match="names client-002, x: must be clients of this simulation, client-000 to"):
        AttackConfig("random", "client-002,client-000,x").check_clients(known)
    with pytest.raises(OptionError, match="'attack.kind' 'copy' must leave at least one honest client"):
        AttackConfig("copy", "client-000,client-001").check_clients(known)


@pytest.mark.parametrize(("side", "square"), [(8, 3), (16, 3), (28, 3), (32, 4), (64, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_trigger_is_a_white_square_in_the_lower_right_corner(side: int, square: int, channels: int) -> None:
    images = torch.zeros(2, channels, side, side, dtype=torch.uint8)

    marked = triggered(images)

    assert int(images.max()) == 0  # the argument stays unchanged
    rows, columns = (marked > 0).any(1).any(0).nonzero(as_tuple=True)
    assert int(rows.min()) == int(columns.min()) == side - square
    assert int((marked == 255).sum()) == 2 * channels * square**2 == int((marked > 0).sum())
