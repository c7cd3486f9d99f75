"""``builtin:math_verify``: is the response equal to the answer as an expression? The library math-verify decides.

math-verify reads LaTeX between ``$``, in ``\\boxed{…}`` and the like, and plain numbers. Of several answers it takes boxed ones
first, and then the last; boxes with little between them (``\\boxed{3} and \\boxed{4}``) are one set. An answer without delimiters
(``x^2+1``) is read as LaTeX, and words in it as products of their letters. Full-width digits are read as those of ASCII. The library
gives up on an expression after ``SECONDS``; the response is wrong then, as is one that it cannot read.
"""

import unicodedata
from functools import lru_cache
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer

SECONDS = 5
"""Most seconds for reading a text, and for the comparison."""


def load(verifier: BuiltinVerifier) -> Judge:
    """Return the comparison."""
    from math_verify import verify

    def judge(response: str, answer: str | None) -> bool:
        expected = _expected(answer or "")
        if not expected:
            raise UnusableAnswer(
                f"math-verify reads nothing in the answer {(answer or '')[:100]!r}; correct the row's answer, or leave the row out"
            )
        found = _read(response)
        return bool(found) and bool(verify(list(expected), found, timeout_seconds=SECONDS))

    return judge


@lru_cache(maxsize=4096)
def _expected(answer: str) -> tuple[Any, ...]:
    """Return the readings of a row's answer, which every response to the row is compared with."""
    return tuple(_read(answer) or _read(f"${answer}$"))


def _read(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(unicodedata.normalize("NFKC", text), parsing_timeout=SECONDS)
    return found
