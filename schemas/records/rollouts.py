"""Header of a ``rollout_collection`` stage's artifact: one Arrow file per split, one row per response."""

from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, is_default
from vantage.schemas.records.artifacts import Digest

HEADER = "rollouts.json"


class RolloutsHeader(Frozen):
    """The file ``rollouts.json``."""

    version: Literal[1] = 1
    tokenizer_digest: Digest
    """Digest of the tokenizer whose ids the rows hold."""
    samples_per_prompt: Count
    """Number of adjacent rows that answer the same training prompt."""
    held_out_samples_per_prompt: Count
    """Number of adjacent rows that answer the same validation or test prompt."""
    terms: tuple[str, ...]
    """The reward's terms; each has a column ``score.TERM``. A term with named scores is ``TERM.NAME`` for each of them."""
    graded: tuple[str, ...] = Field((), exclude_if=is_default(()))
    """Scores of a verifier that returns numbers."""
