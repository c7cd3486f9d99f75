"""Result of ``vantage data inspect`` for a file."""

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.inputs import Content


class Quantiles(Frozen):
    """Quantiles of lengths."""

    least: int
    median: int
    most_95: int
    """Length that 95 % do not exceed."""
    most: int


class ShownRow(Frozen):
    """A row of the file as training reads it."""

    row: int
    """Number of the row in the file, from 0."""
    parts: tuple[tuple[str, bool], ...]
    """Its text in pieces, and whether each is trained on."""
    num_tokens: int | None = None
    """Number of tokens by the model's tokenizer; None: no model was named."""


class FileInspection(Frozen):
    """A file, read as one content."""

    format: str
    content: Content
    also: tuple[Content, ...]
    """Other contents as which it can be read."""
    columns: dict[str, str]
    labels: dict[str, tuple[str, ...]]
    num_rows: int
    num_usable: int
    problems: dict[str, int]
    """Reason → number of rows."""
    first_problems: tuple[str, ...]
    """The first ten rows with a problem, with their numbers."""
    unread: tuple[str, ...]
    """Columns of the file that are not read."""
    nearly: dict[Content, str] = {}
    """Contents with more columns than ``content`` → nearest format, and why the file cannot be read in it."""
    num_conversations: int
    """Usable rows whose prompt has several turns."""
    num_prompts: int
    """Number of different prompts."""
    prompt_characters: Quantiles
    response_characters: Quantiles | None
    """Quantiles of the characters of a response; None: there are no responses."""
    scripts: dict[str, float]
    """Script → share of the letters of the first usable rows."""
    prompt_tokens: Quantiles | None = None
    """Lengths in the first usable rows; None: no model was named."""
    response_tokens: Quantiles | None = None
    num_unlike: int = 0
    """Number of these rows that the model's chat template refuses or renders differently, or that were rendered before."""
    first_unlike: tuple[str, ...] = ()
    """The first of these rows, with their numbers and reasons."""
    special_tokens: dict[str, tuple[int, int]] = {}
    """Special token of the tokenizer that the text of these rows contains → (how often, in how many rows)."""
    unwritten: dict[str, int] = {}
    """Part of the turns before a response that the model does not read → number of these rows that have it."""
    shown: tuple[ShownRow, ...] = ()
    recipe: str
    """Text for the ``data`` section of a recipe."""
