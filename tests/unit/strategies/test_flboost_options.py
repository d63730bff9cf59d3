"""What FLBoost's options change, and which do not go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flboost_fakes import SMALL, C, Rows, differ, job, student
from method_fakes import telling

from strategies.core.errors import OptionError
from strategies.flboost import METHOD, FlBoostConfig
from strategies.method import Outcome, Silent

SWITCHES: dict[str, Any] = {
    "iterations": 3, "generator_steps": 2, "student_steps": 3, "batch_size": 7, "latent": 6, "generator_lr": 0.02,
    "generator_precision": "bfloat16", "student_lr": 0.05, "weight_decay": 0.1, "adversarial_weight": 0.0,
    "ce_weight": 0.0, "diversity_weight": 0.0, "discrepancy": "kl", "generator_step": "joint", "ce_form": "batch-mean",
    "student_divergence": "student-first", "per_class": True, "labels": "uniform", "label_draw": "independent",
    "weights": "uniform", "ensemble": "logits", "augmentation": "crop-flip", "level": "features",
    "moments": "mnist",
}  # fmt: skip


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return METHOD.fit(job(), Silent())


@pytest.mark.parametrize("name", list(SWITCHES))
def test_every_option_changes_the_result(usual: Outcome, name: str) -> None:
    changed = METHOD.fit(job(replace(SMALL, **{name: SWITCHES[name]})), Silent())
    assert differ(student(usual), student(changed))


@pytest.mark.parametrize("option", [{"labels": "uniform"}, {"weights": "uniform"}])
def test_equal_counts_are_as_good_as_none(option: dict[str, Any]) -> None:
    given = job()
    given = replace(given, uploads=tuple(telling(u, label_counts=(5,) * C) for u in given.uploads))
    plain, switched = (METHOD.fit(replace(given, config=c), Silent()) for c in (SMALL, replace(SMALL, **option)))
    assert not differ(student(plain), student(switched))


def test_without_all_label_counts_everything_is_uniform_and_logged_once() -> None:
    given = job()
    silent = replace(
        given,
        uploads=(
            *given.uploads[:2],
            telling(given.uploads[2], label_counts=None),
        ),
    )
    rows = Rows()
    found = METHOD.fit(silent, rows)
    assert [row["note"] for row in rows.rows if "note" in row] == [
        "no label counts from c2: all classes and clients weigh the same"
    ]
    uniform = replace(SMALL, labels="uniform", weights="uniform")
    assert not differ(student(found), student(METHOD.fit(job(uniform), Silent())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adversarial_weight": 0.0, "ce_weight": 0.0, "diversity_weight": 0.0}, "are all 0: must be at least one"),
        ({"generator_width": 7}, "'flboost.generator-width' is 7: must be an even number"),
        ({"level": "features", "augmentation": "crop-flip"}, "must be 'none', or the level 'images'"),
        ({"discrepancy": "l2"}, "'flboost.discrepancy' is 'l2'"),
        ({"batch_size": 1}, "'flboost.batch-size' is 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        FlBoostConfig(**changes)
    assert "\n" not in str(caught.value)


def test_presets_are_the_two_variants_and_feddf() -> None:
    assert FlBoostConfig.preset("default") == FlBoostConfig()
    paper, code, feddf = (FlBoostConfig.preset(name) for name in ("paper", "published-code", "feddf"))
    assert (paper.generator_step, paper.discrepancy, paper.student_divergence) == ("joint", "kl", "student-first")
    assert (paper.ce_form, paper.label_draw, paper.per_class) == ("per-sample", "independent", False)
    assert (code.generator_step, code.discrepancy, code.student_divergence) == ("per-client", "logits", "teacher-first")
    assert (code.ce_form, code.label_draw, code.per_class) == ("batch-mean", "fixed", True)
    assert (feddf.labels, feddf.weights, feddf.ensemble, feddf.adversarial_weight) == (
        "counts",
        "uniform",
        "probabilities",
        0,
    )
    assert feddf.generator_step == "joint"
    assert (feddf.iterations * feddf.generator_steps, feddf.iterations * feddf.student_steps) == (50, 20)
    for one in (paper, code):
        assert (one.iterations, one.generator_steps, one.student_steps) == (10, 1, 5)
    for one in (paper, code, feddf):
        assert one.batch_size == 50
        assert (one.generator_lr, one.student_lr, one.lr_decay, one.weight_decay) == (0.01, 0.1, 0.998, 1e-3)
    with pytest.raises(OptionError, match="unknown preset 'other'"):
        FlBoostConfig.preset("other")
