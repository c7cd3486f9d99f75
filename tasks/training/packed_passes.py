"""Packing: the rows of a minibatch side by side in fewer passes, and whether a model keeps them apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.chunks import chunks
from models.output_head import trunk
from models.packing import boundaries_hold, first_fit_decreasing, pack, takes_positions
from models.policy import PolicyModel
from models.sequences import Sequences, collate
from tasks.data.examples import Completions
from tasks.training import ranks

_TRIED_TOKENS = 16
"""Of each of the two rows with which a model is tried."""


@dataclass(frozen=True)
class PackedPart:
    """Rows of a minibatch that this rank computes in one pass."""

    rows: list[int]
    layout: list[list[int]]
    """Which of them, by their places in ``rows``, share a row of the pass."""
    weight: float
    """As in ``ranks.Part``."""

    def select(self, minibatch: Sequences) -> Sequences:
        """These rows, packed."""
        return pack(minibatch.select(self.rows), self.layout)


def packed_parts(lengths: Sequence[int], size: int | None) -> list[PackedPart]:
    """This rank's passes over a minibatch, as many on every rank; see ``ranks.parts``.

    Args:
        lengths: tokens of each row of the minibatch; the longest is the length of a pass's rows.
        size: most rows of one pass, each of which may hold several of the minibatch; None: all.
    """
    of_ranks = [
        _passes(lengths, range(first, len(lengths), ranks.world_size()), size)
        for first in range(ranks.world_size())
    ]
    mine = [_part([row for group in groups for row in group], groups) for groups in of_ranks[ranks.rank()]]
    missing = max(map(len, of_ranks)) - len(mine)
    return mine + [PackedPart([0], [[0]], 0.0)] * missing


def _passes(lengths: Sequence[int], rows: range, size: int | None) -> list[list[list[int]]]:
    """The passes of one rank: of each, its rows, and of these the rows of the minibatch."""
    places = first_fit_decreasing([lengths[row] for row in rows], capacity=max(lengths))
    groups = [[rows[place] for place in group] for group in places]
    return [groups[part] for part in chunks(len(groups), size)]


def _part(rows: list[int], groups: list[list[int]]) -> PackedPart:
    place_of = {row: place for place, row in enumerate(rows)}
    return PackedPart(rows, [[place_of[row] for row in group] for group in groups], 1.0)


@torch.no_grad()
def check_boundaries(policy: PolicyModel, examples: Completions) -> None:
    """Try with two examples whether the model reads each as if it were alone.

    Raises:
        ValueError: it does not, so the stage has to do without packing.
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
        f"packing=true, but {type(policy.causal_lm).__name__} does not keep texts apart that stand in one row: the tokens of "
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
