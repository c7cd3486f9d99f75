"""An ensemble of reward models that one stage of a recipe describes: its members, each a stage of its own once the recipe is loaded."""

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Count, Name

MOST_MEMBERS = 32


class Members(Frozen):
    """Number of the reward models that a stage trains, and what they differ in."""

    count: Annotated[int, Field(ge=2, le=MOST_MEMBERS, strict=True)]
    """Number of members. Member 2 of the stage ``reward`` is the stage ``reward_2``."""
    by: Literal["seed", "halves"] = "seed"
    """``seed``: each member has another seed, which member 1 shares with a stage without members. ``halves``: each trains on half of
    the prompts, members 1 and 2 on one half and the other, 3 and 4 on the halves of another division, and so on."""

    @rule
    def _halves_come_in_pairs(self) -> None:
        if self.by == "halves" and self.count % 2:
            raise ValueError(
                f"count={self.count} is odd, and by=halves gives each half of the prompts to a member; "
                f"use {self.count - 1 or 2} or {self.count + 1}"
            )


class Member(Frozen):
    """Place of a stage in its ensemble."""

    of: Name
    """The stage that the recipe writes."""
    number: Count
    """Number of the member, from 1 on."""


def _read_members(value: Any) -> Any:
    return {"count": value} if isinstance(value, int) and not isinstance(value, bool) else value


MembersOrCount = Annotated[Members, BeforeValidator(_read_members)]
"""Members, or their number alone."""


def member_name(stage: str, number: int) -> str:
    """Return the name of a member's stage."""
    return f"{stage}_{number}"


def member_seed(seed: int, number: int) -> int:
    """Return the seed of a member of an ensemble by seed: that of the stage for the first, one of 32 bits derived from it for others.

    Neighbouring seeds of a sweep have no member in common.
    """
    if number == 1:
        return seed
    digest = hashlib.sha256(f"{seed}:member:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
