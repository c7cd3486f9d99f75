"""Messages between the command line and the process that holds a model, one line of JSON each."""

from datetime import date as date_type
from pathlib import Path
from typing import Literal

from pydantic import Field

from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import Count, Positive
from vantage.schemas.recipe.inputs import DEFAULT_DATE, Generation
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.stages_on_data import TrainOn


class Turn(Frozen):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class OpenModel(Frozen):
    """The first line: the model, and its recipe's settings for it. Exactly one of ``folder`` and ``source`` is given."""

    folder: Path | None = None
    """A Hugging Face folder, or adapters (LoRA)."""
    base: Path | None = None
    """The base model of the adapters."""
    source: str | None = None
    """A source in the form of a recipe's ``model.source``; it is imported first."""
    generation: Generation = Generation()
    chat: bool | None = None
    """The recipe's ``model.chat``."""
    date: date_type = DEFAULT_DATE
    """The recipe's ``model.date``."""
    rollout: Sampling = Sampling()
    """The engine that samples, as a recipe's ``rollout`` names it."""


class ModelOpened(Frozen):
    """The answer to ``OpenModel``; no weights are loaded before the first request."""

    uses_chat: bool
    """Whether prompts go through the tokenizer's chat template."""
    stop_token_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    """Texts of these tokens."""
    writes_date: bool
    """Whether the chat template writes today's date unless a date is passed; Vantage passes the recipe's ``model.date``."""


def generation_with(recipe: Generation, *, temperature: float | None, max_tokens: int | None) -> Generation:
    """Return the recipe's settings with these instead of its own; None: the recipe's setting stays."""
    given = {"temperature": temperature, "max_response_tokens": max_tokens}
    return recipe.model_copy(update={name: value for name, value in given.items() if value is not None})


class SampleRequest(Frozen):
    """Responses to conversations that end with a user's turn."""

    conversations: tuple[tuple[Turn, ...], ...] = Field(min_length=1)
    count: Count = 1
    """Number of responses to each conversation."""
    seed: int = 0
    greedy: bool = False
    temperature: Positive | None = None
    """Temperature of sampling; None: the recipe's."""
    max_tokens: Count | None = None
    """Most tokens of a response; None: the recipe's ``generation.max_response_tokens``."""


class MergeRequest(Frozen):
    """Merge adapters and their base model into one model."""

    output: Path
    """A new folder for the merged model."""


class Merged(Frozen):
    """The answer to ``MergeRequest``: the folder contains the whole model."""

    output: Path


class Answer(Frozen):
    """One response."""

    text: str
    ended: bool
    """Whether a stop token was reached; else the response was cut off."""
    num_tokens: int
    logprob: float
    """Log-probability of the whole response, in nats, under the distribution that it was sampled from."""
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
    """Reason why training cannot read it; then there are no parts."""
    special_in_prompt: dict[str, int] = {}
    """Special token of the tokenizer → number of times that the prompt's text contains it."""
    special_in_response: dict[str, int] = {}
    unwritten: tuple[str, ...] = ()
    """Parts of the prompt's turns that the chat template does not write (``vantage.models.unwritten_turns``)."""


class RowToRender(Frozen):
    """A row of data."""

    prompt: str
    messages: tuple[dict[str, str | None], ...] | None
    """The turns of a prompt that is a conversation (``vantage.schemas.conversations.Message``)."""
    response: dict[str, str | None] | None
    """The assistant's turn, in the form of the prompt's turns."""
    is_shown: bool = True
    """Whether the rendered text is wanted; otherwise only its counts are."""


class RenderRequest(Frozen):
    """Rows of data to be rendered, which needs no weights."""

    rows: tuple[RowToRender, ...] = Field(min_length=1)
    train_on: TrainOn = "all_responses"


class RenderReply(Frozen):
    """The answer to ``RenderRequest``: one entry for each row."""

    rows: tuple[RenderedRow, ...]


class Refused(Frozen):
    """The answer to a line that cannot be processed."""

    refused: str
    """The fault, and the remedy."""
    is_ours: bool = False
    """Whether it is an internal error, which should not happen."""
