from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import OTHER, TINY, Book, check_option, check_resume, options_to_try, same, tiny_job, upload

from strategies.core.errors import OptionError
from strategies.methods.f_dafl import METHOD, FDaflConfig, fit

SMALL = FDaflConfig(**TINY)
ALIKE = (upload(0, "narrow"), upload(1, "narrow"))


@pytest.mark.parametrize("changes", [{}, {"pool_cap": 9, "pool_augmentation": "flip"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


def test_losses_of_clients_with_equal_features_add_up_and_need_no_note() -> None:
    book = Book()
    fit(tiny_job(SMALL, uploads=ALIKE), book)
    assert book.notes == []
    for row in book.rows:
        assert row.keys() == {"epoch", "one-hot", "information", "activation", "generator", "distillation"}
        total = row["one-hot"] + 5 * row["information"] + 0.1 * row["activation"]
        assert row["generator"] == pytest.approx(total, rel=1e-4)
        assert row["activation"] < 0
        assert -torch.tensor(3.0).log10() - 1e-6 <= row["information"] < 0


DAFL_OTHER: dict[str, Any] = OTHER | {"one_hot_weight": 0.1, "information_weight": 0.0, "activation_weight": 2.0}


@pytest.mark.parametrize("name", options_to_try(FDaflConfig, "activation_weight"))
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, DAFL_OTHER[name])


def test_activation_weight_changes_the_result_where_features_are_alike() -> None:
    outcomes = [
        fit(tiny_job(replace(SMALL, epochs=1, activation_weight=weight), uploads=ALIKE), Book()) for weight in (0, 20)
    ]
    assert not same(*outcomes)


def test_a_generator_with_nothing_to_learn_from_is_refused_before_a_client_works() -> None:
    weights = {"one_hot_weight": 0.0, "information_weight": 0.0, "activation_weight": 0.0}
    with pytest.raises(OptionError, match="activation_weight are all 0: must be at least one"):
        FDaflConfig(**weights)
    for name in weights:
        FDaflConfig(**{**weights, name: 1.0})
