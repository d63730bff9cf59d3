"""Settings that do not go together are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from feature_fakes import SETTINGS as SUMS

from fl_app.attacks import AttackConfig
from server_app.settings.build import check_before_start
from server_app.settings.checks import check_attackers
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError

ROUNDS = {"method": "iterative", "iterative.rounds": 3}
ADAM = {**ROUNDS, "client.optimizer": "adam"}
COUNTED = {"method": "label-count-ensemble"}
PRIVATE = {"privacy.epsilon": 8.0, "client.share-label-counts": False}
NOISY = {**SUMS, **PRIVATE}
HEADS = {**SUMS, "method": "fedavg", "model.name": "head+tiny_backbone:make", "data.proxy": 0.2}
SILENT, MEMBERSHIP = {"client.share-label-counts": False}, {"client.label-counts-as": "presence"}
ONE = "must be one of .*with 'privacy.epsilon'"


def attack(kind: str, client: str = "client-001", **more: Any) -> dict[str, Any]:
    return {"attack.kind": kind, "attack.clients": client, **more}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        # What the method needs.
        ({"method": "fedavg", "model.per-client": "lenet5,resnet8"}, "is 'lenet5,resnet8'.*'fedavg'"),
        ({"method": "fedavg", "model.student": "resnet8"}, "'model.name' is 'lenet5' and .*'resnet8'"),
        ({**COUNTED, **SILENT}, "'client.share-label-counts' is False: must be True .*'label-count-ensemble'"),
        ({"method": "fedavg", "teacher": "tally"}, "'fedavg' does not distil an ensemble"),
        ({"method": "feddf"}, "'feddf' needs that .*'data.proxy', .*'data.proxy-name', .*or 'data.proxy-file'"),
        ({"method": "feddf", "data.proxy": 0.001}, "here it holds images of shape .*must be at least 2"),
        ({"method": "fedcvae-ens", "data.image-size": 20}, r"a CVAE cannot take examples of shape \(1, 20, 20\)"),
        # The data set and the machine.
        ({"model.student": "cnn5"}, r"'model.student' is 'cnn5', .* shape \(1, 16, 16\) in 10 classes: must be lenet5"),
        ({"model.per-client": "lenet5,cnn5"}, r"'model.per-client' is 'cnn5', .* shape \(1, 16, 16\)"),
        ({"data.partition": "classes", "data.classes-per-client": 11}, "s-per-client' is 11: must be at most 10"),
        ({"client.device": "cuda:99"}, "'client.device' is 'cuda:99': must be auto, cpu or cuda in a simulation"),
        # Attackers and their judge.
        (attack("random", "client-005"), "names client-005: must be clients of .*, client-000 to client-004"),
        ({"method": "iterative", **attack("copy")}, "is 'copy': must be .*label-flip, backdoor with .*, whose"),
        (attack("backdoor", **{"attack.target": 10}), "'attack.target' is 10: must be 0 to 9"),
        ({"gatekeeper.policy": "warn", "method": "iterative"}, "must be 'off' with method 'iterative'"),
        ({"gatekeeper.policy": "warn", "uploads": "somewhere"}, "'uploads' 'somewhere': must be 'off'"),
        # Rounds.
        ({**ROUNDS, "client.checkpoint": "{client}.pt"}, "'client.checkpoint' .*: must be empty with .* 'iterative'"),
        ({**ADAM, "iterative.strategy": "scaffold"}, "'client.optimizer' is 'adam': must be 'sgd' with .* 'scaffold'"),
        ({**ADAM, "iterative.strategy": "fednova"}, "must be 'sgd' with 'iterative.strategy' 'fednova'"),
        ({**ROUNDS, "iterative.server-momentum": 0.9}, "-momentum' is 0.9 .*'fedavg': must be 0; only fednova"),
        ({**ROUNDS, "model.per-client": "lenet5,cnn1"}, "method 'iterative' needs one architecture for all"),
        # A budget of privacy, which one upload spends.
        *(
            ({**PRIVATE, "method": name}, f"'method' is '{name}': {ONE}")
            for name in ("iterative", "fens", "fedov", "fedcvae-ens", "label-count-ensemble")
        ),
        ({**PRIVATE, "method": "dense", "dense.rounds": 2}, "'dense.rounds' is 2: must be 1 with 'privacy.epsilon'"),
        ({**PRIVATE, "model.per-client": "lenet5,wrn16-1"}, "'wrn16-1' has batch .* one of lenet5, cnn.* with 'priv"),
        *(({**NOISY, "method": name}, f"'method' is '{name}': must be one of .*ridge") for name in ("fedpft", "lda")),
        ({**NOISY, "features.moments": True}, "is True: must be False .*; the sums of squares carry no nois"),
        ({**NOISY, "features.min-examples": 5}, "'features.min-examples' is 5: must be 0 .* which no noise hides"),
        # Sums of a backbone's features, and heads on them.
        ({**SUMS, **SILENT}, "'client.share-label-counts' is False: must be True with method 'ridge'"),
        ({**SUMS, **MEMBERSHIP}, "'client.label-counts-as' is 'presence': must be 'numbers' with method 'ridge'"),
        ({**SUMS, "max-upload-mib": 0.02}, r"dim' is 96: an upload would have 0\.0214 MiB, .* at most 0.02"),
        ({**SUMS, "max-upload-mib": 0.02, "features.moments": True}, r"is 96: an upload would have 0\.0251 MiB"),
        ({**SUMS, "features.dim": 97}, "'features.dim' is 97: must be at most 96"),
        ({**SUMS, "features.backbone": "tiny_backbone:net"}, r"a oneshot_fl\.fl_app\.models\.backbones\.Backbone"),
        ({**SUMS, "features.backbone": "nowhere:make"}, "'nowhere:make', but there is no module 'nowhere' in "),
        ({**SUMS, "features.backbone": "torchvision:resnet18"}, "'features.weights' is '.*': must be the file"),
        ({**SUMS, "features.backbone": "torchvision:nothing"}, "torchvision has no classifier of this name"),
        ({**HEADS, "method": "dense"}, "'model.name' is 'head.*: must be .*which makes images"),
        ({**HEADS, "method": "fedov"}, "works on uploads of kind 'open-set'"),
        ({**HEADS, "method": "iterative"}, "trains whole models in rounds"),
        *(({"model.name": name}, "'model.name' names .*head[+]<backbone>") for name in ("head+", "heads+tiny")),
        ({"model.name": "statistics"}, "'model.name' names .*head[+]<backbone>"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_the_start(given: dict[str, Any], line: str) -> None:
    with pytest.raises(OptionError, match=line) as error:
        check_before_start(read_settings(given), 5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["fens", "label-count-ensemble"])
def test_methods_that_can_be_private_are_named_where_another_is_refused(method: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_before_start(read_settings({**PRIVATE, "method": method}), 5)

    named = str(caught.value).partition("must be one of ")[2].partition(" with 'privacy.epsilon'")[0].split(", ")
    assert "fedens" in named
    assert not {*named} & {"iterative", "fens", "fedov", "fedcvae-ens", "label-count-ensemble"}


@pytest.mark.parametrize(
    "given",
    [
        *({**PRIVATE, "method": name} for name in ("fedavg", "fedens", "dense", "co-boosting", "dw-fedens")),
        {**PRIVATE, "method": "feddf", "data.proxy": 0.1},
        {**NOISY, **MEMBERSHIP},
        {**SUMS, "method": "fedpft", "max-upload-mib": 0.02},
        {**ADAM, "iterative.strategy": "fedadam"},
        {**ROUNDS, **attack("label-flip")},
    ],
)
def test_settings_that_go_together_are_let_pass(given: dict[str, Any]) -> None:
    check_before_start(read_settings(given), 5)


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
