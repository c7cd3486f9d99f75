"""Means over micro-batches of unequal size are those of the whole, not means of means."""

import torch

from algorithms.supervised_loss import token_nll
from tasks.training.metric_sums import MetricSums


def test_micro_batches_add_up() -> None:
    """Tokens cost 1, 1, 1 and 5 nats: the mean is 2. The mean of the micro-batches' means (1 and 5) would be 3."""
    sums = MetricSums()
    for nll in ([1.0, 1.0, 1.0], [5.0]):
        logprobs = -torch.tensor([nll])
        sums.add(token_nll(logprobs, torch.ones_like(logprobs, dtype=torch.bool), denominator=4.0))
    assert sums.means() == {"nll": 2.0}


def test_what_was_never_counted_is_left_out() -> None:
    sums = MetricSums()
    logprobs = torch.zeros(1, 2)
    sums.add(token_nll(logprobs, torch.zeros_like(logprobs, dtype=torch.bool), denominator=1.0))
    assert sums.means() == {}
