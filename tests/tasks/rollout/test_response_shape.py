"""Lengths and repetition of responses equal hand-worked ones."""

import pytest

from vantage.models.sequences import collate
from vantage.tasks.rollout.response_shape import response_shape


def test_lengths_are_those_of_responses_and_repetition_is_of_all() -> None:
    """Lengths 1, 2, 3 and 6: at 10, 50 and 90 % of the way from the first to the last stand 1, 2 and 3.

    The last one has four trigrams, of which two are alike; the others have one trigram in all, so the mean over two
    responses is 1/8. Of 0 + 1 + 2 + 5 bigrams, 6 7 and 7 6 occur again: 6 of 8 are different.
    """
    responses = [[5], [5, 6], [5, 6, 8], [6, 7, 6, 7, 6, 9]]
    measured = response_shape(collate([[1]] * 4, responses, pad_token_id=0))
    assert measured == pytest.approx({
        "response_length_p10": 1.0, "response_length_p50": 2.0, "response_length_p90": 3.0,
        "repeated_trigrams": 1 / 8, "distinct_bigrams": 5 / 8,
    })  # fmt: skip
