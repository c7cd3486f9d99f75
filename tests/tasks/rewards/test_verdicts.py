"""A user's function may return the documented forms of a verdict; others are refused, and processes exchange them unchanged."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.records.verdict_form import VerdictForm
from vantage.tasks.rewards.verdicts import (
    MAX_SCORE,
    UnusableVerdict,
    as_verdict,
    common_form,
    fitted,
    line_of,
    verdict_in,
)

NUMBERS = st.floats(min_value=-MAX_SCORE, max_value=MAX_SCORE)
NAMED = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), NUMBERS, min_size=1)


@pytest.mark.parametrize(
    ("returned", "verdict"),
    [
        (True, True),
        (numpy.False_, False),
        (1, True),
        (0, False),
        (2, 2.0),
        (1.0, 1.0),
        (numpy.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        ({"b": 2, "a": True}, {"a": 1.0, "b": 2.0}),
    ],
)
def test_bools_numbers_and_numbers_by_name_are_verdicts(returned: object, verdict: object) -> None:
    found = as_verdict(returned)
    assert found == verdict and type(found) is type(verdict)
    if isinstance(found, dict):
        assert list(found) == sorted(found) and all(type(score) is float for score in found.values())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "return True or False, a number, or numbers by name"),
        ("1", "return True or False, a number, or numbers by name"),
        ([0.5], "return True or False, a number, or numbers by name"),
        (Decimal(1), "return True or False, a number, or numbers by name"),
        (math.nan, "the score is not finite"),
        (-math.inf, "the score is not finite"),
        (10**400, "the score is not finite"),
        (1e31, "the size of the score is above 1e+30"),
        ({}, "return between 1 and 200 named scores"),
        ({"Style": 1.0}, "'Style' is no name of a score"),
        ({1: 1.0}, "1 is no name of a score"),
        ({"style": None}, "style is a NoneType; return a number for each name"),
        ({"a": 0.0, "style": math.nan}, "style is not finite"),
    ],
)
def test_what_is_no_verdict_is_refused_with_its_rule(returned: object, message: str) -> None:
    with pytest.raises(UnusableVerdict) as refused:
        as_verdict(returned)
    assert str(refused.value).startswith(message)


@given(st.one_of(st.booleans(), NUMBERS, NAMED))
def test_a_verdict_crosses_between_processes_unchanged_to_the_last_bit(verdict: Any) -> None:
    line = line_of(verdict)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    found = verdict_in(line)
    assert type(found) is type(verdict)
    assert found == verdict
    if isinstance(verdict, float):
        assert math.copysign(1.0, found) == math.copysign(1.0, verdict)  # type: ignore[arg-type]


def test_true_and_false_are_scores_beside_numbers_and_nothing_else() -> None:
    assert common_form([True, 0.5, False]) == VerdictForm(kind="score")
    assert fitted(True, VerdictForm(kind="score")) == 1.0
    assert common_form([True, False]).kind == "right_or_wrong"
    with pytest.raises(UnusableVerdict, match="the dry run had right or wrong, and this is one number"):
        fitted(0.5, VerdictForm())
    with pytest.raises(UnusableVerdict) as refused:  # a verifier of 0, 1 and 2 whose dry run had no 2
        fitted(as_verdict(2), common_form([as_verdict(each) for each in (0, 1, 1)]))
    assert str(refused.value) == (
        "the dry run had right or wrong, and this is one number; return True or False for every row, or else floats: 1.0 is a score, "
        "and the integers 1 and 0 are right and wrong"
    )
    assert fitted(as_verdict(2.0), common_form([as_verdict(each) for each in (0.0, 1.0)])) == 2.0, (
        "the remedy"
    )
    with pytest.raises(UnusableVerdict, match="the dry run had scores named a, and this is right or wrong"):
        fitted(True, VerdictForm(kind="named_scores", names=("a",)))


def test_names_that_differ_are_named() -> None:
    form = VerdictForm(kind="named_scores", names=("a", "b"))
    with pytest.raises(UnusableVerdict, match="lacks a and has c, d besides; return the same names"):
        fitted({"b": 1.0, "c": 1.0, "d": 1.0}, form)
    with pytest.raises(UnusableVerdict, match="and this one has c besides; return the same names"):
        fitted({"a": 1.0, "b": 1.0, "c": 1.0}, form)
