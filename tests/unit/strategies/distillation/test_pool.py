from dataclasses import replace

import pytest
import torch

from strategies.core.errors import OptionError
from strategies.core.seeds import generator as rng
from strategies.distillation.pool import Pool, quantize, shuffled_batches, shuffled_groups
from strategies.method import METHODS
from strategies.teacher.augment import dequantize


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + count)
    return {"images": numbers.to(torch.uint8).view(-1, 1, 1, 1), "labels": numbers}


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (9, 4, [4, 5]), (1, 4, [1]), (3, 4, [3]), (5, 2, [2, 3])],
)
def test_batches_keep_the_partial_one_and_merge_a_single_row(count: int, size: int, expected: list[int]) -> None:
    batches = list(shuffled_batches(rows(0, count), size, rng(0)))
    assert [len(batch["labels"]) for batch in batches] == expected
    assert sorted(torch.cat([batch["labels"] for batch in batches]).tolist()) == list(range(count))


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("together", [1, 2, 8])
def test_groups_are_the_batches_read_at_once(most: int, together: int) -> None:
    columns = {"images": torch.arange(21), "labels": torch.arange(21) * 2}
    batches = list(shuffled_batches(columns, 5, torch.Generator().manual_seed(0), most=most))
    groups = list(shuffled_groups(columns, 5, torch.Generator().manual_seed(0), most=most, together=together))
    parts = [part for rows, sizes in groups for part in torch.split(rows["labels"], sizes)]
    assert [part.tolist() for part in parts] == [batch["labels"].tolist() for batch in batches]
    assert all(torch.equal(rows["labels"], 2 * rows["images"]) for rows, _ in groups)
    assert [len(sizes) for _, sizes in groups][:-1] == [together] * (len(groups) - 1)


def test_add_beyond_the_cap_drops_the_oldest() -> None:
    pool = Pool(cap=5)
    for first in (0, 3, 6):
        pool.add(**rows(first, 3))
    assert pool.columns["labels"].tolist() == [4, 5, 6, 7, 8]
    assert pool.columns["images"].flatten().tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("cap", [0, 5])
def test_restore_of_all_that_was_saved_gives_the_same_pool(cap: int) -> None:
    pool, saved = Pool(cap), []
    for first in (0, 4, 8):
        pool.add(**rows(first, 4))
        saved.append(pool.unsaved())
        pool.mark_saved()
    again = Pool(cap)
    again.restore({name: torch.cat([part[name] for part in saved]) for name in saved[0]})
    assert again.columns.keys() == pool.columns.keys()
    assert all(torch.equal(again.columns[name], pool.columns[name]) for name in pool.columns)
    assert len(again.unsaved()["labels"]) == 0


def test_quantize_floors_to_eight_bits_and_dequantize_goes_back() -> None:
    pixels = torch.tensor([-0.1, 0.0, 0.999, 1.0, 1.5, 0.5])
    assert quantize(pixels).tolist() == [0, 0, 254, 255, 255, 127]
    torch.testing.assert_close(dequantize(quantize(pixels))[-1], torch.tensor(127 / 255))
    assert dequantize(pixels) is pixels


def test_preset_is_its_values_then_the_changes_and_an_unknown_or_invalid_one_is_refused() -> None:
    config = METHODS["dense"].config
    assert config.preset("paper", epochs=8) == replace(config.preset("paper"), epochs=8) != config(epochs=8)
    assert config.preset("published") == config()
    with pytest.raises(OptionError, match="unknown preset 'code' of DenseConfig: known are .*published.*paper"):
        config.preset("code")
    with pytest.raises(OptionError, match="server.epochs"):
        config.preset("paper", epochs=0)


@pytest.mark.parametrize("name", ["co-boosting", "dense", "f-adi", "f-dafl", "intactofl"])
def test_a_pool_of_one_image_is_refused_beside_the_rules_of_the_config(name: str) -> None:
    with pytest.raises(OptionError, match=r"'server.pool-cap' is 1: must be 0 or a whole number at least 2"):
        METHODS[name].config(pool_cap=1)
    with pytest.raises(OptionError, match="'server.synthesis-batch-size' is 0"):  # each value before their rules
        METHODS[name].config(pool_cap=1, synthesis_batch_size=0)
