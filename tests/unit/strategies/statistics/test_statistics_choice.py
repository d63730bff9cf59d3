import math
import time

import pytest
import torch
from statistics_fakes import divided, examples, of

from strategies.statistics.choice import FOLDS, choose_penalty, choose_shrinkage, folds_of, values_of
from strategies.statistics.heads import Lda, Ridge, squared_error
from strategies.statistics.sums import Statistics, from_arrays, to_arrays


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


def test_shrinkage_of_few_examples_is_larger_than_of_many() -> None:
    few, many = (choose_shrinkage(divided(*examples(1, n), 5, 100.0), seed=0).value for n in (40, 4000))
    assert few > many


def test_a_single_client_falls_back_to_features_over_examples() -> None:
    found = choose_penalty({"one": of(*examples(0, 60))}, seed=0)
    assert (found.value, found.curve, found.by_client) == (0.1, {}, {})


def test_many_clients_are_dealt_to_ten_folds_by_the_seed() -> None:
    names = [f"c{k}" for k in range(43)]
    folds = folds_of(names, 0)
    assert len(folds) == FOLDS
    assert sorted(sum(folds, ())) == sorted(names)
    assert folds == folds_of(names[::-1], 0) != folds_of(names, 1)


def test_choice_does_not_depend_on_the_order_of_clients() -> None:
    clients = divided(*examples(2, 300), 6, 0.1)
    swapped = {name: clients[name] for name in sorted(clients, reverse=True)}
    assert choose_penalty(clients, seed=0) == choose_penalty(swapped, seed=0)


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


def test_value_of_more_than_twenty_clients_is_judged_by_ten_folds() -> None:
    rows, labels = examples(5, 920)
    parts = torch.arange(920).chunk(23)
    clients = {f"c{k:02d}": of(rows[part], labels[part]) for k, part in enumerate(parts)}
    clients["c07"] = of(rows[parts[7]], (labels[parts[7]] + 1) % 3)  # wrong labels
    found, total = values_of(clients, 0.1, seed=3), Statistics.total(clients.values())
    assert min(found, key=lambda name: found[name]) == "c07"
    change, judged = 0.0, 0.0
    for fold in folds_of(list(clients), 3):
        if "c00" not in fold:
            held_out = Statistics.total(clients[name] for name in fold)
            heads = [Ridge(total - held_out - left).head(0.1) for left in (clients["c00"], held_out.scaled(0.0))]
            change += squared_error(heads[0], held_out) - squared_error(heads[1], held_out)
            judged += held_out.examples
    assert judged in (800.0, 840.0)
    assert found["c00"] == pytest.approx(change / judged, rel=1e-6)


def test_forgetting_joining_and_their_choice_take_under_a_second() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(2000, 128, generator=rng, dtype=torch.float64))
    clients = {f"c{k}": of(part, torch.arange(len(part)) % 3) for k, part in enumerate(rows.split(200))}
    without = {name: own for name, own in clients.items() if name != "c4"}
    began = time.process_time()
    total, choice = Statistics.total(without.values()), choose_penalty(without, seed=0)
    forgotten = Ridge(total).head(choice.value)
    assert time.process_time() - began < 1.0
    kept = torch.cat([rows[:800], rows[1000:]])
    labels = torch.cat([torch.arange(200) % 3] * 9)
    torch.testing.assert_close(forgotten.weight, Ridge(of(kept, labels)).head(choice.value).weight, rtol=0, atol=1e-8)


@pytest.mark.parametrize("sizes", [(100, 1), (1, 1, 1), (1,)])
def test_clients_of_single_examples_leave_a_finite_choice_and_head(sizes: tuple[int, ...]) -> None:
    for seed in range(10):
        rows, labels = examples(seed, sum(sizes))
        parts = zip(rows.split(list(sizes)), labels.split(list(sizes)), strict=True)
        clients = {f"c{number}": of(*part) for number, part in enumerate(parts)}

        found = choose_shrinkage(clients, seed=0)

        head = Lda(Statistics.total(clients.values())).head(found.value)
        assert all(map(math.isfinite, found.curve.values()))
        assert head.weight.isfinite().all()


@pytest.mark.parametrize(("clients", "size", "penalty"), [(4, 20, 1e-9), (3, 1, 0.1)])
def test_values_of_sums_that_were_rounded_on_the_way_are_finite(clients: int, size: int, penalty: float) -> None:
    rng = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.rand(clients * size, 96, generator=rng, dtype=torch.float64))
    sums = [Statistics.of([(part, torch.arange(size) % 3)], 3, 96) for part in rows.split(size)]

    found = values_of({f"c{k}": from_arrays(to_arrays(own)) for k, own in enumerate(sums)}, penalty)

    assert all(map(math.isfinite, found.values()))
