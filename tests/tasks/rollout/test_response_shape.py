"""Lengths and repetition of responses equal hand-worked ones."""

import pytest

from vantage.models.sequences import collate
from vantage.tasks.rollout.response_shape import response_shape


def test_lengths_are_those_of_responses_and_repetition_is_of_all() -> None:
    """The lengths are 1, 2, 3 and 6, so the 10th, 50th and 90th percentiles are 1, 2 and 3.

    One of the last response's four trigrams is repeated, and the third response has one trigram, so the mean over these
    two is 1/8. Of 0 + 1 + 2 + 5 bigrams, 5 6, 6 7 and 7 6 occur twice, so 5 of 8 are distinct.
    """
    responses = [[5], [5, 6], [5, 6, 8], [6, 7, 6, 7, 6, 9]]
    measured = response_shape(collate([[1]] * 4, responses, pad_token_id=0))
    assert measured == pytest.approx({
        "response_length_p10": 1.0, "response_length_p50": 2.0, "response_length_p90": 3.0,
        "repeated_trigrams": 1 / 8, "distinct_bigrams": 5 / 8,
    })  # fmt: skip
