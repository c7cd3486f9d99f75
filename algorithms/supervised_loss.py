"""Loss of supervised training: the negative log-likelihood of given text."""

from dataclasses import dataclass

from torch import Tensor

from vantage.algorithms.aggregation import Denominator, aggregate
from vantage.algorithms.masking import check_response_mask
from vantage.algorithms.metrics import SumCount, sum_count


@dataclass(frozen=True)
class SupervisedLoss:
    """`loss` is 0-d and differentiable; `nll` is over valid tokens, in nats."""

    loss: Tensor
    nll: SumCount


def token_nll(
    logprobs: Tensor, response_mask: Tensor, *, denominator: Denominator | None = None
) -> SupervisedLoss:
    """Return the mean negative log-likelihood of the tokens under the mask, −(Σ of logprobs) / denominator, in nats.

    `logprobs` (B,T) of the demonstration's own tokens. `denominator` is the number of valid tokens of the
    whole global minibatch; None takes this call's.

    Raises ValueError for unequal shapes, for a denominator that is not positive, and for an empty mask when
    it is None.
    """
    check_response_mask(response_mask, logprobs=logprobs)
    nll = -logprobs
    return SupervisedLoss(
        loss=aggregate(nll, response_mask, aggregation="token", denominator=denominator),
        nll=sum_count(nll, response_mask),
    )
