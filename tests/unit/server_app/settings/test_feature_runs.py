"""Ridge and LDA on features from the clients' sums to the result, by every option, with the refusals on the way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import replayed
from feature_fakes import CLIENTS, SETTINGS, Uploads, sent_by_clients, stored
from safetensors.torch import load_file

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.config import AppConfig
from fl_app.data import normalize, open_split
from fl_app.data.split import pixels, unchanged
from fl_app.division import own_positions
from fl_app.feature_cache import FeatureSource
from fl_app.ledger import Ledger
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from fl_app.node_policy import NodePolicy
from server_app.settings.read import read_settings
from strategies.core.durable import read_json
from strategies.core.errors import DataError, OptionError, UploadError
from strategies.core.facts import UploadFacts
from strategies.statistics.heads import Ridge
from strategies.statistics.privacy import noise_for
from strategies.statistics.sums import Statistics

GIVEN = SETTINGS


@pytest.mark.parametrize("method", ["ridge", "lda"])
def test_stored_sums_are_replayed_to_a_head(run: Path, tmp_path: Path, method: str) -> None:
    result = replayed(run, method, tmp_path / "replay")

    assert [row["kind"] for row in result["table"]] == ["student"]
    assert result["accuracy"] > 75.0
    metrics = (tmp_path / "replay" / "metrics.jsonl").read_text()
    assert metrics.count('"left_out_error"') > CLIENTS
    assert "chosen_" in metrics


def test_the_head_of_a_whole_run_is_that_of_all_examples_in_one_place(oneshot: Any, tmp_path: Path) -> None:
    """Over the messages of a run, where every node permits the backbone."""
    backbone, nodes = "tiny_backbone:make", tmp_path / "nodes"
    nodes.mkdir()
    for k in range(3):
        permits = f'partition-id = {k}\nnum-partitions = 3\narchitectures = "lenet5, {backbone}"\n'
        (nodes / f"node-{k}.toml").write_text(permits)
    given: dict[str, Any] = {
        "features__backbone": backbone,
        "ridge__penalty": 0.1,
        "data__limit": 0,
        "data__proxy": 0.0,
    }
    status, result, log = oneshot("run", method="ridge", client__nodes=str(nodes), **given)
    assert (status, result["uploads"], result["refused"]) == (0, 3, 0), log

    split, config = open_split("digits", "train"), AppConfig()
    data = split.take(torch.cat([own_positions(split, config, partition_id=k, num_partitions=3) for k in range(3)]))
    function = FeatureFunction(FeaturesConfig(backbone=backbone), 0, *split.normalization)
    rows = function.module(normalize(data.images, *split.normalization))
    head = Ridge(Statistics.of([(rows, data.labels)], split.num_classes, function.features)).head(0.1)
    sent = load_file(Path(result["run_dir"]) / "student.safetensors")
    torch.testing.assert_close(sent["head.weight"].double(), head.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sent["head.bias"].double(), head.bias, rtol=1e-4, atol=1e-4)


def test_a_function_that_lies_about_its_fields_is_found_by_the_probe(sent: Uploads, tmp_path: Path) -> None:
    honest = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make"), 0, (0.5,), (0.5,))
    other = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make", side=20), 0, (0.5,), (0.5,))
    states = {name: dict(state) for name, state in sent[0].items()}
    assert honest.sums(10).check_upload(states["client-001"]) == ""
    states["client-001"]["probe"] = other.probe
    assert "its features of the probe differ by 0." in honest.sums(10).check_upload(states["client-001"])

    run = stored(tmp_path / "run", SETTINGS, states, sent[1])
    replayed(run, "ridge", tmp_path / "replay", **{"gatekeeper.policy": "exclude"})
    verdict = read_json(tmp_path / "replay" / "gatekeeper.json")
    assert verdict["quarantined"] == []
    assert ["client-001: its features of the probe differ" in note for note in verdict["notes"]] == [True]


def test_noise_and_counts_that_no_client_can_have_are_refused(sent: Uploads) -> None:
    """The other bounds are asked in test_statistics_uploaded.py."""
    check = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make"), 0).sums(10).check_upload
    state = sent[0]["client-000"]
    for key, value, message in (
        ("noise", -1.0, "noise is -1: must be 0"),
        ("counts", 0.0, "with a positive sum"),
        ("counts", 0.5, "counts are .* must be whole"),
    ):
        with pytest.raises(UploadError, match=message):
            check({**state, key: torch.full_like(state[key], value)})


def test_private_sums_are_noisy_and_tell_no_exact_count(tmp_path: Path) -> None:
    given = {**SETTINGS, "privacy.epsilon": 50.0, "client.share-label-counts": False, "data.limit": 0}
    given["client.state-dir"] = str(tmp_path / "state")
    states, facts = sent_by_clients(given, "0123456789abcdef0123456789abcdef")
    exact, _ = sent_by_clients({**SETTINGS, "data.limit": 0})
    for name, state in states.items():
        assert float(state["noise"]) > 0.0
        assert not torch.equal(state["counts"], state["counts"].round())
        assert facts[name].num_examples == max(1, round(float(state["counts"].sum())))
        assert not torch.allclose(state["sums"], exact[name]["sums"], atol=1e-3)
    unread = {"ridge.penalty": 0.5, "ridge.values": True}
    result = replayed(stored(tmp_path / "run", given, states, facts), "ridge", tmp_path / "replay", **unread)
    rows = (tmp_path / "replay" / "metrics.jsonl").read_text()
    assert "which fixes lambda; settings without effect are 'ridge.penalty', 'ridge.values'" in rows
    assert result["accuracy"] > 50.0
    with pytest.raises(OptionError, match="'lda' cannot use sums with noise"):
        replayed(tmp_path / "run", "lda", tmp_path / "lda")


def test_sums_asked_for_again_are_those_that_were_kept_and_cost_nothing(tmp_path: Path) -> None:
    given = {**SETTINGS, "privacy.epsilon": 1.0, "client.share-label-counts": False, "privacy.total-epsilon": 1.2}
    given["client.state-dir"] = str(tmp_path)
    first, second = (sent_by_clients(given, "0123456789abcdef0123456789abcdef")[0] for _ in range(2))
    ledger = Ledger.of(tmp_path, "client-000")
    assert all(torch.equal(value, second["client-000"][key]) for key, value in first["client-000"].items())
    assert [row["mu"] for row in ledger.releases()] == [pytest.approx(1 / noise_for(1.0, 1e-5))]
    line = r"at most 0\.\d+ on this node, whose privacy.total-epsilon over all runs is 1.2"
    with pytest.raises(UploadError, match=line):
        sent_by_clients(given, "f" * 32)
    assert len(ledger.releases()) == 1
    # As Gaussians the two cost 1.45, where their budgets add up to 2.
    sent_by_clients({**given, "privacy.total-epsilon": 1.6}, "f" * 32)
    assert [row["run"] for row in ledger.releases()] == ["0123456789abcdef" * 2, "f" * 32]


def test_a_private_upload_is_in_the_ledger_before_anything_of_it_is_kept_or_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**SETTINGS, "privacy.epsilon": 1.0, "client.share-label-counts": False}
    given["client.state-dir"] = str(tmp_path)
    ledger, seen = Ledger.of(tmp_path, "client-000"), list[int]()

    def save(*_: object) -> None:
        seen.append(len(ledger.releases()))
        raise OSError("power cut")

    monkeypatch.setattr("client_app.keeping.KeptModel.save", save)
    with pytest.raises(UploadError, match="cannot be kept, so it is not sent: power cut"):
        sent_by_clients(given, "0123456789abcdef0123456789abcdef")
    assert seen == [1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = {**SETTINGS, "features.moments": True}
    return stored(tmp_path_factory.mktemp("runs") / "both", given, *sent_by_clients(given))


@pytest.mark.parametrize("method", ["ridge", "lda", "fedpft"])
def test_uploads_with_moments_are_replayed_by_all_methods_on_features(both: Path, tmp_path: Path, method: str) -> None:
    assert replayed(both, method, tmp_path / "replay")["accuracy"] > 70.0


def test_fedpft_alone_sends_no_gram_matrix_and_one_with_moments_the_same_gaussians(both: Path, tmp_path: Path) -> None:
    given = {**SETTINGS, "method": "fedpft"}
    states, facts = sent_by_clients(given)
    assert states["client-000"].keys() == {"counts", "sums", "squares", "noise", "fingerprint", "probe"}
    alone = stored(tmp_path / "run", given, states, facts)
    for path, name in ((alone, "a"), (both, "b")):
        replayed(path, "fedpft", tmp_path / name)
    one, other = (load_file(tmp_path / name / "student.safetensors") for name in "ab")
    assert torch.equal(one["head.weight"], other["head.weight"])
    card = (tmp_path / "a" / "model_card.md").read_text()
    assert "- Head: trained on 600 features, drawn from the clients' Gaussians." in card
    with pytest.raises(OptionError, match=r"'ridge' needs 'gram' in every upload, which client-000 did not send"):
        replayed(alone, "ridge", tmp_path / "ridge")


def test_spherical_fedpft_takes_every_upload_and_diagonal_those_with_squares(run: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'fedpft' needs 'squares' in every upload, .*'features.moments'"):
        replayed(run, "fedpft", tmp_path / "diagonal")
    result = replayed(run, "fedpft", tmp_path / "spherical", **{"fedpft.covariance": "spherical"})
    assert result["accuracy"] > 70.0


def test_a_client_never_answers_a_private_request_for_squares(tmp_path: Path) -> None:
    given = {**SETTINGS, "method": "fedpft", "privacy.epsilon": 1.0, "client.share-label-counts": False}
    given["client.state-dir"] = str(tmp_path)
    with pytest.raises(UploadError, match="asks for sums of squares: must be one upload of .* without squares"):
        sent_by_clients(given, "0123456789abcdef0123456789abcdef")


def test_a_capped_share_weighs_a_boastful_client_down(sent: Uploads, tmp_path: Path) -> None:
    states, facts = {name: dict(state) for name, state in sent[0].items()}, dict(sent[1])
    facts["client-000"] = UploadFacts("client-000", "statistics", 100 * (facts["client-000"].num_examples or 0), None)
    for key in ("counts", "sums", "gram"):  # passes every bound
        states["client-000"][key] = states["client-000"][key] * 100
    states["client-000"]["sums"] = states["client-000"]["sums"].roll(1, 0)
    states["client-000"]["counts"] = states["client-000"]["counts"].roll(1, 0)
    path = stored(tmp_path / "run", SETTINGS, states, facts)
    free = replayed(path, "ridge", tmp_path / "free")
    capped = replayed(path, "ridge", tmp_path / "capped", **{"server.max-share": 0.25})
    assert free["accuracy"] + 20.0 < capped["accuracy"]


def test_features_have_norm_one_and_do_not_depend_on_the_batch() -> None:
    function = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make", dim=40), 3)
    images = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = function.module(images)
    assert found.shape == (20, 40)
    assert float((found.norm(dim=1) - 1).abs().max()) < 1e-5
    torch.testing.assert_close(found[17:], function.module(images[17:]), rtol=0, atol=1e-6)


def test_a_deployed_node_runs_no_module_of_the_run_s_choice() -> None:
    policy = NodePolicy(deployed=True)
    policy.check_backbone("efficientnet-lite0", "")
    line = "'features.backbone' is 'tiny_backbone:make': must be .* a module of the run's choice"
    with pytest.raises(UploadError, match=line):
        policy.check_backbone("tiny_backbone:make", "")
    with pytest.raises(UploadError, match="'features.weights' is '/etc/passwd'"):
        policy.check_backbone("torchvision:resnet18", "/etc/passwd")
    NodePolicy(deployed=True, architectures=("tiny_backbone:make",)).check_backbone("tiny_backbone:make", "")


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 0.0), ({"gatekeeper.policy": "warn"}, 0.2), ({"gatekeeper.policy": "exclude", "server.max-share": 0.5}, 0.5)],
)
def test_a_gatekeeper_caps_a_client_s_share_unless_it_is_set(settings: dict[str, str | float], share: float) -> None:
    assert read_settings({"method": "ridge", **settings}).method_config.max_share == share


def function(seed: int = 0, **features: Any) -> FeatureFunction:
    return FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make", **features), seed)


def test_features_of_another_projection_are_refused_and_no_projection_reads_other_cached_features() -> None:
    few = function(dim=80)
    with pytest.raises(UploadError, match="differ in dim-seed: 1, expected is 0$"):
        few.sums(10).check_upload(dict(function(1, dim=80).sums(10).state_dict()))
    assert function(3, dim=8).raw == function().raw
    assert function(precision="bfloat16").raw != function().raw
    assert function(3, dim=8).whole == function()


def test_half_precision_is_another_function_whose_features_are_near() -> None:
    images = torch.rand(32, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    whole, half = (function(precision=name).module(images) for name in ("float32", "bfloat16"))
    apart = (whole - half).norm(dim=1)
    assert 1e-5 < float(apart.max()) < 0.1
    assert half.dtype == torch.float64
    with pytest.raises(UploadError, match="differ in precision: bfloat16, expected is float32$"):
        function().sums(10).check_upload(dict(function(precision="bfloat16").sums(10).state_dict()))


@pytest.mark.parametrize(("task", "architecture"), [("statistics", ""), ("classifier", "statistics")])
def test_a_small_client_sends_nothing_and_the_server_is_not_told_its_number(
    task: str, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flwr")
    app = read_settings({**SETTINGS, "data.partition": "iid", "data.limit": 403, "features.min-examples": 101}).app
    app = replace(app, model=replace(app.model, per_client=architecture))
    sent, silent = [], []
    for partition_id in range(CLIENTS):
        node = Node.of({"partition-id": partition_id, "num-partitions": CLIENTS}, app)
        try:
            sent.append(prepare_upload(app, node, TrainRequest("", 1, 0, task=task), {})[0])
        except UploadError as error:
            silent.append(str(error))
    assert [trained.facts.num_examples for trained in sent] == [101, 101, 101]
    assert silent == ["it has fewer examples than 'features.min-examples', 101, so it sends nothing"]
    assert caplog.text.count("has 100 examples and sends nothing: 'features.min-examples' is 101") == 1


def test_images_that_a_backbone_would_clamp_or_cannot_take_are_refused() -> None:
    labels = torch.arange(4) % 2
    signed = torch.linspace(-1, 1, 4 * 64).reshape(4, 1, 8, 8)
    for images, refused in ((signed, True), ((signed + 1) / 2, False)):
        split = unchanged(labels, images.__getitem__, num_classes=2, shape=(1, 8, 8))
        own = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make"), 0, *split.normalization)
        pooled = FeatureSource(own).pooled(split.take(), split.normalization)
        for act in (partial(own.check, split, "mine"), partial(next, pooled)):
            with pytest.raises(DataError, match=r"outside \[0, 1\]: must be pixels") if refused else nullcontext():
                act()
    grey_alpha = pixels(labels, signed.__getitem__, num_classes=2, shape=(2, 8))
    with pytest.raises(OptionError, match="'mine', whose images have 2 channels: must be 1 or 3 for"):
        function().check(grey_alpha, "mine")
