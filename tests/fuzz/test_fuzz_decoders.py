"""Some malformed inputs for every decoder; ``python tests/fuzz`` tries thousands."""

from __future__ import annotations

import pytest
from fuzz_all import DECODERS
from fuzz_decoder import Tally
from fuzz_runs import try_inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_when_its_input_is_malformed_refuses_it_or_can_use_it(name: str) -> None:
    tally = Tally()

    try_inputs(DECODERS[name], tally, examples=20)

    assert tally.tried >= 15
    assert tally.crashed == 0
    assert tally.accepted + tally.refused == tally.tried
