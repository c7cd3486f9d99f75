import pytest

from vantage.tasks.data.judgments import Undecided, preferred

FROM_ONE = {"first": ("1",), "second": ("2",), "tie": ("0",)}


@pytest.mark.parametrize(
    ("label", "best"),
    [("A", 0), ("b", 1), ("response_b", 1), ("Model A", 0), (["A", "A", "B"], 0), (["B", None, "tie"], 1)],
)
def test_words_and_majorities(label: object, best: int) -> None:
    """This label, or list of labels, prefers this response."""
    assert preferred(label, {}) == best


def test_numbers_mean_what_the_recipe_says() -> None:
    assert [preferred(label, FROM_ONE) for label in (1, 2, 2.0, "1")] == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="label '1' is not known; say in labels which"):
        preferred(1, {})


@pytest.mark.parametrize("label", ["tie", "both", ["A", "B"], ["tie", "tie"]])
def test_a_tie_prefers_neither(label: object) -> None:
    with pytest.raises(Undecided):
        preferred(label, {})


@pytest.mark.parametrize("label", [None, [], [None]])
def test_a_missing_label_is_no_tie(label: object) -> None:
    with pytest.raises(ValueError, match="no label") as found:
        preferred(label, {})
    assert not isinstance(found.value, Undecided)
