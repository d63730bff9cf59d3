"""Some malformed inputs for every decoder; ``python tests/fuzz`` tries thousands."""

from __future__ import annotations

import pytest
from fuzz_all import DECODERS
from fuzz_decoder import Tally
from fuzz_runs import try_inputs
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants


@pytest.fixture(autouse=True)
def _same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs do not follow from the constants of all modules that are loaded, which hypothesis would parse first."""
    monkeypatch.setattr(providers, "_get_local_constants", Constants)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_when_its_input_is_malformed_refuses_it_or_can_use_it(name: str) -> None:
    tally = Tally()

    try_inputs(DECODERS[name], tally, examples=8)

    assert tally.tried >= 6
    assert tally.crashed == 0
    assert tally.accepted > 0  # the first input is a good one
    assert tally.accepted + tally.refused == tally.tried
