"""Low-rank adapters (LoRA): which matrices of a model get one, and of which size."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import MAX_NAMED, Count, Positive

ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")]


class Lora(Frozen):
    """Train W + (alpha / rank)·B·A in place of W, and only A and B of it (arXiv 2106.09685)."""

    rank: Count = 16
    """Rank: rows of A, columns of B."""
    alpha: Positive = 32.0
    """Numerator of the factor alpha / rank of B·A."""
    targets: (
        Literal["all_linear"] | Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=MAX_NAMED)]
    ) = "all_linear"
    """The matrices that get an adapter: all linear layers except the output head, or those of these names in every layer
    (``q_proj``, ``v_proj`` …)."""
