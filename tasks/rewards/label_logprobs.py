"""Log-probabilities that a language model gives each of a few answers to a question, the labels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.models.policy import PolicyModel
from vantage.models.prompts import encode_responses
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training.passes import Pass, laid_out, passes

READ_AT_ONCE = 64
"""Pairs of a question and an answer in one forward pass, which ``microbatch_size`` counts, if that is not set."""
_LONGEST_LABEL = 200


class UnusableJudge(ValueError):
    """A model cannot be asked: its tokenizer cannot distinguish the answers, or a question does not fit."""


@dataclass(frozen=True)
class LabelReader:
    """A model that is asked, with the answers whose probabilities are read."""

    policy: PolicyModel
    pad_token_id: int
    labels: tuple[list[int], ...]
    """Ids of each answer."""
    limits: PassLimits

    @property
    def longest(self) -> int:
        """Return the tokens of the longest answer."""
        return max(map(len, self.labels))


def label_ids(
    tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], *, field: str, remedy: str
) -> tuple[list[int], ...]:
    """Return ids of the answers as the beginning of the model's response, without the token that ends it.

    Raises:
        UnusableJudge: one answer begins another, or equals it, so that it could never be the less likely one.
    """
    encoded = encode_responses(tokenizer, labels, max_tokens=_LONGEST_LABEL + 1, chat=None)
    found = tuple(ids[:-1] if ended else ids for ids, ended in encoded)
    for place, first in enumerate(found):
        for later, second in enumerate(found[place + 1 :], place + 1):
            shorter = min(len(first), len(second))
            if first[:shorter] == second[:shorter]:
                raise UnusableJudge(
                    f"{field}: the judge's tokenizer reads {labels[place]!r} as {first} and {labels[later]!r} as {second}, of "
                    f"which one begins like the other; {remedy}"
                )
    return found


def label_passes(reader: LabelReader, questions: Sequence[Sequence[int]]) -> Iterator[Pass]:
    """Yield this rank's passes over questions; all answers to a question share a pass, and so have the same padding."""
    limits, count = reader.limits.or_rows(READ_AT_ONCE), len(reader.labels)
    questions_at_once = replace(limits, rows=max((limits.rows or READ_AT_ONCE) // count, 1))
    yield from passes([len(row) + reader.longest for row in questions], questions_at_once, sequences=count)


@torch.no_grad()
def label_logprobs(reader: LabelReader, questions: Sequence[Sequence[int]], part: Pass) -> Tensor:
    """Return (b,K), float64: the log-probability of each answer to the questions of a pass, at temperature 1."""
    asked = collate(
        [questions[place] for place in part.rows for _ in reader.labels],
        [ids for _ in part.rows for ids in reader.labels],
        pad_token_id=reader.pad_token_id,
    ).to(reader.policy.device)
    if reader.limits.share_prompts:
        asked = laid_out(asked, reader.limits)
    of_tokens: dict[str, Tensor] = reader.policy(asked, temperature=1.0)
    logprobs = of_tokens["logprobs"].double().masked_fill(~asked.response_mask, 0.0)
    return logprobs.sum(dim=1).view(-1, len(reader.labels))
