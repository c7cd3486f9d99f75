"""What a ``rollout_collection`` stage's artifact says of its files: one Arrow file a split, a row for each response."""

from typing import Literal

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count
from vantage.schemas.records.artifacts import Digest

HEADER = "rollouts.json"


class RolloutsHeader(Frozen):
    """The file ``rollouts.json``."""

    version: Literal[1] = 1
    tokenizer_digest: Digest
    """Of the tokenizer whose ids the rows hold."""
    samples_per_prompt: Count
    """Rows in a row that answer one training prompt."""
    held_out_samples_per_prompt: Count
    """The same of the validation and test prompts."""
    terms: tuple[str, ...]
    """The reward's terms; each has a column ``score.TERM``."""
