"""Tokens of samples: the text of each and its log-probability, as the engine recorded it."""

from typing import Any

import torch

from models.sequences import collate
from tasks.rollout.rollouts import Sampled
from tasks.rollout.token_texts import NUM_BY_TOKEN, TOKENS_SHOWN, with_tokens


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


def test_the_first_response_to_the_prompt_token_by_token() -> None:
    """Two responses to each of p and q; what is shown of q is its first, in row 2."""
    prompts = ["p", "p", "q", "q"]
    sides: Any = {
        "candidate": (Letters(), sampled([1], [2], [3, 1], [4], prompts=prompts)),
        "baseline": (Letters(), sampled([5], [6], [7], [8], prompts=prompts)),
    }
    [found] = with_tokens([{"prompt": "q", "candidate": "ca", "baseline": "g"}], sides)
    assert found == {
        "prompt": "q",
        "candidate": "ca",
        "baseline": "g",
        "candidate_tokens": [["c", -0.3], ["a", -0.1]],
        "candidate_num_tokens": 2,
        "baseline_tokens": [["g", -0.7]],
        "baseline_num_tokens": 1,
    }


def test_long_responses_and_later_samples_are_not_handed_back_whole() -> None:
    """``run.json`` holds them, and is written many times."""
    prompts = [f"p{place}" for place in range(NUM_BY_TOKEN + 1)]
    long = sampled(*[[1] * (TOKENS_SHOWN + 7)] * len(prompts), prompts=prompts)
    sides: Any = {"candidate": (Letters(), long), "baseline": (Letters(), long)}
    found = with_tokens([{"prompt": prompt} for prompt in prompts], sides)
    assert len(found[0]["candidate_tokens"]) == TOKENS_SHOWN  # type: ignore[arg-type]
    assert found[0]["candidate_num_tokens"] == TOKENS_SHOWN + 7
    assert found[-1] == {"prompt": prompts[-1]}
