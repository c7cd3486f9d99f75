"""One JSON value has one text."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.canonical_json import canonical_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_canonical_json_is_one_text_written_out_by_hand() -> None:
    value = {"b": [1, 2.0, True, None], "a": {"é": "\n"}, "c": 1e-05}
    assert canonical_json(value) == r'{"a":{"\u00e9":"\n"},"b":[1,2.0,true,null],"c":1e-05}'


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON))
def test_canonical_json_does_not_depend_on_the_order_of_insertion(value: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize(
    "value, message",
    [
        ({"a": [0.0, math.nan]}, r"value\.a\.1=nan is not JSON"),
        ({"a": -math.inf}, r"value\.a=-inf is not JSON"),
        ({"a": {1: "x"}}, r"value\.a has the key 1, which is not JSON"),
        ({"a": {2, 3}}, r"value\.a is a set, which is not JSON"),
    ],
)
def test_canonical_json_refuses_what_json_cannot_say(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonical_json(value)
