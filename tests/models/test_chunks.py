import pytest

from vantage.models.chunks import chunks


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_everything_is_taken_once_in_order(size: int) -> None:
    things = list(range(7))
    parts = [things[chunk] for chunk in chunks(7, size)]
    assert [thing for part in parts for thing in part] == things
    assert all(0 < len(part) <= size for part in parts)
    assert chunks(0, size) == []


def test_without_a_size_it_is_one_slice() -> None:
    assert chunks(3, None) == [slice(0, 3)]
    assert chunks(0, None) == []
