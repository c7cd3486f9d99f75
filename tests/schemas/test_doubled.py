"""Texts that occur more than once are found in linear time, as they are by hand."""

from vantage.schemas.doubled import doubled


class Counted(str):
    """A text that counts how often one is compared with another."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_each_is_named_once_in_the_order_of_first_occurrences() -> None:
    assert doubled(["c", "a", "", "b", "a", "c", "", "a"]) == ["c", "a", ""]
    assert doubled(["a", "b"]) == doubled([]) == []


def test_a_comparison_or_two_for_each_text() -> None:
    texts = [Counted(number % 5_000) for number in range(10_000)]
    assert len(doubled(texts)) == 5_000
    assert Counted.comparisons <= 30_000
