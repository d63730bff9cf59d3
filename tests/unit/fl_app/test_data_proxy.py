"""Which training images the clients hold, and which the server; the halves of the held-out examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fl_app.data import Normalization, Split, clients_share, half_of, images_in, nobodys, server_share
from strategies.core.errors import DataError
from strategies.core.seeds import generator

HALF = Normalization((0.5,), (0.5,))


def split_of(total: int, domains: torch.Tensor | None = None) -> Split:
    return Split(torch.zeros(total, dtype=torch.long), 1, (1, 1, 1), HALF, "none", lambda p: p, domains)


@pytest.mark.parametrize(("limit", "proxy", "held"), [(0, 0.0, 50), (0, 0.2, 40), (30, 0.2, 30), (45, 0.2, 40)])
def test_clients_get_the_begin_of_one_order_and_the_server_its_end(limit: int, proxy: float, held: int) -> None:
    split, order = split_of(50), torch.randperm(50, generator=generator(3, "limit")).tolist()

    clients, server = clients_share(split, seed=3, limit=limit, proxy=proxy), server_share(split, seed=3, proxy=0.2)

    assert clients.tolist() == sorted(order[:held])
    assert server.tolist() == sorted(order[40:])
    assert nobodys(split, seed=3, limit=limit, proxy=proxy) == 50 - held
    assert server_share(split, seed=4, proxy=0.2).tolist() != server.tolist()


@pytest.mark.parametrize("images", [torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4), torch.rand(3, 1, 4, 4)])
def test_images_of_a_file_are_those_in_it(tmp_path: Path, images: torch.Tensor) -> None:
    save_file({"images": images, "labels": torch.zeros(2)}, tmp_path / "pool.safetensors")

    assert torch.equal(images_in(str(tmp_path / "pool.safetensors"), (1, 4, 4)), images)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "no such file; must be a safetensors file with a tensor 'images'"),
        (b"no tensors", "not a readable safetensors file"),
        ({"pixels": torch.zeros(2, 1, 4, 4)}, "with tensors pixels: must have one of the name 'images'"),
        ({"images": torch.zeros(2, 1, 4, 5)}, r"have the shape \(2, 1, 4, 5\): must be \(N, 1, 4, 4\)"),
        ({"images": torch.zeros(())}, r"have the shape \(\): must be \(N, 1, 4, 4\)"),
    ],
)
def test_a_file_without_fitting_images_is_refused_in_one_line(tmp_path: Path, tensors: Any, message: str) -> None:
    file = tmp_path / "pool.safetensors"
    if isinstance(tensors, bytes):
        file.write_bytes(tensors)
    elif tensors is not None:
        save_file(tensors, file)

    with pytest.raises(DataError, match=rf"^setting 'data.proxy-file' is '.*pool.safetensors'.*{message}"):
        images_in(str(file), (1, 4, 4))


LABELS = torch.tensor([0, 1, 1, 0, 2, 1, 0, 0, 1, 2, 2] * 3)


@pytest.mark.parametrize("groups", [None, torch.arange(len(LABELS)) // 3], ids=["examples", "groups"])
def test_halves_share_no_example_nor_group_and_leave_none_out(groups: torch.Tensor | None) -> None:
    selection, report = (half_of(LABELS, half, groups) for half in ("selection", "report"))

    assert torch.cat([selection, report]).sort().values.tolist() == half_of(LABELS, "all").tolist()
    assert groups is None or not set(groups[selection].tolist()) & set(groups[report].tolist())
    alone = half_of(LABELS, "selection", torch.arange(len(LABELS)))
    assert alone.tolist() == half_of(LABELS, "selection").tolist()
