"""A loop of collecting pairs and training on them: its rounds, each with stages of its own once the recipe is loaded."""

import hashlib
from typing import Annotated

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Name

MOST_ROUNDS = 32

NumRounds = Annotated[int, Field(ge=2, le=MOST_ROUNDS, strict=True)]
"""Number of rounds of a loop."""


class Round(Frozen):
    """Place of a stage in its loop."""

    of: Name
    """The stage that the recipe writes."""
    number: Count
    """Number of the round, from 1 on."""


def round_name(stage: str, number: int, last: int) -> str:
    """Return the name of a stage in a round: that of the recipe in the last one, with the round's number in the others."""
    return stage if number == last else f"{stage}_{number}"


def round_seed(seed: int, number: int) -> int:
    """Return the seed of a round: that of the stage in the first, one of 32 bits derived from it in the others.

    With one seed, a policy that has moved little would give nearly the same responses as in the round before.
    """
    if number == 1:
        return seed
    digest = hashlib.sha256(f"{seed}:round:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
