"""Scores from the probabilities that a judge gives to a few answers."""

import torch
from torch import Tensor


def expected_scores(logprobs: Tensor, scores: Tensor) -> Tensor:
    """Return Σ_k p_k·s_k / Σ_k p_k (B,): the mean score of the answers, weighted by their probabilities.

    Source: G-Eval (arXiv 2303.16634) eq. 1. There the probabilities are shares among 20 sampled answers; here they are
    the model's own, of the given answers only.

    Args:
        logprobs: (B,K) log-probability of each answer, in nats.
        scores: (K,) score of each answer.
    """
    return (torch.softmax(logprobs, dim=-1) * scores).sum(dim=-1)


def total_probability(logprobs: Tensor) -> Tensor:
    """Return Σ_k p_k (B,): the probability that the judge gives one of the answers and nothing else.

    Args:
        logprobs: (B,K) log-probability of each answer, in nats.
    """
    return torch.logsumexp(logprobs, dim=-1).exp()
