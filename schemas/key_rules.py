"""Rules of a policy about keys: when a key is valid, and whether it was revoked."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from vantage.schemas.frozen import Frozen, rule

_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_REASON = 2000
_YEARS = range(2000, 10000)


def _check_moment(text: str) -> str:
    """Refuse a text that is neither a day nor a time."""
    try:
        if _DAY.fullmatch(text) or _TIME.fullmatch(text):
            parsed = datetime.fromisoformat(text)
            if parsed.year in _YEARS:
                milliseconds_of(text)
                return text
    except (ValueError, OverflowError):
        pass
    raise ValueError(
        f"{text[:40]!r} is no time from the year 2000 to 9999; write a day of UTC, 2026-11-27, or a time with its "
        "offset, 2026-11-27T12:00:00Z"
    )


Moment = Annotated[str, AfterValidator(_check_moment)]
"""A day of UTC (``2026-11-27``), or a time with its offset from UTC (``2026-11-27T12:00:00Z``)."""


def milliseconds_of(moment: str, *, is_end: bool = False) -> int:
    """Return milliseconds since 1970 for a moment; for a day its beginning, or its end."""
    parsed = datetime.fromisoformat(moment)
    if _DAY.fullmatch(moment):
        parsed = parsed.replace(tzinfo=UTC)
        if is_end:
            return round(parsed.timestamp() * 1000) + round(timedelta(days=1).total_seconds() * 1000) - 1
    return round(parsed.timestamp() * 1000)


def _check_statement(text: str) -> str:
    if _SHA256.fullmatch(text) is None:
        raise ValueError(
            f"{text[:80]!r} is no sha256 of a statement, which has 64 digits and letters from a to f; an audit names it"
        )
    return text


def _check_reason(text: str) -> str:
    words = " ".join(text.split())
    if not 1 <= len(words) <= _LONGEST_REASON:
        raise ValueError(f"a reason has {len(words):,} characters; give 1 to {_LONGEST_REASON:,}")
    return words


Statement = Annotated[str, AfterValidator(_check_statement)]
"""sha256 of a signed statement."""


class Revocation(Frozen):
    """A key that must not be trusted any longer."""

    at: Moment
    """Time since which the key is revoked. It is only shown, since a thief can write any time into a statement."""
    reason: Annotated[str, AfterValidator(_check_reason)]
    """Reason of the revocation."""
    accepted_statements: Annotated[tuple[Statement, ...], Field(max_length=10_000)] = ()
    """sha256 of each statement that is known to be older than the theft, and still counts."""


class KeyRule(Frozen):
    """The period of a key, and its revocation."""

    valid_from: Moment | None = None
    """First moment at which it may sign; None: there is no first moment."""
    valid_until: Moment | None = None
    """Last moment at which it may sign; a day counts to its end. None: there is no last moment."""
    revoked: Revocation | None = None
    """The key's revocation; None: it is not revoked."""

    @rule
    def _has_a_rule(self) -> None:
        if self.valid_from is None and self.valid_until is None and self.revoked is None:
            raise ValueError(
                "none of valid_from, valid_until and revoked is there; give one, or leave the key out"
            )

    @rule
    def _begins_before_it_ends(self) -> None:
        if self.valid_from is None or self.valid_until is None:
            return
        if milliseconds_of(self.valid_from) >= milliseconds_of(self.valid_until, is_end=True):
            raise ValueError(
                f"valid_from={self.valid_from} is not before valid_until={self.valid_until}, so the key would never be "
                "valid; correct one of the two"
            )
