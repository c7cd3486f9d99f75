"""Decide whether keys are valid by the policy, which has their periods and revocations."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from vantage.schemas.key_rules import KeyRule, milliseconds_of


@dataclass(frozen=True)
class Invalid:
    """A key that must not have signed a statement."""

    why: Literal["revoked", "outside"]
    """``outside``: the key signed outside of its period."""
    detail: str


@dataclass(frozen=True)
class KeyValidity:
    """The rules of a policy about keys."""

    rules: Mapping[str, KeyRule] = field(default_factory=dict)
    """Key id → rule; a key without one is always valid."""

    def problem(self, key_id: str, *, statement: str, signed_at: int | None) -> Invalid | None:
        """Return the reason why the key's signature of a statement does not count; None: it counts.

        Args:
            statement: sha256 of the statement; a policy may accept single statements of a revoked key.
            signed_at: time in the statement, in milliseconds since 1970, as its signer claims; None: the statement has
                no time (it is about an artifact), and the key must be valid now.
        """
        known, short = self.rules.get(key_id), key_id[:16]
        if known is None:
            return None
        revoked = known.revoked
        if revoked is not None and statement not in revoked.accepted_statements:
            return Invalid(
                "revoked",
                f"key {short} was revoked as of {revoked.at} ({revoked.reason}), and the policy does not accept its statement "
                f"{statement}",
            )
        if signed_at is None:
            when, said = (
                now(),
                "and a statement without a time needs a key that is valid now",
            )
        else:
            shown = datetime.fromtimestamp(signed_at / 1000, UTC).isoformat(timespec="seconds")
            when, said = signed_at, f"and the statement has the time {shown}"
        if known.valid_from is not None and when < milliseconds_of(known.valid_from):
            return Invalid("outside", f"key {short} is valid from {known.valid_from} on, {said}")
        if known.valid_until is not None and when > milliseconds_of(known.valid_until, is_end=True):
            return Invalid("outside", f"key {short} was valid until {known.valid_until}, {said}")
        return None


def now() -> int:
    """Return the time of this machine's clock, in milliseconds since 1970; no other clock confirms it."""
    return time.time_ns() // 1_000_000


ALWAYS_VALID = KeyValidity()
"""Validity of all keys in a workspace without a policy."""
