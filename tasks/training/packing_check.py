"""Check that a model separates texts that are packed into one row of a pass."""

import torch
from torch import Tensor

from vantage.models.output_head import trunk
from vantage.models.packing import boundaries_hold, pack, takes_positions
from vantage.models.policy import PolicyModel
from vantage.models.sequences import Sequences, collate
from vantage.tasks.data.examples import Completions

_TRIED_TOKENS = 16
"""Number of tokens in each of the two rows with which a model is checked."""


@torch.no_grad()
def check_boundaries(policy: PolicyModel, examples: Completions) -> None:
    """Check with two examples whether the model reads each as if it were alone.

    Raises:
        ValueError: the model does not, so the stage cannot use packing.
    """
    first, second = (_tokens(examples, index) for index in (0, len(examples) - 1))
    packed = pack(_as_sequences(policy, first, second), [[0, 1]])
    if takes_positions(trunk(policy.causal_lm)) and boundaries_hold(
        alone=_logprobs(policy, _as_sequences(policy, second))[0],
        packed=_logprobs(policy, packed)[1, : len(second) - 1],
        joined=_logprobs(policy, _as_sequences(policy, [*first, *second]))[0, len(first) :],
    ):
        return
    raise ValueError(
        f"packing=true, but {type(policy.causal_lm).__name__} does not keep the texts of a packed row apart: the tokens of "
        "one change the log-probabilities of the other; set packing: false"
    )


def _tokens(examples: Completions, index: int) -> list[int]:
    return [*examples.prompt_ids[index], *examples.response_ids["response"][index]][:_TRIED_TOKENS]


def _as_sequences(policy: PolicyModel, *texts: list[int]) -> Sequences:
    return collate([text[:1] for text in texts], [text[1:] for text in texts], pad_token_id=0).to(
        policy.device
    )


def _logprobs(policy: PolicyModel, sequences: Sequences) -> Tensor:
    return policy.logprobs(sequences, temperature=1.0).logprobs
