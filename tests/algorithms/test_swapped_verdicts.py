"""The verdicts of a judge that saw both orders equal a table that was written by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vantage.algorithms.swapped_verdicts import swapped_verdicts

FINITE = st.floats(-50, 50, allow_nan=False)


@pytest.mark.parametrize(
    ("candidate_first", "baseline_first", "win", "disagree"),
    [
        (2.0, -0.5, 1.0, False),  # the first, then the second: the candidate both times
        (-2.0, 0.5, 0.0, False),  # the baseline both times
        (2.0, 0.5, 0.5, True),  # the first response, both times
        (-2.0, -0.5, 0.5, True),  # the second response, both times
        (0.0, 0.0, 0.5, False),  # neither, both times
        (2.0, 0.0, 0.5, True),  # the candidate, then neither
        (0.0, 3.0, 0.5, True),  # neither, then the baseline
    ],
)
def test_a_verdict_is_what_both_orders_say(
    candidate_first: float, baseline_first: float, win: float, disagree: bool
) -> None:
    found = swapped_verdicts(
        candidate_first=torch.tensor([candidate_first]), baseline_first=torch.tensor([baseline_first])
    )
    assert (found.wins.tolist(), found.disagree.tolist()) == ([win], [disagree])
    assert found.wins.dtype == torch.float64


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=20))
def test_the_two_models_exchanged_win_what_the_other_lost(margins: list[tuple[float, float]]) -> None:
    one, other = torch.tensor(margins, dtype=torch.float64).T
    found = swapped_verdicts(candidate_first=one, baseline_first=other)
    exchanged = swapped_verdicts(candidate_first=other, baseline_first=one)
    assert torch.equal(found.wins, 1 - exchanged.wins)
    assert torch.equal(found.disagree, exchanged.disagree)


@given(st.floats(0.001, 50), st.integers(1, 20))
def test_a_judge_that_reads_nothing_ties_everywhere(bias: float, pairs: int) -> None:
    """The judge gives the same answer in both orders, since it only looks at the position."""
    margins = torch.full((pairs,), bias)
    found = swapped_verdicts(candidate_first=margins, baseline_first=margins)
    assert found.wins.tolist() == [0.5] * pairs
    assert bool(found.disagree.all())


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"\(2,\) and baseline_first \(3,\) must be \(B,\)"),
        (torch.zeros(2, 1), torch.zeros(2, 1), r"must be \(B,\)"),
        (torch.tensor([float("nan")]), torch.zeros(1), "not finite"),
        (torch.zeros(1), torch.tensor([float("-inf")]), "not finite"),
    ],
)
def test_what_is_no_verdict_is_refused(one: torch.Tensor, other: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        swapped_verdicts(candidate_first=one, baseline_first=other)
