"""Each token of a sample has its text and the log-probability that the engine recorded."""

from typing import Any

import torch

from vantage.models.sequences import collate
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.rollout.token_texts import (
    NUM_BY_TOKEN,
    TOKENS_SHOWN,
    ByToken,
    first_responses,
    with_tokens,
)


class Letters:
    """A tokenizer whose token 1 is ``a``, 2 is ``b`` and so on."""

    def decode(self, ids: list[int], **options: Any) -> str:
        assert options == {"clean_up_tokenization_spaces": False}
        return "".join(chr(ord("a") + each - 1) for each in ids)


def sampled(*responses: list[int], prompts: list[str]) -> Sampled:
    longest = max(map(len, responses))
    logprobs = [[-each / 10 for each in ids] + [0.0] * (longest - len(ids)) for ids in responses]
    return Sampled(
        prompts=prompts,
        answers=[None] * len(prompts),
        responses=[Letters().decode(ids, clean_up_tokenization_spaces=False) for ids in responses],
        sequences=collate([[9]] * len(responses), list(responses), pad_token_id=0),
        ended=torch.ones(len(responses), dtype=torch.bool),
        sampler_logprobs=torch.tensor(logprobs),
    )


def by_token(samples: Any, responses: Sampled, values: torch.Tensor | None = None) -> ByToken:
    tokenizer: Any = Letters()
    return ByToken(tokenizer, first_responses(samples, responses), values)


def test_the_first_response_to_the_prompt_token_by_token() -> None:
    """Of the two responses to each of p and q, q's first one, in row 2, is shown."""
    prompts = ["p", "p", "q", "q"]
    samples = [{"prompt": "q", "candidate": "ca", "baseline": "g"}]
    sides = {
        "candidate": by_token(samples, sampled([1], [2], [3, 1], [4], prompts=prompts)),
        "baseline": by_token(samples, sampled([5], [6], [7], [8], prompts=prompts)),
    }
    [found] = with_tokens(samples, sides)
    assert found == {
        "prompt": "q",
        "candidate": "ca",
        "baseline": "g",
        "candidate_tokens": [["c", -0.3], ["a", -0.1]],
        "candidate_num_tokens": 2,
        "baseline_tokens": [["g", -0.7]],
        "baseline_num_tokens": 1,
    }


def test_values_stand_beside_the_log_probabilities() -> None:
    """Each sample has a row of values, in the order of the samples. Behind a shorter response there is padding."""
    samples = [{"prompt": "q"}, {"prompt": "p"}]
    values = torch.tensor([[0.5, 0.25], [-1.23456, 0.0]])
    side = by_token(samples, sampled([1], [3, 1], prompts=["p", "q"]), values)
    first, second = with_tokens(samples, {"candidate": side})
    assert first["candidate_tokens"] == [["c", -0.3, 0.5], ["a", -0.1, 0.25]]
    assert second["candidate_tokens"] == [["a", -0.1, -1.2346]]


def test_long_responses_and_later_samples_are_not_handed_back_whole() -> None:
    """``run.json`` holds them, and is written many times."""
    prompts = [f"p{place}" for place in range(NUM_BY_TOKEN + 1)]
    samples = [{"prompt": prompt} for prompt in prompts]
    long = by_token(samples, sampled(*[[1] * (TOKENS_SHOWN + 7)] * len(prompts), prompts=prompts))
    found = with_tokens(samples, {"candidate": long, "baseline": long})
    assert len(found[0]["candidate_tokens"]) == TOKENS_SHOWN  # type: ignore[arg-type]
    assert found[0]["candidate_num_tokens"] == TOKENS_SHOWN + 7
    assert found[-1] == {"prompt": prompts[-1]}
