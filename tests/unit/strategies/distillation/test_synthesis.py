import pytest
import torch
from torch import Tensor, nn

from strategies.core.errors import OptionError
from strategies.core.seeds import generator as rng
from strategies.distillation.synthesis import Recipe, Term, View, in_bfloat16, synthesize


class Toy(nn.Module):
    """Noise [B, 4] -> images [B, 1, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.normal_(self.linear.weight, generator=rng(0))
        nn.init.zeros_(self.linear.bias)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = torch.sigmoid(self.linear(noise)).view(-1, 1, 2, 2)
        return images


NOISE = torch.randn(6, 4, generator=rng(1))
BRIGHT = Term("bright", 2.0, lambda view: (view.images - 0.9).square().mean())


def look(images: Tensor) -> View:
    return View(images, images, torch.zeros(len(images), dtype=torch.long), images.flatten(1))


def test_synthesize_lowers_its_loss() -> None:
    model = Toy()
    start = float(BRIGHT.loss(look(model(NOISE))).detach())
    images, losses = synthesize(model, NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=80, lr=0.05))
    assert float(BRIGHT.loss(look(images))) < 0.1 * start
    assert losses["generator"] == pytest.approx(2.0 * losses["bright"])
    assert not images.requires_grad


def test_synthesize_equals_adam_written_out() -> None:
    model, plain = Toy(), Toy()
    noise = NOISE.clone().requires_grad_()
    optimizer = torch.optim.Adam([*plain.parameters(), noise], lr=0.1, betas=(0.5, 0.999))
    for _ in range(3):
        optimizer.zero_grad()
        (2.0 * BRIGHT.loss(look(plain(noise)))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    images, _ = synthesize(model, NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=3, lr=0.1, keep="last"))
    torch.testing.assert_close(images, plain(noise).detach())
    torch.testing.assert_close(model.linear.weight, plain.linear.weight)


def test_keep_best_returns_the_images_of_the_lowest_total_loss() -> None:
    seen: list[Tensor] = []
    values = iter([3.0, 1.0, 2.0, 5.0])

    def spying(view: View) -> Tensor:
        seen.append(view.images.detach().clone())
        return view.images.mean() * 0 + next(values)

    images, losses = synthesize(
        Toy(), NOISE, look, terms=[Term("spy", 1.0, spying), BRIGHT_ZERO], recipe=Recipe(steps=4)
    )
    assert torch.equal(images, seen[1])
    assert losses["generator"] == 5.0


BRIGHT_ZERO = Term("never", 0.0, lambda view: pytest.fail("a term of weight 0 was computed"))


def test_bfloat16_gives_nearly_the_same_images_in_float32() -> None:
    exact, _ = synthesize(Toy(), NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=3))
    rough, _ = synthesize(Toy(), NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=3, precision="bfloat16"))
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0, atol=0.02)


@pytest.mark.parametrize("terms", [[], [Term("constant", 1.0, lambda view: torch.zeros(()))]])
def test_terms_that_do_not_depend_on_the_images_are_refused(terms: list[Term]) -> None:
    with pytest.raises(OptionError, match="nothing to learn from"):
        synthesize(Toy(), NOISE, look, terms=terms, recipe=Recipe(steps=1))


@pytest.mark.parametrize(
    ("found", "half"), [({"avx512_bf16": True}, True), ({"bf16": True}, True), ({"avx2": True}, False)]
)
def test_auto_follows_the_processor(monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], half: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert in_bfloat16("auto", "cpu") is half
    assert in_bfloat16("bfloat16", "cpu")
    assert not in_bfloat16("float32", "cpu")
