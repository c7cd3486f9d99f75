"""Make preference pairs of collected responses: each prompt's best against its worst, with exactly the sampled ids."""

from vantage.tasks.data.encoding_counts import EncodingCounts, count_tokens
from vantage.tasks.data.examples import Codec, Completions, NothingLeft
from vantage.tasks.rollout.collected import Collected


def best_against_worst(collected: Collected, codec: Codec, *, split: str) -> Completions:
    """Return a pair for each prompt whose responses do not all have one score; of equal scores, the first response is
    taken.

    Raises:
        NothingLeft: no prompt gives a pair.
    """
    scores = collected.scores.view(-1, collected.samples_per_prompt)
    differ = (scores.amax(dim=1) > scores.amin(dim=1)).nonzero()[:, 0].tolist()
    if not differ:
        raise NothingLeft(
            f"rollouts: none of the {collected.num_prompts} prompts of the {split} split has responses of different scores; "
            "raise samples_per_prompt of the rollout_collection stage or generation.temperature, or collect more prompts"
        )
    first = [prompt * collected.samples_per_prompt for prompt in range(collected.num_prompts)]
    best, worst = scores.argmax(dim=1).tolist(), scores.argmin(dim=1).tolist()
    sides = {
        "chosen": [first[prompt] + best[prompt] for prompt in differ],
        "rejected": [first[prompt] + worst[prompt] for prompt in differ],
    }
    prompts = collected.ids("prompt_ids", first)
    responses = {side: collected.ids("response_ids", rows) for side, rows in sides.items()}
    used = [row for rows in sides.values() for row in rows]
    tokens = count_tokens(codec.tokenizer, [*prompts, *(ids for side in responses.values() for ids in side)])
    return Completions(
        prompt_ids=[prompts[prompt] for prompt in differ],
        response_ids=responses,
        pad_token_id=codec.pad_token_id,
        num_too_long=0,
        counts=EncodingCounts(
            num_rows=collected.num_prompts,
            longest_prompt=max(map(len, prompts)),
            num_responses=len(used),
            num_cut=int((~collected.ended[used]).sum()),
            num_tokens=tokens.num_tokens,
            num_unknown=tokens.num_unknown,
            num_bytes=tokens.num_bytes,
        ),
    )
