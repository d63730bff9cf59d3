"""FENS: the talk with the clients, the rounds, what they end with, and what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fens_fakes import CLASSES, RUN, TINY, DirectClients, changed, examples, fens_job, fitted, same, weights
from method_fakes import UPLOADS, Book, model_of, softmax, telling

from strategies.combiners import aggregator_trainers as trainers
from strategies.combiners.aggregators import AGGREGATORS
from strategies.combiners.outcomes import build_ensemble
from strategies.combiners.tally_pool import build_tally_teacher
from strategies.core.clients import Answer
from strategies.core.errors import OptionError, QuorumError
from strategies.core.seeds import derive_seed
from strategies.method import Job, Need, Silent
from strategies.methods.fens import METHOD, FensConfig, plan
from strategies.uploads.needs import check_needs


def member_logits(job: Job, x: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.stack([model_of(upload)(x).detach().numpy() for upload in job.uploads])


def uneven(client: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of a client, of which the first has fewer than a round sees."""
    return examples(client, 5 if client == "c0" else 9)


def naive_rounds(job: Job, config: FensConfig) -> np.ndarray[Any, Any]:
    """Algorithm 1's second phase and Table 8's FedAdam, client by client, for per-class weights."""
    lam = AGGREGATORS["per-class"].start(job.seed, members=3, classes=CLASSES)["weight"].astype(np.float64)
    held = {u.client: uneven(u.client) for u in job.uploads}
    logits = {client: member_logits(job, x).astype(np.float64) for client, (x, _) in held.items()}
    m, v = np.zeros_like(lam), np.zeros_like(lam)
    for number in range(1, config.rounds + 1):
        total, delta = 0.0, np.zeros_like(lam)
        for client, (_, labels) in held.items():
            mine, z, y = lam.copy(), logits[client], labels.numpy()
            rng = np.random.default_rng(derive_seed(derive_seed(job.seed, "fens", client, number), "batches"))
            order = rng.permutation(len(y))
            for step in range(config.local_steps):
                batch = order[step * config.batch_size : (step + 1) * config.batch_size]
                residual = softmax((mine[:, None] * z[:, batch]).sum(0)) - np.eye(CLASSES)[y[batch]]
                mine -= config.client_lr * (residual[None] * z[:, batch]).sum(1) / len(batch)
            seen = min(len(y), config.local_steps * config.batch_size)
            share = seen if config.client_weights == "examples" else 1
            total, delta = total + share, delta + share * (mine - lam)
        delta /= total
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        lam = lam + config.server_lr * m / (np.sqrt(v) + 1e-3)
    return lam


@pytest.mark.parametrize("form", ["examples", "uniform"])
def test_rounds_equal_the_paper_s_algorithm_written_client_by_client(tmp_path: Path, form: str) -> None:
    """Clients count by the examples that they have seen, or equally."""
    config = replace(TINY, client_weights=form)
    job = fens_job(config)

    found = weights(fitted(DirectClients(tmp_path, held=uneven), job))["weight"]

    np.testing.assert_allclose(found, naive_rounds(job, config), rtol=2e-4, atol=1e-5)


def test_a_run_cut_off_in_any_round_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Book(keep=True)
    expected = fitted(DirectClients(tmp_path), progress=whole)

    assert [snapshot.step for snapshot in whole.snapshots] == [1, 2, 3, 4, 5, 6]
    for snapshot in whole.snapshots:
        clients = DirectClients(tmp_path)
        assert same(fitted(clients, progress=Book(snapshot)), expected)
        assert clients.steps("ensemble") == []  # their logits are on their disks
        assert len(clients.steps("round")) == 3 * (6 - snapshot.step)


def test_the_ensemble_goes_once_to_every_client_and_its_own_model_stays_where_it_is(tmp_path: Path) -> None:
    clients = DirectClients(tmp_path)
    fitted(clients)

    assert clients.steps("ensemble") == ["c0", "c1", "c2"]
    whole = sum(value.nbytes for u in UPLOADS for value in (t.numpy() for t in u.read().values()))
    assert {size for _, step, size in clients.asked if step == "ensemble"} == {whole}
    assert sum(size for _, step, size in clients.asked if step == "offer") == 0


def test_int8_sends_about_a_quarter_and_predicts_nearly_the_same(tmp_path: Path) -> None:
    sizes, outcomes = {}, {}
    for precision in ("float32", "int8"):
        clients = DirectClients(tmp_path / precision)
        outcomes[precision] = fitted(clients, fens_job(replace(TINY, precision=precision, rounds=1)))
        sizes[precision] = max(size for _, step, size in clients.asked if step == "ensemble")

    assert 0.25 < sizes["int8"] / sizes["float32"] < 0.35
    spec, (x, _) = outcomes["int8"].ensemble, examples("c0", 50)
    assert spec.precision == "int8"
    logits = [build_ensemble(fens_job(), replace(spec, precision=precision))(x) for precision in ("float32", "int8")]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].abs().max()


@pytest.mark.parametrize(
    ("name", "aggregator", "when", "step", "asked"),
    [
        ("c2", "per-class", lambda _, a: (a.client, a.facts.get("round")) == ("c2", 2), "ensemble", "c0 c1 c2 c2"),
        ("c1", "voting", lambda clients, _: len(clients.steps("ensemble")) == 3, "votes", "c0 c1 c2 c1"),
    ],
    ids=["ensemble", "votes"],
)
def test_a_client_that_lost_its_disk_is_asked_again_and_the_others_go_on(
    tmp_path: Path, name: str, aggregator: str, when: Callable[[DirectClients, Answer], bool], step: str, asked: str
) -> None:
    lost: list[str] = []

    def lose(answer: Answer) -> Answer:
        if when(clients, answer) and not lost:
            lost.append(name)
            for path in tmp_path.rglob(f"{name}-ensembles-*/*.npz"):
                path.unlink()
        return answer

    clients = DirectClients(tmp_path, spoil=lose)
    outcome = fitted(clients, fens_job(replace(TINY, aggregator=aggregator)))

    assert clients.steps(step) == asked.split()
    assert clients.refused == []
    assert aggregator != "voting" or weights(outcome)["counts"].sum() == 3 * 3 * 9  # members, clients, examples


@pytest.mark.parametrize("needs", [7, [0, 0, 1, 1], [3], [-1], ["0"], "all", [0.0], [True], [[0]]])
def test_invalid_needs_cost_the_client_that_sends_them(tmp_path: Path, needs: Any) -> None:
    def greedy(answer: Answer) -> Answer:
        return changed(answer, needs=needs) if answer.client == "c1" and "needs" in answer.facts else answer

    clients = DirectClients(tmp_path, spoil=greedy)
    fitted(clients)

    assert any(name == "c1" and "it requests members" in reason for name, reason in clients.refused)


@pytest.mark.parametrize("size", [1e4, 9e8])
def test_a_long_update_counts_as_five_medians_and_is_noted_once(tmp_path: Path, size: float) -> None:
    def long(answer: Answer) -> Answer:
        if answer.client == "c1" and answer.facts.get("round") == 1:
            return replace(answer, arrays={key: value + np.float32(size) for key, value in answer.arrays.items()})
        return answer

    job, book = fens_job(replace(TINY, rounds=40)), Book()
    honest = weights(fitted(DirectClients(tmp_path / "honest"), job))
    attacked = weights(fitted(DirectClients(tmp_path / "attacked", spoil=long), job, book))

    (note,) = book.notes
    assert note.startswith("c1's change in round 1 is ")
    assert "it counts as 5 times" in note
    start = AGGREGATORS["per-class"].start(0, members=3, classes=CLASSES)["weight"]
    learned = np.linalg.norm(honest["weight"] - start)
    assert np.linalg.norm(attacked["weight"] - honest["weight"]) < learned


@pytest.mark.parametrize(
    ("changes", "classes", "reason"),
    [
        ({"aggregator": "two-class-nn"}, 3, "two-class-nn"),
        ({"aggregator": "moe"}, 3, "aggregator 'moe' looks at images"),
        ({"aggregator": "per-class", "start": "label-counts"}, 2, "'fens.start' is 'label-counts', and there are 2"),
        ({"aggregator": "per-class", "start": "tally"}, 2, "'fens.start' is 'tally', and there are 2"),
    ],
)
def test_an_aggregator_unfit_for_classes_or_examples_is_refused_before_a_client_works(
    changes: dict[str, Any], classes: int, reason: str
) -> None:
    job = replace(fens_job(replace(TINY, **changes)), uploads=(), num_classes=classes)

    with pytest.raises(OptionError, match=reason):
        check_needs(METHOD, job)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 0.1), ({"train_on": "server"}, 0.0), ({"aggregator": "average"}, 0.0), ({"aggregator": "voting"}, 0.1)],
)
def test_clients_hold_out_a_share_only_where_a_step_uses_it(changes: dict[str, Any], kept: float) -> None:
    assert plan(FensConfig(**changes)).asks.holdout == kept


@pytest.mark.parametrize(
    ("changes", "counted"),
    [({}, False), ({"aggregator": "weighted"}, True), ({"aggregator": "two-class-weighted"}, True),
     ({"start": "label-counts"}, True), ({"start": "tally"}, False)],
)  # fmt: skip
def test_label_counts_are_needed_only_where_the_aggregator_uses_or_starts_from_them(
    changes: dict[str, Any], counted: bool
) -> None:
    assert (Need.LABEL_COUNTS in METHOD.all_needs(FensConfig(**{"aggregator": "per-class", **changes}))) is counted


def test_a_round_without_a_quorum_fails_and_says_how_many_are_needed(tmp_path: Path) -> None:
    clients = DirectClients(tmp_path, away={3: {"c0", "c1"}})

    with pytest.raises(QuorumError, match="aggregator: 1 usable answers, needs 2"):
        fitted(clients)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda a: replace(a, arrays={k: v * np.nan for k, v in a.arrays.items()}), "holds NaN or Inf"),
        (lambda a: replace(a, arrays={k: v + np.float32(1e25) for k, v in a.arrays.items()}),
         "c1: its parameters exceed 1e+09: must be at most that large"),
        (lambda a: replace(a, arrays={k: v[:1] for k, v in a.arrays.items()}), "is float32 [1, 3]: must be"),
        (lambda a: changed(a, ensemble="other"), "c1: its answer is for ensemble 'other': must be"),
        (lambda a: changed(a, round=5), "c1: its answer is for round 5: must be 1"),
        (lambda a: changed(a, examples=0), "c1: examples is 0: must be a positive whole number"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_costs_that_answer(tmp_path: Path, spoil: Any, reason: str) -> None:
    def spoiled(answer: Answer) -> Answer:
        return spoil(answer) if answer.client == "c1" and answer.facts.get("round") == 1 else answer

    clients = DirectClients(tmp_path / "spoiled", spoil=spoiled)
    outcome = fitted(clients)

    assert [name for name, _ in clients.refused] == ["c1"]
    assert reason in clients.refused[0][1]
    assert same(outcome, fitted(DirectClients(tmp_path / "away", away={1: {"c1"}})))


def test_an_ensemble_with_a_tampered_member_is_refused_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = DirectClients(tmp_path)
    honest = trainers.to_wire

    def tampered(number: int, packed: Any) -> Any:
        arrays, facts = honest(number, packed)
        return {key: value + 1 for key, value in arrays.items()}, facts

    monkeypatch.setattr(trainers, "to_wire", tampered)
    with pytest.raises(QuorumError, match="^ensemble: 0 usable answers, needs 2$"):
        fitted(clients)

    assert "has another digest than the server's offer" in clients.refused[0][1]


def test_forgetting_a_client_equals_a_run_that_never_had_it(tmp_path: Path) -> None:
    fitted(DirectClients(tmp_path / "all"))
    left = fens_job(clients=("c0", "c2"))
    never = fitted(DirectClients(tmp_path / "never", names=("c0", "c2")), left)

    clients = DirectClients(tmp_path / "all", names=("c0", "c2"))
    clients.common["forget-others"] = True
    forgot = fitted(clients, left)

    assert same(forgot, never)
    assert clients.steps("ensemble") == []  # the logits of the others were here
    assert len(list((tmp_path / "all" / RUN).rglob("c0-ensembles-*/*.npz"))) == 1  # and those with c1's are gone


@pytest.mark.parametrize("aggregator", ["average", "weighted"])
def test_a_static_aggregator_asks_no_client(tmp_path: Path, aggregator: str) -> None:
    clients = DirectClients(tmp_path)
    outcome = fitted(clients, fens_job(replace(TINY, aggregator=aggregator)))

    assert clients.asked == []
    wanted = {"average": "mean", "weighted": "label-count"}[aggregator]
    assert outcome.ensemble.combiner == wanted


def test_a_server_with_labelled_images_trains_alone_as_one_client_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "BATCH", 8)  # of the members' inputs
    images = torch.randint(0, 256, (30, 2, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (30,), generator=torch.Generator().manual_seed(4))
    config = replace(TINY, train_on="server", rounds=3)
    job = replace(fens_job(config), labelled=(images, labels))
    clients = DirectClients(tmp_path)

    outcome = fitted(clients, job)

    assert clients.asked == []
    assert same(outcome, METHOD.fit(job, Silent()))
    x = (images.float() / 255 - 0.5) / 0.5
    lam = AGGREGATORS["per-class"].start(0, members=3, classes=CLASSES)["weight"]
    assert not np.array_equal(weights(outcome)["weight"], lam)
    z = member_logits(job, x)

    def loss(weight: np.ndarray[Any, Any]) -> float:
        p = softmax((weight[:, None] * z).sum(0))
        return float(-np.log(p[np.arange(30), labels.numpy()]).mean())

    assert loss(weights(outcome)["weight"]) < loss(lam)


def test_per_class_weights_may_start_from_tallys_shares_sent_or_estimated(tmp_path: Path) -> None:
    config = replace(TINY, start="tally", server_lr=1e-9, rounds=1)
    counts = np.array([u.label_counts for u in UPLOADS], dtype=np.float64)

    told = weights(fitted(DirectClients(tmp_path / "told"), fens_job(config)))["weight"]
    job = fens_job(config)
    job = replace(job, uploads=tuple(telling(upload, label_counts=None) for upload in job.uploads))
    silent = weights(fitted(DirectClients(tmp_path / "silent"), job))["weight"]

    np.testing.assert_allclose(told, counts / counts.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(silent, build_tally_teacher(job)[1].shares().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(silent.sum(0), 1, rtol=1e-5)
    assert np.abs(silent - told).max() > 0.01
