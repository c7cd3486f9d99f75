"""What the command line and the process that holds a model tell each other, one line of JSON each."""

from datetime import date as date_type
from pathlib import Path
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Positive
from vantage.schemas.recipe.inputs import DEFAULT_DATE, Generation
from vantage.schemas.recipe.stages import TrainOn


class Turn(Frozen):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class OpenModel(Frozen):
    """The first line: which model, and how its recipe uses it. Exactly one of ``folder`` and ``source`` is given."""

    folder: Path | None = None
    """A Hugging Face folder, or adapters (LoRA)."""
    base: Path | None = None
    """The whole model that the adapters stand on."""
    source: str | None = None
    """What a recipe's ``model.source`` may be; it is imported first."""
    generation: Generation = Generation()
    chat: bool | None = None
    """The recipe's ``model.chat``."""
    date: date_type = DEFAULT_DATE
    """The recipe's ``model.date``."""


class ModelOpened(Frozen):
    """The answer to ``OpenModel``; no weights are loaded before the first request."""

    uses_chat: bool
    """Prompts go through the tokenizer's chat template."""
    stop_token_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    """The same as text."""
    writes_date: bool
    """The chat template writes today's date where nobody gives it one; Vantage gives it the recipe's ``model.date``."""


class SampleRequest(Frozen):
    """Responses to conversations that end with a user's turn."""

    conversations: tuple[tuple[Turn, ...], ...] = Field(min_length=1)
    count: Count = 1
    """Responses to each."""
    seed: int = 0
    greedy: bool = False
    temperature: Positive | None = None
    """None: the recipe's."""
    max_tokens: Count | None = None
    """None: the recipe's ``generation.max_response_tokens``."""


class MergeRequest(Frozen):
    """Make adapters and their base one model."""

    output: Path
    """A new folder."""


class Merged(Frozen):
    """The answer to ``MergeRequest``: the folder holds the whole model."""

    output: Path


class Answer(Frozen):
    """One response."""

    text: str
    ended: bool
    """A stop token was reached; else the response was cut off."""
    num_tokens: int
    logprob: float
    """Of the whole response, in nats, under the distribution that it was sampled from."""
    tokens: tuple[str, ...]
    """Text of each token, the stop token included."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, in nats."""


class Answers(Frozen):
    """The responses to one conversation."""

    prompt_tokens: int
    answers: tuple[Answer, ...]


class SampleReply(Frozen):
    """The answer to ``SampleRequest``: one entry for each conversation."""

    conversations: tuple[Answers, ...]


class RenderedRow(Frozen):
    """A row of data as the model reads it."""

    parts: tuple[tuple[str, bool], ...]
    """Its text in pieces, and whether each is trained on."""
    prompt_tokens: int
    response_tokens: int
    fault: str | None = None
    """Why training cannot read it; then there are no parts."""
    special_in_prompt: dict[str, int] = {}
    """Special token of the tokenizer → how often the prompt's text spells it out."""
    special_in_response: dict[str, int] = {}


class RowToRender(Frozen):
    """A row of data."""

    prompt: str
    messages: tuple[dict[str, str | None], ...] | None
    """The turns of a prompt that is a conversation (``vantage.schemas.conversations.Message``)."""
    response: dict[str, str | None] | None
    """The assistant's turn, as the turns of the prompt are."""


class RenderRequest(Frozen):
    """Rows of data, which need no weights."""

    rows: tuple[RowToRender, ...] = Field(min_length=1)
    train_on: TrainOn = "all_responses"


class RenderReply(Frozen):
    """The answer to ``RenderRequest``: one entry for each row."""

    rows: tuple[RenderedRow, ...]


class Refused(Frozen):
    """The answer to a line that cannot be followed."""

    refused: str
    """What is wrong, and the remedy."""
    is_ours: bool = False
    """An error that should not happen."""
