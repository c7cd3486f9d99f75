"""Regular expressions of RE2, which take time linear in the text: no response makes them run without end.

RE2 has no look-around and no back-references. ``\\d``, ``\\w`` and ``\\s`` match ASCII only; ``\\p{Nd}`` and ``\\pL``
match Unicode. A lone surrogate matches as ``?``.
"""

from typing import Any, NewType

Expression = NewType("Expression", object)
"""A compiled expression; the library has no types."""


def compiled(pattern: str, *, field: str) -> Expression:
    """Return the compiled expression.

    Args:
        field: name of the recipe's field, for the message.

    Raises:
        ValueError: RE2 does not accept the pattern.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return Expression(re2.compile(pattern, options))
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error.args[0]
        raise ValueError(
            f"{field}={pattern!r} is no expression of RE2 ({reason}); RE2 has no look-around and no back-references"
        ) from None


def matches(expression: Expression, text: str, *, whole: bool) -> bool:
    """Return whether the whole text, or any part of it, matches."""
    found: Any = expression
    match = found.fullmatch if whole else found.search
    return match(as_unicode(text)) is not None


def last_group(expression: Expression, text: str) -> str | None:
    """Return the expression's group in its last match; None without a match, or without its group."""
    found: Any = expression
    last = None
    for match in found.finditer(as_unicode(text)):
        last = match
    return None if last is None else last.group(1)


def as_unicode(text: str) -> str:
    """Return the text with ``?`` for each lone surrogate, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
