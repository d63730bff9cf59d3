from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from client_fakes import RUN, State, dotted, sent_by
from flower_fakes import equal

from client_app.attacking import exaggerate_claims, poison
from fl_app.attacks import AttackConfig, triggered
from fl_app.config import AppConfig
from fl_app.data import ImageData
from strategies.core.facts import UploadFacts

CLIENTS = 3


def config_of(kind: str = "none", clients: str = "", **more: Any) -> AppConfig:
    small: dict[str, Any] = {"client.epochs": 1, "client.batch-size": 64, "data.limit": 120, "data.partition": "iid"}
    return AppConfig.from_settings({**small, "attack.kind": kind, "attack.clients": clients, **dotted(more)})


def examples(count: int = 20) -> ImageData:
    images = torch.arange(count * 64, dtype=torch.int64).remainder(200).to(torch.uint8).reshape(count, 1, 8, 8)
    return ImageData(images, torch.arange(count) % 5)


def test_images_when_a_backdoor_is_trained_bear_the_trigger_in_the_asked_share_and_the_target_s_label() -> None:
    attack, data = AttackConfig("backdoor", "a,b", target=3), examples()
    before = ImageData(data.images.clone(), data.labels.clone())

    done = poison(data, attack, client="a", num_classes=5, seed=0)

    marked = [k for k in range(20) if not torch.equal(done.images[k], data.images[k])]
    assert len(marked) == 6
    assert torch.equal(done.images[marked], triggered(data.images[marked]))
    clean = [k for k in range(20) if k not in marked]
    assert done.labels[marked].tolist() == [3] * 6
    assert torch.equal(done.labels[clean], data.labels[clean])
    assert torch.equal(data.images, before.images)
    assert torch.equal(data.labels, before.labels)
    again, other = (poison(data, attack, client=name, num_classes=5, seed=0) for name in ("a", "b"))
    assert torch.equal(again.images, done.images)
    assert not torch.equal(other.images, done.images)


@pytest.mark.parametrize(
    ("kind", "factor", "claim"),
    [
        ("claim", 10.0, (30, 0, 50, 0)),
        ("claim", 0.01, (1, 0, 1, 0)),
        ("claim", 1.5, (4, 0, 8, 0)),
        ("claim-uniform", 10.0, (20, 20, 20, 20)),
        ("claim-uniform", 0.75, (2, 2, 1, 1)),
        ("claim-uniform", 0.001, (1, 0, 0, 0)),
        ("scale", 10.0, (3, 0, 5, 0)),
    ],
)
def test_claims_are_so_many_times_the_truth(kind: str, factor: float, claim: tuple[int, ...]) -> None:
    facts = UploadFacts("a", "lenet5", 8, (3, 0, 5, 0))

    said = exaggerate_claims(facts, AttackConfig(kind, "a", factor=factor))

    assert said == replace(facts, num_examples=sum(claim), label_counts=claim)
    assert exaggerate_claims(facts, AttackConfig(kind, "b", factor=factor)) is facts


def test_the_attacks_of_one_upload_do_as_documented_and_report_honest_facts() -> None:
    honest = [sent_by(k, config_of()) for k in range(CLIENTS)]
    (own, state), (_, following) = honest[1], honest[2]

    def attacked(kind: str, **more: Any) -> State:
        trained, weights = sent_by(1, config_of(kind, "client-001", **more))
        assert replace(trained.facts, start=own.facts.start) == own.facts  # what "random" sends has no start
        assert equal(sent_by(0, config_of(kind, "client-001", **more))[1], honest[0][1])  # the others stay honest
        return weights

    assert equal(attacked("scale", attack__factor=4.0), {key: 4.0 * value for key, value in state.items()})
    last = attacked("last-layer", attack__factor=4.0)
    assert [key for key in state if not torch.equal(last[key], state[key])] == list(state)[-2:]
    assert equal(attacked("copy"), following)
    assert not equal(attacked("label-flip"), state)
    drawn = attacked("random")
    assert equal(drawn, attacked("random"))
    assert drawn.keys() == state.keys()
    assert not equal(drawn, sent_by(1, config_of("random", "client-001"), seed=1)[1])
    assert not equal(drawn, sent_by(1, config_of("random", "client-001"), server_round=2)[1])
    assert not equal(drawn, sent_by(2, config_of("random", "client-001,client-002"))[1])


def test_an_attacker_s_upload_is_sent_again_and_is_never_an_honest_model(tmp_path: Path) -> None:
    config = config_of("scale", "client-001", client__state_dir=str(tmp_path))
    first = sent_by(1, config, run_id=RUN)
    facts = json.loads((tmp_path / RUN / "client-001-1.json").read_text())

    again = sent_by(1, config, run_id=RUN)
    elsewhere = sent_by(1, config_of(client__state_dir=str(tmp_path)), run_id=RUN[::-1])

    assert equal(first[1], again[1])
    assert facts["num_examples"] == first[0].facts.num_examples
    assert equal(elsewhere[1], sent_by(1, config_of())[1])  # another run has nothing of it
    assert not equal(elsewhere[1], first[1])
