"""``builtin:number``: is the response the answer's number, within a tolerance?

A number is a decimal (``-1,234.5``, ``.5``, ``1e-3``) or a ratio of two (``3/4``), without anything around it but white
space. Thousands may be separated by commas. Full-width digits (１２), digits of other scripts (٣) and the minus sign − count as
the digits and signs of ASCII. ``1,23``, ``nan``, ``1/0``, ``12 apples`` and two numbers are no number: such a response is
wrong. So are ``10³``, ``5₂``, ``①`` and ``½``. Numbers of more than ``MAX_DIGITS`` characters or beyond 10^±``MAX_EXPONENT`` are no numbers either. The comparison is
exact: no binary fraction is involved.
"""

import re
from fractions import Fraction

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier, NumberVerifier
from vantage.tasks.rewards.builtin.characters import with_ascii_numbers
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer

MAX_DIGITS = 1000
MAX_EXPONENT = 1000

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"([+-]?(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]{{1,5}})|\s*/\s*([0-9]+(?:\.[0-9]+)?))?"
)
_EN_DASH = "–"
"""Often written instead of a minus sign; in a single number it cannot mean a range."""


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the comparison."""
    assert isinstance(verifier, NumberVerifier)
    absolute, relative = Fraction(str(verifier.absolute)), Fraction(str(verifier.relative))

    def judge(response: str, answer: str | None) -> bool:
        expected = number_in(answer or "")
        if expected is None:
            raise UnusableAnswer(
                f"the answer {(answer or '')[:100]!r} is no number; correct the row's answer, or leave the row out"
            )
        found = number_in(response)
        return found is not None and abs(found - expected) <= max(absolute, relative * abs(expected))

    return judge


def number_in(text: str) -> Fraction | None:
    """Return the text as a number; None if it is no number."""
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    match = _NUMBER.fullmatch(with_ascii_numbers(text).replace(_EN_DASH, "-"))
    if match is None:
        return None
    number, exponent, divisor = match[1].replace(",", ""), int(match[2] or 0), Fraction(match[3] or 1)
    if divisor == 0 or abs(exponent) > MAX_EXPONENT:
        return None
    return Fraction(number) * Fraction(10) ** exponent / divisor
