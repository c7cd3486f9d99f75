"""Give chat templates the recipe's date, whatever clock, time zone and locale the machine has."""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from vantage.schemas.recipe.inputs import DEFAULT_DATE

_DIRECTIVE = re.compile(r"%([-_0^#]*)[EO]?([A-Za-z%+])")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_COMPOSED = {"c": "%a %b %e %H:%M:%S %Y", "x": "%m/%d/%y", "X": "%H:%M:%S", "r": "%I:%M:%S %p"}
"""Formats of directives in the locale C, which other locales write differently."""


def pin_date(tokenizer: PreTrainedTokenizerBase, day: date) -> PreTrainedTokenizerBase:
    """Pin the date that this tokenizer's chat template gets from `template_arguments`, in place; returns the
    tokenizer."""
    tokenizer.pinned_date = day
    return tokenizer


def template_arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the variables that replace the clock in a chat template: with the pinned date, else the default.

    A template reads a date from ``date_string``, if it knows that name, or calls ``strftime_now(FORMAT)``. The time of day
    is midnight, UTC.
    """
    day: date = getattr(tokenizer, "pinned_date", DEFAULT_DATE)
    return {"date_string": _format(day, "%d %b %Y"), "strftime_now": strftime_of(day)}


def strftime_of(day: date) -> Callable[[str], str]:
    """Return a function from a format to its text for midnight of this day, in English."""
    return lambda form: _format(day, form)


def _format(day: date, form: str) -> str:
    moment = datetime(day.year, day.month, day.day, tzinfo=UTC)

    def write(match: re.Match[str]) -> str:
        flags, directive = match.groups()
        names = {
            "A": _DAYS[day.weekday()],
            "B": _MONTHS[day.month - 1],
            "p": "AM",
            "P": "am",
            "s": str(int(moment.timestamp())),  # strftime itself would read the moment as local time
            "Y": f"{day.year:04}",
        }
        names |= {"a": names["A"][:3], "b": names["B"][:3], "h": names["B"][:3]}
        if directive in _COMPOSED:
            return _format(day, _COMPOSED[directive])
        if directive not in names:
            return moment.strftime(f"%{flags}{directive}")
        text = names[directive]
        return text.upper() if "^" in flags else text.swapcase() if "#" in flags else text

    return _DIRECTIVE.sub(write, form)
