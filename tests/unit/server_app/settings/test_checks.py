"""Settings that do not go together are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_app.attacks import AttackConfig
from server_app.settings.build import build_job, check_before_start
from server_app.settings.checks import check_attackers, check_needs_of_settings
from server_app.settings.read import read_settings
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError


def test_an_attacker_among_nodes_that_are_not_played_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.toml").write_text(f'client = "{name}"\npartition-id = 0\n')
    attack = AttackConfig(kind="random", clients="c")

    check_attackers(attack, 3, str(tmp_path))
    with pytest.raises(OptionError, match="names c: must be clients of this simulation, a to b"):
        check_attackers(attack, 2, str(tmp_path))
    (tmp_path / "c.toml").write_text('client = "c"\npartition-id = 0\nmax-epsilon = 8.0\n')
    with pytest.raises(OptionError, match="client.nodes: c: setting 'attack.kind' is 'random', and .* must be 'none'"):
        check_attackers(attack, 3, str(tmp_path))


def test_attacks_when_they_cannot_be_are_refused_before_anything_starts(small: dict[str, Any]) -> None:
    def settings(**more: Any) -> Any:
        return read_settings({**small, **{key.replace("__", "."): value for key, value in more.items()}})

    with pytest.raises(
        OptionError, match="names client-005: must be clients of this simulation, client-000 to client-004"
    ):
        check_before_start(settings(attack__kind="random", attack__clients="client-005"), 5)
    with pytest.raises(
        OptionError, match="'attack.kind' is 'copy': must be .*label-flip, backdoor with method 'iterative', whose"
    ):
        check_needs_of_settings(settings(method="iterative", attack__kind="copy", attack__clients="client-001"))
    check_needs_of_settings(settings(method="iterative", attack__kind="label-flip", attack__clients="client-001"))
    chosen = settings(attack__kind="backdoor", attack__clients="client-001", attack__target=10)
    with pytest.raises(OptionError, match="'attack.target' is 10: must be 0 to 9"):
        build_job(chosen, open_half(chosen, "test"), None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "iterative"}, "must be 'off' with method 'iterative'"),
        ({"uploads": "somewhere"}, "'uploads' 'somewhere': must be 'off'"),
    ],
)
def test_a_gatekeeper_where_nothing_is_uploaded_once_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check_needs_of_settings(read_settings({**settings, "gatekeeper.policy": "warn"}))
