"""What ``vantage data inspect`` finds out about a file."""

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.inputs import Content


class Quantiles(Frozen):
    """Of lengths."""

    least: int
    median: int
    most_95: int
    """95 % are no longer."""
    most: int


class ShownRow(Frozen):
    """A row of the file as training reads it."""

    row: int
    """Its number in the file, from 0."""
    parts: tuple[tuple[str, bool], ...]
    """Its text in pieces, and whether each is trained on."""
    num_tokens: int | None = None
    """None: no model was named."""


class FileInspection(Frozen):
    """One file as one content."""

    format: str
    content: Content
    also: tuple[Content, ...]
    """Contents as which it can be read, too."""
    columns: dict[str, str]
    labels: dict[str, tuple[str, ...]]
    num_rows: int
    num_usable: int
    problems: dict[str, int]
    """Reason → number of rows."""
    first_problems: tuple[str, ...]
    """The first ten rows with a problem, with their numbers."""
    unread: tuple[str, ...]
    """Columns of the file that nothing is read from."""
    nearly: dict[Content, str] = {}
    """Contents that say more than ``content``: the format that the file is nearest to, and why it cannot be read as it."""
    num_conversations: int
    """Usable rows whose prompt has several turns."""
    num_prompts: int
    """Different prompts."""
    prompt_characters: Quantiles
    response_characters: Quantiles | None
    """None: there are no responses."""
    scripts: dict[str, float]
    """Script → share of the letters of the first usable rows."""
    prompt_tokens: Quantiles | None = None
    """Of the first usable rows; None: no model was named."""
    response_tokens: Quantiles | None = None
    num_unlike: int = 0
    """Of the same rows: those that the model's chat template refuses or writes otherwise, or has rendered before."""
    first_unlike: tuple[str, ...] = ()
    """The first of them, with their numbers and reasons."""
    special_tokens: dict[str, tuple[int, int]] = {}
    """Special token of the tokenizer that the text of the same rows spells out → (how often, in how many rows)."""
    shown: tuple[ShownRow, ...] = ()
    recipe: str
    """What to write under ``data`` of a recipe."""
