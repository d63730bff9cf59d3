"""Random numbers from the operating system, which privacy rests on."""

from __future__ import annotations

import os

import pytest
import torch

from strategies.core.seeds import system_normal, system_uniform


def test_the_system_s_numbers_have_the_moments_that_they_should_and_never_come_again() -> None:
    uniform, normal = system_uniform(200_000), system_normal(200_001)

    assert (len(uniform), len(normal)) == (200_000, 200_001)
    assert 0.0 < float(uniform.min()) < 1e-3 < 1 - 1e-3 < float(uniform.max()) <= 1.0
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(normal.mean()) == pytest.approx(0.0, abs=0.02)
    assert float(normal.var()) == pytest.approx(1.0, abs=0.02)
    assert float((normal**4).mean()) == pytest.approx(3.0, abs=0.2)
    assert float((normal.abs() < 1.0).double().mean()) == pytest.approx(0.6827, abs=0.01)
    torch.manual_seed(0)
    first = system_normal(4)
    torch.manual_seed(0)
    assert not torch.equal(system_normal(4), first)


def test_the_noise_of_both_private_uploads_has_the_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    from client_app.training import private
    from strategies.statistics import privacy

    assert private.system_normal is privacy.system_normal is system_normal
    asked: list[int] = []
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or bytes(size))
    assert system_normal(3, 5).shape == (3, 5)
    assert asked == [64, 64]  # 8 bytes for each of two uniform numbers per pair


def test_the_normal_numbers_are_those_of_box_and_muller(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [torch.tensor([0.3, 1.0]), torch.tensor([0.25, 0.5])]
    monkeypatch.setattr("strategies.core.seeds.system_uniform", lambda _: drawn.pop(0).double())
    radius = (-2.0 * torch.tensor(0.3, dtype=torch.float64).log()).sqrt()
    wanted = torch.tensor([0.0, 0.0, float(radius), 0.0], dtype=torch.float64)
    torch.testing.assert_close(system_normal(4), wanted, atol=1e-7, rtol=1e-7)
