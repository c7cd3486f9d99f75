"""A response, or the part of it that the expression finds last, is compared with the answer, on hand-written cases."""

from decimal import Decimal

import pytest

from vantage.tasks.rewards.exact_match import as_number, exact_match

BOXED = r"\\boxed\{([^}]*)\}"
HASHES = r"####\s*(.+)"


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        # -- text
        ("Paris", "Paris", True),
        ("  Paris\n", "Paris", True),
        ("Paris", " Paris ", True),
        ("Paris.", "Paris", False),
        ("paris", "Paris", False),
        ("x + 1", "x+1", False),
        ("北京", "北京", True),
        ("", "Paris", False),
        # -- numbers
        ("1,000", "1000.0", True),
        ("1000.0", "1,000", True),
        ("1000", "1000.", True),
        ("007", "7", True),
        ("+7", "7", True),
        ("-0", "0", True),
        (".5", "0.50", True),
        ("-1,234,567.80", "-1234567.8", True),
        ("0.1", "0.10000000000000001", False),  # equal as floats, not as numbers
        ("12345678901234567890123456789012", "12345678901234567890123456789013", False),
        ("7", "-7", False),
        ("70", "7", False),
        # -- what only looks like a number
        ("1,00", "100", False),
        ("1000,000", "1000000", False),
        (",", "0", False),
        (".", "0", False),
        ("-", "-0", False),
        ("1e3", "1000", False),
        ("1 000", "1000", False),
        ("$7", "7", False),
        ("7%", "7", False),
        ("½", "0.5", False),
        ("７", "7", False),  # full-width digits are another text
        ("nan", "NaN", False),
        ("inf", "Infinity", False),
        ("True", "1", False),
        ("7 8", "7", False),
    ],
)  # fmt: skip
def test_the_whole_response_against_the_answer(response: str, answer: str, right: bool) -> None:
    assert exact_match(response, answer, extract=None) is right


@pytest.mark.parametrize(
    ("extract", "response", "answer", "right"),
    [
        (HASHES, "3 + 4 = 7\n#### 7", "7", True),
        (HASHES, "#### 1,007 ", "1007", True),
        (HASHES, "7", "7", False),  # no match
        (HASHES, "#### 7\nno, wait\n#### 8", "8", True),  # the last one counts
        (HASHES, "#### 7\nno, wait\n#### 8", "7", False),
        (HASHES, "####", "", False),
        (BOXED, r"so \boxed{7} or rather \boxed{ 12 }.", "12", True),
        (BOXED, r"\boxed{}", "", True),  # the match is empty
        (BOXED, r"\boxed{7", "7", False),
        ("(?:A|B): ([a-d])", "A: a, B: c", "c", True),
        ("(?i)answer is (.*)", "The ANSWER is 5", "5", True),
        ("x(y)?", "xy x", "y", False),  # the last match is without its group
        ("x(y)?", "x xy", "y", True),
        ("(a*)", "aaa", "", True),  # the last match is empty, at the end
    ],
)
def test_what_the_expression_finds_last_against_the_answer(
    extract: str, response: str, answer: str, right: bool
) -> None:
    assert exact_match(response, answer, extract=extract) is right


def test_a_number_of_any_length_is_exact() -> None:
    digits = "9" * 5000
    assert as_number(digits) == Decimal(digits)
    assert exact_match(digits + ".0", digits, extract=None)
    assert not exact_match(digits + ".1", digits, extract=None)
