"""Show the tokens of sampled responses as text, with their log-probabilities and values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.tasks.rollout.rollouts import Sampled

NUM_BY_TOKEN = 12
"""Number of samples that are shown with the tokens of both responses."""
TOKENS_SHOWN = 200
"""Most tokens that are shown of a response."""


@dataclass(frozen=True)
class ByToken:
    """The responses of one model that are shown with their tokens."""

    tokenizer: PreTrainedTokenizerBase
    sampled: Sampled
    """One row per sample."""
    values: Tensor | None
    """(B,T): the critic's value before it has seen each token; None: no critic reads them."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text of each single token; parts of a character become a replacement character."""
    return tuple(str(tokenizer.decode([each], clean_up_tokenization_spaces=False)) for each in ids)


def first_responses(samples: Sequence[Mapping[str, object]], sampled: Sampled) -> Sampled:
    """Return the responses that are shown with their tokens: the first to the prompt of each of the first samples."""
    prompts = [str(each) for each in sampled.prompts]
    return sampled.select([prompts.index(str(sample["prompt"])) for sample in samples[:NUM_BY_TOKEN]])


def with_tokens(
    samples: Sequence[Mapping[str, object]], sides: Mapping[str, ByToken]
) -> tuple[dict[str, object], ...]:
    """Return the samples; the first ones have for each token its text, its log-probability (nats) when drawn, and a
    critic's value.

    Args:
        samples: samples that an evaluation returns to be shown.
        sides: ``candidate`` and ``baseline`` → their ``first_responses`` to these samples.
    """
    return tuple(
        {**sample, **(_tokens_of(place, sides) if place < NUM_BY_TOKEN else {})}
        for place, sample in enumerate(samples)
    )


def _tokens_of(row: int, sides: Mapping[str, ByToken]) -> dict[str, object]:
    """Return the tokens of both responses in a row, and their numbers."""
    found: dict[str, object] = {}
    for side, of in sides.items():
        length = int(of.sampled.sequences.lengths[row])
        shown = min(length, TOKENS_SHOWN)
        texts = token_texts(of.tokenizer, of.sampled.sequences.response_ids[row, :shown].tolist())
        numbers = [of.sampled.sampler_logprobs, *([] if of.values is None else [of.values])]
        columns = [[round(each, 4) for each in column[row, :shown].tolist()] for column in numbers]
        found[f"{side}_tokens"] = [list(token) for token in zip(texts, *columns, strict=True)]
        found[f"{side}_num_tokens"] = length
    return found
