import pytest

from strategies.core.errors import OptionError
from strategies.run.retired import RETIRED, without_retired


def test_settings_at_their_fixed_values_are_left_out() -> None:
    assert without_retired({**RETIRED, "seed": 3}) == {"seed": 3}


def test_whole_float_may_be_stored_without_its_point() -> None:
    assert without_retired({"dense.ce-weight": 1}) == {}


@pytest.mark.parametrize("key", RETIRED)
def test_another_value_is_refused_in_one_line(key: str) -> None:
    with pytest.raises(OptionError) as refused:
        without_retired({"seed": 3, key: "other"})
    assert str(refused.value) == f"setting {key!r} is 'other': must be {RETIRED[key]!r}, which is fixed now"
