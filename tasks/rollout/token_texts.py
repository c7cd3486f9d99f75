"""The tokens of sampled responses as text, to be shown to people."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from tasks.rollout.rollouts import Sampled

NUM_BY_TOKEN = 12
"""So many samples come with the tokens of both responses."""
TOKENS_SHOWN = 200
"""Of a longer response, so many are handed back."""


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """The text of each token alone; parts of one character come out as a replacement character."""
    return tuple(str(tokenizer.decode([each], clean_up_tokenization_spaces=False)) for each in ids)


def with_tokens(
    samples: Sequence[Mapping[str, object]],
    sides: Mapping[str, tuple[PreTrainedTokenizerBase, Sampled]],
) -> tuple[dict[str, object], ...]:
    """The samples, the first of them with each token's text and its log-probability (nats) when it was drawn.

    Args:
        samples: as an evaluation hands them back to be shown: ``prompt``, and the first response of each side to it.
        sides: ``candidate`` and ``baseline`` → tokenizer and responses.
    """
    return tuple(
        {**sample, **(_tokens_of(sample["prompt"], sides) if place < NUM_BY_TOKEN else {})}
        for place, sample in enumerate(samples)
    )


def _tokens_of(
    prompt: object, sides: Mapping[str, tuple[PreTrainedTokenizerBase, Sampled]]
) -> dict[str, object]:
    """Tokens of both first responses to a prompt, and how many there are of each."""
    found: dict[str, object] = {}
    for side, (tokenizer, sampled) in sides.items():
        row = [str(each) for each in sampled.prompts].index(str(prompt))
        length = int(sampled.sequences.lengths[row])
        shown = min(length, TOKENS_SHOWN)
        ids = sampled.sequences.response_ids[row, :shown].tolist()
        logprobs = sampled.sampler_logprobs[row, :shown].tolist()
        texts = token_texts(tokenizer, ids)
        found[f"{side}_tokens"] = [[text, round(each, 4)] for text, each in zip(texts, logprobs, strict=True)]
        found[f"{side}_num_tokens"] = length
    return found
