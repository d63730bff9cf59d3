"""What FLBoost ends with, starts from and remembers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flboost_fakes import COUNTS, SHAPE, SMALL, B, C, Rows, Z, differ, job, net, student, weights
from method_fakes import telling

from strategies.compute.in_process import InProcess
from strategies.core.errors import OneShotError, OptionError
from strategies.distillation.generators import ConditionalGenerator
from strategies.flboost import METHOD, FlBoostConfig, _Server
from strategies.method import Job, Silent
from strategies.rounds.refinement import refines
from strategies.run.merging import merge
from strategies.run.run_folder import RunFolder
from strategies.run.stage import run_stage
from strategies.uploads.outputs import check_outputs

# A change here changes every published number.
PINNED = 0.698160


def test_outcome_is_the_model_the_generator_times_and_images() -> None:
    outcome = METHOD.fit(job(), Silent())
    assert student(outcome).keys() == net().state_dict().keys()
    assert outcome.memory.keys() == ConditionalGenerator(Z, C, SHAPE).state_dict().keys()
    assert set(outcome.timings) == {"synthesis", "distillation"}
    assert all(seconds > 0 for seconds in outcome.timings.values())
    assert outcome.images is not None
    assert outcome.images.shape == (B, *SHAPE)
    assert outcome.images.dtype == torch.uint8


def test_losses_are_recorded_once_and_work_is_reported() -> None:
    rows = Rows()
    METHOD.fit(job(), rows)
    (row,) = rows.rows
    assert row.keys() == {"epoch", "generator", "adversarial", "ce", "diversity", "distillation"}
    assert row["epoch"] == 2
    assert row["generator"] == pytest.approx(row["adversarial"] + row["ce"] + row["diversity"], rel=1e-5)
    assert row["adversarial"] < 0 < row["distillation"]
    assert 0 < row["diversity"] <= 1
    assert rows.steps[-1] == (2, 2)
    assert rows.steps == sorted(rows.steps)


@pytest.mark.parametrize(("augmentation", "changed"), [("none", 1), ("crop-flip", 3)])
def test_images_that_are_augmented_are_changed_anew_for_each_step_of_the_model(
    augmentation: str, changed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[int](), _Server._look
    monkeypatch.setattr(_Server, "_look", lambda *given: looks.append(len(given[1])) or look(*given))  # type: ignore[func-returns-value]
    METHOD.fit(job(replace(SMALL, augmentation=augmentation, student_steps=3, generator_steps=1)), Silent())
    per_client = len(COUNTS)  # steps of the generator
    assert len(looks) == 2 * (per_client + changed)


def test_observer_scores_the_model_in_the_same_row() -> None:
    rows = Rows()
    watched = job(observer=lambda epoch, module: {"seen": float(epoch), "training": float(module.training)})
    outcome = METHOD.fit(watched, rows)
    assert (rows.rows[0]["seen"], rows.rows[0]["training"]) == (2.0, 0.0)
    assert not differ(student(outcome), student(METHOD.fit(job(), Silent())))


def test_uploads_start_and_memory_stay_as_they_are() -> None:
    first = METHOD.fit(job(), Silent())
    given = job(memory=first.memory)
    assert given.start is not None
    states = [upload.read() for upload in given.uploads] + [given.start, first.memory]
    before = [{name: value.clone() for name, value in state.items()} for state in states]
    METHOD.fit(given, Silent())
    assert not any(differ(state, copy) for state, copy in zip(states, before, strict=True))


def test_same_seed_gives_the_same_bits_and_rounds_draw_anew() -> None:
    first, again = METHOD.fit(job(), Silent()), METHOD.fit(job(), Silent())
    assert not differ(student(first), student(again))
    assert not differ(first.memory, again.memory)
    still = FlBoostConfig.preset("default", **{**vars(SMALL), "lr_decay": 1.0})
    one, two, seed = (METHOD.fit(job(still, **c), Silent()) for c in ({}, {"server_round": 2}, {"seed": 1}))
    assert differ(student(one), student(two))
    assert differ(student(one), student(seed))


@pytest.mark.parametrize("step", ["per-client", "joint"])
def test_order_of_uploads_does_not_show(step: str) -> None:
    given = job(replace(SMALL, generator_step=step))
    turned = replace(given, uploads=given.uploads[::-1])
    assert not differ(student(METHOD.fit(given, Silent())), student(METHOD.fit(turned, Silent())))


def test_names_of_clients_do_not_show_in_the_joint_form() -> None:
    given = job(replace(SMALL, generator_step="joint"))
    renamed = replace(
        given,
        uploads=tuple(telling(u, client=f"z{9 - k}") for k, u in enumerate(given.uploads)),
    )
    one, two = (student(METHOD.fit(g, Silent())) for g in (given, renamed))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-3)


def test_generator_continues_from_its_memory() -> None:
    first = METHOD.fit(job(), Silent())
    fresh, going_on = (METHOD.fit(job(server_round=2, memory=m), Silent()) for m in (None, first.memory))
    assert differ(student(fresh), student(going_on))
    # With steps near 0 it stays almost unchanged.
    slow = replace(SMALL, generator_lr=1e-12)
    kept = METHOD.fit(job(slow, memory=first.memory, server_round=2), Silent()).memory
    for name, value in first.memory.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-8)
    assert int(kept["norm0.num_batches_tracked"]) == 2 * int(first.memory["norm0.num_batches_tracked"]) == 12


def test_memory_of_another_generator_is_refused() -> None:
    memory = ConditionalGenerator(Z + 1, C, SHAPE).state_dict()
    with pytest.raises(OptionError, match=r"previous round.s generator .*flboost.latent"):
        METHOD.fit(job(memory=memory), Silent())


def test_learning_rates_fall_from_round_to_round() -> None:
    config = replace(SMALL, weight_decay=0.0, student_lr=1e-3, generator_lr=1e-4, iterations=1, student_steps=1)
    memory = METHOD.fit(job(), Silent()).memory
    moved = {}
    for decay in (1.0, 0.5):
        given = job(replace(config, lr_decay=decay), memory=memory, server_round=3)
        outcome = METHOD.fit(given, Silent())
        assert given.start is not None
        moved[decay] = [
            float((student(outcome)["6.weight"] - given.start["6.weight"]).norm()),
            float((outcome.memory["pixels.weight"] - memory["pixels.weight"]).norm()),
        ]
    for full, fallen in zip(moved[1.0], moved[0.5], strict=True):
        assert fallen / full == pytest.approx(0.25, rel=0.05)


def test_student_starts_from_the_average_of_its_architecture_where_no_start_is_given() -> None:
    still = replace(SMALL, student_lr=1e-12, weight_decay=0.0)
    found = student(METHOD.fit(job(still, kinds=("net", "other", "net"), start=None), Silent()))
    sizes = [sum(COUNTS[0]), sum(COUNTS[2])]
    for name in ("0.weight", "6.bias"):
        wanted = (sizes[0] * weights("net", 0)[name] + sizes[1] * weights("net", 2)[name]) / sum(sizes)
        torch.testing.assert_close(found[name], wanted)


def test_clients_of_other_architectures_teach_too_but_give_no_start() -> None:
    given = job(kinds=("other", "other", "net"))
    assert differ(student(METHOD.fit(given, Silent())), student(METHOD.fit(job(), Silent())))
    with pytest.raises(OptionError, match=r"no client has the student's architecture 'net'; .* must be one of other"):
        METHOD.fit(job(kinds=("other",) * 3, start=None), Silent())


def test_it_refines() -> None:
    assert refines(METHOD)


@pytest.mark.usefixtures("wide_generators")
def test_pinned_value() -> None:
    found = student(METHOD.fit(job(), Silent()))
    assert float(found["6.weight"].abs().mean()) == pytest.approx(PINNED, rel=1e-3)


def mute(given: Job) -> Job:
    return replace(
        given,
        uploads=tuple(telling(upload, label_counts=None) for upload in given.uploads),
    )


@pytest.mark.parametrize("level", ["images", "features"])
def test_model_learns_from_tallys_pool_where_that_is_the_teacher(level: str) -> None:
    given = job(replace(SMALL, level=level), teacher="tally")
    told, again, silent = (METHOD.fit(one, Silent()) for one in (given, given, mute(given)))
    assert not differ(student(told), student(again))
    assert differ(student(told), student(METHOD.fit(replace(given, teacher=None), Silent())))
    assert differ(student(told), student(silent))


def test_generator_of_silent_clients_is_trained_by_estimated_shares() -> None:
    given, rows = mute(job(replace(SMALL, student_lr=1e-9), teacher="tally")), Rows()
    estimated = METHOD.fit(given, rows)
    assert not any("note" in row for row in rows.rows)
    assert differ(estimated.memory, METHOD.fit(replace(given, teacher=None), Silent()).memory)
    # The pool that the model learns from does not reach the generator's own losses: counts from the clients do.
    plain = METHOD.fit(job(replace(SMALL, student_lr=1e-9)), Silent())
    pooled = METHOD.fit(job(replace(SMALL, student_lr=1e-9), teacher="tally"), Silent())
    for name, value in plain.memory.items():
        torch.testing.assert_close(pooled.memory[name], value, rtol=1e-3, atol=1e-4)


def test_mixed_architectures_have_a_pool() -> None:
    given = mute(job(kinds=("net", "other", "net"), teacher="tally"))
    assert all(bool(value.isfinite().all()) for value in student(METHOD.fit(given, Silent())).values())


def test_student_that_one_accepted_upload_made_nan_is_no_result(tmp_path: Path) -> None:
    huge = {key: value * 5e36 if key.startswith("6.") else value for key, value in weights("net", 2).items()}
    check_outputs("net", huge, net, SHAPE)
    one = job()
    spoilt = replace(one, start=None, uploads=(*one.uploads[:2], replace(one.uploads[2], read=lambda: huge)))
    said = r"^method 'flboost' ended with NaN or Inf in tensor '0\.weight' of the student: must be finite"

    with RunFolder.create(tmp_path / "run", {}) as run, pytest.raises(OneShotError, match=said):
        run_stage(METHOD, spoilt, InProcess(), run.round(), log=lambda _: None)
    with pytest.raises(OneShotError, match=said):
        merge([upload.read() for upload in spoilt.uploads], "flboost", model=net, num_classes=C, input_shape=SHAPE)
