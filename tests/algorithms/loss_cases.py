"""List every loss with the batch that it is tried on, for the tests of all losses and their two ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from vantage.algorithms.aggregation import Aggregation, Denominator, aggregate, denominator_of
from vantage.algorithms.bounded_ratio import clipped_weight_gradient, geometric_mean_surrogate, soft_gate
from vantage.algorithms.covariance import SelectedKLLoss, selected_kl_loss
from vantage.algorithms.kl import OldKLKind, full_kl
from vantage.algorithms.kl_loss import (
    KLLoss,
    KLLossKind,
    OldKLLoss,
    UnbiasedKLKind,
    exact_kl_loss,
    old_kl_loss,
    reference_kl_loss,
)
from vantage.algorithms.kto_loss import KTOLoss, kto
from vantage.algorithms.pair_losses import ipo, orpo, simpo
from vantage.algorithms.policy_loss import (
    PolicyLoss,
    clipped_surrogate,
    masked_ratio_gradient,
    policy_gradient,
    positive_example_nll,
)
from vantage.algorithms.preference_loss import (
    CentringLoss,
    DPOLoss,
    PreferenceLoss,
    bradley_terry,
    dpo,
    rankable,
    ranking_loss,
    score_centring,
)
from vantage.algorithms.supervised_loss import token_nll
from vantage.algorithms.value_loss import value_loss

MAX_LENGTH = 9
NUM_FEATURES = 3


@dataclass(frozen=True)
class Batch:
    """Rows for every loss. `features` (B,T,F) feed a linear model, whose outputs (B,T) the losses read.

    Each loss decides what an output stands for: a log-probability, a value, a score, or one logit of three.
    """

    features: Tensor
    old: Tensor
    targets: Tensor
    mask: Tensor
    is_positive: Tensor
    pair_weights: Tensor

    def rows(self, indices: Sequence[int]) -> "Batch":
        """Return some rows, trimmed to the longest among them, as a micro-batch would be."""
        mask = self.mask[indices]
        width = max(1, int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 1)
        return Batch(
            features=self.features[indices][:, :width],
            old=self.old[indices][:, :width],
            targets=self.targets[indices][:, :width],
            mask=mask[:, :width],
            is_positive=self.is_positive[indices],
            pair_weights=self.pair_weights[indices],
        )


def random_batch(seed: int, num_rows: int = 6) -> Batch:
    """Return ragged rows with gaps, an empty row among them, right-padded to MAX_LENGTH; row 0 has an untied pair."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, MAX_LENGTH)
    mask = (np.arange(MAX_LENGTH) < rng.integers(1, MAX_LENGTH + 1, size=(num_rows, 1))) & (
        rng.random(shape) < 0.85
    )
    mask[0, :2], mask[-1] = True, False
    targets = rng.normal(size=shape)
    targets[0, :2] = [-2, 2]
    is_positive = rng.random(num_rows) < 0.5
    is_positive[0] = True
    return Batch(
        features=torch.tensor(rng.normal(size=(*shape, NUM_FEATURES))),
        old=torch.tensor(rng.normal(size=shape)),
        targets=torch.tensor(targets),
        mask=torch.tensor(mask),
        is_positive=torch.tensor(is_positive),
        pair_weights=torch.tensor(mask.any(axis=1) * rng.integers(1, 4, size=num_rows) / 2),
    )


class Result(Protocol):
    """The common part of the results of all losses: a 0-d tensor. The metrics differ from loss to loss."""

    @property
    def loss(self) -> Tensor: ...


@dataclass(frozen=True)
class Case:
    """A loss on (model outputs, batch, denominator), and what a batch contributes to its denominator.

    `of_pairs`: the first old value and target of a row are numbers of the whole row, and must not become garbage.
    `held`: for a loss with a detached factor, the same loss with that factor held at its value at `at`, from
    (outputs, at, batch, denominator). This is what finite differences have to differentiate.
    """

    loss: Callable[[Tensor, Batch, Denominator | None], Result]
    denominator: Callable[[Batch], float]
    whole_minibatch_by_default: bool = True
    of_pairs: bool = False
    held: Callable[[Tensor, Tensor, Batch, Denominator | None], Tensor] | None = None


def on_tokens(
    outputs: Tensor,
    batch: Batch,
    denominator: Denominator | None,
    *,
    loss: Callable[..., PolicyLoss],
    **settings: Any,
) -> PolicyLoss:
    """Return a loss of the ratio, whose outputs are log-probabilities and whose targets are advantages."""
    return loss(outputs, batch.old, batch.targets, batch.mask, denominator=denominator, **settings)


surrogate = partial(on_tokens, loss=clipped_surrogate, clip_range_low=0.2, clip_range_high=0.2)
masked_ratio = partial(on_tokens, loss=masked_ratio_gradient, clip_range_low=0.5, clip_range_high=2.0)
"""Its ranges leave out tokens on both sides."""
ratio_of_the_response = partial(
    surrogate, clip_range_high=0.3, ratio_level="sequence", aggregation="sequence"
)
clipped_weight = partial(
    on_tokens, loss=clipped_weight_gradient, clip_range_low=0.2, clip_range_high=0.3, aggregation="token"
)
gated = partial(
    on_tokens, loss=soft_gate, temperature_positive=0.6, temperature_negative=1.4, aggregation="sequence"
)
geometric_mean = partial(
    on_tokens, loss=geometric_mean_surrogate, clip_range_low=0.2, clip_range_high=0.3, aggregation="token"
)


def masked_ratio_with_ratio_held(
    outputs: Tensor, at: Tensor, batch: Batch, denominator: Denominator | None, *, aggregation: Aggregation
) -> Tensor:
    ratio = (at - batch.old).exp()
    weight = ratio * ((ratio > 0.5) & (ratio < 3.0))
    per_token = -weight * batch.targets * outputs
    return aggregate(per_token, batch.mask, aggregation=aggregation, denominator=denominator)


def ratio_of_the_response_held(
    outputs: Tensor, at: Tensor, batch: Batch, denominator: Denominator | None
) -> Tensor:
    """Return a loss in which each token's ratio moves alone, around the geometric mean of the response."""
    differences = torch.where(batch.mask, at - batch.old, 0.0)
    mean = differences.sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)
    ratio = (mean[:, None] + outputs - at).exp()
    per_token = -torch.minimum(ratio * batch.targets, ratio.clamp(0.8, 1.3) * batch.targets)
    return aggregate(per_token, batch.mask, aggregation="sequence", denominator=denominator)


def clipped_weight_held(outputs: Tensor, at: Tensor, batch: Batch, denominator: Denominator | None) -> Tensor:
    per_token = -(at - batch.old).exp().clamp(0.8, 1.3) * batch.targets * outputs
    return aggregate(per_token, batch.mask, aggregation="token", denominator=denominator)


def selected_kl(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> SelectedKLLoss:
    """Return the part over the tokens with a positive target."""
    return selected_kl_loss(
        outputs, batch.old, batch.mask, batch.targets > 0, aggregation="token", denominator=denominator
    )


def to_reference(
    outputs: Tensor,
    batch: Batch,
    denominator: Denominator | None,
    *,
    kind: KLLossKind | UnbiasedKLKind,
    aggregation: Aggregation,
    through_ratio: bool = False,
) -> KLLoss:
    """Return KL to a policy whose log-probabilities are the targets, on tokens that old sampled."""
    return reference_kl_loss(
        outputs,
        batch.targets,
        batch.old,
        batch.mask,
        kind=kind,
        through_ratio=through_ratio,
        aggregation=aggregation,
        denominator=denominator,
    )


def to_reference_with_ratio_held(
    outputs: Tensor,
    at: Tensor,
    batch: Batch,
    denominator: Denominator | None,
    *,
    kind: KLLossKind,
    aggregation: Aggregation,
) -> Tensor:
    difference = outputs - batch.targets
    estimates: dict[KLLossKind, Tensor] = {
        "abs": difference.abs(),
        "k2": difference.square() / 2,
        "k3": (-difference).exp() - 1 + difference,
    }
    ratio = (at - batch.old).exp()
    return aggregate(ratio * estimates[kind], batch.mask, aggregation=aggregation, denominator=denominator)


def to_reference_exactly(
    outputs: Tensor, batch: Batch, denominator: Denominator | None, *, aggregation: Aggregation
) -> KLLoss:
    """Return KL over a vocabulary of three, whose logits are multiples of the outputs and of the targets."""
    multiples = torch.tensor([1.0, -0.5, 0.2], dtype=outputs.dtype)
    kl = full_kl(outputs.unsqueeze(2) * multiples, batch.targets.unsqueeze(2) * multiples)
    return exact_kl_loss(kl, batch.mask, aggregation=aggregation, denominator=denominator)


def to_old(
    outputs: Tensor,
    batch: Batch,
    denominator: Denominator | None,
    *,
    kind: OldKLKind,
    aggregation: Aggregation,
) -> OldKLLoss:
    return old_kl_loss(
        outputs, batch.old, batch.mask, kind=kind, aggregation=aggregation, denominator=denominator
    )


def summed(outputs: Tensor, batch: Batch) -> Tensor:
    return torch.where(batch.mask, outputs, 0.0).sum(dim=1)


def preference(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> PreferenceLoss:
    """Return the Bradley-Terry loss of pairs, one in each row: the row's summed outputs are the chosen score, and its
    first old value is the rejected one. An empty row has weight 0.
    """
    return bradley_terry(
        summed(outputs, batch),
        batch.old[:, 0],
        margin=batch.targets[:, 0],
        weights=batch.pair_weights,
        denominator=denominator,
    )


def centring(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> CentringLoss:
    return score_centring(summed(outputs, batch), batch.old[:, 0], denominator=denominator)


def against_reference(
    outputs: Tensor, batch: Batch, denominator: Denominator | None, *, loss: Callable[..., DPOLoss]
) -> DPOLoss:
    """Return the loss of pairs, one in each row. The summed outputs are the chosen response's log-probability; the
    row's first old and target values stand for the other three.
    """
    sides = (summed(outputs, batch), batch.old[:, 0], batch.targets[:, 0], 0.5 * batch.targets[:, 0])
    return loss(*sides, beta=0.3, denominator=denominator)


def mean_logprobs(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return numbers below 0 for each row and for the one that it is compared with."""
    return -softplus(summed(outputs, batch)), -softplus(batch.old[:, 0])


def simple_preference(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> DPOLoss:
    sides = mean_logprobs(outputs, batch)
    return simpo(*sides, beta=2.0, target_margin=0.5, label_smoothing=0.1, denominator=denominator)


def odds_ratio(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> DPOLoss:
    return orpo(*mean_logprobs(outputs, batch), beta=0.3, denominator=denominator)


def unpaired(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> KTOLoss:
    return kto(
        summed(outputs, batch),
        batch.old[:, 0],
        batch.is_positive,
        reference_point=0.2,
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        denominator=denominator,
    )


def completions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss where each row is a prompt and each of its tokens a completion; the rounded targets rank them, with ties."""
    prompts = torch.arange(len(batch.mask)).unsqueeze(1).expand(batch.mask.shape)
    return batch.targets.round()[batch.mask], prompts[batch.mask]


def ranking(outputs: Tensor, batch: Batch, denominator: Denominator | None) -> PreferenceLoss:
    return ranking_loss(outputs[batch.mask], *completions(batch), denominator=denominator)


def count(aggregation: Aggregation) -> Callable[[Batch], int]:
    return lambda batch: denominator_of(batch.mask, aggregation=aggregation, max_length=MAX_LENGTH)


TOKENS = count("token")
OF_SURROGATE: tuple[Aggregation, ...] = ("token", "sequence", "sequence_sum", "constant")
OF_PLAIN_GRADIENT: tuple[Aggregation, ...] = ("token", "sequence_sum", "constant")
OF_REFERENCE: tuple[tuple[KLLossKind, Aggregation], ...] = (
    ("k2", "token"),
    ("k3", "sequence"),
    ("abs", "constant"),
)
CASES: dict[str, Case] = {
    **{
        f"clipped_surrogate by {aggregation}": Case(
            partial(surrogate, aggregation=aggregation), count(aggregation), aggregation != "constant"
        )
        for aggregation in OF_SURROGATE
    },
    "unclipped surrogate": Case(
        partial(surrogate, aggregation="token", clip_range_low=None, clip_range_high=None), TOKENS
    ),
    "dual-clipped surrogate": Case(partial(surrogate, aggregation="token", dual_clip=1.5), TOKENS),
    **{
        f"policy_gradient by {aggregation}": Case(
            partial(on_tokens, loss=policy_gradient, aggregation=aggregation),
            count(aggregation),
            aggregation != "constant",
        )
        for aggregation in OF_PLAIN_GRADIENT
    },
    **{
        f"masked_ratio_gradient by {aggregation}": Case(
            partial(masked_ratio, through_ratio=False, aggregation=aggregation),
            count(aggregation),
            aggregation != "constant",
            held=partial(masked_ratio_with_ratio_held, aggregation=aggregation),
        )
        for aggregation in OF_PLAIN_GRADIENT
    },
    "masked_ratio_gradient through the ratio": Case(
        partial(masked_ratio, aggregation="token", through_ratio=True), TOKENS
    ),
    **{
        f"{kind} loss by {aggregation}": Case(
            partial(to_reference, kind=kind, aggregation=aggregation),
            count(aggregation),
            aggregation != "constant",
            held=partial(to_reference_with_ratio_held, kind=kind, aggregation=aggregation),
        )
        for kind, aggregation in OF_REFERENCE
    },
    "ratio of the response": Case(ratio_of_the_response, count("sequence"), held=ratio_of_the_response_held),
    "clipped weight": Case(clipped_weight, TOKENS, held=clipped_weight_held),
    "soft gate": Case(gated, count("sequence")),
    "geometric mean": Case(geometric_mean, TOKENS),
    "KL of selected tokens": Case(selected_kl, TOKENS),
    "k3 loss through the ratio": Case(
        partial(to_reference, kind="k3", aggregation="token", through_ratio=True), TOKENS
    ),
    "k1 loss through the ratio": Case(
        partial(to_reference, kind="k1", aggregation="sequence", through_ratio=True), count("sequence")
    ),
    "full KL loss by sequence": Case(
        partial(to_reference_exactly, aggregation="sequence"), count("sequence")
    ),
    "full KL loss by constant": Case(
        partial(to_reference_exactly, aggregation="constant"), count("constant"), False
    ),
    "old_kl_loss k1 by sequence_sum": Case(
        partial(to_old, kind="k1", aggregation="sequence_sum"), count("sequence_sum")
    ),
    "old_kl_loss k3 by token": Case(partial(to_old, kind="k3", aggregation="token"), TOKENS),
    "positive_example_nll": Case(
        lambda outputs, batch, denominator: positive_example_nll(
            outputs, batch.mask, batch.is_positive, denominator=denominator
        ),
        lambda batch: denominator_of(batch.mask & batch.is_positive[:, None], aggregation="token"),
    ),
    "value_loss": Case(
        lambda outputs, batch, denominator: value_loss(
            outputs, None, batch.targets, batch.mask, denominator=denominator
        ),
        TOKENS,
    ),
    "clipped value_loss": Case(
        lambda outputs, batch, denominator: value_loss(
            outputs, batch.old, batch.targets, batch.mask, value_clip_range=0.5, denominator=denominator
        ),
        TOKENS,
    ),
    "bradley_terry": Case(preference, lambda batch: float(batch.pair_weights.sum()), of_pairs=True),
    "score_centring": Case(centring, lambda batch: len(batch.mask), of_pairs=True),
    "dpo": Case(partial(against_reference, loss=dpo), lambda batch: len(batch.mask), of_pairs=True),
    "ipo": Case(partial(against_reference, loss=ipo), lambda batch: len(batch.mask), of_pairs=True),
    "simpo": Case(simple_preference, lambda batch: len(batch.mask), of_pairs=True),
    "orpo": Case(odds_ratio, lambda batch: len(batch.mask), of_pairs=True),
    "kto": Case(unpaired, lambda batch: len(batch.mask), of_pairs=True),
    "ranking_loss": Case(ranking, lambda batch: rankable(*completions(batch))),
    "token_nll": Case(
        lambda outputs, batch, denominator: token_nll(outputs, batch.mask, denominator=denominator), TOKENS
    ),
}


def initial_weights() -> Tensor:
    return torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)


def result_and_gradient(case: Case, batch: Batch, denominator: Denominator | None) -> tuple[Result, Tensor]:
    weights = initial_weights()
    result = case.loss(batch.features @ weights, batch, denominator)
    return result, torch.autograd.grad(result.loss, weights)[0]
