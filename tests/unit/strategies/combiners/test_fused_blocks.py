"""FuseFL's fused model: by hand in numpy for two clients, and rebuilt from its tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fused_fakes import C, First, M, made

from strategies.teacher.ensemble import Ensemble

Floats = np.ndarray[Any, np.dtype[np.float64]]


def outputs() -> torch.Tensor:
    return torch.rand(M, 6, C, 2, 2, generator=torch.Generator().manual_seed(5))


def by_hand(weights: dict[str, Floats], maps: Floats, adapter: str) -> tuple[Floats, Floats]:
    """Return features and logits of one image from the members' maps [M, C, h, w], pixel by pixel."""
    for stage, rest in enumerate(("block.0", "block.2")):
        after = []
        for k in range(M):
            own = {key.removeprefix(f"stages.{stage}.{k}."): value for key, value in weights.items()}
            mixed = maps.mean(0)
            if adapter == "conv":
                joined = np.concatenate([maps[j] for j in range(M)])  # client by client
                mixed = np.einsum("oi,ihw->ohw", own["adapter.weight"][:, :, 0, 0], joined)
                mixed = mixed + own["adapter.bias"][:, None, None]
            if stage == 0:
                plain = np.einsum("oi,ihw->ohw", own[f"{rest}.weight"][:, :, 0, 0], mixed)
                plain = plain + own[f"{rest}.bias"][:, None, None]
                mean, var, gain, shift = (
                    own[f"block.1.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
                )
                after.append((plain - mean) / np.sqrt(var + 1e-5) * gain + shift)
            else:
                after.append(own[f"{rest}.weight"] @ np.tanh(mixed).ravel() + own[f"{rest}.bias"])
        maps = np.stack(after)
    features = maps.sum(0)
    return features, weights["classifier.weight"] @ features + weights["classifier.bias"]


@pytest.mark.parametrize("adapter", ["conv", "mean"])
def test_forward_of_two_clients_is_that_by_hand(adapter: str) -> None:
    fused, maps = made(adapter), outputs()
    weights = {key: value.double().numpy() for key, value in fused.state_dict().items()}

    features, logits = fused.features(maps), fused(maps)

    assert (adapter == "conv") is ("stages.1.0.adapter.weight" in weights)
    for image in range(6):
        wanted = by_hand(weights, maps[:, image].double().numpy(), adapter)
        np.testing.assert_allclose(features[image], wanted[0], rtol=1e-4)
        np.testing.assert_allclose(logits[image], wanted[1], rtol=1e-4)
    # Pinned: another order of members, or another split of the channels, changes the seed's own figure.
    assert float(logits[0, 0]) == pytest.approx({"conv": 0.0530768, "mean": 0.2179986}[adapter], rel=1e-4)


def test_ensemble_of_first_blocks_is_the_whole_network() -> None:
    firsts = [First() for _ in range(M)]
    images = torch.rand(6, 1, 4, 4)
    maps = torch.stack([first(images) for first in firsts]).detach()

    torch.testing.assert_close(Ensemble(firsts, made())(images), made()(maps))
