"""What methods need of examples that are no images; the other needs are tested where methods have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import model_of, tiny_job
from torch import Tensor, nn

from fl_app.models import builders
from strategies.core.errors import OptionError, UploadError
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, Job, Need, Normalization, Silent, Upload
from strategies.methods.dense import DenseConfig
from strategies.methods.feddf import FedDfConfig
from strategies.uploads.builders import check_student
from strategies.uploads.checks import check_outputs
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


def test_a_shape_with_the_channels_last_is_told_their_place() -> None:
    with pytest.raises(OptionError, match=r"shape is \(32, 32, 3\), which must be \(channels, height, width\): method"):
        check_needs(METHODS["dense"], replace(job(), config=DenseConfig(), input_shape=(32, 32, 3)))


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].needs & {Need.IMAGES, Need.SIDES_OF_FOUR}])
@pytest.mark.parametrize("shape", [ROW, TEXT], ids=["row", "text"])
def test_method_that_makes_images_is_refused_for_other_examples(name: str, shape: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError) as caught:
        check_needs(METHODS[name], job(shape))
    assert f"shape is {shape}: method {name!r} needs that the examples are images" in str(caught.value)
    assert "fedens" in str(caught.value)
    assert "dense" not in str(caught.value).partition("Choose")[2]


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
    with pytest.raises(OptionError, match="it holds list: must be at least 2"):
        check_needs(method, replace(given, proxy=list(given.proxy)))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_feddf_learns_from_rows_and_from_tokens_as_they_are(precision: str) -> None:
    config = FedDfConfig(epochs=120, batch_size=8, student_lr=0.5, teacher_precision=precision)
    rows = torch.randn(16, *ROW, generator=torch.Generator().manual_seed(0))
    words = torch.arange(600, 696).view(16, 1, 1, 6)  # bfloat16 would round these
    for shape, proxy in ((ROW, rows), (TEXT, words)):
        given = job(shape, config, proxy)
        state = METHODS["feddf"].fit(given, Silent()).student
        assert state is not None
        student = given.builders["net"]()
        student.load_state_dict(state)
        taught = torch.stack([model_of(upload, given.builders)(proxy) for upload in given.uploads]).mean(0).softmax(1)
        torch.manual_seed(1)
        fresh = given.builders["net"]()
        apart, before = ((model(proxy).softmax(1) - taught).abs().max() for model in (student, fresh))
        assert apart < 0.2 * before


# Finite weights whose model answers with numbers that are not finite.


SHAPE = (1, 8, 8)


def net_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


def test_weights_whose_outputs_overflow_are_refused() -> None:
    state = {key: torch.full_like(value, 3e38) for key, value in net_outputs().state_dict().items()}

    with pytest.raises(UploadError, match=r"outputs for normal noise are not \(largest value 3e\+38\)"):
        check_outputs("net", state, net_outputs, SHAPE)
    with pytest.raises(UploadError, match="outputs for normal noise are not"):
        check_outputs("net+unknown", state, net_outputs, SHAPE)
    check_outputs("cvae-decoder", state, net_outputs, SHAPE)


def test_trained_weights_pass_and_global_random_state_stays() -> None:
    state = net_outputs().state_dict()
    before = torch.get_rng_state()

    check_outputs("net", {key: value * 1e3 for key, value in state.items()}, net_outputs, SHAPE)

    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 16, 16), (5, 1, 1), (1, 1, 12)])
def test_no_untrained_model_of_the_zoo_is_refused(shape: tuple[int, int, int]) -> None:
    models = builders(2, shape)
    small = models.keys() & {"lenet5", "logistic", "mlp", "text-bag"}
    assert small
    for name in small:
        check_outputs(name, dict(models[name]().state_dict()), models[name], shape)


# Models that a method cannot use are refused before a client has worked, each in one line.


class Net(nn.Module):
    """A model whose outputs and modes the tests change."""

    def __init__(self, answer: Callable[[nn.Module, Tensor], Any] = lambda _, logits: logits) -> None:
        super().__init__()
        self.flat, self.last, self.answer = nn.Flatten(), nn.LazyLinear(tiny().num_classes), answer
        self.last(torch.zeros(1, SIZE))

    def forward(self, x: Tensor) -> Any:
        """Map images [B, ch, H, W] to what ``answer`` makes of the logits."""
        return self.answer(self, self.last(self.flat(x)))


def tiny() -> Job:
    return tiny_job(FedDfConfig())


SIZE = int(torch.tensor(tiny().input_shape).prod())
SHARED = Net()


def with_model(builder: Callable[[], nn.Module], **changes: Any) -> Job:
    return replace(tiny(), builders={"net": builder}, student="net", **changes)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (with_model(Net, num_classes=1), "num_classes is 1: must be at least 2; a single logit z is the pair"),
        (with_model(lambda: SHARED), "'net' is made of the same parameters each time: must be a new module"),
        (with_model(lambda: Net().requires_grad_(False)), "'net' has no parameter that requires grad: must have one"),
        (with_model(lambda: Net().half()), "'net' has 'last.weight' of float16: must be"),
        (with_model(lambda: Net(lambda _, z: {"logits": z})), "'net' returns a dict: must return logits alone"),
        (
            with_model(lambda: Net(lambda net, z: (z, z) if net.training else z)),
            "'net' in training mode returns a tuple: must return logits alone",
        ),
        (with_model(lambda: Net(lambda _, z: z[:, 1:])), "'net' maps 2 images of shape"),
    ],
)
def test_a_student_that_cannot_be_trained_is_refused(job: Job, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        check_student(job)


def test_a_model_whose_state_holds_more_than_tensors_is_refused() -> None:
    class Extra(Net):
        """Keeps a text beside its weights."""

        def get_extra_state(self) -> str:
            """Return the text."""
            return "version 2"

    with pytest.raises(OptionError, match="'net' has '_extra_state' in its state_dict: must have tensors alone"):
        check_student(with_model(Extra), trained=False)
