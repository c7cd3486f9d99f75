"""A record describes how a longer stage went on from shorter ones: iterations or epochs, before and after."""

from vantage.schemas.records.extensions import Shorter, in_words


def shorter(run_id: str, length: float) -> Shorter:
    return Shorter(run_id=run_id, step="trained", stage_key="a" * 64, digest="b" * 64, length=length)


def test_each_shorter_stage_has_a_line() -> None:
    assert in_words((), {"configuration": {"epochs": 1}}) == []
    assert in_words((shorter("one", 0.5), shorter("two", 1)), {"configuration": {"epochs": 3}}) == [
        "extends one/trained: 0.5 → 1 epoch",
        "extends two/trained: 1 → 3 epochs",
    ]
    assert in_words((shorter("one", 20),), {"configuration": {"iterations": 60}}) == [
        "extends one/trained: 20 → 60 iterations"
    ]
