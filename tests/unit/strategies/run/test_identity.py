"""What a run's facts say of its models, for those who read it later."""

from __future__ import annotations

from strategies.method import Normalization
from strategies.run.identity import stored_normalization


def test_stored_normalization_is_that_of_the_facts_and_half_in_files_of_early_versions() -> None:
    early = {"input-shape": [3, 8, 8]}

    assert stored_normalization({**early, "normalization": [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]}) == Normalization(
        (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    )
    assert stored_normalization(early) == Normalization((0.5,) * 3, (0.5,) * 3)
