"""What methods need of examples that are no images; the other needs are tested where methods have them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from method_fakes import telling
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.feddf import FedDfConfig
from strategies.method import METHODS, Job, Need, Normalization, Silent, Upload
from strategies.uploads.needs import check_needs

ROW, TEXT = (5, 1, 1), (1, 1, 6)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 2))


class Words(nn.Module):
    """A model that wants whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.flatten(1)).mean(1)


def job(shape: tuple[int, int, int] = ROW, config: object = None, proxy: torch.Tensor | None = None) -> Job:
    builder = Words if shape == TEXT else net
    torch.manual_seed(0)
    states = [builder().state_dict() for _ in range(2)]
    uploads = tuple(Upload(UploadFacts(f"c{k}", "net", 3, (1, 2)), lambda k=k: dict(states[k])) for k in range(2))  # type: ignore[misc]
    same = Normalization((0.0,) * shape[0], (1.0,) * shape[0])
    return Job(uploads, {"net": builder}, "net", 2, shape, same, config, proxy=proxy)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs & {Need.IMAGES, Need.SIDES_OF_FOUR}])
@pytest.mark.parametrize("shape", [ROW, TEXT], ids=["row", "text"])
def test_method_that_makes_images_is_refused_for_other_examples(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError) as caught:
        check_needs(METHODS[name], job(shape))
    assert f"shape is {shape}: method {name!r} needs that the examples are images" in str(caught.value)
    assert "fedens" in str(caught.value)
    assert "dense" not in str(caught.value).partition("Choose")[2]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fedavg", "feddf", "fedkd", "fedcvae-ens", "dense"])
@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 6, 6), ROW], ids=["image", "odd", "row"])
def test_methods_that_a_refusal_recommends_do_not_lack_anything_either(name: str, shape: tuple[int, int, int]) -> None:
    def flat() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 2))

    told, silent = (replace(upload, read=lambda: flat().state_dict()) for upload in job(shape).uploads)
    uploads = (told, telling(silent, architecture="wide", label_counts=None))
    poor = replace(job(shape), uploads=uploads, builders={"net": flat, "wide": flat})

    try:
        check_needs(METHODS[name], replace(poor, config=METHODS[name].config()))
    except OptionError as error:
        recommended = str(error).rpartition("method: ")[2].split(", ")
    else:
        assert (name, shape) == ("dense", (2, 8, 8))
        return

    assert {"fedens", "fedavg"} & set(recommended) == {"fedens"}
    for other in recommended:
        check_needs(METHODS[other], replace(poor, config=METHODS[other].config()))


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((2, 8, 8), torch.uint8, True),
        ((2, 8, 8), torch.float32, False),
        (ROW, torch.float32, True),
        (TEXT, torch.int64, True),
        (ROW, torch.uint8, False),
    ],
)
def test_proxy_has_the_type_of_its_examples(shape: tuple[int, int, int], dtype: torch.dtype, fits: bool) -> None:
    method, given = METHODS["feddf"], job(shape, FedDfConfig(), torch.full((4, *shape), 2, dtype=dtype))
    if fits:
        check_needs(method, given)
    else:
        with pytest.raises(OptionError, match=rf"it holds images of shape .*, {dtype}: must be at least 2 of shape"):
            check_needs(method, given)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_feddf_learns_from_rows_and_from_tokens_as_they_are(precision: str) -> None:
    config = FedDfConfig(epochs=40, batch_size=8, student_lr=0.5, teacher_precision=precision)
    rows = torch.randn(16, *ROW, generator=torch.Generator().manual_seed(0))
    words = torch.arange(600, 696).view(16, 1, 1, 6)  # bfloat16 would round these
    for shape, proxy in ((ROW, rows), (TEXT, words)):
        given = job(shape, config, proxy)
        state = METHODS["feddf"].fit(given, Silent()).student
        assert state is not None
        student = given.builders["net"]()
        student.load_state_dict(state)
        teachers = []
        for upload in given.uploads:
            teacher = given.builders["net"]()
            teacher.load_state_dict(upload.read())
            teachers.append(teacher(proxy))
        apart = (student(proxy).softmax(1) - torch.stack(teachers).mean(0).softmax(1)).abs().max()
        fresh = (given.builders["net"]()(proxy).softmax(1) - torch.stack(teachers).mean(0).softmax(1)).abs().max()
        assert apart < 0.5 * fresh
