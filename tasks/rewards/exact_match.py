"""Compare a response with the row's answer: the built-in verifier."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]*)?")


def exact_match(response: str, answer: str, *, extract: str | None) -> bool:
    """Return whether the match of ``extract`` in the response is the answer: the same text except for white space
    around it, or the same number (``1,000`` is ``1000.0``).

    Args:
        extract: a regular expression with one group, of which the last match counts; without a match the response is
            wrong. None: the whole response is compared.
    """
    found = response if extract is None else last_match(response, extract)
    if found is None:
        return False
    number = as_number(answer)
    return found.strip() == answer.strip() or (number is not None and as_number(found) == number)


def last_match(response: str, extract: str) -> str | None:
    """Return the expression's group in its last match; None without a match, or without its group."""
    found = None
    for match in re.finditer(extract, response):
        found = match[1]
    return found


def as_number(text: str) -> Decimal | None:
    """Return the decimal number in the text, with or without commas between thousands; exact at any length."""
    text = text.strip()
    is_number = _NUMBER.fullmatch(text) and any("0" <= character <= "9" for character in text)
    return Decimal(text.replace(",", "")) if is_number else None
