"""``builtin:math_verify``: is the response equal to the answer as an expression? The library math-verify decides.

math-verify reads LaTeX between ``$``, in ``\\boxed{…}`` and the like, and plain numbers. Of several answers it takes the last box;
without a box, what follows the word ``answer``; else the last. Boxes less than 70 characters apart with a comma, a semicolon, ``and`` or
``or`` between them (``\\boxed{3} and \\boxed{4}``) are one set. An answer without delimiters
(``x^2+1``) is read as LaTeX, and words in it as products of their letters. The library gives up on an expression after ``SECONDS``; the
response is wrong then, as is one that it cannot read.

Superscripts, subscripts and fractions are written out before, since the library ignores them, or then reads nothing:
``10³`` becomes ``10^(3)``, ``x₁`` ``x_{1}``, ``½`` ``(1/2)`` and the mixed number ``1½`` ``(1+1/2)``. Full-width
digits, digits of other scripts, minus signs and mathematical letters (``𝑥``) are read as those of ASCII.
"""

import re
import unicodedata
from functools import lru_cache
from typing import Any

from vantage.schemas.recipe.builtin_verifiers import BuiltinVerifier
from vantage.tasks.rewards.builtin.characters import with_ascii_numbers
from vantage.tasks.rewards.builtin.judge import Judge, UnusableAnswer

SECONDS = 5
"""Most seconds for reading a text, and for the comparison."""

_RAISED_DIGITS, _LOWERED_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹", "₀₁₂₃₄₅₆₇₈₉"
_RAISED = _RAISED_DIGITS + "⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"
_LOWERED = _LOWERED_DIGITS + "₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ"
_FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉"
_FULL_STOP = r"(?:\.(?=[\s$}\\]|$))?"
"""The end of a sentence: before it, math-verify does not read a parenthesis."""
_SUPERSCRIPT, _SUBSCRIPT = re.compile(f"([{_RAISED}]++){_FULL_STOP}"), re.compile(f"[{_LOWERED}]++")
_FRACTION = re.compile(
    rf"(?:(?<![0-9.,])([0-9]++(?:,[0-9]{{3}})*+) ?)?([{_FRACTIONS}]|(?<![{_RAISED}])[{_RAISED_DIGITS}]++[⁄/][{_LOWERED_DIGITS}]++){_FULL_STOP}"
)
"""The whole part of a mixed number, if there is one, and a fraction in one character or in small digits."""
_SIGNED_DIGITS = re.compile("[+-]?[0-9]+")
_SLASHES = {ord(slash): "/" for slash in "⁄∕"}
"""The fraction slash U+2044 and the division slash U+2215."""


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

    found: list[Any] = parse(written_out(text), parsing_timeout=SECONDS)
    return found


def written_out(text: str) -> str:
    """Return the text with superscripts, subscripts and fractions in characters of ASCII, as math-verify reads them.

    Parentheses are read within LaTeX and outside of it, and braces within it alone. There an exponent may have parentheses of its own.
    """
    if text.isascii():
        return text
    text = "".join(map(_letter, with_ascii_numbers(text)))
    text = _FRACTION.sub(_written_fraction, text)
    text = _SUPERSCRIPT.sub(_written_exponent, text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + _full_size(match[0]) + "}", text)
    return text.translate(_SLASHES)


def _letter(character: str) -> str:
    """Return a mathematical letter as one of ASCII or Greek, and a space of any width as that of ASCII."""
    if "\U0001d400" <= character <= "\U0001d7ff":
        return unicodedata.normalize("NFKC", character)
    return " " if unicodedata.category(character) == "Zs" else character


def _written_fraction(match: re.Match[str]) -> str:
    fraction = _full_size(match[2]).translate(_SLASHES)
    return f"({fraction})" if match[1] is None else f"({match[1].replace(',', '')}+{fraction})"


def _written_exponent(match: re.Match[str]) -> str:
    exponent = _full_size(match[1])
    return f"^({exponent})" if _SIGNED_DIGITS.fullmatch(exponent) else "^{" + exponent + "}"


def _full_size(small: str) -> str:
    """Return the characters of a superscript, a subscript or a fraction in full size."""
    return with_ascii_numbers(unicodedata.normalize("NFKC", small))
