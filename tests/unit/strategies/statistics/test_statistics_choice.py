import pytest
import torch
from statistics_fakes import divided, examples, of

from strategies.statistics.choice import FOLDS, choose_penalty, folds_of, values_of
from strategies.statistics.heads import Ridge, squared_error
from strategies.statistics.sums import Statistics


def test_choice_is_cross_validation_over_clients() -> None:
    clients = divided(*examples(0, 300), 4, 1.0)
    found, grid = choose_penalty(clients, seed=0, grid=(0.01, 0.1, 1.0)), (0.01, 0.1, 1.0)
    total = Statistics.total(clients.values())
    for penalty in grid:
        errors = [squared_error(Ridge(total - own).head(penalty), own) for own in clients.values()]
        assert found.curve[penalty] == pytest.approx(sum(errors) / 300)
    assert found.value == min(grid, key=lambda penalty: found.curve[penalty])
    assert set(found.by_client) == set(clients)


def test_few_examples_want_a_larger_penalty_than_many() -> None:
    few, many = (choose_penalty(divided(*examples(1, n), 5, 100.0), seed=0).value for n in (20, 4000))
    assert few > many


def test_many_clients_are_dealt_to_ten_folds_by_the_seed() -> None:
    names = [f"c{k}" for k in range(43)]
    folds = folds_of(names, 0)
    assert len(folds) == FOLDS
    assert sorted(sum(folds, ())) == sorted(names)
    assert folds == folds_of(names[::-1], 0) != folds_of(names, 1)


def test_value_is_the_loss_of_the_others_without_a_client() -> None:
    rows, labels = examples(3, 240)
    parts = dict(zip("abcd", torch.arange(240).chunk(4), strict=True))
    clients = {name: of(rows[part], labels[part]) for name, part in parts.items()}
    clients["d"] = of(rows[parts["d"]], (labels[parts["d"]] + 1) % 3)  # wrong labels
    found = values_of(clients, 0.1)
    assert found["d"] < 0 < min(found["a"], found["b"], found["c"])
    with pytest.raises(ValueError, match="must be at least 3"):
        values_of({"a": clients["a"], "b": clients["b"]}, 0.1)


def test_value_is_the_mean_over_the_others_of_their_error_without_it() -> None:
    clients = divided(*examples(4, 300), 5, 1.0)
    total, found = Statistics.total(clients.values()), values_of(clients, 0.1)
    for name, own in clients.items():
        changes = [
            squared_error(Ridge(total - own - judge).head(0.1), judge)
            - squared_error(Ridge(total - judge).head(0.1), judge)
            for other, judge in clients.items()
            if other != name
        ]
        assert found[name] == pytest.approx(sum(changes) / (300 - own.examples), rel=1e-6)
